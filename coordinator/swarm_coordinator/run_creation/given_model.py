"""A model in Hugging Face's format from which a run continues, as `init --from` reads it.

Owns which folders the model's blocks can compute, and the files of version 0 that are made of one
(`run_dir.initial_states`). The family is Llama's; a Mistral model is the same where no sequence is
longer than its attention window. Parameters keep their names, so that the files are a cut of the
folder's tensors, in float32. Holds one stage in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from swarm_coordinator.offline.merged_stages import parameter_shapes
from swarm_coordinator.run_dir.folder import RunFolder, read_bytes
from swarm_coordinator.run_dir.state_files import stage_file_name
from swarm_shared.base.errors import DataError
from swarm_shared.model.llama import EMBEDDING_NAME, Stage
from swarm_shared.model.state import save_state
from swarm_shared.run.manifest import InitialState, Manifest
from swarm_shared.run.model_config import PRESETS, ModelConfig

LONGEST_DEFAULT = 2048
"""Sequence length unless one is given or the model's own is shorter; tokens."""

_FAMILIES = ("llama", "mistral")
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
            f"there is no folder {folder}; name one with config.json and model.safetensors, as `hf "
            "download ORG/NAME --local-dir FOLDER` fetches it"
        )
    config = _model_config(folder, sequence_length)
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
    """Write the parameters of every stage into the run folder; return the files' sizes and hashes
    for the manifest. DataError for tensors that are not as the configuration says."""
    folder.initial.mkdir()
    states: list[InitialState] = []
    for index, cut in enumerate(manifest.stages):
        last = index == manifest.stage_count - 1
        stage = Stage(manifest.model, cut, is_first=index == 0, is_last=last)
        with torch.no_grad():
            for name, parameter in stage.all_parameters():
                parameter.copy_(_tensor(model.files[name], name, tuple(parameter.shape)))
        path = folder.initial / stage_file_name(index)
        save_state(path, dict(stage.all_parameters()), {"stage": str(index), "version": "0"})
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        states.append(InitialState(bytes=path.stat().st_size, sha256=digest))
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
    rope_type: str | None = None
    type: str | None = None
    """The older name of `rope_type`."""
    rope_theta: float | None = None


class _ConfigFile(BaseModel):
    """What is read of config.json, with the defaults of transformers' LlamaConfig."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_parameters: _Rope | None = None
    """Of transformers 5; before, `rope_theta` and `rope_scaling`."""
    rope_scaling: _Rope | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def rope(self) -> _Rope:
        return self.rope_parameters or self.rope_scaling or _Rope()

    @property
    def longest(self) -> int:
        """Tokens that one position may attend to."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )


def _model_config(folder: Path, sequence_length: int | None) -> ModelConfig:
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
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} describes no model that can be trained here: "
            f"{place + ': ' if place else ''}{first['msg']}"
        ) from error
    if config.sequence_length > read.longest:
        raise DataError(
            f"{folder} is a model for at most {read.longest} tokens, not {config.sequence_length}; "
            "choose less with --set model.sequence_length"
        )
    return config


def _refuse_other_blocks(folder: Path, read: _ConfigFile) -> None:
    """DataError for what Llama's blocks do not have."""
    if read.model_type not in _FAMILIES:
        raise DataError(
            f"{folder} is a model of type {read.model_type!r}; {' and '.join(_FAMILIES)} can be "
            "trained here"
        )
    head_size = read.hidden_size // max(1, read.num_attention_heads)
    for name, found, needed in (
        ("hidden_act", read.hidden_act, "silu"),
        ("attention_bias", read.attention_bias, False),
        ("mlp_bias", read.mlp_bias, False),
        ("rope_type", read.rope.rope_type or read.rope.type or "default", "default"),
        ("head_dim", read.head_dim or head_size, head_size),
    ):
        if found != needed:
            raise DataError(
                f"{folder} is a model with {name} = {found!r}; only {needed!r} can be trained here"
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
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object; fetch it again")
    return content
