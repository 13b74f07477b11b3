"""Audits at a stage worker: what an audited peer shows of a microbatch, and what its auditor finds.

Files carry the tensors between daemon and worker, because they are larger than a slot. That of the
inputs has the bytes that crossed the wire: the input, the targets on the last stage, the output's
gradient on the others. That of the computed tensors has the output (not on the last stage) and the
input's gradient (not on stage 0) as they are sent, and the parameters' gradient as it is counted,
in float32. Nothing here changes the accumulator or the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.slot_sizes import SlotSizes
from swarm_client.stage.worker.accumulator import KeptMicrobatch
from swarm_client.stage.worker.digests import counted_pieces
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MAX_MAGNITUDE, LinearDigests, MicrobatchIndex, Step
from swarm_shared.codecs.errors import CodecError
from swarm_shared.codecs.tensors import decode
from swarm_shared.identity.linear_digest import DigestKey, to_text
from swarm_shared.identity.work_statements import wire_digest
from swarm_shared.run.codec_sizes import CodecName

SMALLEST_NORM = 1e-30
"""Denominator of a distance to zeros."""


@dataclass(frozen=True, slots=True)
class AuditedTensors:
    """What one microbatch gives, as bytes."""

    output: bytes
    """As it is sent; empty on the last stage."""
    input_gradient: bytes
    """As it is sent; empty on stage 0."""
    gradient: bytes
    """As it is counted, in float32."""

    @classmethod
    def cut(cls, content: bytes, sizes: SlotSizes) -> AuditedTensors:
        end = sizes.output_bytes + sizes.input_gradient_bytes
        return cls(content[: sizes.output_bytes], content[sizes.output_bytes : end], content[end:])

    def joined(self) -> bytes:
        return self.output + self.input_gradient + self.gradient

    def transcript(self, kept: KeptMicrobatch, sizes: SlotSizes) -> Transcript:
        """The transcript of a peer that got `kept` and computed these."""
        inputs = memoryview(kept.inputs)
        targets = inputs[sizes.input_bytes :]
        return Transcript(
            input=wire_digest(inputs[: sizes.input_bytes]),
            output=wire_digest(targets if sizes.target_bytes else self.output),
            output_gradient=wire_digest(kept.output_gradient)
            if sizes.output_gradient_bytes
            else "",
            input_gradient=wire_digest(self.input_gradient) if self.input_gradient else "",
            gradient=wire_digest(self.gradient),
        )


@dataclass(frozen=True, slots=True)
class AuditFindings:
    """What an auditor's worker found."""

    transcript: Transcript
    loss_sum: float | None
    distance: float | None
    sums: tuple[LinearDigests, ...]


class AuditRunner:
    """The audits of one stage runner."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._sizes = runner.sizes

    def save_kept(
        self, step: Step, microbatch: MicrobatchIndex, path: Path, *, computed: bool
    ) -> int:
        """Write what is kept of an accumulated microbatch, or what it gives; return the bytes.

        RequestFailed: unknown_microbatch when it is not in the accumulator or its inputs are not
        kept; not_repeatable when it gives something else than what was counted of it; storage.
        """
        accumulator = self._runner.open_parameter_set(step).accumulator
        kept = accumulator.contents.kept(microbatch)
        if kept is None:
            raise RequestFailed(
                "unknown_microbatch",
                f"microbatch {microbatch} of step {step} is not kept in stage "
                f"{self._runner.stage_index}",
            )
        if computed:
            content, _ = self._computed(step, kept)
            counted = accumulator.transcripts.get(microbatch)
            if counted is not None and content.transcript(kept, self._sizes) != counted:
                raise RequestFailed(
                    "not_repeatable",
                    f"microbatch {microbatch} of step {step} in stage {self._runner.stage_index} "
                    "does not give what was counted of it when it is computed again",
                )
            return _write(path, content.joined())
        return _write(path, bytes(kept.inputs + kept.output_gradient))

    def audit(
        self, step: Step, inputs: Path, computed: Path | None, claimed: Transcript | None,
        seed: str | None = None,
    ) -> AuditFindings:  # fmt: skip
        """Compute a microbatch from the file of its inputs, and compare it with another peer's;
        see `swarm_client.stage.protocol.messages.RunAudit`.

        RequestFailed: wrong_step, bad_input, not_finite, storage.
        """
        content = _read(inputs)
        size = self._sizes.request_bytes
        kept = KeptMicrobatch(bytearray(content[:size]), bytearray(content[size:]))
        own, loss_sum = self._computed(step, kept)
        transcript = own.transcript(kept, self._sizes)
        distance = None
        if computed is not None and claimed is not None:
            other = AuditedTensors.cut(_read(computed), self._sizes)
            if other.transcript(kept, self._sizes) == claimed:
                distance = self._distance(other, own)
        sums = () if seed is None else self._sums(own.gradient, seed)
        return AuditFindings(transcript, loss_sum, distance, sums)

    def _sums(self, gradient: bytes, seed: str) -> tuple[LinearDigests, ...]:
        """A linear digest of each part of a gradient; none where it is not counted in whole
        numbers."""
        if self._runner.parameter_sets.quantum is None:
            return ()
        counts_P = np.frombuffer(gradient, np.float32)
        own = self._runner.layout.own_count
        parts = [("own", counts_P[:own])]
        if self._runner.layout.tied_count:
            parts.append(("tied", counts_P[own:]))
        return tuple((to_text(DigestKey(seed, name).digest(part_P)),) for name, part_P in parts)

    def _computed(self, step: Step, kept: KeptMicrobatch) -> tuple[AuditedTensors, float | None]:
        """What the microbatch gives here, and the loss on the last stage."""
        runner, sizes = self._runner, self._sizes
        result = runner.compute_again(runner.open_parameter_set(step), kept)
        slot = memoryview(bytearray(sizes.slot_bytes))
        output = input_gradient = b""
        loss_sum = None
        if runner.stage.is_last:
            loss_sum = float(result.output)
        else:
            host = runner.copier.to_host(result.output)
            output = bytes(slot[: runner.codec.write_output(host, slot)])
        if result.input_gradient is not None:
            host = runner.copier.to_host(result.input_gradient)
            input_gradient = bytes(slot[: runner.codec.write_input_gradient(host, slot)])
        pieces = counted_pieces(result.gradients, runner.parameter_sets.quantum)
        gradient = b"".join(
            piece.detach().reshape(-1).float().cpu().numpy().tobytes() for piece in pieces
        )
        return AuditedTensors(output, input_gradient, gradient), loss_sum

    def _distance(self, other: AuditedTensors, own: AuditedTensors) -> float:
        """The largest relative L2 distance over output, input gradient and gradient."""
        codecs = self._runner.manifest.codecs
        pairs = [
            (self._decoded(codecs.activation, other.output),
             self._decoded(codecs.activation, own.output)),
            (self._decoded(codecs.gradient, other.input_gradient),
             self._decoded(codecs.gradient, own.input_gradient)),
            (_floats(other.gradient), _floats(own.gradient)),
        ]  # fmt: skip
        return max(_relative(one, two) for one, two in pairs)

    def _decoded(self, codec: CodecName, content: bytes) -> Tensor | None:
        """The tensor; None for bytes that no sender writes."""
        if not content:
            return torch.zeros(0)
        manifest = self._runner.manifest
        shape = (manifest.tokens_per_microbatch, manifest.model.boundary_size)
        try:
            return decode(codec, bytearray(content), shape, manifest.training.dtype)
        except CodecError:
            return None


def _floats(content: bytes) -> Tensor | None:
    if len(content) % 4:
        return None
    return torch.frombuffer(bytearray(content), dtype=torch.float32) if content else torch.zeros(0)


def _relative(other: Tensor | None, own: Tensor | None) -> float:
    """The relative L2 distance; the largest number for what cannot be compared."""
    if other is None or own is None or other.shape != own.shape:
        return MAX_MAGNITUDE
    difference = float((other.double() - own.double()).norm())
    distance = difference / max(float(own.double().norm()), SMALLEST_NORM)
    return distance if distance <= MAX_MAGNITUDE else MAX_MAGNITUDE


def _write(path: Path, content: bytes) -> int:
    try:
        return path.write_bytes(content)
    except OSError as error:
        raise RequestFailed("storage", f"{path} cannot be written: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestFailed("storage", f"{path} cannot be read: {error.strerror}") from error
