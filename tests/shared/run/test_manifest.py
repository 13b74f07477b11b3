"""What an organiser can write into a manifest: every number has two bounds, every list and text a
length, and a volunteer refuses what is outside in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from kits.manifests import manifest_of
from swarm_shared.base.errors import FrameError
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import MANIFEST_DOMAIN, open_manifest
from swarm_shared.identity.signing import JSON_PAYLOAD_TYPE, seal
from swarm_shared.run.manifest import (
    Manifest,
)

ORGANISER = Identity.from_seed(b"o" * 32)


def fields(
    schema: dict[str, Any], definitions: dict[str, Any], path: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value of the manifest with its JSON schema, references resolved."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if options := schema.get("anyOf"):
        for option in options:
            yield from fields(option, definitions, path)
        return
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from fields(part, definitions, f"{path}.{name}")
    if isinstance(items := schema.get("items"), dict):
        yield from fields(items, definitions, f"{path}[]")


SCHEMA = Manifest.model_json_schema()
FIELDS = list(fields(SCHEMA, SCHEMA["$defs"], "manifest"))


def test_every_number_of_a_manifest_has_two_bounds():
    numbers = [(path, one) for path, one in FIELDS if one.get("type") in ("integer", "number")]
    assert len(numbers) > 30
    for path, one in numbers:
        fixed = "enum" in one or "const" in one
        assert fixed or one.keys() & {"minimum", "exclusiveMinimum"}, f"{path} has no lower bound"
        assert fixed or one.keys() & {"maximum", "exclusiveMaximum"}, f"{path} has no upper bound"


def test_every_list_and_text_of_a_manifest_has_a_longest_length():
    for path, one in FIELDS:
        if one.get("type") == "array":
            assert "maxItems" in one, f"{path} has no longest length"
        if one.get("type") == "string":
            assert one.keys() & {"maxLength", "pattern", "enum", "const"}, f"{path} has no bound"


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("limits", "heartbeat_seconds", 1e-6),
        ("limits", "heartbeat_seconds", 1e9),
        ("limits", "dead_after_seconds", 1e-6),
        ("limits", "receipt_interval_seconds", 1e-6),
        ("limits", "round_stall_seconds", 1e-6),
        ("limits", "lease_seconds", 1e-6),
        ("limits", "lease_seconds", math.inf),
        ("limits", "join_hold_seconds", 1e9),
        ("optimizer", "learning_rate", math.inf),
        ("optimizer", "clip_norm", math.nan),
        ("training", "steps", 2**63),
    ],
)
def test_a_volunteer_refuses_a_number_outside_its_range(section: str, name: str, value: float):
    content = json.loads(manifest_of(organiser=ORGANISER.peer_id).model_dump_json())
    content[section][name] = value
    envelope = seal(ORGANISER, MANIFEST_DOMAIN, JSON_PAYLOAD_TYPE, json.dumps(content).encode())
    with pytest.raises(FrameError, match=rf"{section}\.{name}: Input should be"):
        open_manifest(envelope, ORGANISER.peer_id)
