"""Settings that are given on a command line: `--set SECTION.NAME=VALUE` and `--codec`."""

from __future__ import annotations

import tomllib

from swarm_shared.base.errors import ConfigurationError


def parse_codec(text: str) -> dict[str, str]:
    """Convert `int8/int4` of a command line, or one name for both directions, to settings."""
    activation, slash, gradient = (part.strip() for part in text.partition("/"))
    return {
        "codecs.activation": activation,
        "codecs.gradient": gradient if slash else activation,
    }


def parse_override(text: str) -> tuple[str, object]:
    """Convert `training.steps=20` to ("training.steps", 20); an unquoted word is text."""
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise ConfigurationError(
            f"{text!r} is not a setting; write SECTION.NAME=VALUE, for example training.steps=20"
        )
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()
    return name.strip(), parsed["value"]
