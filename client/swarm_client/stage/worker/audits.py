"""Audits at a stage worker: what a peer shows of a microbatch that it counted, and what an auditor
finds.

Files carry the tensors between daemon and worker, because they are larger than a slot. That of the
inputs has the bytes that crossed the wire: the input, the targets on the last stage, the output's
gradient on the others. That of the computed tensors has the digests of all blocks of the
parameters' gradient as it is counted, in float32, and those blocks that the auditor asks for; then
the output (not on the last stage) and the input's gradient (not on stage 0) as they are before the
run's codecs round them. Nothing here changes the accumulator or the parameters.

Two honest machines may differ in a value by its last bit, and where that lies at the edge of a
codec's step, by a whole step in what they send. So what is measured is the distance before
rounding; that it is of what the audited peer has sent is shown by rounding it again, which gives
the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.gradient_blocks import (
    block_count,
    gradient_digest,
    has_blocks,
    shown_bytes,
)
from swarm_client.stage.protocol.messages import AuditDone, ShownFile
from swarm_client.stage.protocol.slot_sizes import GRADIENT_ELEMENT_BYTES
from swarm_client.stage.worker.accumulation.accumulator import KeptMicrobatch
from swarm_client.stage.worker.accumulation.audited_gradient import (
    AuditedGradient,
    CellSums,
    norm,
)
from swarm_client.stage.worker.accumulation.digests import counted_pieces
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_shared.base.transcript import KeptTensors, Transcript
from swarm_shared.base.types import MAX_MAGNITUDE, MicrobatchIndex, Step
from swarm_shared.codecs.errors import CodecError
from swarm_shared.codecs.tensors import DTYPES
from swarm_shared.identity.work_statements import DIGEST_BYTES, wire_digest

SMALLEST_NORM = 1e-30
"""Denominator of a distance to zeros."""


@dataclass(frozen=True, slots=True)
class ShownTensors:
    """What one microbatch gives, as a peer shows it to an auditor; flat, in host memory."""

    block_digests: bytes
    """Those of all blocks of the parameters' gradient, one behind the other."""
    blocks_P: Tensor  # noqa: N815
    """The blocks that the auditor asks for, in float32 as they are counted."""
    output_N: Tensor  # noqa: N815
    """The output before it is encoded, in the model's dtype; empty on the last stage."""
    input_gradient_N: Tensor  # noqa: N815
    """The gradient of the input before it is encoded, in the model's dtype; empty on stage 0."""

    def joined(self) -> bytes:
        """Return the content of a file with these tensors, in which each begins at a multiple of
        its element size."""
        tensors = (self.blocks_P, self.output_N, self.input_gradient_N)
        parts = (part.view(torch.uint8).numpy().tobytes() for part in tensors)
        return self.block_digests + b"".join(parts)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What a machine gets when it computes a microbatch again."""

    shown: ShownTensors
    """What it would show of this."""
    gradient_norm: float
    elements: int
    """Number of elements of the parameters' gradient."""
    loss_sum: float | None = None
    sums: CellSums | None = None
    """The linear digests and sketches of a gradient that is counted in whole numbers."""

    def distance(self, claimed: ShownTensors) -> float:
        """The largest relative distance of what another peer shows.

        The distance of a sample of blocks is relative to its own norm, or to that which it would
        have if all blocks had the same one, whichever is more: blocks of small gradients, such as
        those of tokens that hardly occur, are rounded more coarsely than the whole.
        """
        own = self.shown
        mean_norm = self.gradient_norm * math.sqrt(own.blocks_P.numel() / max(1, self.elements))
        return max(
            _relative(claimed.output_N, own.output_N),
            _relative(claimed.input_gradient_N, own.input_gradient_N),
            _relative(claimed.blocks_P, own.blocks_P, mean_norm),
        )


class AuditRunner:
    """The audits of one stage runner."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._sizes = runner.sizes

    def save_kept(
        self, step: Step, microbatch: MicrobatchIndex, path: Path, tensors: KeptTensors,
        blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Write tensors of an accumulated microbatch; of the gradient that was computed these
        blocks.

        RequestFailed: unknown_microbatch when it is not in the accumulator or its inputs are not
        kept; bad_input for what this stage does not send or have; not_repeatable when it gives
        something else than what was counted of it; storage.
        """
        accumulator = self._runner.open_parameter_set(step).accumulator
        kept = accumulator.contents.kept(microbatch)
        if kept is None:
            raise RequestFailed(
                "unknown_microbatch",
                f"microbatch {microbatch} of step {step} is not kept in stage "
                f"{self._runner.stage_index}",
            )
        counted = accumulator.transcripts.get(microbatch)
        match tensors:
            case KeptTensors.INPUTS:
                content, repeats = bytes(kept.inputs + kept.output_gradient), True
            case KeptTensors.COMPUTED:
                self._check(blocks)
                shown = self._recomputed(step, kept, blocks).shown
                content = shown.joined()
                repeats = counted is None or self._transcript(kept, shown) == counted
            case KeptTensors.OUTPUT | KeptTensors.INPUT_GRADIENT:
                content = self._sent(step, kept, tensors)
                repeats = counted is None or wire_digest(content) == (
                    counted.output if tensors is KeptTensors.OUTPUT else counted.input_gradient
                )
        if not repeats:
            raise RequestFailed(
                "not_repeatable",
                f"microbatch {microbatch} of step {step} in stage {self._runner.stage_index} "
                "does not give what was counted of it when it is computed again",
            )
        try:
            path.write_bytes(content)
        except OSError as error:
            raise RequestFailed("storage", f"{path} cannot be written: {error.strerror}") from error

    def _sent(self, step: Step, kept: KeptMicrobatch, tensors: KeptTensors) -> bytes:
        """Return what this stage sends of a microbatch, onwards or back, as it crosses the wire."""
        runner = self._runner
        parameter_set = runner.open_parameter_set(step)
        slot = memoryview(bytearray(self._sizes.slot_bytes))
        if tensors is KeptTensors.OUTPUT and self._sizes.output_bytes:
            output = runner.output_again(parameter_set, kept)
            return bytes(slot[: runner.codec.write_output(runner.copier.to_host(output), slot)])
        if tensors is KeptTensors.INPUT_GRADIENT and self._sizes.input_gradient_bytes:
            gradient = runner.input_gradient_again(parameter_set, kept)
            assert gradient is not None, "this is not stage 0"
            host = runner.copier.to_host(gradient)
            return bytes(slot[: runner.codec.write_input_gradient(host, slot)])
        raise RequestFailed("bad_input", f"stage {runner.stage_index} sends no {tensors}")

    def audit(
        self, step: Step, inputs: Path, shown: ShownFile | None = None, secret: str | None = None
    ) -> AuditDone:
        """Compute a microbatch from the file of its inputs, and compare it with another peer's;
        see `swarm_client.stage.protocol.messages.RunAudit`.

        RequestFailed: wrong_step, bad_input, not_finite, storage.
        """
        content = _read(inputs)
        size = self._sizes.request_bytes
        kept = KeptMicrobatch(bytearray(content[:size]), bytearray(content[size:]))
        own = self._recomputed(step, kept, () if shown is None else shown.blocks, secret)
        others = None if shown is None else self._opened(kept, shown)
        return AuditDone(
            transcript=self._transcript(kept, own.shown),
            loss_sum=own.loss_sum,
            distance=None if others is None else own.distance(others),
            sums=() if own.sums is None else own.sums.digests(),
            sketches=() if own.sums is None else own.sums.sketches(),
        )

    @property
    def _elements(self) -> int:
        """Number of elements of the parameters' gradient."""
        return self._runner.layout.own_count + self._runner.layout.tied_count

    def _check(self, blocks: Sequence[int]) -> None:
        """RequestFailed (bad_input) unless the gradient has these blocks, in ascending order."""
        count = block_count(self._elements * GRADIENT_ELEMENT_BYTES)
        if list(blocks) != sorted({block for block in blocks if 0 <= block < count}):
            raise RequestFailed("bad_input", f"blocks that are none of {count} in ascending order")

    def _opened(self, kept: KeptMicrobatch, shown: ShownFile) -> ShownTensors | None:
        """The tensors in another peer's file; None if they do not have the claimed digests."""
        tensors = self._cut(_read(Path(shown.path)), shown.blocks)
        if tensors is None:
            return None
        try:
            is_claimed = self._transcript(kept, tensors) == shown.claimed
        except CodecError:
            return None
        content = tensors.blocks_P.view(torch.uint8).numpy().data
        has_all = has_blocks(tensors.block_digests, shown.blocks, content)
        return tensors if is_claimed and has_all else None

    def _recomputed(
        self, step: Step, kept: KeptMicrobatch, blocks: Sequence[int], secret: str | None = None
    ) -> Recomputed:
        """Compute the microbatch here; keep these blocks of the gradient. With a secret, also
        compute the digests by which a member's sum is checked."""
        runner, quantum = self._runner, self._runner.parameter_sets.quantum
        result = runner.compute_again(runner.open_parameter_set(step), kept)
        dtype = DTYPES[runner.manifest.training.dtype]
        output_N = input_gradient_N = torch.zeros(0, dtype=dtype)
        if not runner.stage.is_last:
            output_N = runner.copier.to_host(result.output).reshape(-1).to(dtype)
        if result.input_gradient is not None:
            host = runner.copier.to_host(result.input_gradient)
            input_gradient_N = host.reshape(-1).to(dtype)
        gradient = AuditedGradient(self._elements, blocks)
        sums = None if secret is None or quantum is None else CellSums(runner.layout, secret)
        for piece in counted_pieces(result.gradients, quantum):
            host_P = piece.detach().reshape(-1).float().cpu()
            gradient.add(host_P)
            if sums is not None:
                sums.add(host_P.numpy())
        return Recomputed(
            ShownTensors(gradient.block_digests, gradient.blocks_P, output_N, input_gradient_N),
            gradient.norm,
            self._elements,
            loss_sum=float(result.output) if runner.stage.is_last else None,
            sums=sums,
        )

    def _cut(self, content: bytes, blocks: Sequence[int]) -> ShownTensors | None:
        """The tensors in another peer's file; None if it has another size than such a file."""
        sizes, dtype = self._sizes, DTYPES[self._runner.manifest.training.dtype]
        if len(content) != sizes.computed_bytes(self._elements, blocks):
            return None
        nbytes = self._elements * GRADIENT_ELEMENT_BYTES
        begin = block_count(nbytes) * DIGEST_BYTES
        end = shown_bytes(blocks, nbytes)
        middle = end + (sizes.tensor_bytes if sizes.output_bytes else 0)
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return ShownTensors(
            content[:begin],
            whole[begin:end].view(torch.float32),
            whole[end:middle].view(dtype),
            whole[middle:].view(dtype),
        )

    def _transcript(self, kept: KeptMicrobatch, tensors: ShownTensors) -> Transcript:
        """The transcript of a peer that got `kept` and computed these. CodecError where no codec
        can encode them."""
        sizes, codec = self._sizes, self._runner.codec
        slot = memoryview(bytearray(sizes.slot_bytes))
        inputs = memoryview(kept.inputs)
        output, input_gradient = wire_digest(inputs[sizes.input_bytes :]), ""
        if sizes.output_bytes:
            output = wire_digest(slot[: codec.write_output(tensors.output_N, slot)])
        if sizes.input_gradient_bytes:
            nbytes = codec.write_input_gradient(tensors.input_gradient_N, slot)
            input_gradient = wire_digest(slot[:nbytes])
        output_gradient = wire_digest(kept.output_gradient) if sizes.output_gradient_bytes else ""
        return Transcript(
            input=wire_digest(inputs[: sizes.input_bytes]),
            output=output,
            output_gradient=output_gradient,
            input_gradient=input_gradient,
            gradient=gradient_digest(tensors.block_digests),
        )


def _relative(claimed: Tensor, own: Tensor, least_norm: float = SMALLEST_NORM) -> float:
    """The L2 distance of `claimed` from `own`, relative to the norm of `own`, or to a least one;
    MAX_MAGNITUDE for what is not finite."""
    difference = float((claimed.double() - own.double()).norm())
    distance = difference / max(norm(own), least_norm, SMALLEST_NORM)
    return distance if distance <= MAX_MAGNITUDE else MAX_MAGNITUDE


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestFailed("storage", f"{path} cannot be read: {error.strerror}") from error
