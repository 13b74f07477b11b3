"""Preferences over the control socket: show all with their sources, and change one.

Flags and the environment are not changed over it: they belong to the user who started the program.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from swarm_client.preferences.file import allowed, default_of, fields_of, set_preference
from swarm_client.preferences.hours import WEEKDAYS
from swarm_client.preferences.layers import DEFAULT, load
from swarm_client.preferences.model import GPU, GROUPS, VERSION, GpuPreferences, Preferences

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
        said = {name: (value, origin) for name, value, origin in layered.values()}
        preferences: dict[str, dict[str, object]] = {}
        for group in GROUPS:
            for name, field, usual, where in _names(group, layered.preferences, said):
                value, origin = said.get(name, (usual, DEFAULT))
                preferences[name] = {
                    "value": value, "layer": origin.layer,
                    "where": where if origin is DEFAULT else origin.where, "group": group,
                    "text": field.description or "", "allowed": allowed(field),
                }  # fmt: skip
        return {"version": VERSION, "file": str(self._path), "preferences": preferences}

    def set(self, name: str, text: str) -> object:
        """Set a value in the file, where a running governor finds it at its next tick; return the
        parsed value. An empty text removes it. ConfigurationError for an impossible value."""
        return set_preference(self._path, name, text or None)


def _names(
    group: str, preferences: Preferences, said: Container[str]
) -> Iterator[tuple[str, FieldInfo, object, str]]:
    """The names of a group with what applies where nothing is said, and where that comes from."""
    if group == GPU:
        for table in ("all", *sorted(preferences.gpu.keys() - {"all"}, key=int)):
            for key, field in GpuPreferences.model_fields.items():
                if table == "all" or f"gpu.{table}.{key}" in said:
                    yield f"gpu.{table}.{key}", field, default_of(field), DEFAULT.where
        return
    for name, field in fields_of(group):
        if name not in _DAYS:
            yield name, field, None, DEFAULT.where
            continue
        for day in WEEKDAYS:
            usual = getattr(preferences, _DAYS[name])
            yield f"{name}.{day}", field, usual, f"`{_DAYS[name]}`"
