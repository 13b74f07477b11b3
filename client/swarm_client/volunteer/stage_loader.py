"""Brings a stage worker to an assigned version: from the manifest's seed, or from a snapshot.

In a run that trains adapters a worker starts with the frozen parameters, which the organiser
serves; seed and snapshots are of the adapters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.membership.membership import CurrentMembership
from swarm_client.pipeline.held_stage import LoadedStage
from swarm_client.pipeline.receipts import receipt_signer
from swarm_client.stage.handle.stage_memory import (
    graph_budget,
    host_graph_budget,
    streamed_bytes,
    worker_allowance,
)
from swarm_client.stage.handle.warm_worker import WarmWorker
from swarm_client.stage.handle.worker_handle import StageWorker, open_worker
from swarm_client.volunteer.base_files import base_state
from swarm_client.volunteer.context import VolunteerContext
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.text import duration_text, size_text
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.protocol import AssignStage
from swarm_shared.run.manifest import InitialState, Manifest, initial_item
from swarm_shared.scheduling.placement.stage_sizes import is_size_of_state_file, stage_sizes
from swarm_shared.transfer.download_meter import DownloadMeter, DownloadProgress
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import fetch
from swarm_shared.volunteer_rules.stage_account import StageAccount


def inject_faults(phase: FaultPoint, version: int) -> None:
    """A point where the daemon may die or lose its network, in the step after `version`."""
    faults.inject_outage(phase, version + 1)
    faults.inject(phase, version + 1)


@dataclass(slots=True, eq=False)
class StageLoader:
    """Takes `spare` for the next worker; a new process takes seconds to start."""

    context: VolunteerContext
    membership: CurrentMembership
    snapshots: SnapshotStore
    spare: WarmWorker
    coordinator: TransferSource
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _meter: DownloadMeter | None = field(default=None, init=False)

    @property
    def download(self) -> DownloadProgress | None:
        """The download in progress."""
        return None if self._meter is None else self._meter.progress

    @asynccontextmanager
    async def open_worker(self, stage: StageIndex) -> AsyncIterator[StageWorker]:
        """A worker of the stage, with parameters from the manifest's seed, and frozen ones, if any,
        from the manifest's file. CapacityError when the stage needs more memory than is offered."""
        options, manifest = self.context.options, self.membership.now.manifest
        offer = self._offer()
        allowance = worker_allowance(manifest, stage, offer, options.threads)
        base = await self._base(manifest, stage)
        async with open_worker(
            manifest, stage, options.device.name, options.threads,
            self.graph_bytes(stage),
            f"swarm-{self.context.node.peer_id[-8:]}-{next(self._numbers)}",
            self.context.home.log_folder / "worker.log",
            # A GPU's driver maps memory of the host as it likes.
            private_bytes=allowance if options.device.name == "cpu" else None,
            streamed_bytes=streamed_bytes(manifest, stage, offer),
            host_graph_bytes=self.host_graph_bytes(stage),
            process=self.spare.process(),
            base_path=base,
        ) as worker:  # fmt: skip
            yield worker

    def graph_bytes(self, stage: StageIndex) -> int:
        """Return the memory of the device that a worker of the stage may take for graphs now."""
        return graph_budget(self.membership.now.manifest, stage, self._offer())

    def host_graph_bytes(self, stage: StageIndex) -> int:
        """Return the memory of the host for graphs of a device with memory of its own."""
        return host_graph_budget(self.membership.now.manifest, stage, self._offer())

    def _offer(self) -> MemoryOffer:
        return self.context.options.offer(trio.current_time())

    def missing_memory(self, stage: StageIndex, worker: StageWorker) -> str:
        """Return in words what the worker takes beyond what the device offers; empty if nothing."""
        memory = self.membership.now.manifest.stages[stage].memory
        offer, streams = self.context.options.device.memory, worker.configured.streamed_bytes
        if offer.holds(memory) and offer.streamed_bytes(memory) <= streams:
            return ""
        return f"it needs {memory}, and a stage may take {offer}"

    async def _base(self, manifest: Manifest, stage: StageIndex) -> Path | None:
        """The file of the stage's frozen parameters, downloaded unless it is there; None where the
        run has none."""
        state = base_state(manifest, stage)
        if state is None:
            return None
        bases = self.snapshots.bases
        path = bases.path(stage)
        if not await bases.has(stage, state):
            bases.make_room()
            await self._download(
                f"the base of stage {stage}", "frozen parameters", [self.coordinator],
                initial_item(stage), state, path,
            )  # fmt: skip
        return path

    async def load(self, worker: StageWorker, assignment: AssignStage, *, is_fresh: bool) -> str:
        """Bring the worker to the assigned version; return the digest of the stage's state.

        `is_fresh`: the worker is as it was started.
        """
        if assignment.source == "fresh":
            manifest = self.membership.now.manifest
            if manifest.initial and not manifest.model.has_adapters:
                raise ProtocolError(
                    "parameters from the seed are asked for, but the manifest has a file of "
                    "version 0; the coordinator must offer that file"
                )
            if is_fresh:
                return worker.configured.digest
            return await worker.reinitialise(assignment.version)
        path = await self._fetch(assignment)
        faults.corrupt_file(FaultPoint.STATE_DOWNLOAD, assignment.version + 1, path)
        try:
            return await worker.load_state(path, assignment.version)
        finally:
            path.unlink(missing_ok=True)

    async def _fetch(self, assignment: AssignStage) -> Path:
        """Download the assigned state."""
        check_file_size(self.membership.now.manifest, assignment)
        path = self.snapshots.fetched_path(assignment)
        await self._download(
            f"stage {assignment.stage}", "state",
            [TransferSource(holder.peer, holder.addresses) for holder in assignment.holders],
            assignment.item, assignment, path,
            lambda: inject_faults(FaultPoint.STATE_DOWNLOAD, assignment.version),
        )  # fmt: skip
        return path

    async def _download(
        self, name: str, content: str, sources: Sequence[TransferSource], item: str,
        file: AssignStage | InitialState, path: Path, on_chunk: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Download a file of known size and hash, with its progress as lines for people."""
        context, member = self.context, self.membership.now
        context.claim_disk(file.bytes)
        meter = self._meter = DownloadMeter(name, trio.current_time)

        def progress(received_bytes: int, total_bytes: int) -> None:
            on_chunk()
            meter.record(received_bytes, total_bytes)
            if (line := meter.due_line()) is not None:
                context.report(line)

        try:
            await fetch(
                context.node, sources, item, file.bytes, file.sha256, path, member.certificate,
                member.run, progress,
            )  # fmt: skip
        finally:
            if self._meter is meter:
                self._meter = None
        context.report(
            f"downloaded {size_text(file.bytes)} of {content} from {len(sources)} peer(s) in "
            f"{duration_text(meter.seconds)}"
        )

    def loaded_stage(self, worker: StageWorker, version: Version) -> LoadedStage:
        """The worker's stage with a new account."""
        sign = receipt_signer(self.context.identity, self.membership, worker.stage)
        staleness = self.membership.now.manifest.training.staleness
        return LoadedStage(worker, StageAccount(worker.stage, version, staleness, sign))


def check_file_size(manifest: Manifest, assignment: AssignStage) -> None:
    """ProtocolError for a file that cannot be the stage's state, before any of it is fetched."""
    sizes = stage_sizes(manifest)[assignment.stage]
    state_bytes = sizes.state_bytes
    if assignment.version == 0 and manifest.initial and not manifest.model.has_adapters:
        state_bytes = sizes.parameter_bytes
        # The run's id depends on it: where a run begins cannot be changed later.
        state = manifest.initial[assignment.stage]
        if (assignment.bytes, assignment.sha256) != (state.bytes, state.sha256):
            raise ProtocolError(
                f"the file offered for stage {assignment.stage} at version 0 is not the one that "
                "the manifest names; another source is needed"
            )
    if not is_size_of_state_file(assignment.bytes, state_bytes):
        raise ProtocolError(
            f"the state of stage {assignment.stage} has {size_text(state_bytes)}, and a file of "
            f"{size_text(assignment.bytes)} is offered; another source is needed"
        )
