"""Access to the Hugging Face hub by huggingface_hub; the only door to that package.

Owns the package's import, its progress bars, and one sentence for each of its refusals. Its
environment variables and files decide about hub, token, cache and proxies (HF_ENDPOINT, HF_TOKEN,
HF_HOME and others).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from swarm_shared.base.atomic_file import storage_error
from swarm_shared.base.errors import ConfigurationError, DataError, NetworkError
from swarm_shared.base.text import printable

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
NAME_PATTERN = rf"{_PART}/{_PART}"
"""Owner and name of a repository, to be compiled with re.ASCII; `is_name` checks the rest."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub, as sentences about it need it."""

    name: str
    """Owner and name, as `ORG/NAME`."""
    revision: str | None
    page: str
    """Its address below the hub's."""
    absence: str
    """What is said to be missing if the hub has none: `there is no data set ORG/NAME`."""


def is_name(text: str) -> bool:
    """Whether the hub may have a repository of this name."""
    fits = re.fullmatch(NAME_PATTERN, text, re.ASCII)
    return bool(fits) and "--" not in text and ".." not in text and not text.endswith(".git")


def hub_package(extras: str = "hf") -> ModuleType:
    """Import huggingface_hub. ConfigurationError that names the `extras` to install without it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ConfigurationError(
            "the Hugging Face hub needs huggingface_hub, which is not installed; install it with "
            f"`pip install 'swarmtrain[{extras}]'`"
        ) from error
    module: ModuleType = huggingface_hub
    return module


@contextmanager
def bars_on_terminals_only(hub: ModuleType) -> Iterator[None]:
    """Let the package draw its progress bars where stderr is a terminal."""
    shown = not hub.utils.are_progress_bars_disabled()
    if shown and not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            hub.utils.enable_progress_bars()


@contextmanager
def absence_explained(hub: ModuleType, repository: Repository) -> Iterator[None]:
    """Explain what the hub does not give out, in one sentence."""
    errors, site = hub.errors, hub.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            f"{repository.name} is given out on request only; ask for it at "
            f"{site}/{repository.page}, and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(
            f"{repository.name} at {site} has no revision {repository.revision}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"{repository.absence} at {site}, unless it is private; check the name, or log in with "
            "`hf auth login`"
        ) from error


@contextmanager
def refusals_explained(hub: ModuleType, repository: Repository) -> Iterator[None]:
    """Explain what the hub, the network or the disk refuses, in one sentence."""
    errors, site, name = hub.errors, hub.constants.ENDPOINT, repository.name
    try:
        yield
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        said = error.server_message or f"HTTP status {code}"
        if code in (401, 403):
            raise ConfigurationError(
                f"{site} refuses access to {name} ({first_line(said)}); log in with `hf auth "
                "login`, or set HF_TOKEN to a token that has the right"
            ) from error
        raise NetworkError(
            f"{site} refuses the request for {name} ({first_line(said)}); try again later"
        ) from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        # A connection that failed, or that HF_HUB_OFFLINE forbids.
        reason = error.__cause__ or error  # the error itself tells of the cache
        raise NetworkError(
            f"{site} cannot be reached for {name} ({first_line(str(reason))}); check the "
            "connection and HF_ENDPOINT"
        ) from error
    except OSError as error:
        if error.errno is None:  # the package's own: a file without or of another size
            raise NetworkError(
                f"{site} has not sent a file of {name} in full ({first_line(str(error))}); try "
                "again later"
            ) from error
        raise storage_error(Path(error.filename or hub.constants.HF_HUB_CACHE), error) from error


def first_line(text: str) -> str:
    """The first line of a remote's text, safe to print."""
    return printable((text.strip().splitlines() or [""])[0])[:200]
