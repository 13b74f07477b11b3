"""Export of a trained run to a Hugging Face folder that `transformers` loads, as LlamaForCausalLM,
or as Qwen2ForCausalLM or Qwen3ForCausalLM where the model has their biases or norms; of adapters to
a folder that `peft` loads.

Owns the folder's files. Parameters have Hugging Face's names already during training
(`swarm_shared.model.llama`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from swarm_coordinator.offline.merged_stages import open_stages, open_whole_model
from swarm_coordinator.offline.weight_files import (
    SHARD_BYTES,
    ExportDtype,
    check_range,
    is_weight_file,
    write_adapters,
    write_weights,
)
from swarm_shared.base.atomic_file import make_folder, storage_error, write_atomically
from swarm_shared.base.errors import ConfigurationError, StorageError, UsageError
from swarm_shared.data.tokenizer import BytesTokenizer, JsonTokenizer
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import ModelConfig, RopeScaling

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_CONFIG_FILES = (CONFIG_FILE, ADAPTER_CONFIG_FILE)
MODEL_CARD = "README.md"
_OTHER_FILES = (MODEL_CARD, "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export_huggingface(
    manifest: Manifest,
    stage_state_files: Sequence[Path],
    tokenizer_path: Path,
    out_dir: Path,
    dtype: ExportDtype = "float32",
    shard_bytes: int = SHARD_BYTES,
    model_card: str | None = None,
    initial: Sequence[Path] = (),
) -> None:
    """Write `out_dir` from one state file per stage, without the optimizer's state and the
    parameters of the previous version, which only training needs.

    `tokenizer_path` is the run's tokenizer.json; for the bytes tokenizer, which has none, one is
    generated. An earlier export in the folder is replaced: config.json is removed first and written
    last, so that an incomplete folder does not load as a model. Adapters are added to the matrices
    of the model in the files `initial`.
    """
    if manifest.model.bottlenecks:
        raise ConfigurationError(
            f"this model passes {len(manifest.model.bottlenecks)} bottleneck(s) between its stages "
            "([model] bottleneck_size), which no model of transformers has, so that it could not "
            "be loaded; its parameters are in the run's checkpoints, as safetensors files"
        )
    merged = open_whole_model(manifest.model, stage_state_files, initial)
    tokenizer = _tokenizer(manifest, tokenizer_path)
    config = huggingface_config(manifest.model, tokenizer.end_of_text, dtype)
    # Before an earlier export is removed.
    check_range(merged, dtype)
    _make_unloadable(out_dir)
    write_weights(merged, out_dir, dtype, shard_bytes)
    length = manifest.model.sequence_length
    generation: dict[str, object] = {
        "do_sample": True, "eos_token_id": tokenizer.end_of_text, "max_length": length,
    }  # fmt: skip
    _write_json(out_dir / "generation_config.json", generation)
    _write_descriptions(out_dir, manifest, tokenizer, model_card)
    _write_json(out_dir / CONFIG_FILE, config)


def export_adapters(
    manifest: Manifest,
    stage_state_files: Sequence[Path],
    tokenizer_path: Path,
    out_dir: Path,
    dtype: ExportDtype = "float32",
    model_card: str | None = None,
) -> None:
    """Write the adapters of a run to `out_dir` as `peft` loads them, with the run's tokenizer.

    An earlier export in the folder is replaced, as by `export_huggingface`.
    """
    adapters = open_stages(manifest.model, stage_state_files)
    tokenizer = _tokenizer(manifest, tokenizer_path)
    check_range(adapters, dtype)
    _make_unloadable(out_dir)
    (out_dir / "generation_config.json").unlink(missing_ok=True)
    write_adapters(adapters, out_dir, dtype)
    _write_descriptions(out_dir, manifest, tokenizer, model_card)
    _write_json(out_dir / ADAPTER_CONFIG_FILE, _adapter_config(manifest))


def _adapter_config(manifest: Manifest) -> dict[str, object]:
    adapters = manifest.model.adapters
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # Without a name on the hub, the model is given where the adapters are loaded.
        "base_model_name_or_path": manifest.base_model or None,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": list(adapters.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _make_unloadable(out_dir: Path) -> None:
    """Make the folder, or remove from it what makes an earlier export load."""
    try:
        make_folder(out_dir)
        for name in _CONFIG_FILES:
            (out_dir / name).unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(out_dir, error) from error


def exported_files(out_dir: Path) -> list[str]:
    """Return the names of the files in a folder that an export writes."""
    names = (path.name for path in out_dir.iterdir())
    return sorted(
        name for name in names if name in (*_CONFIG_FILES, *_OTHER_FILES) or is_weight_file(name)
    )


def check_out(out_dir: Path) -> None:
    """UsageError unless the folder is new, empty, or has a model in it that may be replaced."""
    if out_dir.exists() and not out_dir.is_dir():
        raise UsageError(f"{out_dir} exists and is not a folder; choose another name")
    names = {path.name for path in out_dir.iterdir()} if out_dir.is_dir() else set()
    # Without a configuration, what an interrupted export has left.
    is_unfinished = all(name in _OTHER_FILES or is_weight_file(name) for name in names)
    if names.isdisjoint(_CONFIG_FILES) and (not is_unfinished or names == {MODEL_CARD}):
        raise UsageError(
            f"{out_dir} holds files other than an exported model; choose another name, or empty it"
        )


def huggingface_config(
    config: ModelConfig, end_of_text: int, dtype: ExportDtype
) -> dict[str, object]:
    """Return config.json, with rotary positions and dtype in the forms of transformers 4 and 5."""
    scaling = _rope_scaling(config.rope_scaling)
    return _family(config) | {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            **(scaling or {"rope_type": "default"}),
            "rope_theta": config.rope_theta,
        },
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _family(config: ModelConfig) -> dict[str, object]:
    """Return the entries that say of which class the model is, and what is of that class alone."""
    has_bias = config.attention_bias == "all"
    if config.query_key_norm:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "attention_bias": has_bias, "use_sliding_window": False,
        }  # fmt: skip
    if config.attention_bias == "qkv":
        # The class has these biases always, and no setting of them.
        return {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
            "use_sliding_window": False,
        }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "attention_bias": has_bias, "mlp_bias": False,
    }  # fmt: skip


def _rope_scaling(scaling: RopeScaling) -> dict[str, object] | None:
    if scaling.kind == "none":
        return None
    content: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        content |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    if scaling.kind == "yarn":
        content |= {
            "beta_slow": scaling.low_frequency_factor,
            "beta_fast": scaling.high_frequency_factor,
            "attention_factor": scaling.attention_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return content


def bytes_tokenizer() -> Tokenizer:
    """Return a `tokenizers` model of UTF-8 bytes: the id of a byte is its value, without merges."""
    characters = _byte_characters()
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bytes_tokenizer_file() -> bytes:
    """Return the tokenizer.json of an exported run on bytes."""
    return str(bytes_tokenizer().to_str(pretty=True)).encode("utf-8")


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers (Radford et al.
    2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    replacement = {byte: 256 + index for index, byte in enumerate(unprintable)}
    return [chr(replacement.get(byte, byte)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class _TokenizerFile:
    """The content of tokenizer.json, and its token between documents."""

    content: bytes
    end_of_text: int
    end_of_text_token: str


def _tokenizer(manifest: Manifest, tokenizer_path: Path) -> _TokenizerFile:
    if manifest.data.tokenizer == "bytes":
        end = BytesTokenizer.end_of_text
        return _TokenizerFile(bytes_tokenizer_file(), end, _byte_characters()[end])
    try:
        content = tokenizer_path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"the tokenizer {tokenizer_path} cannot be read ({error}); restore it from a copy"
        ) from error
    tokenizer = JsonTokenizer(content, str(tokenizer_path))
    return _TokenizerFile(content, tokenizer.end_of_text, tokenizer.end_of_text_token)


def _write_descriptions(
    out_dir: Path, manifest: Manifest, tokenizer: _TokenizerFile, model_card: str | None
) -> None:
    """Write the tokenizer and the model card."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end_of_text_token,
        "model_max_length": manifest.model.sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(out_dir / "tokenizer.json", tokenizer.content)
    _write_json(out_dir / "tokenizer_config.json", config)
    if model_card is not None:
        write_atomically(out_dir / MODEL_CARD, model_card.encode())


def _write_json(path: Path, content: dict[str, object]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
