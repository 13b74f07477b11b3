"""Which files of a data set's repository are read."""

from __future__ import annotations

import pytest

from swarm_coordinator.model_hub.data_files import FileChoice, choose_files
from swarm_coordinator.model_hub.data_sets import HubDataset, HubFile
from swarm_shared.base.errors import DataError, UsageError

KINDS = (lambda name: name.endswith((".parquet", ".jsonl")), lambda name: name.endswith(".txt"))


def chosen(path: str, *files: str) -> list[str]:
    return [file.path for file in choice(path, *files).files]


def choice(path: str, *files: str) -> FileChoice:
    listed = [HubFile(file, 1000) for file in files]
    return choose_files(HubDataset("ada/texts", path=path), listed, KINDS)


def refusal(path: str, *files: str) -> str:
    with pytest.raises(DataError) as caught:
        choice(path, *files)
    return str(caught.value)


SPLITS = (
    "README.md", ".gitattributes", "texts.py", "data/test-00000-of-00001.parquet",
    "data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet",
    "data/validation-00000-of-00001.parquet",
)  # fmt: skip
CONFIGURATIONS = (
    "large/test-0.parquet", "large/train-0.parquet", "small/train-0.parquet", "small/train-1.jsonl",
)  # fmt: skip


def test_of_a_folder_the_training_split_is_read_in_the_order_of_names() -> None:
    train = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    for path in ("", "data"):
        found = choice(path, *SPLITS)
        assert [file.path for file in found.files] == train
        assert found.left_out == 2
    assert [found.name(file)[:11] for file in found.files] == ["train-00000", "train-00001"]


@pytest.mark.parametrize(
    ("held_back", "read"),
    [
        ("test.jsonl", "train.jsonl"), ("valid.jsonl", "train.jsonl"), ("dev.jsonl", "a.jsonl"),
        ("Eval_1.jsonl", "b.jsonl"), ("x-val.jsonl", "x.jsonl"), ("test/x.jsonl", "train/x.jsonl"),
        ("train/test-0.jsonl", "train/train-0.jsonl"), ("test/0.jsonl", "test/train-0.jsonl"),
        ("validation00.jsonl", "valley.jsonl"), ("test.jsonl", "latest.jsonl"),
        ("dev.jsonl", "developers.jsonl"),
    ],
)  # fmt: skip
def test_words_of_a_name_tell_the_split(held_back: str, read: str) -> None:
    assert chosen("", held_back, read) == [read]


def test_a_test_split_alone_or_named_is_read() -> None:
    assert chosen("", "data/test-0.jsonl", "README.md") == ["data/test-0.jsonl"]
    assert chosen("test", "test/0.jsonl", "train/0.jsonl") == ["test/0.jsonl"]
    assert chosen("a/test.jsonl", "a/test.jsonl", "a/train.jsonl") == ["a/test.jsonl"]
    assert len(chosen("data/*", *SPLITS)) == 4


def test_several_folders_are_refused_with_the_choices() -> None:
    said = refusal("", *CONFIGURATIONS)
    assert "in 2 folders" in said
    assert "large (1 kB), small (2 kB); choose one, such as hf://datasets/ada/texts/large" in said
    assert "all with hf://datasets/ada/texts/**" in said
    deeper = refusal("", "data/a/x/0.parquet", "data/a/y/0.parquet", "data/b/0.parquet")
    assert "hf://datasets/ada/texts/data has files in 3 folders" in deeper
    assert "a (2 kB), b (1 kB)" in deeper
    beside = refusal("", "a/0.jsonl", "b.jsonl")
    assert "hf://datasets/ada/texts has files in 2 folders" in beside
    assert "a (1 kB), b.jsonl (1 kB)" in beside
    many = refusal("", *(f"part-{n:03}/0.jsonl" for n in range(50)))
    assert "part-011 (1 kB) and 38 more" in many
    assert "part-012" not in many


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("small", ["small/train-0.parquet", "small/train-1.jsonl"]),
        ("large", ["large/train-0.parquet"]),
        ("small/train-1.jsonl", ["small/train-1.jsonl"]),
        ("*/train-*", ["large/train-0.parquet", "small/train-0.parquet", "small/train-1.jsonl"]),
        ("**", list(CONFIGURATIONS)),
        ("**/train-0.parquet", ["large/train-0.parquet", "small/train-0.parquet"]),
        ("small/**", ["small/train-0.parquet", "small/train-1.jsonl"]),
        ("[!l]*/train-?.jsonl", ["small/train-1.jsonl"]),
        ("[a-m]*/t*0.parquet", ["large/test-0.parquet", "large/train-0.parquet"]),
    ],
)
def test_a_folder_a_file_or_a_glob_chooses(path: str, files: list[str]) -> None:
    assert chosen(path, *CONFIGURATIONS) == files


def test_a_glob_matches_whole_names_and_names_its_files_below_its_fixed_folder() -> None:
    assert "no files *.parquet, but large, small" in refusal("*.parquet", *CONFIGURATIONS)
    assert "no files smal?/train, but" in refusal("smal?/train", *CONFIGURATIONS)
    found = choice("small/train-*", *CONFIGURATIONS)
    assert [found.name(file) for file in found.files] == ["train-0.parquet", "train-1.jsonl"]
    found = choice("**/train-*", *CONFIGURATIONS)
    assert found.name(found.files[0]) == "large/train-0.parquet"
    assert chosen("**/0.jsonl", "0.jsonl", "a/b/0.jsonl") == ["0.jsonl", "a/b/0.jsonl"]
    assert chosen("a[1].jsonl", "a[1].jsonl", "a1.jsonl") == ["a[1].jsonl"]


def test_a_wrong_path_is_refused_with_what_there_is() -> None:
    said = refusal("smal", *CONFIGURATIONS)
    assert "has no file or folder smal, but large, small" in said
    with pytest.raises(UsageError, match=r"\[z-a\] is no pattern of files"):
        choice("[z-a]", *CONFIGURATIONS)


def test_text_is_read_where_there_are_no_records_and_nothing_else_ever() -> None:
    assert chosen("", "a.txt", "b.txt", "README.md") == ["a.txt", "b.txt"]
    assert chosen("", "a.txt", "b.jsonl", "README.md") == ["b.jsonl"]
    assert chosen("", ".cache/b.jsonl", "a.txt") == ["a.txt"]
    for path, files in (
        ("", ("README.md", "texts.py", "data.csv")), ("", ()), ("**", ("texts.py",)),
        ("texts.py", ("texts.py",)), ("", (".hidden.jsonl", "a\x1b.jsonl")),
    ):  # fmt: skip
        said = refusal(path, *files)
        assert "has no file that can be read here; .parquet" in said
        assert "hf://datasets/ada/texts@refs/convert/parquet" in said
