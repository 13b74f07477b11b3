"""The exported folder, as `transformers` reads it."""

from __future__ import annotations

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kits.runs.stage_files import small_manifest
from swarm_coordinator.offline.hf_export import bytes_tokenizer, export_huggingface
from swarm_coordinator.offline.merged_stages import merge_stages
from swarm_coordinator.run_creation.tokenizer_files import organisers_tokenizer
from swarm_shared.base.errors import ConfigurationError, StorageError
from swarm_shared.data.tokenizer import BytesTokenizer, train_bpe
from swarm_shared.model.flat_gradients import FlatLayout
from swarm_shared.model.initialise import build_stage, build_whole
from swarm_shared.model.optimizer import apply_step, make_optimizer
from swarm_shared.model.state import open_state, save_state, state_to_tensors
from swarm_shared.run.manifest import (
    Manifest,
)
from swarm_shared.run.model_config import RopeScaling

NO_TOKENIZER = Path("nowhere")
LLAMA3 = RopeScaling(kind="llama3", factor=8, low_frequency_factor=1, original_length=64)
TEXT = "def f(x):\n\treturn 'ä😀' + \"\\x00\"  # two  spaces\r\n"


def manifest(
    tied: bool, tokenizer: str = "bytes", key_value_heads: int = 2, **blocks: Any
) -> Manifest:
    made = small_manifest(
        tie_embeddings=tied, key_value_heads=key_value_heads, rope_theta=5000.0,
        norm_epsilon=3e-5, **blocks,
    )  # fmt: skip
    return made.model_copy(update={"data": made.data.model_copy(update={"tokenizer": tokenizer})})


def save_stages(described: Manifest, folder):
    """One trained step, so that norms and all other values are no longer the initial ones."""
    paths = []
    for index in range(described.stage_count):
        stage = build_stage(described, index)
        optimizer, layout = make_optimizer(stage, described.optimizer), FlatLayout.of(stage)
        flat = torch.randn(layout.count, generator=torch.Generator().manual_seed(index))
        tied = torch.randn(layout.tied_count, generator=torch.Generator().manual_seed(77))
        flat[layout.own_count :] = tied
        apply_step(optimizer, layout, flat, 0.05, 1.0)
        paths.append(folder / f"stage-{index}.safetensors")
        save_state(paths[-1], state_to_tensors(stage, optimizer), {"stage": str(index)})
    return paths


BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"tied": True}),
    ("LlamaForCausalLM", {"key_value_heads": 4}),
    ("LlamaForCausalLM", {"attention_bias": "all", "attention_head_size": 24}),
    ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
    ("Qwen2ForCausalLM", {"attention_bias": "qkv", "tied": True}),
    (
        "Qwen2ForCausalLM",
        {
            "attention_bias": "qkv",
            "attention_head_size": 8,
            "rope_scaling": RopeScaling(kind="linear", factor=4),
        },
    ),
    (
        "LlamaForCausalLM",
        {
            "rope_scaling": RopeScaling(
                kind="yarn",
                factor=4,
                high_frequency_factor=32,
                original_length=16,
                attention_factor=1.2,
            )
        },
    ),
    ("Qwen3ForCausalLM", {"query_key_norm": True, "tied": True}),
    (
        "Qwen3ForCausalLM",
        {"query_key_norm": True, "attention_bias": "all", "attention_head_size": 32},
    ),
    (
        "Qwen3ForCausalLM",
        {"query_key_norm": True, "attention_head_size": 24, "rope_scaling": LLAMA3},
    ),
]


@pytest.mark.parametrize(("architecture", "blocks"), BLOCKS)
def test_transformers_computes_our_logits_and_gradients(tmp_path, architecture, blocks):
    described = manifest(**{"tied": False} | blocks)
    paths = save_stages(described, tmp_path)
    export_huggingface(described, paths, NO_TOKENIZER, tmp_path / "out")
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert type(theirs).__name__ == architecture
    ours = build_whole(described)
    merged = merge_stages(described.model, paths)
    ours.load_state_dict(merged)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 300, (2, 33), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    logits = theirs(inputs).logits
    assert (ours(inputs) - logits).abs().max() <= 1e-5
    assert logits.std() > 0.1
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ).backward()
    ours(inputs, targets).backward()
    expected = dict(theirs.named_parameters())
    assert set(expected) == {name for name, _ in ours.all_parameters()}
    for name, parameter in ours.all_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-4, msg=name
        )


def test_the_export_holds_no_optimizer_state_and_a_readable_mode(tmp_path):
    described = manifest(tied=True)
    export_huggingface(described, save_stages(described, tmp_path), NO_TOKENIZER, tmp_path / "out")
    stored = open_state(tmp_path / "out" / "model.safetensors")
    assert not any(name.startswith("optimizer.") for name in stored.tensors)
    assert "lm_head.weight" not in stored.tensors
    assert stored.metadata == {"format": "pt"}
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 300


def test_the_bytes_tokenizer_gives_the_bytes_and_the_text_back(tmp_path):
    described = manifest(tied=False)
    export_huggingface(described, save_stages(described, tmp_path), NO_TOKENIZER, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == list(TEXT.encode()) == BytesTokenizer().encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == 0


def test_every_byte_has_its_value_as_id():
    vocabulary = bytes_tokenizer().get_vocab()
    assert sorted(vocabulary.values()) == list(range(256))
    every_character = "".join(chr(code) for code in range(1, 0x250))
    tokenizer = Tokenizer.from_str(bytes_tokenizer().to_str())
    assert tokenizer.encode(every_character).ids == list(every_character.encode())


def test_the_bpe_tokenizer_is_copied_and_gives_the_same_ids(tmp_path):
    described = manifest(tied=False, tokenizer="bpe")
    trained = train_bpe([TEXT * 3, "return f(x) + f(y)\n" * 5], 280)
    trained.save(tmp_path / "tokenizer.json")
    paths = save_stages(described, tmp_path)
    export_huggingface(described, paths, tmp_path / "tokenizer.json", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == trained.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == 0


def test_the_organisers_tokenizer_is_copied_with_its_own_end_of_text(tmp_path):
    described = manifest(tied=False, tokenizer="file")
    (tmp_path / "vocabulary.txt").write_text("A\nC\n<unk>\n<eos>\nG\n")
    own = organisers_tokenizer(tmp_path / "vocabulary.txt")
    own.save(tmp_path / "tokenizer.json")
    paths = save_stages(described, tmp_path)
    export_huggingface(described, paths, tmp_path / "tokenizer.json", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("GAXC")["input_ids"] == own.encode("GAXC").tolist() == [4, 0, 2, 1]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 3)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == 3


def test_a_bpe_run_without_its_tokenizer_is_refused_before_anything_is_written(tmp_path):
    described = manifest(tied=False, tokenizer="bpe")
    with pytest.raises(StorageError, match="the tokenizer nowhere cannot be read"):
        export_huggingface(
            described, save_stages(described, tmp_path), NO_TOKENIZER, tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_a_model_with_bottlenecks_is_refused_because_transformers_could_not_load_it(tmp_path):
    described = manifest(tied=False)
    narrow = described.model.model_copy(update={"bottleneck_size": 8, "bottlenecks": (2,)})
    described = described.model_copy(update={"model": narrow})
    paths = save_stages(described, tmp_path)
    merged = merge_stages(narrow, paths)
    assert merged["model.narrow.2.proj.weight"].shape == (8, 64)
    with pytest.raises(ConfigurationError, match="1 bottleneck"):
        export_huggingface(described, paths, NO_TOKENIZER, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_stage_is_refused(tmp_path):
    described = manifest(tied=False)
    paths = save_stages(described, tmp_path)
    with pytest.raises(StorageError, match="do not make up this model"):
        export_huggingface(described, paths[:1], NO_TOKENIZER, tmp_path / "out")


def test_a_stage_of_another_model_is_refused(tmp_path):
    described = manifest(tied=False)
    paths = save_stages(described, tmp_path)
    other = manifest(tied=False, key_value_heads=4)
    with pytest.raises(StorageError, match=r"k_proj\.weight is stored as"):
        export_huggingface(other, paths, NO_TOKENIZER, tmp_path / "out")


def test_parameters_of_the_version_before_are_left_out(tmp_path):
    described = manifest(tied=False)
    plain = save_stages(described, tmp_path)
    export_huggingface(described, plain, NO_TOKENIZER, tmp_path / "plain")
    for index, path in enumerate(plain):
        tensors = dict(open_state(path).tensors)
        previous = build_stage(described, index).all_parameters()
        tensors.update({"previous." + name: value.detach() for name, value in previous})
        save_state(path, tensors, {"stage": str(index)})
    export_huggingface(described, plain, NO_TOKENIZER, tmp_path / "stale")
    one, other = (tmp_path / name / "model.safetensors" for name in ("plain", "stale"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_tied_halves_of_different_checkpoints_are_refused(tmp_path, wrong):
    described = manifest(tied=True)
    paths = save_stages(described, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in open_state(paths[1]).tensors.items()}
    tensors["model.embed_tokens.weight"] += wrong
    save_state(paths[1], tensors, {})
    with pytest.raises(StorageError, match="differs from the copy"):
        export_huggingface(described, paths, NO_TOKENIZER, tmp_path / "out")
