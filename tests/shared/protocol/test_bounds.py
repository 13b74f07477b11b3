"""Every text, list and number that another machine may have written has a bound.

The models are found by reflection: each subclass of `FrozenModel` in the three packages counts as
written by another machine, unless its module is one of `LOCAL`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

import swarm_client
import swarm_coordinator
import swarm_shared
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import Heartbeat, client_messages

LOCAL = (
    # Files and settings of this machine's user, and what is measured or shown here.
    "swarm_client.control", "swarm_client.doctor", "swarm_client.fault_injection",
    "swarm_client.governor", "swarm_client.preferences", "swarm_client.tui",
    "swarm_coordinator.admission.requests", "swarm_coordinator.configuration",
    "swarm_coordinator.durability", "swarm_coordinator.run_dir", "swarm_coordinator.simulator",
    "swarm_shared.codecs",
    # Files of this machine's own views; a line's length is checked before it is parsed.
    "swarm_shared.tui.recording",
    # The daemon and its stage worker, over a socket pair.
    "swarm_client.stage.protocol",
)  # fmt: skip
"""Modules whose models no other machine writes."""

NOT_WRITTEN = {"swarm_shared.run.model_config.Preset"}
"""Models that are never parsed."""

MAX_CHARACTERS = 4 * 2**20
MAX_ITEMS = 200_000
UNBOUNDED_QUANTIFIERS = set("*+")


def imported(package: Any) -> None:
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            import_module(found.name)


def models() -> dict[str, type[FrozenModel]]:
    """All models that another machine may have written, by name."""
    for package in (swarm_shared, swarm_client, swarm_coordinator):
        imported(package)
    found: dict[str, type[FrozenModel]] = {}
    open_classes: list[type[FrozenModel]] = [FrozenModel]
    while open_classes:
        for one in open_classes.pop().__subclasses__():
            open_classes.append(one)
            name = f"{one.__module__}.{one.__qualname__}"
            if one.__module__.startswith("swarm_") and not one.__module__.startswith(LOCAL):
                found[name] = one
    return {name: one for name, one in found.items() if name not in NOT_WRITTEN}


@dataclass
class Search:
    """One walk over the schema that pydantic validates a type by."""

    definitions: dict[str, Any]
    seen: set[str]

    def unbounded(self, schema: Any, place: str) -> Iterator[str]:
        """Yield the places of values without a bound."""
        kind = schema["type"]
        match kind:
            case "str":
                pattern = schema.get("pattern", "*")
                anchored = pattern.startswith("^") and pattern.endswith("$")
                if schema.get("max_length", MAX_CHARACTERS + 1) > MAX_CHARACTERS and not (
                    anchored and not UNBOUNDED_QUANTIFIERS & set(pattern)
                ):
                    yield f"{place}: a text"
            case "bytes":
                if schema.get("max_length", MAX_CHARACTERS + 1) > MAX_CHARACTERS:
                    yield f"{place}: bytes"
            case "int" | "float":
                if kind == "float" and schema.get("allow_inf_nan", True):
                    yield f"{place}: a number that may be infinite or no number"
                if not ({"ge", "gt"} & schema.keys() and {"le", "lt"} & schema.keys()):
                    yield f"{place}: a number without bounds"
            case "tuple" if "variadic_item_index" not in schema:
                yield from self.all_of(schema["items_schema"], place)
            case "tuple" | "list" | "dict" | "set" | "frozenset":
                if schema.get("max_length", MAX_ITEMS + 1) > MAX_ITEMS:
                    yield f"{place}: a {kind}"
                parts = schema.get("items_schema", [])
                parts = parts if isinstance(parts, list) else [parts]
                parts += [schema[key] for key in ("keys_schema", "values_schema") if key in schema]
                yield from self.all_of(parts, f"{place}[]")
            case "bool" | "none" | "literal" | "enum":
                pass
            case _:
                yield from self.inside(schema, place)

    def inside(self, schema: Any, place: str) -> Iterator[str]:
        """Go on with what the schema holds or wraps."""
        match schema["type"]:
            case "definitions":
                self.definitions |= {one["ref"]: one for one in schema["definitions"]}
                yield from self.unbounded(schema["schema"], place)
            case "definition-ref":
                if schema["schema_ref"] not in self.seen:
                    self.seen.add(schema["schema_ref"])
                    yield from self.unbounded(self.definitions[schema["schema_ref"]], place)
            case "model-fields" | "dataclass-args":
                fields = schema["fields"]
                named = fields.items() if isinstance(fields, dict) else (
                    (one["name"], one) for one in fields
                )  # fmt: skip
                for name, field in named:
                    yield from self.unbounded(field["schema"], f"{place}.{name}")
            case "json-or-python":
                # What comes from another machine is JSON.
                yield from self.unbounded(schema["json_schema"], place)
            case "union":
                choices = [one[0] if isinstance(one, tuple) else one for one in schema["choices"]]
                yield from self.all_of(choices, place)
            case "tagged-union":
                yield from self.all_of(schema["choices"].values(), place)
            case _ if "schema" in schema:
                yield from self.unbounded(schema["schema"], place)
            case kind:
                yield f"{place}: a value of any kind ({kind})"

    def all_of(self, schemas: Any, place: str) -> Iterator[str]:
        for schema in schemas:
            yield from self.unbounded(schema, place)


def unbounded(type_: Any, name: str) -> list[str]:
    return list(Search({}, set()).unbounded(TypeAdapter(type_).core_schema, name))


def test_every_value_that_another_machine_writes_has_a_bound() -> None:
    found = models()
    assert {"Hello", "Welcome", "Forward", "ChunkRequest", "DoctorHello", "Receipt", "Invite",
            "Manifest", "DirectoryRecord", "StartRound", "OpenStream", "StepLine"} <= {
        name.rpartition(".")[2] for name in found
    }  # fmt: skip
    assert [place for name, one in found.items() for place in unbounded(one, name)] == []


@pytest.mark.parametrize(
    "type_",
    [
        str, bytes, int, float, tuple[bool, ...], list[bool], dict[bool, bool], object,
        Annotated[str, Field(min_length=3)], Annotated[str, Field(pattern="^a+$")],
        Annotated[str, Field(pattern="aaa")], Annotated[int, Field(ge=0)],
        Annotated[float, Field(ge=0, le=1)],
        Annotated[tuple[str, ...], Field(max_length=3)], bool | str,
    ],
)  # fmt: skip
def test_the_search_finds_each_kind_of_value_without_a_bound(type_: Any) -> None:
    assert len(unbounded(type_, "here")) >= 1


WRONG: list[tuple[Any, bytes]] = [
    (PeerId, b'"' + b"b" * 200_000 + b'"'), (PeerId, b'"12D3KooW"'),
    (PeerId, b'"QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"'),
    (PeerId, b'"12D3KooW' + b"0" * 44 + b'"'), (PeerId, b'"12D3KooW' + b"1" * 45 + b'"'),
    (PeerId, b'"12D3KooW' + b"1" * 44 + rb'\n"'),
    (RunId, b'"ab"'), (RunId, b'"' + b"AB" * 32 + b'"'), (StageIndex, b"512"), (StageIndex, b"-1"),
    (Step, b"-1"), (Step, b"9007199254740992"), (MicrobatchIndex, b"65536"), (Generation, b"-1"),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "content"), WRONG)
def test_an_identifier_of_another_form_is_refused(type_: Any, content: bytes) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(type_).validate_json(content)


def test_identifiers_as_they_are_made_here_are_accepted() -> None:
    for number in range(100):
        peer = Identity.from_seed(bytes([number]) * 32).peer_id
        assert TypeAdapter(PeerId).validate_json(f'"{peer}"') == peer


@pytest.mark.parametrize("place", ["changed_links", "changed_paths", "lost_paths"])
def test_a_heartbeat_cannot_carry_texts_of_any_length_as_remotes(place: str) -> None:
    """Measured at the coordinator: 300 heartbeats took 72 MB of it."""
    remote = "x" * 250_000
    rows: dict[str, object] = {
        "changed_links": {"remote": remote, "protocol": "/a/1", "sent": 1, "received": 1},
        "changed_paths": {"remote": remote, "kind": "direct", "rtt_seconds": 0.1},
        "lost_paths": remote,
    }
    message = {"kind": "heartbeat", place: [rows[place]]}
    with pytest.raises(ValidationError, match=r"remote|lost_paths"):
        client_messages.validate_python(Heartbeat.model_validate_json(_json(message)))


@pytest.mark.parametrize("claim", ["", "5e0f1a2", "5E0F1A2B", "5e0f1a2b\n", "5e0f1a2b" * 2, 5])
def test_a_heartbeat_carries_a_class_of_arithmetic_of_eight_hex_digits_or_none(
    claim: object,
) -> None:
    message = {"kind": "heartbeat", "arithmetic": "5e0f1a2b"}
    assert Heartbeat.model_validate_json(_json(message)).arithmetic == "5e0f1a2b"
    with pytest.raises(ValidationError, match="arithmetic"):
        Heartbeat.model_validate_json(_json(message | {"arithmetic": claim}))


def _json(value: object) -> bytes:
    return TypeAdapter(object).dump_json(value)
