"""Download and upload of models by huggingface_hub; the only door to it.

Its environment variables and files decide about hub, token, cache and proxies (HF_ENDPOINT,
HF_TOKEN, HF_HOME and others). Of a repository, only the files of `given_model` are downloaded: JSON
and safetensors, no code and no pickle.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from swarm_shared.base.atomic_file import storage_error
from swarm_shared.base.errors import ConfigurationError, DataError, NetworkError, UsageError
from swarm_shared.base.text import printable, size_text

_NAME = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_MODEL = re.compile(rf"({_NAME}/{_NAME})(?:@([\w./-]{{1,200}}))?", re.ASCII)
_DESCRIPTION = ("config.json", "tokenizer.json", "model.safetensors.index.json")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


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
        if match is None or "--" in match[1] or ".." in match[1] or match[1].endswith(".git"):
            return None
        return cls(match[1], match[2])

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
    hub = _package()
    with _refusals_explained(hub, model), _absence_explained(hub, model):
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
    hub = _package()
    with _refusals_explained(hub, model):
        api = hub.HfApi()
        api.create_repo(model.name, private=private or None, exist_ok=True)
        if private and not api.model_info(model.name).private:
            raise UsageError(
                f"{model.name} exists and is public; make it private on its page, or leave out "
                "--private"
            )
        with _bars_on_terminals_only(hub):
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
    _package()
    return model


def _package() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ConfigurationError(
            "models on the Hugging Face hub need huggingface_hub, which is not installed; install "
            "it with `pip install 'swarmtrain[hf]'`"
        ) from error
    module: ModuleType = huggingface_hub
    return module


def _snapshot(hub: ModuleType, model: HubModel, files: Sequence[str]) -> Path:
    with _bars_on_terminals_only(hub):
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
        return sorted({Path(str(name)).name for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is no index of safetensors files; name another model") from error


@contextmanager
def _bars_on_terminals_only(hub: ModuleType) -> Iterator[None]:
    shown = not hub.utils.are_progress_bars_disabled()
    if shown and not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            hub.utils.enable_progress_bars()


@contextmanager
def _absence_explained(hub: ModuleType, model: HubModel) -> Iterator[None]:
    """Explain what the hub does not give out, in one sentence."""
    errors, site = hub.errors, hub.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            f"{model.name} is given out on request only; ask for it at {site}/{model.name}, and "
            "log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{model.name} at {site} has no revision {model.revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"there is neither a folder {model} nor a model {model.name} at {site}, unless it is "
            "private; check the name, or log in with `hf auth login`"
        ) from error


@contextmanager
def _refusals_explained(hub: ModuleType, model: HubModel) -> Iterator[None]:
    """Explain what the hub, the network or the disk refuses, in one sentence."""
    errors, site = hub.errors, hub.constants.ENDPOINT
    try:
        yield
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        said = error.server_message or f"HTTP status {code}"
        if code in (401, 403):
            raise ConfigurationError(
                f"{site} refuses access to {model.name} ({_line(said)}); log in with `hf auth "
                "login`, or set HF_TOKEN to a token that may write"
            ) from error
        raise NetworkError(
            f"{site} refuses the request for {model.name} ({_line(said)}); try again later"
        ) from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        # A connection that failed, or that HF_HUB_OFFLINE forbids.
        raise NetworkError(
            f"{site} cannot be reached for {model.name} ({_line(str(error))}); check the "
            "connection and HF_ENDPOINT"
        ) from error
    except OSError as error:
        raise storage_error(Path(error.filename or hub.constants.HF_HUB_CACHE), error) from error


def _line(text: str) -> str:
    """The first line of a remote's text, safe to print."""
    return printable((text.strip().splitlines() or [""])[0])[:200]
