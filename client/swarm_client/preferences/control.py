"""All preferences with their sources, as the control socket shows them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from swarm_client.preferences.file import allowed, default_of, fields_of
from swarm_client.preferences.hours import WEEKDAYS
from swarm_client.preferences.layers import DEFAULT, load
from swarm_client.preferences.model import GPU, GROUPS, VERSION, GpuPreferences, Preferences

_DAYS = {"hours_on": "hours", "network_hours_on": "network_hours"}
"""Tables by weekday, and the preference that applies on a day without an entry."""


def shown(path: Path, flags: Sequence[str]) -> dict[str, Any]:
    """All effective values by name, in the order of the groups, with source and meaning. Of tables,
    also the values for all days and for all GPUs.

    The layers are read for each request: the file may have been edited by hand.
    """
    layered = load(path, flags=flags)
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
    return {"version": VERSION, "file": str(path), "preferences": preferences}


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
