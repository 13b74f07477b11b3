"""The card of an exported model: the run's figures, and text that cannot leave its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kits.coordinator import run as run_kit
from kits.coordinator.shell_world import make_run
from kits.runs.stage_files import small_manifest
from swarm_coordinator.core.events import EvaluationRecord, RolledBack
from swarm_coordinator.durability.run_files import load_manifest, read_database
from swarm_coordinator.model_hub.model_card import RunFigures, escaped, model_card
from swarm_coordinator.storage.history import Reached, read_reached
from swarm_shared.base.types import RunId, Version
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import AdapterConfig

FIGURES = RunFigures(
    run_id=RunId("ab" * 32), manifest_sha256="cd" * 32, steps=1500, training_loss=2.5,
    heldout_loss=None, volunteers=7,
)  # fmt: skip


def front_matter(card: str) -> dict[str, Any]:
    _, content, _ = card.split("---\n", 2)
    found = yaml.safe_load(content)
    assert isinstance(found, dict)
    return found


def rows(card: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", card, re.M))


def test_the_card_has_the_figures_of_the_run() -> None:
    manifest = small_manifest()
    card = model_card(manifest, FIGURES, "bfloat16", "ada/x")
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["swarmtrain", "distributed-training", "volunteer-computing"],
    }
    found = rows(card)
    assert found["run"] == f"`{'ab' * 32}`"
    assert found["manifest, SHA-256"] == f"`{'cd' * 32}`"
    assert found["steps"] == "1,500 of 5"
    assert found["tokens trained"] == "48,000"  # one sequence of 32 tokens a step
    assert found["training loss of the last step"] == "2.5000 nats a token"
    assert found["devices that contributed"] == "7"
    assert found["parameters stored in"] == "bfloat16"
    assert "held-out loss" not in found
    assert 'model="ada/x", dtype="bfloat16"' in card


def test_the_model_that_a_run_continues_is_named_if_it_is_known() -> None:
    manifest = small_manifest().model_copy(update={"base_model": "org/base"})
    card = model_card(manifest, FIGURES, "float32", "ada/x")
    assert front_matter(card)["base_model"] == "org/base"
    assert r"continued from org\/base" in card


def test_the_card_of_adapters_says_how_peft_loads_them() -> None:
    plain = small_manifest()
    adapters = AdapterConfig(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    model = plain.model.model_copy(update={"adapters": adapters})
    manifest = plain.model_copy(update={"base_model": "org/base", "model": model})
    card = model_card(manifest, FIGURES, "float32", "ada/x", as_adapters=True)
    assert front_matter(card)["library_name"] == "peft"
    assert front_matter(card)["base_model"] == "org/base"
    assert rows(card)["adapters"] == "rank 4, alpha 8, of `q_proj`, `v_proj`"
    assert r"Low-rank adapters of org\/base, trained by swarmtrain across 7 devices" in card
    assert 'AutoModelForCausalLM.from_pretrained("org/base")' in card
    assert 'PeftModel.from_pretrained(base, "ada/x")' in card
    merged = model_card(manifest, FIGURES, "float32", "ada/x")
    assert front_matter(merged)["library_name"] == "transformers"
    assert r"A language model trained by swarmtrain across 7 devices" in merged
    assert rows(merged)["adapters"] == rows(card)["adapters"]


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_what_is_not_known_is_left_out(loss: float | None) -> None:
    figures = RunFigures(RunId("ab" * 32), "cd" * 32, 3, loss, loss, None)
    found = rows(model_card(small_manifest(), figures, "float32", "ada/x"))
    assert not any("loss" in label or "devices" in label for label in found)


HOSTILE = "x\n---\nlicense: y\n# <script>alert(1)</script> | ![a](http://b) `c` $d$ \x1b[2J"


def test_a_runs_name_stays_text_on_its_line() -> None:
    manifest = small_manifest()
    plain = model_card(manifest, FIGURES, "float32", "ada/x")
    named = Manifest.model_validate(manifest.model_dump() | {"name": HOSTILE[:100]})
    card = model_card(named, FIGURES, "float32", "ada/x")
    assert front_matter(card) == front_matter(plain)
    assert card.count("\n") == plain.count("\n")
    assert "\x1b" not in card
    assert not re.search(r"(?<!\\)[<\[`|$]", escaped(HOSTILE))


def test_figures_are_those_of_the_exported_version(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=9)
    assert read_database(folder, lambda c: read_reached(c, 2)) is None
    run_kit.one_start(
        folder, *(run_kit.step(number) for number in range(1, 6)),
        EvaluationRecord(Version(4), 1.75, 64), RolledBack(Version(3), "all were lost"),
        run_kit.step(4, attempt=2, loss=3.0), EvaluationRecord(Version(4), 1.5, 64),
    )  # fmt: skip
    assert load_manifest(folder).training.steps == 9

    def at(version: int) -> Reached | None:
        return read_database(folder, lambda connection: read_reached(connection, version))

    assert at(4) == Reached(training_loss=3.25, heldout_loss=1.5, peers=2)
    assert at(3) == Reached(training_loss=2.0 + 1 / 3, heldout_loss=None, peers=2)
    assert at(5) == Reached(training_loss=None, heldout_loss=None, peers=2)
    assert at(0) == Reached(training_loss=None, heldout_loss=None, peers=0)
