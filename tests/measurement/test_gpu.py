"""One stage at work: FLOPs, figures, and the way without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.stage.flops import (
    layer_forward_flops_per_token,
    layer_training_flops_per_token,
    peak_tflops,
)
from benchmarks.stage.gpu import figures, main
from benchmarks.stage.middle_stage import (
    Timed,
    largest_inner_stage,
    stage_manifest,
)
from swarm_client.stage.worker.accelerator import accelerators
from swarm_shared.model.llama import Stage
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import PRESETS


@pytest.mark.parametrize("name", ["tiny", "small", "1b", "7b"])
def test_the_formula_counts_what_torch_counts(name: str) -> None:
    model = PRESETS[name].model
    tokens = 2 * model.sequence_length
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        stage = Stage(model, StageRange(first_layer=1, end_layer=3), False, False)
        x_BTD = torch.zeros(2, model.sequence_length, model.hidden_size, requires_grad=True)
        output = stage(x_BTD)
        forward = counter.get_total_flops()
        torch.autograd.backward(output, torch.ones_like(output))
    assert forward == 2 * tokens * layer_forward_flops_per_token(model)
    # Whether a backward pass of attention computes its scores anew is the kernel's choice.
    again = 2 * tokens * 2 * model.sequence_length * model.heads * model.head_size
    training = 2 * tokens * layer_training_flops_per_token(model)
    assert counter.get_total_flops() in (training, training + again)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("Quadro P400", None),
    ],
)
def test_peaks_are_known_by_the_longest_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


def test_a_presets_largest_inner_stage_is_measured() -> None:
    assert [largest_inner_stage(PRESETS[name]) for name in ("tiny", "1b", "7b")] == [2, 3, 2]
    manifest = stage_manifest(PRESETS["tiny"], 2, "bfloat16")
    assert [cut.end_layer - cut.first_layer for cut in manifest.stages] == [1, 2, 1]


def test_figures_are_medians_of_steps() -> None:
    timed = [Timed(2, seconds, 1.0) for seconds in (2.0, 4.0, 100.0)]
    found = figures(timed, tokens=80, flops=2e12, peak=10.0)
    assert found["tokens_per_second"] == 20.0
    assert found["tokens_per_second_with_optimizer"] == 16.0
    assert found["mfu"] == pytest.approx(0.05)
    assert figures(timed, 80, 2e12, None)["mfu"] is None


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    if accelerators():
        pytest.skip("there is a GPU here")
    out = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, ["--out", str(out)])
    assert done.exit_code == 0
    assert done.output.count("\n") == 1
    assert "torch finds no GPU" in done.output
    assert not out.exists()


def test_the_way_on_a_processor_prints_and_writes_what_a_gpu_would(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = ["--device", "cpu", "--preset", "tiny", "--layers", "1", "--microbatches", "1"]
    words += ["--steps", "1", "--backend", "aot_eager", "--peak-tflops", "1", "--out", str(out)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0
    for word in ("tokens/s", "MFU", "aot_eager", "share of full speed"):
        assert word in done.output
    document = json.loads(out.read_text())
    plain, compiled = document["stages"]
    assert (plain["compiled_by"], compiled["compiled_by"]) == (None, "aot_eager")
    for one in (plain, compiled):
        assert one["tokens_per_step"] == 1024
        assert one["mfu"] == pytest.approx(one["teraflops"])
    (budgets,) = document["budgets"]
    assert budgets["plans"][0]["speed"] == 1.0
    assert all(plan["same_sums"] for plan in budgets["plans"])
