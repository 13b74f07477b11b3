"""What `status` says of admission and of paths, to people."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from swarm_coordinator.status.status_file import (
    PATHS_SHOWN,
    ROWS_PER_TURN,
    encode_document,
    status_lines,
    without_nan,
)

ANNA, BERT, CARL, OWN = (f"12D3KooW{name * 11}" for name in ("anna", "bert", "carl", "self"))


def path(remote: str, **changes: object) -> dict[str, Any]:
    return {
        "reporter": ANNA, "remote": remote, "kind": "direct", "relay": None, "rtt_seconds": 0.001,
        "bytes_per_second": 0.0, **changes,
    }  # fmt: skip


def document(*paths: dict[str, Any], **changes: object) -> dict[str, Any]:
    peers = [
        {
            "peer": peer, "name": name, "stage": 0, "phase": "ready", "device": "CPU",
            "microbatches_per_second": 1.0,
        }
        for peer, name in ((ANNA, "anna"), (BERT, None))
    ]  # fmt: skip
    return {
        "run": "a run", "phase": "collecting", "version": 1, "steps": 2, "time": 0.0,
        "coordinator": OWN, "stages": [], "peers": peers, "paths": list(paths),
        "admission": {"mode": "open", "members": 2, "valid_tokens": 0, "bans": []}, **changes,
    }  # fmt: skip


def shown(*paths: dict[str, Any], **changes: object) -> list[str]:
    return status_lines(document(*paths, **changes), True, 0.0)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (path(OWN), "the coordinator direct, 1 ms"),
        (
            path(BERT, kind="punched", rtt_seconds=0.0341, bytes_per_second=12.34e6),
            "…bertbert punched, 34.1 ms, 12.3 MB/s",
        ),
        (
            path(CARL, kind="relayed", relay=OWN, rtt_seconds=0.2, bytes_per_second=45_600.0),
            "…carlcarl relayed via the coordinator, 200 ms, 45.6 kB/s",
        ),
        (
            path(CARL, kind="relayed", relay=BERT, rtt_seconds=0.00061, bytes_per_second=100.0),
            "…carlcarl relayed via …bertbert, 0.61 ms",
        ),
    ],
)
def test_a_path_is_its_kind_its_round_trip_and_its_rate(one: dict[str, Any], text: str) -> None:
    assert f"      links: {text}" in shown(one)


def test_the_busiest_paths_of_a_peer_are_shown_and_the_others_counted() -> None:
    paths = [path(f"{n}" * 8, bytes_per_second=n * 1e6) for n in range(1, PATHS_SHOWN + 3)]
    [line] = [line for line in shown(*paths) if "links:" in line]
    assert line.index("…66666666 direct, 1 ms, 6 MB/s") < line.index("…55555555")
    assert line.endswith("; 2 more")
    assert "…11111111" not in line


def test_a_peer_is_named_with_the_end_of_its_id_by_which_it_can_be_banned() -> None:
    lines = shown()
    assert any(line.startswith("    anna (…annaanna): stage 0, ready") for line in lines)
    assert any(line.startswith("    …bertbert: stage 0, ready") for line in lines)
    assert not any("links:" in line for line in lines)


def test_admission_is_its_mode_its_members_and_its_bans() -> None:
    assert "  admission: open, 2 member(s), 0 banned" in shown()
    bans = [
        {"peer": CARL, "reason": "cheats\x1b[2J", "banned_at": 0.0},
        {"peer": BERT, "reason": "", "banned_at": 0.0},
    ]
    admission = {"mode": "token", "members": 7, "valid_tokens": 2, "bans": bans}
    lines = shown(admission=admission)
    assert "  admission: token, 7 member(s), 2 valid token(s), 2 banned" in lines
    assert f"    banned {CARL}: cheats\N{REPLACEMENT CHARACTER}[2J" in lines
    assert f"    banned {BERT}" in lines


def test_a_status_that_an_earlier_release_has_written_is_shown_as_well() -> None:
    old = document()
    for key in ("admission", "paths", "coordinator"):
        del old[key]
    lines = status_lines(old, True, 0.0)
    assert not any("admission" in line or "links" in line for line in lines)


def rebalancing(**changes: object) -> dict[str, Any]:
    return {
        "rule": "throughput", "period_seconds": 60.0, "decided": 3, "made": 2, "dropped": 1,
        "bytes_moved": 4_000_000, "on_the_way": 1, "reason": "", "decisions": [], **changes,
    }  # fmt: skip


def test_each_decision_to_move_somebody_is_a_sentence() -> None:
    decisions = [{"seconds_ago": 90.0, "peer": ANNA, "text": "anna moves, and why"}]
    lines = shown(rebalancing=rebalancing(decisions=decisions))
    assert (
        "  rebalancing: 2 move(s) made, 1 on the way, 1 given up, 4 MB of state for them" in lines
    )
    assert "    90 s ago: anna moves, and why" in lines


def test_that_nobody_moves_is_explained_too() -> None:
    lines = shown(rebalancing=rebalancing(reason="it is not worth the downloads"))
    assert "    nobody moves now: it is not worth the downloads" in lines


def test_a_run_that_moves_nobody_says_nothing_of_moves() -> None:
    assert not [line for line in shown(rebalancing=rebalancing(rule="none")) if "move" in line]


def test_long_tables_are_encoded_in_parts_as_they_would_be_whole() -> None:
    rows = [{"n": n, "of": [None, "\N{SNOWMAN}", 'a "b"']} for n in range(3 * ROWS_PER_TURN + 7)]
    whole = {
        "rows": rows, "none": [], "few": (1, 2), "deep": {"rows": rows},
        "not numbers": [{"x": math.nan}, {"x": math.inf}] * ROWS_PER_TURN, "text": "it's",
    }  # fmt: skip
    assert encode_document(whole) == json.dumps(without_nan(whole))
