"""A volunteer that offers little memory, and runs that take more.

The first tests are about the volunteer's own figures, the last ones about real worker processes
under the operating system's limit.
"""

from __future__ import annotations

import resource
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from kits.manifests import manifest_of, stage_ranges
from kits.memory import offers, takes
from swarm_client.machine.devices import Device
from swarm_client.machine.memory_limit import OVERHEAD_BYTES, _private_bytes
from swarm_client.stage.handle.stage_memory import (
    graph_budget,
    host_graph_budget,
    streamed_bytes,
    worker_allowance,
)
from swarm_client.stage.handle.warm_worker import WarmWorker
from swarm_client.stage.handle.worker_handle import StageWorker, open_worker
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.volunteer.context import VolunteerOptions
from swarm_client.volunteer.stage_loader import StageLoader
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import StageIndex
from swarm_shared.run.manifest import (
    LimitsConfig,
    Manifest,
    StageRange,
)
from swarm_shared.scheduling.placement.memory_need import least_stage_memory

MIB = 2**20


def make_manifest(width: int, claimed_bytes: int | None = None, stage_queue: int = 4) -> Manifest:
    """A run of one layer of this width, which claims so much memory, or what it needs."""
    manifest = manifest_of(
        model={
            "vocabulary_size": 64, "hidden_size": width, "intermediate_size": 4 * width,
            "heads": 4, "key_value_heads": 4, "sequence_length": 16,
        },
        stages=(StageRange(first_layer=0, end_layer=1, memory=takes(claimed_bytes or 0)),),
        limits={"stage_queue": stage_queue}, codecs={"average": "exact"},
    )  # fmt: skip
    if claimed_bytes is not None:
        return manifest
    cut = manifest.stages[0].model_copy(update={"memory": least_stage_memory(manifest)[0]})
    return manifest.model_copy(update={"stages": (cut,)})


def make_inner_manifest() -> Manifest:
    """A run whose middle stage keeps 110 MB of a microbatch's graph, 14 MB of each layer's, and has
    34 MB of parameters."""
    plain = make_manifest(256)
    model = plain.model.model_copy(update={"layers": 10, "sequence_length": 256})
    return plain.model_copy(update={"model": model, "stages": stage_ranges(1, 9, 10)})


def loader_of(manifest: Manifest, offered_bytes: int, folder: Path) -> StageLoader:
    """The loader of a volunteer that offers so much memory."""
    context: Any = SimpleNamespace(
        options=VolunteerOptions(Device("cpu", "CPU", offered_bytes), 1, None, None),
        node=SimpleNamespace(peer_id=f"peer{uuid.uuid4().hex[:8]}"),
        home=SimpleNamespace(log_folder=folder),
    )
    membership: Any = SimpleNamespace(now=SimpleNamespace(manifest=manifest))
    spare = WarmWorker(1, folder / "worker.log")
    return StageLoader(context, membership, None, spare, None)  # type: ignore[arg-type]


def peak_bytes(worker: StageWorker) -> int:
    for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the worker has ended")


def test_a_stage_that_needs_more_than_is_offered_is_refused_whatever_the_manifest_claims():
    manifest = make_manifest(1024, claimed_bytes=1000)
    with pytest.raises(CapacityError, match=r"stage 0 needs 197 MiB .* offers 256 MiB"):
        worker_allowance(manifest, StageIndex(0), offers(256 * MIB), 1)


def test_a_stage_that_claims_more_than_is_offered_is_refused():
    manifest = make_manifest(64, claimed_bytes=2**40)
    with pytest.raises(CapacityError, match="stage 0 needs 1 TiB"):
        worker_allowance(manifest, StageIndex(0), offers(256 * MIB), 1)


def test_payloads_in_flight_that_take_more_than_is_offered_are_refused():
    queue = {"limits": LimitsConfig(stage_queue=4096)}
    manifest = make_manifest(64).model_copy(update=queue)
    with pytest.raises(CapacityError, match="microbatches that may be in flight at stage 0"):
        worker_allowance(manifest, StageIndex(0), offers(16 * MIB), 1)


def test_what_lies_in_shared_memory_is_taken_off_the_private_memory():
    manifest = make_manifest(256)
    offered = 512 * MIB
    allowance = worker_allowance(manifest, StageIndex(0), offers(offered), 1)
    parameters = 16 * 256 * 256 + 2 * 64 * 256
    assert offered - 16 * 1.01 * parameters < allowance - OVERHEAD_BYTES < offered


@pytest.mark.parametrize("lacking", [0, 1, 10_000])
def test_what_a_card_lacks_is_streamed_and_graphs_have_their_least_room(lacking: int):
    manifest, stage = make_manifest(256), StageIndex(0)
    memory = manifest.stages[0].memory
    offer = MemoryOffer(
        device_bytes=memory.device_bytes - lacking,
        host_bytes=memory.host_bytes + (lacking + memory.stream_buffer_bytes if lacking else 0),
    )
    worker_allowance(manifest, stage, offer, 1)
    assert streamed_bytes(manifest, stage, offer) == lacking
    assert host_graph_budget(manifest, stage, offer) == 0
    more = offer.model_copy(update={"host_bytes": (offer.host_bytes or 0) + 7})
    assert host_graph_budget(manifest, stage, more) == 7
    assert host_graph_budget(manifest, stage, offers(2**40)) == 0, "the device is the host"
    enough = offer.replaced(memory.device_bytes)
    assert graph_budget(manifest, stage, offer) == graph_budget(manifest, stage, enough) > 0


def test_weights_that_the_host_has_no_room_for_are_not_streamed():
    manifest = make_manifest(256)
    memory = manifest.stages[0].memory
    offer = MemoryOffer(device_bytes=memory.device_bytes - 1, host_bytes=memory.host_bytes)
    with pytest.raises(CapacityError, match="stage 0 needs"):
        worker_allowance(manifest, StageIndex(0), offer, 1)


@pytest.mark.process
def test_a_worker_of_a_hidden_giant_never_starts(tmp_path: Path):
    """With a claim that was believed, the worker took twelve times what was offered."""
    loader = loader_of(make_manifest(1024, claimed_bytes=1000), 64 * MIB, tmp_path)

    async def main() -> None:
        async with loader.open_worker(StageIndex(0)) as worker:
            pytest.fail(f"the worker took {peak_bytes(worker) / MIB:.0f} MiB of 64 MiB")

    with pytest.raises(CapacityError, match="stage 0 needs"):
        trio.run(main)


@pytest.mark.process
def test_the_system_stops_a_worker_at_its_limit_and_the_daemon_gets_a_sentence(tmp_path: Path):
    manifest = make_manifest(2048)

    async def main() -> None:
        async with open_worker(
            manifest, StageIndex(0), "cpu", 1, 2**30, f"test-{uuid.uuid4().hex[:12]}",
            tmp_path / "worker.log", private_bytes=256 * MIB,
        ) as worker:  # fmt: skip
            pytest.fail(f"the worker took {peak_bytes(worker) / MIB:.0f} MiB")

    with pytest.raises(RequestFailed, match=r"needs more than the .* that this process may take"):
        trio.run(main)


@pytest.mark.process
def test_a_worker_within_its_limit_works(tmp_path: Path):
    manifest = make_manifest(512)
    memory = manifest.stages[0].memory
    needed = memory.device_bytes + memory.host_bytes
    loader = loader_of(manifest, needed, tmp_path)

    async def main() -> None:
        async with loader.open_worker(StageIndex(0)) as worker:
            inputs = bytes(4 * manifest.tokens_per_microbatch)
            for microbatch in range(6):
                done = await worker.forward(1, microbatch, True, (inputs, inputs))  # type: ignore[arg-type]
                assert done.added
                done.release()
            assert peak_bytes(worker) < needed + OVERHEAD_BYTES

    trio.run(main)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_worker_whose_memory_shrinks_keeps_less_and_counts_the_same(tmp_path: Path):
    """Another program takes memory while microbatches are in flight: nothing is lost."""
    manifest = make_inner_manifest()
    digests: list[list[object]] = []

    async def count(worker: StageWorker, shrinks: bool) -> None:
        inputs = np.random.default_rng(1).normal(size=worker.sizes.input_bytes // 4)
        payload = inputs.astype(np.float32).tobytes()
        outputs = [await worker.forward(1, 0, True, (payload,))]  # type: ignore[arg-type]
        if shrinks:
            # Less than two graphs, and more than the parameters' gradients with one layer's: by
            # 64 MiB, as the holes that the C library's heap has then are lost to the process.
            limit = _private_bytes(worker.pid) + 112 * MIB
            resource.prlimit(worker.pid, resource.RLIMIT_DATA, (limit, limit))
        outputs += [await worker.forward(1, n, True, (payload,)) for n in range(1, 4)]  # type: ignore[arg-type]
        found: list[object] = []
        for output in outputs:
            with await worker.backward(output, payload) as back:
                done = await worker.count_weights(back) if back.owed else back
                found.append(done.transcript)
            output.release()
        assert None not in found
        digests.append(found)

    async def main() -> None:
        for shrinks in (False, True):
            async with open_worker(
                manifest, StageIndex(1), "cpu", 1, 2**30, f"shrink-{uuid.uuid4().hex[:8]}",
                tmp_path / "worker.log",
            ) as worker:  # fmt: skip
                await count(worker, shrinks)

    trio.run(main)
    assert digests[0] == digests[1]
