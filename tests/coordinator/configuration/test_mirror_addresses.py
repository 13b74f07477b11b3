"""Buckets and data sets of a hub become the web addresses at which they are served."""

from __future__ import annotations

import re

import pytest

from swarm_coordinator.configuration.mirror_addresses import ADDRESS_PATTERN, web_address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://example.org/data/", "https://example.org/data"),
        ("s3://corpus", "https://corpus.s3.amazonaws.com"),
        ("s3://corpus/run/data/", "https://corpus.s3.amazonaws.com/run/data"),
        ("s3://my.corpus/data", "https://s3.amazonaws.com/my.corpus/data"),
        ("gs://corpus/run/data", "https://storage.googleapis.com/corpus/run/data"),
        (
            "hf://datasets/someone/corpus/data",
            "https://huggingface.co/datasets/someone/corpus/resolve/main/data",
        ),
        (
            "hf://datasets/someone/corpus@v1.2",
            "https://huggingface.co/datasets/someone/corpus/resolve/v1.2",
        ),
    ],
)
def test_a_bucket_or_data_set_is_found_where_it_is_served(address: str, expected: str) -> None:
    assert re.fullmatch(ADDRESS_PATTERN, address)
    assert web_address(address) == expected


@pytest.mark.parametrize(
    "address", ["hf://someone/model/data", "hf://datasets/corpus", "hf://", "s3://", "ftp://x"]
)
def test_an_address_of_another_form_is_refused(address: str) -> None:
    assert re.fullmatch(ADDRESS_PATTERN, address) is None
