"""A peer whose network is limited averages over its own host, where every byte is counted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from kits.averaging.group import LOOPBACK, group, wait_available
from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker

pytestmark = pytest.mark.process

ELEMENTS = 300_001


def p2pds() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at this moment
            if child.name() == "p2pd":
                found.append(child)
    return found


async def test_a_limit_ends_p2pd_and_the_averages_stay_exact_over_the_host(tmp_path: Path) -> None:
    async with group(tmp_path, [True, True], ELEMENTS) as g:
        limited = g.peers[0]
        assert await g.round() == {}
        assert {route for _, route in limited.carried()} == {"p2pd"}

        limited.worker.hold_back("a limit is set")
        while limited.worker.available or len(p2pds()) > 1:
            await trio.sleep(0.02)
        assert limited.worker.reason == "a limit is set"
        assert limited.carrier is None
        g.publish()
        before = limited.node.bandwidth.up.bytes
        assert await g.round() == {}
        g.check_exact()
        # Its half of the sums, and the other's half of its own numbers.
        assert limited.node.bandwidth.up.bytes - before > 4 * ELEMENTS
        assert {route for _, route in limited.carried()} == {"p2pd", "host"}

        limited.worker.hold_back("")
        await wait_available(limited.worker)
        g.publish()
        assert await g.round() == {}
        g.check_exact()


async def test_a_worker_that_is_held_back_from_the_start_is_never_run(tmp_path: Path) -> None:
    worker = AveragingWorker(AveragingOptions(tmp_path, LOOPBACK))
    worker.hold_back("a limit is set")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        assert not await worker.settled()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (worker.pid, worker.reason) == (None, "a limit is set")
        worker.hold_back("")
        assert await wait_available(worker)
        nursery.cancel_scope.cancel()
