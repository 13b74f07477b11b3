"""Commented TOML: settings of a pydantic model written so that the file explains itself.

Owns TOML's notation of values and the comment above each setting, which is the field's
`Field(description)`. The models, the order of sections and what a file shows belong to the callers.
"""

from __future__ import annotations

import json
import textwrap

from pydantic.fields import FieldInfo

from swarm_shared.base.frozen_model import FrozenModel

COMMENT_COLUMNS = 88
"""Width to which comments are wrapped."""


def toml_value(value: object) -> str:
    """Write a value in TOML; a whole float is written without a fraction, a nested value without
    its defaults."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Above 2**53 digits would be invented.
        whole = value.is_integer() and abs(value) <= 2**53
        return str(int(value)) if whole else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML requires an escape for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, FrozenModel):
        named = value.model_dump(exclude_defaults=True).items()
        return "{" + ", ".join(f"{name} = {toml_value(part)}" for name, part in named) + "}"
    assert isinstance(value, tuple), f"no TOML for {value!r}"
    return "[" + ", ".join(toml_value(part) for part in value) + "]"


def comment(text: str) -> str:
    """Wrap a text as a comment."""
    # Names of commands have hyphens and must stay whole.
    return textwrap.fill(
        text, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def setting(name: str, field: FieldInfo, value: object, *, as_comment: bool = False) -> list[str]:
    """Return the lines of one setting under its description; a default is shown `as_comment`."""
    line = f"{name} = {toml_value(value)}"
    described = [comment(field.description)] if field.description else []
    return [*described, f"# {line}" if as_comment else line]
