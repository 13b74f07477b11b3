"""Which files of a data set's repository are read: a pure function of their names.

The rules are those that users of the hub know: a folder or a glob chooses, files of test and
validation splits are recognised by their names, and several folders are several configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from posixpath import commonpath

from swarm_coordinator.model_hub.data_sets import HubDataset, HubFile
from swarm_shared.base.errors import DataError, UsageError
from swarm_shared.base.text import size_text

MOST_LISTED = 12
"""Choices that a sentence lists; more would hide the rest of it."""

_TRAIN_WORDS = frozenset({"train", "training"})
_OTHER_WORDS = frozenset(
    {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev"}
)
"""Words in names of files and folders by which the `datasets` package recognises splits:
https://huggingface.co/docs/hub/datasets-file-names-and-splits"""
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FileChoice:
    """The files of a repository that are read."""

    files: tuple[HubFile, ...]
    """In the order in which a folder of them is read."""
    folder: str
    """The folder relative to which the files are named; empty for the repository."""
    left_out: int
    """Files of test and validation splits that are not read."""

    def name(self, file: HubFile) -> str:
        """Return the file's path within the folder, by which its documents are named."""
        return _below(file.path, self.folder)


def choose_files(
    dataset: HubDataset, files: Sequence[HubFile], kinds: Sequence[Callable[[str], bool]]
) -> FileChoice:
    """Choose the files that `dataset.path` names, of the first of `kinds` that any is of.

    Of a folder, files of test and validation splits are left out unless there are no others, and
    the rest must lie in one folder. A file or a glob is taken as it is. DataError lists the choices
    where there are several.
    """
    shown = [file for file in files if not _is_hidden(file.path)]
    folder, named, is_exact = _named(dataset, shown)
    readable = next((found for kind in kinds if (found := [f for f in named if kind(f.path)])), [])
    if not readable:
        raise DataError(
            f"{dataset} has no file that can be read here; .parquet, .arrow, .jsonl, .json.gz, "
            ".json.zst and .txt can, the last also as .gz or .zst, and the hub may have converted "
            f"the data set: hf://datasets/{dataset.name}@refs/convert/parquet"
        )
    kept = readable
    if not is_exact:
        kept = [f for f in readable if not _is_held_back(_below(f.path, folder))] or readable
        _refuse_several_folders(dataset, kept)
    ordered = sorted(kept, key=lambda file: file.path)
    return FileChoice(tuple(ordered), folder, len(readable) - len(kept))


def _named(dataset: HubDataset, files: Sequence[HubFile]) -> tuple[str, list[HubFile], bool]:
    """Return the folder that the path names or begins with, its files, and whether the path says
    exactly which."""
    path = dataset.path
    if not path:
        return "", list(files), False
    if any(file.path == path for file in files):
        return _parent(path), [file for file in files if file.path == path], True
    if inside := [file for file in files if file.path.startswith(f"{path}/")]:
        return path, inside, False
    glob = _GLOB.search(path)
    if glob:
        pattern = _glob_pattern(path)
        if matching := [file for file in files if pattern.fullmatch(file.path)]:
            return _parent(path[: glob.start()] + "*"), matching, True
    entries = _listed(dict.fromkeys(sorted({file.path.split("/")[0] for file in files}), ""))
    raise DataError(
        f"{dataset.at('')} has no {'files' if glob else 'file or folder'} {path}, but "
        f"{entries or 'no files'}"
    )


def _refuse_several_folders(dataset: HubDataset, files: Sequence[HubFile]) -> None:
    folders = {_parent(file.path) for file in files}
    if len(folders) == 1:
        return
    common = commonpath(folders)
    sizes: dict[str, int] = {}
    for file in files:
        entry = _below(file.path, common).split("/")[0]
        sizes[entry] = sizes.get(entry, 0) + file.size
    inside = dataset.at(common)
    choices = _listed({name: f" ({size_text(size)})" for name, size in sorted(sizes.items())})
    raise DataError(
        f"{inside} has files in {len(folders)} folders, of which each may be a data set of its "
        f"own: {choices}; choose one, such as {inside}/{min(sizes)}, several with a "
        f"glob, or all with {inside}/**"
    )


def _listed(notes: dict[str, str]) -> str:
    shown = [f"{name}{note}" for name, note in list(notes.items())[:MOST_LISTED]]
    more = len(notes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _is_held_back(path: str) -> bool:
    """Whether the last part of the path that names a split names one for tests or validation."""
    for part in reversed(path.split("/")):
        words = set(re.split("[^a-z]+", part.lower()))
        if words & _TRAIN_WORDS:
            return False
        if words & _OTHER_WORDS:
            return True
    return False


def _glob_pattern(glob: str) -> re.Pattern[str]:
    """`*`, `?` and `[...]` match within a name, and `**` any number of folders."""
    parts: list[str] = []
    for piece in re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]/]+\])", glob):
        match piece:
            case "**/":
                parts.append("(?:[^/]+/)*")
            case "**":
                parts.append(".*")
            case "*":
                parts.append("[^/]*")
            case "?":
                parts.append("[^/]")
            case _ if piece.startswith("[") and piece.endswith("]"):
                inner = re.sub(r"([\\\[^&~|])", r"\\\1", piece[1:-1].removeprefix("!"))
                parts.append(f"[{'^/' if piece[1] == '!' else ''}{inner}]")
            case _:
                parts.append(re.escape(piece))
    try:
        return re.compile("".join(parts))
    except re.error as error:  # [z-a]
        raise UsageError(f"{glob} is no pattern of files ({error.msg})") from error


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _below(path: str, folder: str) -> str:
    return path.removeprefix(f"{folder}/") if folder else path


def _is_hidden(path: str) -> bool:
    """Also a name that cannot be shown: sentences name files."""
    return any(part.startswith(".") for part in path.split("/")) or not path.isprintable()
