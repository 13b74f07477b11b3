"""Models of Hugging Face's format as the beginning of a run: equal logits, and bad folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kits.coordinator.commands import complaint, edit
from kits.manifests import equal_stages, manifest_of
from swarm_coordinator.cli.main import run as run_command
from swarm_coordinator.configuration.run_settings import settings_differences
from swarm_coordinator.durability.backup import make_backup
from swarm_coordinator.durability.integrity_check import check_run, check_start
from swarm_coordinator.durability.restore import restore_backup
from swarm_coordinator.durability.run_files import load_manifest, load_settings
from swarm_coordinator.offline.hf_export import export_huggingface
from swarm_coordinator.offline.merged_stages import merge_stages
from swarm_coordinator.run_creation.given_model import (
    GivenModel,
    read_given_model,
    write_initial_states,
)
from swarm_coordinator.run_creation.initialise import initialise_run, refresh_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_shared.base.errors import ConfigurationError, DataError
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.tokenizer import train_bpe
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.model.initialise import build_whole
from swarm_shared.model.state import load_parameters
from swarm_shared.run.manifest import (
    Manifest,
)
from swarm_shared.run.model_config import RopeScaling

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "some words of text, and a few more of them\n"


def llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"rope_theta": 20_000.0} | options)))


def saved(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    train_bpe([TEXT], 270).save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 400)
    return str(path)


def continued(
    tmp_path: Path, text: str, given: Path, stages: int, **settings: object
) -> tuple[Manifest, RunFolder]:
    folder = tmp_path / "run"
    made = initialise_run(folder, None, text, stages, settings, given_model=given)
    return made, RunFolder.open(folder)


def in_stages(path: Path, given: GivenModel, stages: int) -> tuple[Manifest, RunFolder]:
    """The model cut into stages of one layer, without the data of a run."""
    manifest = manifest_of(
        model=given.config, stages=equal_stages(stages, stages), data={"token_bytes": 2}
    )
    folder = RunFolder.create(path)
    initial = write_initial_states(given, manifest, folder)
    return manifest.model_copy(update={"initial": initial}), folder


def unlike(model: Any) -> Any:
    """Norms begin at one, and every position of a table alike: let each parameter differ."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 48,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 30_000.0, "factor": 4.0}

MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "llama": (LlamaConfig, {"rope_theta": 20_000.0}, "LlamaForCausalLM"),
    "tied": (LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-4}, "LlamaForCausalLM"),
    "multi-head": (LlamaConfig, {"num_key_value_heads": 4}, "LlamaForCausalLM"),
    "biases": (LlamaConfig, {"attention_bias": True, "head_dim": 12}, "LlamaForCausalLM"),
    "llama 3.1": (LlamaConfig, {"rope_parameters": LLAMA3}, "LlamaForCausalLM"),
    "linear": (LlamaConfig, {"rope_parameters": LINEAR}, "LlamaForCausalLM"),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}, "LlamaForCausalLM"),
    "yarn with factors": (
        Qwen2Config,
        {
            "rope_parameters": YARN
            | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.4}
        },
        "Qwen2ForCausalLM",
    ),
    "mistral": (MistralConfig, {"sliding_window": 64, "head_dim": 16}, "LlamaForCausalLM"),
    "qwen2": (Qwen2Config, {"rope_theta": 1e6}, "Qwen2ForCausalLM"),
    "qwen2 tied": (
        Qwen2Config,
        {
            "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 64,
            "max_window_layers": 1, "rope_parameters": LINEAR,
        },
        "Qwen2ForCausalLM",
    ),
    "qwen3": (Qwen3Config, {"head_dim": 12, "rope_theta": 1e6}, "Qwen3ForCausalLM"),
    "qwen3 tied": (
        Qwen3Config,
        {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        "Qwen3ForCausalLM",
    ),
    "qwen3 biases": (Qwen3Config, {"attention_bias": True}, "Qwen3ForCausalLM"),
}  # fmt: skip
"""Configurations, and the class as which the model is exported."""

CASES = [(name, torch.float32) for name in MODELS] + [
    (name, dtype)
    for name in ("llama", "tied", "multi-head", "mistral", "qwen3")
    for dtype in (torch.bfloat16, torch.float16)
]


def made(name: str) -> Any:
    kind, options, _ = MODELS[name]
    return AutoModelForCausalLM.from_config(kind(**SIZES | options))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_logits_are_those_of_transformers_before_and_after_an_export(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    given = saved(tmp_path / "given", unlike(made(name)).to(dtype), max_shard_size="20KB")
    # Not from the one above: its rotary table was rounded to the dtype, too.
    theirs = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32)
    manifest, folder = in_stages(tmp_path / "run", read_given_model(given), 3)
    ours = build_whole(manifest)
    load_parameters(ours, merge_stages(manifest.model, initial_files(folder, manifest)))
    tokens = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(1))
    export_huggingface(manifest, initial_files(folder, manifest), Path(), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert float((ours(tokens) - expected).abs().max()) < 1e-5
        assert float((exported(tokens).logits - expected).abs().max()) < 1e-5
    assert float(expected.std()) > 0.1
    assert type(exported).__name__ == MODELS[name][2]


def test_rotary_positions_are_read_in_the_form_of_transformers_4(tmp_path: Path) -> None:
    given = saved(tmp_path / "given", made("llama 3.1"))
    expected = read_given_model(given).config
    assert expected.rope_scaling == RopeScaling(kind="llama3", factor=8, original_length=48)
    assert expected.rope_theta == 5_000.0
    path = given / "config.json"
    content = json.loads(path.read_text())
    del content["rope_parameters"]
    older = LLAMA3 | {"type": LLAMA3["rope_type"]}
    content["rope_theta"] = older.pop("rope_theta")
    del older["rope_type"]
    path.write_text(json.dumps(content | {"rope_scaling": older}))
    assert read_given_model(given).config == expected


def test_a_run_has_the_blocks_of_its_model(tmp_path: Path, text: str) -> None:
    given = saved(tmp_path / "given", made("qwen3 tied"))
    manifest, folder = continued(tmp_path, text, given, 2)
    assert manifest.model == read_given_model(given).config
    assert manifest.model.query_key_norm
    assert manifest.model.rope_scaling.kind == "llama3"
    assert settings_differences(load_settings(folder), manifest) == []


@pytest.mark.parametrize(
    ("name", "changes", "longest"),
    [
        ("llama", {"sliding_window": 16}, 64),
        ("mistral", {"sliding_window": None}, 64),
        ("mistral", {"sliding_window": 16}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, 16),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True}, 16),
    ],
)
def test_no_sequence_is_longer_than_the_attention_window(
    tmp_path: Path, name: str, changes: dict[str, object], longest: int
) -> None:
    given = saved(tmp_path / "given", made(name))
    edited(given, **changes)
    assert read_given_model(given).config.sequence_length == longest
    with pytest.raises(DataError, match=f"for at most {longest} tokens"):
        read_given_model(given, longest + 2)


def test_the_run_has_the_models_sizes_its_tokenizer_and_a_tenth_of_the_presets_rate(
    tmp_path: Path, text: str
) -> None:
    given = saved(tmp_path / "given", llama())
    manifest, folder = continued(tmp_path, text, given, 2)
    assert manifest.model.model_dump() | {"vocabulary_size": 300, "layers": 3, "heads": 4} == (
        manifest.model.model_dump()
    )
    assert manifest.data.tokenizer == "file"
    assert folder.tokenizer.read_bytes() == (given / "tokenizer.json").read_bytes()
    assert manifest.optimizer.learning_rate == pytest.approx(2e-4)  # of tiny
    assert [path.stat().st_size for path in initial_files(folder, manifest)] == [
        state.bytes for state in manifest.initial
    ]


def test_where_a_run_begins_is_part_of_its_id(tmp_path: Path, text: str) -> None:
    manifest, _ = continued(tmp_path, text, saved(tmp_path / "given", llama()), 2)
    assert run_id_of(manifest) != run_id_of(manifest.model_copy(update={"initial": ()}))
    with pytest.raises(ValueError, match="one file for each stage"):
        Manifest.model_validate(manifest.model_dump() | {"initial": manifest.initial[:1]})


def test_an_edited_run_keeps_its_beginning_but_not_another_cut(tmp_path: Path, text: str) -> None:
    given = saved(tmp_path / "given", llama())
    manifest, folder = continued(tmp_path, text, given, 2)
    edit(folder, ("weight_decay = 0.1", "weight_decay = 0.2"))
    again = refresh_manifest(folder)
    assert (again.initial, again.optimizer.weight_decay) == (manifest.initial, 0.2)
    edit(folder, ("count = 2", "count = 3"))
    with pytest.raises(ConfigurationError, match="cut for 2 stage"):
        refresh_manifest(folder)
    assert load_manifest(folder) == again


def test_a_damaged_or_lost_beginning_is_found_before_the_run_starts(
    tmp_path: Path, text: str
) -> None:
    manifest, folder = continued(tmp_path, text, saved(tmp_path / "given", llama()), 2)
    assert check_start(folder, manifest)[1].findings == ()
    assert "2 states of version 0 have the manifest's hashes" in check_run(folder).good
    path = initial_files(folder, manifest)[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (finding,) = check_start(folder, manifest)[1].findings
    assert "stage-1.safetensors is damaged (its hash is wrong); the run begins" in finding.problem
    path.unlink()
    (finding,) = check_run(folder).findings
    assert "stage-1.safetensors cannot be read" in finding.problem


def test_a_backup_has_the_beginning_of_the_run(tmp_path: Path, text: str) -> None:
    manifest, folder = continued(tmp_path, text, saved(tmp_path / "given", llama()), 2)
    make_backup(folder, tmp_path / "backup", with_key=True, with_data=True)
    restore_backup(tmp_path / "backup", tmp_path / "restored")
    restored = RunFolder.open(tmp_path / "restored")
    assert check_start(restored, manifest)[1].findings == ()
    for one, other in zip(
        initial_files(folder, manifest), initial_files(restored, manifest), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()


def test_the_reference_begins_with_the_models_own_loss(tmp_path: Path, text: str) -> None:
    theirs = unlike(llama())
    given = saved(tmp_path / "given", theirs)
    manifest, folder = continued(
        tmp_path, text, given, 2,
        **{
            "training.microbatches_per_step": 2, "training.sequences_per_microbatch": 3,
            "codecs.activation": "none", "codecs.gradient": "none",
        },
    )  # fmt: skip
    steps = tmp_path / "steps.json"
    assert run_command(["reference", str(folder.path), "--steps=1", f"--json={steps}"]) == 0
    losses = []
    for inputs, targets in ShardSamples(folder.data, manifest).of_step(1):
        with torch.no_grad():
            logits = theirs(torch.from_numpy(inputs.astype("int64"))).logits
        wanted = torch.from_numpy(targets.astype("int64"))
        losses.append(float(cross_entropy(logits.flatten(0, 1), wanted.flatten())))
    (step,) = json.loads(steps.read_text())["steps"]
    assert step["loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)


# ---------------------------------------------------------------- bad folders


def edited(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, folder / "new")
    (folder / "new").rename(folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


WRONG_CONFIGURATIONS: list[tuple[dict[str, object], str]] = [
    ({"model_type": "gpt2"}, "type 'gpt2'; llama, mistral, qwen2, qwen"),
    ({"mlp_bias": True}, "mlp_bias = True; only False"),
    ({"attention_bias": True}, "12 are missing and 0 unknown"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
    ({"rope_parameters": YARN | {"truncate": False}}, "truncate = False; only True"),
    ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "more than 1"),
    (
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": -7.0}},
        "mscale_all_dim: Input should be greater",
    ),
    ({"rope_parameters": {"type": "linear"}}, "factor: Input should be"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"head_dim": 16}, "needs (64, 32)"),
    ({"head_dim": 7}, "multiple of 2"),
    ({"hidden_size": None}, "hidden_size: Input should be a valid"),
    ({"num_attention_heads": 5, "head_dim": 6}, "multiple of 2 * heads"),
    ({"num_hidden_layers": 4}, "9 are missing and 0 unknown (model.l"),
    ({"num_hidden_layers": 2}, "0 are missing and 9 unknown (model.l"),
    ({"vocab_size": 280}, "and the configuration needs (280, 32)"),
    ({"vocab_size": 200}, "the tokenizer has 270 ids, but"),
]
WRONG_FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / "config.json").write_text("{"), "config.json is not JSON"),
    (lambda at: (at / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    (lambda at: (at / "config.json").unlink(), "there is no "),
    (lambda at: (at / "config.json").write_text("[]"), "holds no JSON object"),
    (without_head, "1 are missing and 0 unknown (lm_head.weight is missing)"),
    (cut_short, "model.safetensors cannot be read"),
    (with_nan, "model.norm.weight in "),
    (lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"), "no model.s"),
    (lambda at: (at / "tokenizer.json").unlink(), "name one with --tokenizer"),
]


@pytest.mark.parametrize(("damage", "reason"), [*WRONG_CONFIGURATIONS, *WRONG_FILES])
def test_a_bad_folder_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str],
    damage: dict[str, object] | Callable[[Path], object], reason: str,
) -> None:  # fmt: skip
    given = saved(tmp_path / "given", llama())
    if isinstance(damage, dict):
        edited(given, **damage)
    else:
        damage(given)
    capsys.readouterr()  # a progress bar of transformers
    before = set(tmp_path.iterdir())
    code = run_command(["init", str(tmp_path / "run"), "--from", str(given), "--data", text])
    assert reason in complaint(capsys)
    assert code in (3, 5)
    assert set(tmp_path.iterdir()) == before


def test_sizes_and_lengths_that_the_model_does_not_have_are_refused(
    tmp_path: Path, text: str
) -> None:
    given = saved(tmp_path / "given", llama())
    with pytest.raises(ConfigurationError, match=r"model\.layers cannot be chosen with --from"):
        initialise_run(tmp_path / "run", None, text, 2, {"model.layers": 2}, given_model=given)
    with pytest.raises(DataError, match="for at most 64 tokens, not 65"):
        read_given_model(given, 65)
    assert read_given_model(given, 16).config.sequence_length == 16
    with pytest.raises(DataError, match="there is no folder"):
        read_given_model(tmp_path / "missing")


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    given = saved(tmp_path / "given", llama(), max_shard_size="20KB")
    index = given / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../../etc/x")
    index.write_text(json.dumps(content))
    assert {path.parent for path in read_given_model(given).files.values()} == {given}
