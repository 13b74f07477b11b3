"""A real run that continues from a model of Hugging Face, under churn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from kits.runs.real_run import corpus_sources
from swarm_coordinator.offline.hf_export import export_huggingface
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_shared.data.tokenizer import train_bpe

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(420)]

STEPS = 10


SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, rope_theta=50_000.0)
QWEN3 = Qwen3Config(**SIZES, head_dim=32, attention_bias=True, rope_parameters=LLAMA3)


def save_model(config: PreTrainedConfig, folder: Path) -> None:
    """Save a model with random parameters, in bfloat16 and several files, with its tokenizer."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    texts = [source.read_text(encoding="utf-8") for source in corpus_sources()]
    train_bpe(texts, 400).save(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("config", "staleness"),
    [pytest.param(LLAMA, 0, id="llama"), pytest.param(QWEN3, 1, id="qwen3, stale")],
)
def test_deaths_a_join_and_a_return_to_version_0_change_no_bit(
    make_run, tmp_path: Path, config: PreTrainedConfig, staleness: int
) -> None:
    given = tmp_path / "given"
    save_model(config, given)
    run = make_run(
        2, STEPS, given_model=given, codecs__average="exact", checkpoint__every_steps=100,
        training__staleness=staleness,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    volunteers = [swarm.start_volunteer(invite, stage=number % 2) for number in range(4)]

    run.wait_for_version(3)
    for volunteer in volunteers[1::2]:
        # Stage 1 has no peer any more, and the run no checkpoint yet.
        run.kill(volunteer)
    for _ in range(2):
        swarm.start_volunteer(invite, stage=1)
    run.wait_for_version(6)
    run.kill(volunteers[0])
    swarm.start_volunteer(invite, stage=0)
    history = swarm.watch()

    assert swarm.wait_for_exit() == []
    assert any("to its checkpoint at 0" in note.text for note in history.notes)
    run.assert_equals_reference()
    out = tmp_path / "exported"
    checkpoints = CheckpointFolder.of_run(run.folder, run.manifest)
    export_huggingface(run.manifest, checkpoints.stage_files(STEPS), run.folder.tokenizer, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == config.model_type
    exported = dict(model.named_parameters())
    trained = run.parameters(STEPS)
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())
