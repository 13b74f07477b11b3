"""Exported adapters, as `peft` reads them, and the model with adapters in its matrices."""

from __future__ import annotations

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coordinator.evaluation.test_checkpoint_evaluation import heldout
from coordinator.offline.test_hf_export import NO_TOKENIZER, manifest, save_stages
from swarm_coordinator.evaluation.checkpoint_evaluation import heldout_loss, whole_model
from swarm_coordinator.offline.hf_export import (
    check_out,
    export_adapters,
    export_huggingface,
    exported_files,
)
from swarm_coordinator.offline.reference import evaluate
from swarm_shared.model.initialise import build_stage
from swarm_shared.model.state import save_state
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import ALL_TARGETS, AdapterConfig

CASES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (ALL_TARGETS, {}),
    (("q_proj", "v_proj"), {"tied": True}),
    (("o_proj", "down_proj"), {"attention_bias": "all", "attention_head_size": 24}),
    (("k_proj", "gate_proj", "up_proj"), {"attention_bias": "qkv", "tied": True}),
    (ALL_TARGETS, {"query_key_norm": True}),
]


def save_base(described: Manifest, folder: Path) -> list[Path]:
    """Write the model without adapters as a run's files of version 0, and export it."""
    base = described.model_copy(update={"model": described.model.base})
    folder.mkdir()
    paths = [folder / f"stage-{index}.safetensors" for index in range(base.stage_count)]
    for index, path in enumerate(paths):
        stage = build_stage(base, index)
        tensors = {name: p.detach() for name, p in stage.all_parameters()}
        save_state(path, tensors, {"stage": str(index), "version": "0"})
    export_huggingface(base, paths, NO_TOKENIZER, folder / "model")
    return paths


@pytest.mark.parametrize(("targets", "blocks"), CASES)
def test_peft_and_transformers_compute_our_logits(
    tmp_path: Path, targets: tuple[Any, ...], blocks: dict[str, Any]
) -> None:
    adapters = AdapterConfig(rank=3, alpha=7.0, targets=targets)
    described = manifest(**{"tied": False} | blocks, adapters=adapters)
    initial = save_base(described, tmp_path / "base")
    files = save_stages(described, tmp_path)
    ours = whole_model(described, files, initial)
    export_adapters(described, files, NO_TOKENIZER, tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "model")
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone = base(tokens).logits
        theirs = PeftModel.from_pretrained(base, tmp_path / "out")
        expected = theirs(tokens).logits
        found = ours(tokens)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((found - alone).abs().max()) > 1e-3
    loaded = {n for n, _ in theirs.named_parameters() if "lora_" in n}
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {n.replace(".default.", ".") for n in loaded} == stored.keys()

    export_huggingface(described, files, NO_TOKENIZER, tmp_path / "merged", initial=initial)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert float((merged(tokens).logits - expected).abs().max()) < 1e-5


def test_a_checkpoint_of_adapters_is_evaluated_with_what_is_frozen(tmp_path: Path) -> None:
    described = manifest(tied=True, adapters=AdapterConfig(rank=3))
    initial = save_base(described, tmp_path / "base")
    files = save_stages(described, tmp_path)
    microbatches = heldout(1, 2)
    whole = whole_model(described, files, initial)
    assert heldout_loss(described, files, microbatches, initial).nats == evaluate(
        whole, microbatches
    )


def test_an_export_replaces_one_of_the_other_kind(tmp_path: Path) -> None:
    described = manifest(tied=False, adapters=AdapterConfig(rank=3))
    described = described.model_copy(update={"base_model": "org/base"})
    initial = save_base(described, tmp_path / "base")
    files, out = save_stages(described, tmp_path), tmp_path / "out"
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    for _ in range(2):
        export_huggingface(described, files, NO_TOKENIZER, out, initial=initial)
        whole = {"config.json", "generation_config.json", "model.safetensors"} | tokenizer
        assert {path.name for path in out.iterdir()} == whole
        check_out(out)
        export_adapters(described, files, NO_TOKENIZER, out, "bfloat16")
        assert {path.name for path in out.iterdir()} == set(exported_files(out))
        assert set(exported_files(out)) == tokenizer | {
            "adapter_config.json", "adapter_model.safetensors",
        }  # fmt: skip
        check_out(out)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "org/base"
    )
    stored = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
