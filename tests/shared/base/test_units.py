"""Sizes, rates and durations as text: three digits, the nearest unit, nothing for the unknown."""

from __future__ import annotations

import math

import pytest

from swarm_shared.base.text import (
    count_text,
    duration_text,
    latency_text,
    memory_text,
    parse_size,
    progress_text,
    rate_text,
    size_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"), (0.4, "0 s"), (9.6, "10 s"), (119.4, "119 s"), (120, "2 min"),
        (3599, "59 min"), (3600, "60 min"), (7200, "2:00 h"), (11_100, "3:05 h"),
        (172_799, "47:59 h"), (172_800, "2 days"), (3 * 86_400, "3 days"), (None, "-"),
        (math.nan, "-"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00061, "0.61 ms"), (0.0812, "81.2 ms"), (0.9996, "1 s"), (1.25, "1.25 s"), (None, "-")],
)
def test_latencies(seconds: float | None, text: str) -> None:
    assert latency_text(seconds) == text


def test_sizes_and_rates() -> None:
    assert [size_text(size) for size in (0, 999, 999_600, 999_950, 1.21e9, None)] == [
        "0 B", "999 B", "1 MB", "1 MB", "1.21 GB", "-",
    ]  # fmt: skip
    assert [memory_text(size * 2**20) for size in (1023.9, 1536)] == ["1 GiB", "1.5 GiB"]
    assert rate_text(12.5e6) == "12.5 MB/s"
    assert rate_text(None) == "-"


def test_counts() -> None:
    counts = (0, 950, 999.6, 404_766_720, 1.21e9, None)
    assert [count_text(count) for count in counts] == ["0", "950", "1 k", "405 M", "1.21 B", "-"]


@pytest.mark.parametrize(
    ("done", "total", "rate", "text"),
    [
        (0, 4_000_000, None, "0 B of 4 MB (0 %)"),
        (1_000_000, 4_000_000, 1e5, "1 MB of 4 MB (25 %), 100 kB/s, 30 s left"),
        (3_999_999, 4_000_000, 0.0, "4 MB of 4 MB (99 %), 0 B/s"),
        (0, 0, None, "0 B of 0 B"),
    ],
)
def test_how_far_a_transfer_is(done: int, total: int, rate: float | None, text: str) -> None:
    assert progress_text(done, total, rate) == text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("5GB", 5 * 10**9), ("1.5 tb", 1_500_000_000_000), (" 200 kB ", 200_000), ("7B", 7),
        ("0.5MB", 500_000),
    ],
)  # fmt: skip
def test_sizes_are_read_in_decimal_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "5", "5GiB", "-1GB", "1e9B", "GB", "5 G B", "\u0665GB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size like 5GB"):
        parse_size(text)
