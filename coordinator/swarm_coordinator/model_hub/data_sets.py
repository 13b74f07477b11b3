"""Data sets on the Hugging Face hub: their addresses, the list of their files, and downloads.

Does not choose among the files (`model_hub.data_files`) or read them. Nothing of a repository is
run, such as a loading script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from swarm_coordinator.model_hub.access import (
    NAME_PATTERN,
    Repository,
    absence_explained,
    bars_on_terminals_only,
    first_line,
    hub_package,
    is_name,
    refusals_explained,
)
from swarm_shared.base.errors import NetworkError, UsageError
from swarm_shared.base.text import printable

SCHEME = "hf://"
ADDRESS_FORM = "hf://datasets/ORG/NAME[@REVISION][/FOLDER_OR_GLOB]"
_SPECIAL_REVISION = r"refs/(?:convert/\w+|pr/\d+)"
"""Revisions that stand in an address with their slashes; of others they are written as %2F."""
_ADDRESS = re.compile(
    rf"hf://datasets/({NAME_PATTERN})(?:@({_SPECIAL_REVISION}|[^/@\s]{{1,200}}))?(?:/(.*))?",
    re.ASCII,
)
_EXTRAS = "hf,data"
_DESCRIPTION = (".gitattributes", "README.md")
"""Files that are fetched with the list: huggingface_hub stores the list beside a download only, and
the hub gives every repository the first of them."""


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A data set on the hub, or the files of it that `path` names.

    Its text is an address as huggingface_hub's file system, pandas, polars and DuckDB take it:
    https://huggingface.co/docs/huggingface_hub/guides/hf_file_system
    """

    name: str
    """Owner and name, as `ORG/NAME`."""
    revision: str | None = None
    """Branch, tag or commit; None for the newest commit of the main branch."""
    path: str = ""
    """A folder, a file or a pattern of files; empty for the whole repository."""

    @classmethod
    def parse(cls, text: str) -> HubDataset | None:
        """Read an address; None if the text is none of the hub, UsageError if it is a wrong one."""
        if not text.startswith(SCHEME):
            return None
        match = _ADDRESS.fullmatch(text)
        if match is None or not is_name(match[1]) or not text.isprintable():
            raise UsageError(
                f"a data set of the Hugging Face hub has the form {ADDRESS_FORM}, and not "
                f"{printable(text)!r}"
            )
        revision = None if match[2] is None else unquote(match[2])
        return cls(match[1], revision, (match[3] or "").strip("/"))

    @property
    def repository(self) -> Repository:
        page = f"datasets/{self.name}"
        return Repository(self.name, self.revision, page, f"there is no data set {self.name}")

    def at(self, path: str) -> HubDataset:
        return replace(self, path=path)

    def __str__(self) -> str:
        revision = ""
        if self.revision is not None:
            special = re.fullmatch(_SPECIAL_REVISION, self.revision, re.ASCII)
            revision = "@" + (self.revision if special else quote(self.revision, safe=""))
        path = f"/{self.path}" if self.path else ""
        return f"hf://datasets/{self.name}{revision}{path}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository."""

    path: str
    """Within the repository, with slashes."""
    size: int
    """Bytes."""


def list_files(dataset: HubDataset) -> tuple[HubDataset, list[HubFile]]:
    """Return the data set with the commit as its revision, and all files of that commit.

    The list is kept in the package's cache, so that a second call with the commit needs no network.
    DataError if the hub does not give the data set out, NetworkError if it cannot be reached and
    the cache has no list.
    """
    hub, repository = hub_package(_EXTRAS), dataset.repository
    with (
        refusals_explained(hub, repository),
        absence_explained(hub, repository),
        bars_on_terminals_only(hub),
    ):
        folder = hub.snapshot_download(
            dataset.name,
            repo_type="dataset",
            revision=dataset.revision,
            allow_patterns=list(_DESCRIPTION),
        )
        commit = Path(folder).name
        tree = hub.get_cached_repo_tree(dataset.name, repo_type="dataset", revision=commit)
    files = [HubFile(file.path, file.size) for file in tree]
    return replace(dataset, revision=commit), files


def cached_file(dataset: HubDataset, file: HubFile) -> Path | None:
    """Return where the cache has a file of this commit; None if it has not."""
    found = hub_package(_EXTRAS).try_to_load_from_cache(
        dataset.name, file.path, repo_type="dataset", revision=dataset.revision
    )
    return Path(found) if isinstance(found, str) else None


def fetch_file(dataset: HubDataset, file: HubFile) -> Path:
    """Download a file of this commit into the package's cache, and return its path there.

    A connection that breaks is resumed. DataError, ConfigurationError or NetworkError if the hub
    does not give it out, StorageError if the disk does not take it.
    """
    hub, repository = hub_package(_EXTRAS), dataset.repository
    with (
        refusals_explained(hub, repository),
        absence_explained(hub, repository),
        bars_on_terminals_only(hub),
    ):
        try:
            return Path(
                hub.hf_hub_download(
                    dataset.name, file.path, repo_type="dataset", revision=dataset.revision
                )
            )
        except RuntimeError as error:  # what hf_xet raises for most of its failures
            raise NetworkError(
                f"{file.path} of {dataset.name} cannot be fetched ({first_line(str(error))}); "
                "check the connection and start again"
            ) from error


def cache_folder() -> Path:
    """The folder into which files are fetched; it need not exist."""
    return Path(hub_package(_EXTRAS).constants.HF_HUB_CACHE).expanduser()
