"""A data set of the Hugging Face hub as training text.

Owns when its files are fetched: one after another, each when a reading reaches it for the first
time, so that a wrong column shows after one file. They stay in huggingface_hub's cache, because the
text is read several times: it takes as much of the disk as all chosen files together.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swarm_coordinator.model_hub.data_files import FileChoice, choose_files
from swarm_coordinator.model_hub.data_sets import (
    HubDataset,
    HubFile,
    cache_folder,
    cached_file,
    fetch_file,
    list_files,
)
from swarm_coordinator.run_creation.compressed_files import require_zstandard
from swarm_coordinator.run_creation.corpus import (
    TextCorpus,
    TextDocument,
    file_documents,
    holds_records,
)
from swarm_coordinator.run_creation.shards import Progress
from swarm_coordinator.run_creation.tables import TABLE_SUFFIXES, require_pyarrow
from swarm_coordinator.run_creation.tokenise import REPORT_SECONDS
from swarm_shared.base.errors import StorageError
from swarm_shared.base.text import progress_text, size_text

_TEXT = (".txt", ".txt.gz", ".txt.zst")
"""Text files of a repository; others without records are its README, licence and scripts."""
_KINDS: tuple[Callable[[str], bool], ...] = (holds_records, lambda name: name.endswith(_TEXT))


def pinned(dataset: HubDataset, progress: Progress) -> HubDataset:
    """Return the data set at the commit that its revision names, and report it. DataError or
    ConfigurationError if its files cannot be read, before any is fetched."""
    at_commit, files = list_files(dataset)
    _check_packages(choose_files(dataset, files, _KINDS))
    progress(f"{dataset} is at commit {at_commit.revision}")
    return at_commit


def hub_corpus(dataset: HubDataset, column: str, progress: Progress) -> TextCorpus:
    """Return the text of a data set whose files are fetched when they are read; `column` of tables
    and JSON lines has the text."""
    at_commit, files = list_files(dataset)
    choice = choose_files(dataset, files, _KINDS)
    size = sum(file.size for file in choice.files)
    what = f"{len(choice.files)} file(s), {size_text(size)}"
    if choice.left_out:
        what += f", without {choice.left_out} file(s) of test and validation splits"
    fetching = _Fetching(at_commit, choice, progress)

    def documents() -> Iterator[TextDocument]:
        for file in choice.files:
            yield from file_documents(fetching.path(file), choice.name(file), column)

    return TextCorpus(f"{at_commit} ({what})", documents)


def _check_packages(choice: FileChoice) -> None:
    for file in choice.files:
        if file.path.endswith(TABLE_SUFFIXES):
            require_pyarrow(file.path)
        elif file.path.endswith(".zst"):
            require_zstandard(file.path)


class _Fetching:
    """The files of one choice on the disk, and the report of their download."""

    def __init__(self, dataset: HubDataset, choice: FileChoice, progress: Progress) -> None:
        self._dataset, self._choice, self._progress = dataset, choice, progress
        self._total: int | None = None
        """Bytes that the cache did not have at the first download."""
        self._done = 0
        self._began = self._reported = 0.0

    def path(self, file: HubFile) -> Path:
        """Return where the file lies, and fetch it if the cache has it not."""
        cached = cached_file(self._dataset, file)
        if cached is not None:
            return cached
        if self._total is None:
            self._total = self._begin()
        path = fetch_file(self._dataset, file)
        self._done += file.size
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            rate = self._done / (now - self._began)
            self._progress(f"fetched {progress_text(self._done, self._total, rate)}")
        return path

    def _begin(self) -> int:
        """Report what is to be fetched, and return its bytes. StorageError if the disk is full."""
        missing = [f for f in self._choice.files if cached_file(self._dataset, f) is None]
        total = sum(file.size for file in missing)
        cache = cache_folder()
        disk = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(disk).free
        if total > free:
            raise StorageError(
                f"the files of {self._dataset} need {size_text(total)} in {cache}, and "
                f"{size_text(free)} are free; free some, set HF_HOME to a folder on another disk, "
                "or choose fewer files with a folder or a glob"
            )
        self._progress(f"fetching {len(missing)} file(s), {size_text(total)}, into {cache}")
        self._began = self._reported = time.monotonic()
        return total
