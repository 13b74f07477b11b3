"""A model in Hugging Face's format from which a run continues, as `init --from` reads it.

Owns which folders the model's blocks can compute, and the files of version 0 that are made of one
(`run_dir.initial_states`). Llama, Mistral, Qwen2 and Qwen3 are the same blocks with the differences
that `ModelConfig` has, where no sequence is longer than an attention window. Parameters keep their
names, so that the files are a cut of the folder's tensors, in float32. Holds one stage in memory at
a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from swarm_coordinator.offline.merged_stages import parameter_shapes
from swarm_coordinator.run_dir.folder import RunFolder, read_bytes
from swarm_coordinator.run_dir.state_files import file_sha256, stage_file_name
from swarm_shared.base.errors import DataError
from swarm_shared.base.json_messages import first_error
from swarm_shared.model.initialise import empty_stage
from swarm_shared.model.llama import EMBEDDING_NAME
from swarm_shared.model.state import save_state
from swarm_shared.run.manifest import InitialState, Manifest
from swarm_shared.run.model_config import PRESETS, AttentionBias, ModelConfig, RopeScaling

LONGEST_DEFAULT = 2048
"""Sequence length unless one is given or the model's own is shorter; tokens."""

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_QWEN3_HEAD_SIZE = 128
"""Of a Qwen3 model whose config.json has no `head_dim`."""
_HEAD_NAME = "lm_head.weight"
_NOT_PARAMETERS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tables that older versions of transformers stored, and that follow from the configuration."""


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A folder whose configuration and names of tensors are checked."""

    folder: Path
    config: ModelConfig
    files: Mapping[str, Path]
    """The file of each parameter."""
    tokenizer: Path | None
    hub_name: str = ""
    """Its name on the Hugging Face hub, if it is from there."""

    @property
    def nearest_preset(self) -> str:
        """The preset whose model has the most similar number of parameters."""
        own = _parameters(self.config)

        def ratio(name: str) -> float:
            other = _parameters(PRESETS[name].model)
            return max(own / other, other / own)

        return min(PRESETS, key=ratio)


def _parameters(config: ModelConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())


def read_given_model(folder: Path, sequence_length: int | None = None) -> GivenModel:
    """Read the configuration and the names of the tensors. DataError if the folder is no model that
    can be trained here."""
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}; name one with config.json and model.safetensors, or a "
            "model on the Hugging Face hub as ORG/NAME"
        )
    config = read_config(folder, sequence_length)
    files = _tensor_files(folder)
    expected = parameter_shapes(config)
    if config.tie_embeddings and EMBEDDING_NAME in files:
        files.pop(_HEAD_NAME, None)  # some folders store the table twice
    if files.keys() != expected.keys():
        missing, unknown = expected.keys() - files.keys(), files.keys() - expected.keys()
        example = f"{min(missing)} is missing" if missing else f"{min(unknown)} is unknown"
        raise DataError(
            f"the tensors in {folder} are not those of its config.json: {len(missing)} are missing "
            f"and {len(unknown)} unknown ({example}); fetch the folder again"
        )
    tokenizer = folder / "tokenizer.json"
    return GivenModel(folder, config, files, tokenizer if tokenizer.is_file() else None)


def write_initial_states(
    model: GivenModel, manifest: Manifest, folder: RunFolder
) -> tuple[InitialState, ...]:
    """Write the parameters of every stage into the run folder, those of adapters left out; return
    the files' sizes and hashes for the manifest. DataError for tensors that are not as the
    configuration says."""
    folder.initial.mkdir()
    whole = manifest.model_copy(update={"model": manifest.model.base})
    states: list[InitialState] = []
    for index in range(manifest.stage_count):
        stage = empty_stage(whole, index)
        with torch.no_grad():
            for name, parameter in stage.all_parameters():
                parameter.copy_(_tensor(model.files[name], name, tuple(parameter.shape)))
        path = folder.initial / stage_file_name(index)
        save_state(path, dict(stage.all_parameters()), {"stage": str(index), "version": "0"})
        states.append(InitialState(bytes=path.stat().st_size, sha256=file_sha256(path)))
    return tuple(states)


def _tensor(path: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise DataError(
            f"{name} in {path} is {tuple(tensor.shape)} {tensor.dtype}, and the configuration "
            f"needs {shape} floating-point numbers; fetch the folder again"
        )
    wide = tensor.float()
    if not bool(torch.isfinite(wide).all()):
        raise DataError(f"{name} in {path} holds infinities or NaNs; training cannot begin there")
    return wide


# ---------------------------------------------------------------- config.json


class _Rope(BaseModel):
    """Unknown entries are refused: they may change the positions."""

    model_config = ConfigDict(extra="forbid")

    rope_type: str | None = None
    type: str | None = None
    """The older name of `rope_type`."""
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    beta_slow: float | None = None
    beta_fast: float | None = None
    attention_factor: float | None = None
    mscale: float | None = Field(default=None, ge=0)
    mscale_all_dim: float | None = Field(default=None, ge=0)
    truncate: bool = True

    @property
    def yarn_attention_factor(self) -> float:
        """As transformers derives it where the file has none."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, share: float) -> float:
        longer = max(1.0, self.factor or 1.0)
        return 0.1 * share * math.log(longer) + 1.0

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _ConfigFile(BaseModel):
    """What is read of config.json, with the defaults of transformers' classes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    """Of Qwen; Mistral always uses its window, and Llama has none."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_parameters: _Rope | None = None
    """Of transformers 5; before, `rope_theta` and `rope_scaling`."""
    rope_scaling: _Rope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def rope(self) -> _Rope:
        return self.rope_scaling or self.rope_parameters or _Rope()

    @property
    def rope_factors(self) -> RopeScaling:
        """The scaling of the rotary positions. ValidationError where a number is missing."""
        rope = self.rope
        content: dict[str, object] = {"kind": "none"}
        if rope.kind != "default":
            content = {"kind": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            content |= {
                "low_frequency_factor": rope.low_freq_factor,
                "high_frequency_factor": rope.high_freq_factor,
                "original_length": rope.original_max_position_embeddings
                or self.max_position_embeddings,
            }
        if rope.kind == "yarn":
            content |= {
                "low_frequency_factor": rope.beta_slow or 1.0,
                "high_frequency_factor": rope.beta_fast or 32.0,
                "attention_factor": rope.yarn_attention_factor,
                "original_length": rope.original_max_position_embeddings
                or self.max_position_embeddings,
            }
        return RopeScaling.model_validate(content)

    @property
    def head_size(self) -> int:
        """Width of a head where it is not `hidden_size / num_attention_heads`, else 0."""
        usual = self.hidden_size // max(1, self.num_attention_heads)
        of_family = _QWEN3_HEAD_SIZE if self.model_type == "qwen3" else usual
        size = of_family if self.head_dim is None else self.head_dim
        return 0 if size == usual else size

    @property
    def biases(self) -> AttentionBias:
        """Qwen2 always has those of queries, keys and values, Mistral never has any."""
        if self.model_type == "qwen2":
            return "qkv"
        return "all" if self.attention_bias and self.model_type != "mistral" else "none"

    @property
    def longest(self) -> int:
        """Tokens that one position may attend to."""
        slides = self.use_sliding_window and self.model_type != "llama"
        window = self.sliding_window if slides or self.model_type == "mistral" else None
        return min(self.max_position_embeddings, window or self.max_position_embeddings)


def read_config(folder: Path, sequence_length: int | None) -> ModelConfig:
    """Read a folder's config.json. DataError if it describes no model that can be trained here."""
    path = folder / "config.json"
    try:
        read = _ConfigFile.model_validate(_json(path))
        _refuse_other_blocks(folder, read)
        length = min(read.longest, LONGEST_DEFAULT) if sequence_length is None else sequence_length
        config = ModelConfig(
            vocabulary_size=read.vocab_size,
            hidden_size=read.hidden_size,
            intermediate_size=read.intermediate_size,
            layers=read.num_hidden_layers,
            heads=read.num_attention_heads,
            key_value_heads=read.num_key_value_heads or read.num_attention_heads,
            sequence_length=length,
            rope_theta=read.rope.rope_theta or read.rope_theta,
            norm_epsilon=read.rms_norm_eps,
            tie_embeddings=read.tie_word_embeddings,
            attention_head_size=read.head_size,
            attention_bias=read.biases,
            query_key_norm=read.model_type == "qwen3",
            rope_scaling=read.rope_factors,
        )
    except ValidationError as error:
        raise DataError(
            f"{path} describes no model that can be trained here: {first_error(error)}"
        ) from error
    if config.sequence_length > read.longest:
        raise DataError(
            f"{folder} is a model for at most {read.longest} tokens, not {config.sequence_length}; "
            "choose less with --set model.sequence_length"
        )
    return config


def _refuse_other_blocks(folder: Path, read: _ConfigFile) -> None:
    """DataError for what the blocks do not have."""
    if read.model_type not in _FAMILIES:
        raise DataError(
            f"{folder} is a model of type {read.model_type!r}; {', '.join(_FAMILIES)} can be "
            "trained here"
        )
    rotated = read.rope.partial_rotary_factor or read.partial_rotary_factor or 1.0
    known: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("hidden_act", read.hidden_act, ("silu",)),
        ("mlp_bias", read.mlp_bias, (False,)),
        ("rope_type", read.rope.kind, ("default", "linear", "llama3", "yarn")),
        ("truncate", read.rope.truncate, (True,)),
        ("partial_rotary_factor", rotated, (1.0,)),
    )
    for name, found, possible in known:
        if found not in possible:
            raise DataError(
                f"{folder} is a model with {name} = {found!r}; only "
                f"{' or '.join(map(repr, possible))} can be trained here"
            )


# ---------------------------------------------------------------- the tensors' files


def _tensor_files(folder: Path) -> dict[str, Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = _json(index).get("weight_map")
        names = weight_map.items() if isinstance(weight_map, Mapping) else ()
        files = {str(name): folder / Path(str(file)).name for name, file in names}
    elif single.is_file():
        try:
            with safe_open(str(single), framework="pt", device="cpu") as file:
                files = dict.fromkeys(file.keys(), single)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{single} cannot be read ({error}); fetch it again") from error
    else:
        raise DataError(
            f"the folder {folder} has no model.safetensors and no index of several; other formats "
            "are not read"
        )
    return {name: path for name, path in files.items() if not _NOT_PARAMETERS.search(name)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(
            f"there is no {path}; name a folder in the format of Hugging Face's transformers"
        )
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object; fetch it again")
    return content
