"""hivemind's p2pd, a libp2p written by others, at our relay."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from kits.network import p2pd_pair
from kits.network.nodes import a_relay
from kits.waiting import until

# Starting two daemons takes long.
pytestmark = pytest.mark.process

SIZE_BYTES = 4 * 2**20


@pytest.mark.skipif(
    importlib.util.find_spec("hivemind") is None, reason="hivemind is not installed here"
)
async def test_a_p2pd_is_reached_through_our_relay_by_another_one(tmp_path: Path) -> None:
    program = Path(p2pd_pair.__file__)
    async with a_relay() as relay, trio.open_nursery() as nursery:
        server = relay.relay
        assert server is not None
        most_circuits = 0
        done: subprocess.CompletedProcess[bytes] | None = None

        async def run() -> None:
            nonlocal done
            words = [sys.executable, str(program), str(tmp_path), relay.addresses[0]]
            done = await trio.run_process(
                [*words, str(SIZE_BYTES)], capture_stdout=True, capture_stderr=True, check=False
            )

        nursery.start_soon(run)
        with trio.fail_after(50):
            while done is None:
                most_circuits = max(most_circuits, server.open_circuits)
                await trio.sleep(0.01)
        assert done.returncode == 0, done.stderr.decode()
        assert int(done.stdout.decode().split()[-1]) == SIZE_BYTES
        assert most_circuits >= 1
        assert server.forwarded_bytes > 2 * SIZE_BYTES
        # Both daemons are gone: what they held goes with them.
        await until(lambda: not server.open_circuits and not server.reservations)
        assert relay.handler_errors == {}
