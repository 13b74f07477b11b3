"""Addresses of data sets on the hub."""

from __future__ import annotations

import pytest

from swarm_coordinator.model_hub.data_sets import HubDataset
from swarm_shared.base.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/ada/texts", HubDataset("ada/texts")),
        ("hf://datasets/ada/texts@v1.2", HubDataset("ada/texts", "v1.2")),
        ("hf://datasets/ada/texts/en/train", HubDataset("ada/texts", None, "en/train")),
        ("hf://datasets/ada/texts@v1/**/*.parquet", HubDataset("ada/texts", "v1", "**/*.parquet")),
        ("hf://datasets/ada/texts@refs/pr/7/a", HubDataset("ada/texts", "refs/pr/7", "a")),
        (
            "hf://datasets/ada/texts@refs/convert/parquet/default/train",
            HubDataset("ada/texts", "refs/convert/parquet", "default/train"),
        ),
        ("hf://datasets/ada/texts@my%2Fbranch/a b", HubDataset("ada/texts", "my/branch", "a b")),
    ],
)
def test_an_address_is_read_and_written(text: str, expected: HubDataset) -> None:
    assert HubDataset.parse(text) == expected
    assert str(expected) == text


def test_a_slash_at_the_end_says_nothing() -> None:
    assert HubDataset.parse("hf://datasets/ada/texts/en/") == HubDataset("ada/texts", None, "en")
    assert HubDataset.parse("hf://datasets/ada/texts/") == HubDataset("ada/texts")


@pytest.mark.parametrize("text", ["ada/texts", "datasets/ada/texts", "python-stdlib", "./hf:/x"])
def test_what_is_no_address_is_a_path(text: str) -> None:
    assert HubDataset.parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "hf://", "hf://ada/texts", "hf://datasets/texts", "hf://datasets/ada/--", "hf://spaces/a/b",
        "hf://datasets/ada/texts@", "hf://datasets/ada/texts.git", "hf://datasets/../texts",
        "hf://datasets/ada/a\x1bb", "hf://datasets/ada/texts/a\x1bb",
    ],
)  # fmt: skip
def test_a_wrong_address_is_one_printable_sentence(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        HubDataset.parse(text)
    said = str(caught.value)
    assert "has the form hf://datasets/ORG/NAME[@REVISION][/FOLDER_OR_GLOB], and not " in said
    assert said.isprintable()
