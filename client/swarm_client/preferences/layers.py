"""The source of each preference: flag, then environment, then file, then default.

A preference has one dotted name (`gpu.0.vram_gib`) in all layers. Every error names the layer it is
in. A file of a newer version is refused and left unchanged.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from swarm_client.machine.home import Home
from swarm_client.preferences.model import VERSION, GpuPreferences, Preferences
from swarm_shared.base.errors import ConfigurationError, StorageError, VersionError
from swarm_shared.host.user_folders import settings_folder
from swarm_shared.settings.errors import describe_setting_error, nearest

FILE_NAME = "preferences.toml"
ENVIRONMENT_PREFIX = "SWARM_"
MAX_FILE_BYTES = 2**20
"""Maximum size; a file with all preferences has some 6 KB."""

FlatValues = dict[str, object]
"""Values by their dotted names."""

_NOT_TOML = (ValueError, RecursionError)
"""Errors of tomllib. A number of thousands of digits, and thousands of brackets, are none of its
own."""

_TABLES = ("hours_on", "network_hours_on", "gpu")


@dataclass(frozen=True, slots=True)
class Origin:
    layer: str
    """`flag`, `environment`, `file` or `default`."""
    where: str
    """The place of the value, for people: the flag's text, the variable or the path."""


DEFAULT = Origin("default", "the default")


@dataclass(frozen=True, slots=True)
class Layered:
    """The effective preferences, and the origins of those that were set."""

    preferences: Preferences
    origins: Mapping[str, Origin]

    def origin(self, name: str) -> Origin:
        """Return the origin of a preference."""
        return self.origins.get(name, DEFAULT)

    def values(self) -> Iterator[tuple[str, object, Origin]]:
        """All preferences by name; of tables only what was set."""
        for name, value in flatten(self.preferences.model_dump(exclude_unset=False)).items():
            was_set = name in self.origins
            if was_set or name.partition(".")[0] not in _TABLES:
                yield name, value, self.origin(name)


def preferences_path(home: Path | None) -> Path:
    """Return the path of the preferences: in the given home, or for the default home in the
    platform's folder for settings."""
    place = Home.locate(home).path
    with contextlib.suppress(StorageError):  # a user without a home folder has no default home
        if place == Home.locate(None).path:
            return settings_folder() / FILE_NAME
    return place / FILE_NAME


def load(
    path: Path,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Layered:
    """All layers together. `flags` are NAME=VALUE.

    ConfigurationError for an unknown name or an impossible value, VersionError for a newer file,
    StorageError for one that cannot be read. A missing file sets nothing.
    """
    values: FlatValues = {}
    origins: dict[str, Origin] = {}
    for layer, where, layer_values in (
        ("file", str(path), read_file(path)),
        *(
            ("environment", name, variable_values)
            for name, variable_values in _from_environment(environment)
        ),
        *(("flag", text, _from_flag(text)) for text in flags),
    ):
        values.update(layer_values)
        origins.update(dict.fromkeys(layer_values, Origin(layer, where)))
    return Layered(build(values, origins), origins)


def build(values: FlatValues, origins: Mapping[str, Origin]) -> Preferences:
    """Return the preferences with these values. ConfigurationError names every impossible value and
    its origin."""
    try:
        return Preferences.model_validate(unflatten(values))
    except ValidationError as error:
        # One sentence for each value: of a value's two errors one has to be corrected first.
        by_name = {_name_of(detail): detail for detail in reversed(error.errors(include_url=False))}
        sentences = [_sentence(name, detail, origins) for name, detail in reversed(by_name.items())]
        raise ConfigurationError("; ".join(sentences)) from None


# ---------------------------------------------------------------------------------- the file


def read_file(path: Path) -> FlatValues:
    """Return the values in the file; none if it does not exist."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StorageError(
            f"the preferences in {path} cannot be read: {error.strerror}; "
            "correct that or move the file away"
        ) from error
    return parse_file(content, str(path))


def parse_file(content: bytes, where: str) -> FlatValues:
    """The file's content, with names and version checked; values are not."""
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(
            f"{where}: is longer than {MAX_FILE_BYTES} bytes, too long for preferences"
        )
    try:
        document = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: is not text in UTF-8") from error
    except _NOT_TOML as error:
        raise ConfigurationError(
            f"{where}: is not TOML: {error}; correct it, or move the file away"
        ) from error
    version = document.pop("version", VERSION)
    if type(version) is not int or version < 1:
        raise ConfigurationError(f"{where}: version must be {VERSION}, not {version!r}")
    if version > VERSION:
        raise VersionError(
            f"{where}: was written by a newer swarm-client (version = {version}; this one supports "
            f"{VERSION}); update this one, or move the file away. It was not changed"
        )
    named = flatten(document)
    for name in named:
        check_name(name, where)
    return named


def _from_environment(environment: Mapping[str, str] | None) -> Iterator[tuple[str, FlatValues]]:
    """SWARM_CPU_PERCENT and SWARM_GPU_0_VRAM_GIB; unknown variables with the prefix are ignored."""
    for variable, text in sorted((os.environ if environment is None else environment).items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text:
            continue
        name = _name_of_variable(variable.removeprefix(ENVIRONMENT_PREFIX).lower())
        if name is not None:
            yield variable, {name: parse_value(name, text)}


def _name_of_variable(words: str) -> str | None:
    fields = Preferences.model_fields
    if words in fields and words not in _TABLES:
        return words
    table = next((table for table in _TABLES if words.startswith(f"{table}_")), None)
    if table is None:
        return None
    rest = words.removeprefix(f"{table}_")
    if table == "gpu":
        which, _, key = rest.partition("_")
        return f"gpu.{which}.{key}" if key in GpuPreferences.model_fields else None
    return f"{table}.{rest}"


def _from_flag(text: str) -> FlatValues:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(
            f"{text!r} is not a preference; write NAME=VALUE, for example cpu_percent=50"
        )
    check_name(name.strip(), text)
    return {name.strip(): parse_value(name.strip(), value)}


def parse_value(name: str, text: str) -> object:
    """The value as TOML; if it is not TOML, a list of words or the text itself. Its type is not
    checked."""
    try:
        value: object = tomllib.loads(f"value = {text.strip()}")["value"]
    except _NOT_TOML:
        value = text.strip()
    field = Preferences.model_fields.get(name)
    if field is not None and get_origin(field.annotation) is tuple and isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------- names


def check_name(name: str, where: str) -> None:
    """ConfigurationError, with the nearest known name, for an unknown one."""
    head, *rest = name.split(".")
    fields = Preferences.model_fields
    if head not in fields:
        raise ConfigurationError(f"{where}: there is no preference {name!r}{nearest(head, fields)}")
    if head not in _TABLES:
        if rest:
            raise ConfigurationError(f"{where}: {head} is a single value and has no {rest[0]!r}")
        return
    depth = 2 if head == "gpu" else 1
    if len(rest) != depth:
        form = "gpu.0.vram_gib" if head == "gpu" else f"{head}.saturday"
        raise ConfigurationError(f"{where}: {head} is a table; give one of its values, like {form}")
    if head == "gpu" and rest[1] not in GpuPreferences.model_fields:
        raise ConfigurationError(
            f"{where}: [gpu.{rest[0]}] has no preference {rest[1]!r}"
            f"{nearest(rest[1], GpuPreferences.model_fields)}"
        )


def flatten(document: Mapping[str, Any]) -> FlatValues:
    named: FlatValues = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            named |= {f"{name}.{key}": one for key, one in flatten(value).items()}
        else:
            named[name] = tuple(value) if isinstance(value, list) else value
    return named


def unflatten(values: Mapping[str, object]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        table = document
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return document


def _name_of(detail: ErrorDetails) -> str:
    """The preference's name; an element of a list belongs to the list."""
    return ".".join(part for part in detail["loc"] if isinstance(part, str))


def _sentence(name: str, detail: ErrorDetails, origins: Mapping[str, Origin]) -> str:
    origin = origins.get(name)
    if origin is None:
        # A table as a whole: its first value determines the layer.
        inside = (one for key, one in origins.items() if key.startswith(f"{name}."))
        origin = next(inside, DEFAULT)
    listed = any(isinstance(part, int) for part in detail["loc"])
    shown = f"each part of {name}" if listed else name
    return f"{origin.where}: {shown} {describe_setting_error(detail)}"


class PreferenceSource:
    """The layers of a running program; reads the file again on request."""

    def __init__(
        self, path: Path, environment: Mapping[str, str] | None = None, flags: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._environment = environment
        self._flags = tuple(flags)
        self._seen = _stamp(path)
        self.current = load(path, environment, self._flags)

    def changed(self) -> bool:
        """Whether the file has changed since the last load or attempt."""
        return _stamp(self._path) != self._seen

    def reload(self) -> None:
        """Load again. When that fails, the previous values stay."""
        self._seen = _stamp(self._path)
        self.current = load(self._path, self._environment, self._flags)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
