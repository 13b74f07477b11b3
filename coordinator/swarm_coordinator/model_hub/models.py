"""Download and upload of models on the Hugging Face hub.

Of a repository, only the files of `given_model` are downloaded: JSON and safetensors, no code and
no pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from swarm_coordinator.model_hub.access import (
    NAME_PATTERN,
    Repository,
    absence_explained,
    bars_on_terminals_only,
    hub_package,
    is_name,
    refusals_explained,
)
from swarm_shared.base.errors import DataError, UsageError
from swarm_shared.base.text import printable, size_text

_MODEL = re.compile(rf"({NAME_PATTERN})(?:@([\w./-]{{1,200}}))?", re.ASCII)
_DESCRIPTION = ("config.json", "tokenizer.json", "model.safetensors.index.json")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_WEIGHT_FILE = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
"""A name in an index. It becomes a pattern of files to download, where `*` would be all of them."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub."""

    name: str
    """Owner and name, as `ORG/NAME`."""
    revision: str | None = None
    """Branch, tag or commit; None for the newest."""

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Read `ORG/NAME` or `ORG/NAME@REVISION`; None if the text has another form."""
        match = _MODEL.fullmatch(text)
        if match is None or not is_name(match[1]):
            return None
        return cls(match[1], match[2])

    @property
    def repository(self) -> Repository:
        absence = f"there is neither a folder {self} nor a model {self.name}"
        return Repository(self.name, self.revision, self.name, absence)

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def download_model(
    model: HubModel, report: Callable[[str], None], check: Callable[[Path], object]
) -> Path:
    """Download a model into huggingface_hub's cache, as far as it is not there, and return its
    folder.

    `check` is called with the folder before the parameters are downloaded. DataError if the hub
    does not give the model out, NetworkError if it cannot be reached and the cache has no copy.
    """
    hub = hub_package()
    with refusals_explained(hub, model.repository), absence_explained(hub, model.repository):
        folder = _snapshot(hub, model, _DESCRIPTION)
        check(folder)
        files = _weight_files(folder)
        sizes = {
            file.path: file.size
            for file in hub.get_cached_repo_tree(model.name, revision=folder.name)
        }
        size = sum(sizes.get(name, 0) for name in files if not (folder / name).exists())
        if size:
            report(f"downloading {model} at {folder.name[:12]}, {size_text(size)}")
        # Again all: the branch may have moved on since, and then the folder is another one.
        return _snapshot(hub, model, (*_DESCRIPTION, *files))


def push_model(folder: Path, files: Sequence[str], model: HubModel, *, private: bool) -> str:
    """Upload the files of an exported model as a new commit, and return its address.

    The repository is made if it does not exist. Files of parameters that an earlier model had there
    are deleted. UsageError if `private` is wanted and the repository is public; ConfigurationError
    if the hub refuses the token, NetworkError if it cannot be reached.
    """
    hub = hub_package()
    with refusals_explained(hub, model.repository):
        api = hub.HfApi()
        api.create_repo(model.name, private=private or None, exist_ok=True)
        if private and not api.model_info(model.name).private:
            raise UsageError(
                f"{model.name} exists and is public; make it private on its page, or leave out "
                "--private"
            )
        with bars_on_terminals_only(hub):
            done = api.upload_folder(
                repo_id=model.name,
                folder_path=folder,
                allow_patterns=list(files),
                delete_patterns=list(_WEIGHTS),
                commit_message="Export of swarmtrain",
            )
        return str(done.commit_url)


def check_push(text: str) -> HubModel:
    """Return the repository that a model is pushed to; UsageError if the text names none.
    ConfigurationError if huggingface_hub is missing."""
    model = HubModel.parse(text)
    if model is None or model.revision is not None:
        raise UsageError(f"--push needs the form ORG/NAME, and not {printable(text)!r}")
    hub_package()
    return model


def _snapshot(hub: ModuleType, model: HubModel, files: Sequence[str]) -> Path:
    with bars_on_terminals_only(hub):
        return Path(
            hub.snapshot_download(model.name, revision=model.revision, allow_patterns=list(files))
        )


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files of parameters, according to the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is no index of safetensors files; name another model") from error
    if wrong := [name for name in names if not _WEIGHT_FILE.fullmatch(name)]:
        raise DataError(
            f"{index} names {printable(wrong[0])[:200]!r}, which is no safetensors file beside it; "
            "name another model"
        )
    return names
