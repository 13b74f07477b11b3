"""Runs that train adapters of a given model: what `init` makes, refuses, and keeps on an edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from coordinator.run_creation.test_given_model import continued, llama, saved, text
from kits.coordinator.commands import complaint, edit
from swarm_coordinator.cli.main import run as run_command
from swarm_coordinator.configuration.run_settings import settings_differences
from swarm_coordinator.durability.run_files import load_settings
from swarm_coordinator.run_creation.initialise import refresh_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import AdapterConfig

__all__ = ["text"]  # a fixture

SETTINGS: dict[str, Any] = {
    "adapters.rank": 4, "adapters.alpha": 8, "adapters.targets": ["q_proj", "v_proj"],
    "training.microbatches_per_step": 2, "training.sequences_per_microbatch": 2,
    "codecs.activation": "none", "codecs.gradient": "none",
}  # fmt: skip


def adapter_run(tmp_path: Path, text: str, **settings: Any) -> tuple[Manifest, RunFolder]:
    given = saved(tmp_path / "given", llama())
    return continued(tmp_path, text, given, 2, **SETTINGS | settings)


def test_the_manifest_has_the_adapters_and_the_files_what_is_frozen(
    tmp_path: Path, text: str
) -> None:
    manifest, folder = adapter_run(tmp_path, text)
    assert manifest.model.adapters == AdapterConfig(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    assert settings_differences(load_settings(folder), manifest) == []
    # Adapters are not trained yet: the preset's own rate.
    assert manifest.optimizer.learning_rate == pytest.approx(2e-3)
    for path in initial_files(folder, manifest):
        with safe_open(str(path), framework="pt") as file:
            assert not any("lora" in name for name in file.keys())  # noqa: SIM118
    plain = manifest.model_copy(update={"model": manifest.model.base})
    assert run_id_of(manifest) != run_id_of(plain)


def test_other_adapters_keep_the_files_and_the_cut(tmp_path: Path, text: str) -> None:
    manifest, folder = adapter_run(tmp_path, text)
    edit(folder, ("rank = 4", "rank = 5"))
    (difference,) = settings_differences(load_settings(folder), manifest)
    assert difference.startswith("[adapters] rank is 5")
    again = refresh_manifest(folder)
    assert (again.model.adapters.rank, again.initial) == (5, manifest.initial)
    assert settings_differences(load_settings(folder), again) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--set", "adapters.rank=-1"], "[adapters] rank must be at least 0"),
        (["--set", "adapters.rank=33"], "the rank of adapters must be at most hidden_size"),
        (["--set", "adapters.rank=4", "--set", "adapters.targets=['lm_head']"], "'down_proj'"),
        (["--set", "adapters.rank=4", "--set", "adapters.targets=[]"], "at least 1 part"),
        (
            ["--set", "adapters.rank=4", "--set", "adapters.targets=['q_proj', 'q_proj']"],
            "must name each matrix once",
        ),
        (["--set", "adapters.rank=4", "--stages", "4"], "every stage needs a layer"),
        (["--set", "adapters.ranks=4"], "did you mean 'rank'?"),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_a_sentence(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    given = saved(tmp_path / "given", llama())
    before = set(tmp_path.iterdir())
    capsys.readouterr()  # the progress of saving
    command = ["init", str(tmp_path / "run"), "--data", text, "--from", str(given), *options]
    assert run_command(command) == 3
    assert reason in complaint(capsys)
    assert set(tmp_path.iterdir()) == before


def test_adapters_need_a_model_that_exists(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["init", str(tmp_path / "run"), "--data", text]
    assert run_command([*made, "--set", "adapters.rank=4"]) == 3
    assert "name it with `init --from`" in complaint(capsys)
    assert run_command(made) == 0
    folder = RunFolder.open(tmp_path / "run")
    edit(folder, ("rank = 0", "rank = 4"))
    with pytest.raises(ConfigurationError, match="name it with `init --from`"):
        refresh_manifest(folder)


def test_the_reference_trains_the_adapters_from_the_models_own_loss(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = adapter_run(tmp_path, text)
    given = tmp_path / "given"
    whole_folder = tmp_path / "whole"
    whole_folder.mkdir()
    settings = {n: v for n, v in SETTINGS.items() if not n.startswith("adapters.")}
    _, whole = continued(whole_folder, text, given, 2, **settings)

    def losses(folder: RunFolder) -> list[float]:
        steps = tmp_path / f"{folder.path.parent.name}.json"
        command = ["reference", str(folder.path), "--steps", "3", "--json", str(steps)]
        assert run_command([*command, "--threads", "1"]) == 0
        return [step["loss"] for step in json.loads(steps.read_text())["steps"]]

    adapted, trained = losses(folder), losses(whole)
    assert adapted[0] == trained[0]
    assert adapted[2] != adapted[0]
    assert adapted[1:] != trained[1:]
