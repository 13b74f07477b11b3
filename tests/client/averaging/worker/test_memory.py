"""The averaging worker takes what a volunteer offers, and p2pd is not cut short by it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import pytest
import trio

from kits.averaging.group import LOOPBACK, wait_available
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.machine.memory_limit import OVERHEAD_BYTES

pytestmark = pytest.mark.process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits another process's memory")
async def test_the_worker_is_limited_to_the_offer_and_p2pd_is_not(tmp_path: Path) -> None:
    offered = 64 * 2**20
    worker = AveragingWorker(AveragingOptions(tmp_path, LOOPBACK, memory_bytes=offered))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        assert await wait_available(worker)
        assert worker.pid is not None
        limit, hard = resource.prlimit(worker.pid, resource.RLIMIT_DATA)
        assert offered + OVERHEAD_BYTES < limit == hard < offered + 2 * OVERHEAD_BYTES
        (p2pd,) = [
            child
            for child in psutil.Process(worker.pid).children(recursive=True)
            if child.name() == "p2pd"
        ]
        assert resource.prlimit(p2pd.pid, resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
        nursery.cancel_scope.cancel()
