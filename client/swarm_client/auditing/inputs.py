"""The inputs of an audited microbatch: the input, the targets, the gradient of the output.

The audited peer has them, and learns from the request that it is audited. Where it is not to know,
its neighbours in the pipeline compute them again: what the stage before has sent is the input, what
the stage behind has returned is the output's gradient. Token ids and targets are drawn from the
training data. The digests in the order tell whether all fit, whichever peer gives them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import trio

from swarm_client.auditing.exchange import fetch_kept
from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.trainer import token_bytes
from swarm_client.stage.protocol.slot_sizes import SlotSizes
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.transcript import KeptTensors
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step
from swarm_shared.identity.work_statements import wire_digest
from swarm_shared.protocol import Audit, AuditSources, KeptRequest

log = logging.getLogger(__name__)


class AuditedSamples(Protocol):
    """Source of token ids and targets (`swarm_client.training_data`)."""

    async def audited(
        self, step: Step, microbatch: MicrobatchIndex
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and the targets of a microbatch."""


class TensorsWithheld(SwarmError):
    """A peer gives no tensors that fit the receipt that is audited."""


def inputs_fit(order: Audit, content: bytes, sizes: SlotSizes) -> bool:
    """Whether `content` is what the receipt that is audited names as its inputs.

    Otherwise an audited peer could give each auditor other targets, and set them against each
    other.
    """
    view = memoryview(content)
    parts = (
        view[: sizes.input_bytes],
        view[sizes.input_bytes : sizes.request_bytes],
        view[sizes.request_bytes :],
    )
    digests = tuple(wire_digest(part) if part.nbytes else "" for part in parts)
    return digests == (order.input, order.targets, order.output_gradient)


class AuditInputs:
    """Gets the tensors of an audited microbatch into files."""

    def __init__(self, member: MemberContext, samples: AuditedSamples) -> None:
        self._member = member
        self._samples = samples

    async def write_inputs(self, order: Audit, sizes: SlotSizes, path: Path) -> None:
        """Write the inputs to a file. TensorsWithheld if no peer gives those of the receipt;
        SwarmError if this peer cannot ask or write."""
        sources = order.sources
        if sources is not None:
            with trio.move_on_after(order.patience_seconds):
                try:
                    await self._write_from_neighbours(order, sources, sizes, path)
                    return
                except TensorsWithheld as error:
                    log.info("audit %d asks the audited peer: %s", order.audit, error)
        total_bytes = sizes.request_bytes + sizes.output_gradient_bytes
        # Twice: the time of the whole order, after which the coordinator has asked another auditor.
        with trio.move_on_after(2 * order.patience_seconds) as waiting:
            await self._fetch(order, order.peer, KeptTensors.INPUTS, total_bytes, path)
        if waiting.cancelled_caught:
            raise SwarmError(f"{order.peer} has not given the inputs in time")
        if not inputs_fit(order, await trio.Path(path).read_bytes(), sizes):
            raise TensorsWithheld(f"{order.peer} gave inputs that do not fit its receipt")

    async def write_computed(
        self, order: Audit, blocks: Sequence[int], total_bytes: int, seconds: float, path: Path
    ) -> None:
        """Write what the audited peer has computed, with these blocks of the gradient, to a file of
        this size. TensorsWithheld, also if that takes longer than these seconds: this auditor has
        already found other digests, and what is never shown could be anything."""
        with trio.move_on_after(seconds) as waiting:
            await self._fetch(order, order.peer, KeptTensors.COMPUTED, total_bytes, path, blocks)
        if waiting.cancelled_caught:
            raise TensorsWithheld(
                f"{order.peer} has not shown what it claims within {seconds:.1f} s"
            )

    async def _write_from_neighbours(
        self, order: Audit, sources: AuditSources, sizes: SlotSizes, path: Path
    ) -> None:
        async def entry() -> bytes:
            if sources.before is None:
                return token_bytes((await self._samples.audited(order.step, order.microbatch))[0])
            output = KeptTensors.OUTPUT
            return await self._sent(order, sources.before, output, sizes.input_bytes, path)

        async def targets() -> bytes:
            if not sizes.target_bytes:
                return b""
            return token_bytes((await self._samples.audited(order.step, order.microbatch))[1])

        async def output_gradient() -> bytes:
            if sources.behind is None:
                return b""
            gradient, nbytes = KeptTensors.INPUT_GRADIENT, sizes.output_gradient_bytes
            return await self._sent(order, sources.behind, gradient, nbytes, path)

        content = b"".join(await _together(entry, targets, output_gradient))
        if not inputs_fit(order, content, sizes):
            raise TensorsWithheld("its neighbours gave tensors that do not fit its receipt")
        try:
            await trio.Path(path).write_bytes(content)
        except OSError as error:
            raise SwarmError(f"{path} cannot be written: {error.strerror}") from error

    async def _sent(
        self, order: Audit, neighbour: PeerId, tensors: KeptTensors, nbytes: int, path: Path
    ) -> bytes:
        """Fetch what a neighbour has sent to the audited peer."""
        file = path.with_name(f"{path.name}-{tensors}")
        try:
            await self._fetch(order, neighbour, tensors, nbytes, file)
            return await trio.Path(file).read_bytes()
        finally:
            file.unlink(missing_ok=True)

    async def _fetch(
        self, order: Audit, holder: PeerId, tensors: KeptTensors, total_bytes: int, path: Path,
        blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        record = self._member.roster.get(holder)
        if record is None:
            raise SwarmError(f"{holder} is not in the roster")
        request = KeptRequest(permit=order.permit, tensors=tensors, blocks=tuple(blocks))
        try:
            await fetch_kept(self._member, record, request, total_bytes, path)
        except OSError as error:
            raise SwarmError(f"{path} cannot be written: {error.strerror}") from error
        except SwarmError as error:
            raise TensorsWithheld(str(error)) from error


async def _together(*parts: Callable[[], Awaitable[bytes]]) -> list[bytes]:
    """Await all parts at the same time; TensorsWithheld if one fails."""
    results, failures = [b""] * len(parts), list[SwarmError]()

    async def take(place: int, part: Callable[[], Awaitable[bytes]]) -> None:
        try:
            results[place] = await part()
        except SwarmError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for place, part in enumerate(parts):
            nursery.start_soon(take, place, part)
    if failures:
        raise TensorsWithheld(str(failures[0])) from failures[0]
    return results
