"""The held-out loss of a checkpoint, and a text that its model writes.

The loss is computed stage by stage, with one stage's parameters in memory at a time, so that a
machine can evaluate a model that it could not hold. It is the loss that the swarm itself measures
at the end of a run: activations pass the run's codecs at every stage boundary. A text needs all
stages at once, for each token again; a model that is too large for that writes none.

Shape suffixes: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm_coordinator.offline.merged_stages import merge_stages
from swarm_coordinator.offline.reference import Microbatch, load_given_model, on_device
from swarm_coordinator.offline.sampling import sample_text
from swarm_coordinator.status.document import MAX_SAMPLE_CHARACTERS
from swarm_shared.codecs.boundary import stage_boundary
from swarm_shared.data.tokenizer import Tokenizer
from swarm_shared.host.memory import host_memory
from swarm_shared.model.initialise import empty_stage, empty_whole
from swarm_shared.model.llama import Stage
from swarm_shared.model.state import is_parameter, load_frozen, load_parameters, open_state
from swarm_shared.run.manifest import Manifest

SAMPLE_TEMPERATURE = 0.7
LARGEST_SHARE_OF_MEMORY = 0.5
"""Of the memory that is free, the most that a whole model may take for writing a text."""


@dataclass(frozen=True, slots=True)
class HeldoutLoss:
    """Mean cross entropy over the held-out tokens."""

    nats: float
    tokens: int


def heldout_loss(
    manifest: Manifest,
    stage_files: Sequence[Path],
    microbatches: Sequence[Microbatch],
    initial: Sequence[Path] = (),
) -> HeldoutLoss:
    """Evaluate a checkpoint on held-out microbatches; `stage_files` has one file a stage, and so
    has `initial`: the files of the manifest's initial states, with what is frozen.

    Memory: the parameters of one stage, and the residual stream of all microbatches. StorageError
    for a file that cannot be read, ProtocolError for one that is not of this model.
    """
    cross = stage_boundary(manifest.codecs.activation, manifest.codecs.gradient)
    tensors = [on_device(microbatch) for microbatch in microbatches]
    streams = [inputs_BT for inputs_BT, _ in tensors]
    targets = [targets_BT for _, targets_BT in tensors]
    bases = initial if manifest.model.has_adapters else [None] * len(stage_files)
    for index, (path, base) in enumerate(zip(stage_files, bases, strict=True)):
        if index > 0:
            streams = [cross(x_BTD) for x_BTD in streams]
        streams = _through_stage(manifest, index, path, base, streams, targets)
    tokens = sum(targets_BT.numel() for targets_BT in targets)
    return HeldoutLoss(math.fsum(map(float, streams)) / tokens, tokens)


def _through_stage(
    manifest: Manifest,
    index: int,
    path: Path,
    base: Path | None,
    streams: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return what stage `index` makes of each microbatch; the last one makes sums of losses. The
    stage lives in this call only."""
    stage = empty_stage(manifest, index)
    if base is not None:
        load_frozen(stage, open_state(base).tensors)
    tensors = open_state(path).tensors
    load_parameters(stage, {name: t for name, t in tensors.items() if is_parameter(name)})
    with torch.no_grad():
        return [
            stage(x, targets_BT if stage.is_last else None)
            for x, targets_BT in zip(streams, targets, strict=True)
        ]


def written_text(
    manifest: Manifest,
    stage_files: Sequence[Path],
    tokenizer: Tokenizer,
    prompt: str,
    new_tokens: int,
    seed: int,
    initial: Sequence[Path] = (),
) -> str:
    """Return a text that the model of a checkpoint writes after `prompt`; empty where the model is
    too large for the memory that is free, or `new_tokens` is 0."""
    base = initial if manifest.model.has_adapters else ()
    needed_bytes = sum(path.stat().st_size for path in (*stage_files, *base))
    if not new_tokens or needed_bytes > LARGEST_SHARE_OF_MEMORY * host_memory().available_bytes:
        return ""
    model = whole_model(manifest, stage_files, initial)
    text = sample_text(
        model, tokenizer.encode, tokenizer.decode, tokenizer.end_of_text, prompt, new_tokens,
        SAMPLE_TEMPERATURE, seed,
    )  # fmt: skip
    # PostgreSQL stores no NUL in a text.
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:MAX_SAMPLE_CHARACTERS]


def whole_model(
    manifest: Manifest, stage_files: Sequence[Path], initial: Sequence[Path] = ()
) -> Stage:
    """Load the uncut model from one file a stage."""
    model = empty_whole(manifest)
    if manifest.model.has_adapters:
        load_given_model(model, manifest, initial)
    load_parameters(model, merge_stages(manifest.model, stage_files))
    return model
