"""The preferences as the control socket shows and changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm_client.preferences.file import set_preference
from swarm_client.preferences.layers import load
from swarm_client.preferences.model import VERSION


class PreferenceDesk:
    """Reads the layers anew for each question: the file may have been edited by hand."""

    def __init__(self, path: Path, flags: Callable[[], Sequence[str]]) -> None:
        """`flags`: those of the run that is worked on."""
        self._path = path
        self._flags = flags

    def show(self) -> dict[str, Any]:
        """Every value that holds, by name, with where it comes from."""
        layered = load(self._path, flags=self._flags())
        preferences = {
            name: {"value": value, "layer": origin.layer, "where": origin.where}
            for name, value, origin in layered.values()
        }
        return {"version": VERSION, "file": str(self._path), "preferences": preferences}

    def set(self, name: str, text: str) -> object:
        """Into the file, where a running governor finds it at its next look; what was understood.
        An empty text takes it out. ConfigurationError when it cannot be."""
        return set_preference(self._path, name, text or None)
