"""The text of a new run.toml, and the one edit that the program makes in an existing one.

Owns the head of the file and its order. Every setting is there under its description, so that no
manual is needed; sizes of the model that follow from the preset are shown as comments.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

import tomlkit

from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.commented_toml import comment, setting
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.run.manifest import CodecsConfig
from swarm_shared.run.model_config import PRESETS, preset

_HEAD = f"""\
# A run of swarmtrain, as its organiser describes it.
#
# The manifest that volunteers receive was made from this file and signed by
# `swarm-coordinator init`. Settings marked (fixed) are part of it: when they are changed
# later, the manifest must be made anew, and `swarm-coordinator start` reports that. All
# others are read at every start.
#
# Presets: {", ".join(PRESETS)}.
"""


def render_run_toml(settings: RunSettings) -> str:
    """Return the text of a run.toml with exactly these settings."""
    lines = [_HEAD]
    for name, section in RunSettings.model_fields.items():
        content: FrozenModel = getattr(settings, name)
        lines += [comment(section.description or ""), f"[{name}]"]
        for key, field in type(content).model_fields.items():
            value = getattr(content, key)
            if value is None:
                # Only a size of the model can be unset: it follows from the preset.
                default = getattr(preset(settings.model.preset).model, key)
                lines += setting(key, field, default, as_comment=True)
            else:
                lines += setting(key, field, value)
        lines.append("")
    return "\n".join(lines)


def write_codecs(path: Path, codecs: CodecsConfig) -> None:
    """Write the selected codecs into an edited run.toml, and change nothing else in it."""
    # A file that was saved with a byte order mark keeps it.
    text = path.read_bytes().decode("utf-8")
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    document = tomlkit.parse(text.removeprefix(mark))
    section = document["codecs"]
    assert isinstance(section, MutableMapping), "it was read as a section before"
    section["activation"], section["gradient"] = codecs.activation, codecs.gradient
    write_atomically(path, (mark + tomlkit.dumps(document)).encode("utf-8"))
