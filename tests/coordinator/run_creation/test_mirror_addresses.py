"""Buckets and data sets of a hub become the web addresses at which they are served."""

from __future__ import annotations

import pytest

from swarm_coordinator.run_creation.mirror_addresses import web_address
from swarm_shared.base.errors import ConfigurationError


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
    assert web_address(address) == expected


@pytest.mark.parametrize("address", ["hf://someone/model/data", "hf://datasets/corpus", "hf://"])
def test_a_hub_address_without_a_data_set_is_one_clear_sentence(address: str) -> None:
    with pytest.raises(ConfigurationError, match="names no data set; write hf://datasets/"):
        web_address(address)
