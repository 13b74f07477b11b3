"""Preferences over the control socket: show all with their sources, and change one.

Flags and the environment are not changed over it: they belong to the user who started the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from swarm_client.preferences.file import allowed, default_of, fields_of, set_preference
from swarm_client.preferences.hours import WEEKDAYS
from swarm_client.preferences.layers import DEFAULT, Layered, load
from swarm_client.preferences.model import GPU, GROUPS, VERSION, GpuPreferences

_DAYS = {"hours_on": "hours", "network_hours_on": "network_hours"}
"""Tables by weekday, and the preference that applies on a day without an entry."""


class PreferenceStore:
    """Reads the layers for each request: the file may have been edited by hand."""

    def __init__(self, path: Path, flags: Callable[[], Sequence[str]]) -> None:
        """`flags`: those of the current run."""
        self._path = path
        self._flags = flags

    def show(self) -> dict[str, Any]:
        """All effective values by name, in the order of the groups, with source and meaning. Of
        tables, also the values for all days and for all GPUs."""
        layered = load(self._path, flags=self._flags())
        preferences = {
            name: {"value": value, "layer": layer, "where": where, **_meaning(group, field)}
            for group in GROUPS
            for name, value, layer, where, field in _of_group(group, layered)
        }
        return {"version": VERSION, "file": str(self._path), "preferences": preferences}

    def set(self, name: str, text: str) -> object:
        """Set a value in the file, where a running governor finds it at its next tick; return the
        parsed value. An empty text removes it. ConfigurationError for an impossible value."""
        return set_preference(self._path, name, text or None)


_Row = tuple[str, object, str, str, FieldInfo]


def _of_group(group: str, layered: Layered) -> Iterator[_Row]:
    if group == GPU:
        yield from _of_gpus(layered)
        return
    said = {name: (value, origin) for name, value, origin in layered.values()}
    for name, field in fields_of(group):
        if name not in _DAYS:
            value, origin = said[name]
            yield name, value, origin.layer, origin.where, field
            continue
        usual = getattr(layered.preferences, _DAYS[name])
        for day in WEEKDAYS:
            value, origin = said.get(f"{name}.{day}", (usual, DEFAULT))
            where = f"`{_DAYS[name]}`" if origin is DEFAULT else origin.where
            yield f"{name}.{day}", value, origin.layer, where, field


def _of_gpus(layered: Layered) -> Iterator[_Row]:
    said = {
        name: (value, origin) for name, value, origin in layered.values() if name.startswith("gpu.")
    }
    tables = sorted({name.split(".")[1] for name in said} - {"all"}, key=int)
    for table in ("all", *tables):
        for key, field in GpuPreferences.model_fields.items():
            name = f"gpu.{table}.{key}"
            if name in said:
                value, origin = said[name]
                yield name, value, origin.layer, origin.where, field
            elif table == "all":
                yield name, default_of(field), DEFAULT.layer, DEFAULT.where, field


def _meaning(group: str, field: FieldInfo) -> dict[str, str]:
    return {"group": group, "text": field.description or "", "allowed": allowed(field)}
