"""Simulated volunteers with one connection each to the coordinator, in a separate process.

    python -m benchmarks.coordinator.sockets INVITE VOLUNTEERS MANIFEST STEP_SECONDS MEMBERS

`benchmarks.coordinator --sockets` starts this. Each volunteer is a libp2p host with its own
identity: TCP, Noise and yamux over loopback. A heartbeat carries its time of sending, in
nanoseconds of the machine's monotonic clock, as the byte count of a fictitious link.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import trio

from benchmarks.coordinator.heartbeats import Heart
from benchmarks.coordinator.volunteers import SimulatedVolunteer, World, beat_for_ever
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.network import FramedStream, FrameLimits, Node, change_watch, open_node
from swarm_shared.protocol import CONTROL_PROTOCOL, LinkBytes
from swarm_shared.run.manifest import Manifest

STAMP_PROTOCOL = "stamp"
JOIN_SECONDS = 0.5
"""Seconds between two joins from this process; real volunteers do not join all at once."""
LOOK_SECONDS = 120.0
"""Seconds between two checks of the machine's addresses. The default of two seconds would occupy
a thousand nodes on one machine entirely."""
LIMITS = FrameLimits(max_header_bytes=16 * 2**20)


class OwnTime:
    """Clock of a separate process, whose work never counts against the coordinator's core."""

    def current_time(self) -> float:
        return time.monotonic()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        yield


class SocketVolunteer(SimulatedVolunteer):
    def __init__(self, world: World, identity: Identity, coordinator: PeerId) -> None:
        super().__init__(world, identity)
        self.stream = Outbox()
        self._coordinator = coordinator

    def beat(self, due: float) -> None:
        stamp = LinkBytes(
            remote=self._coordinator, protocol=STAMP_PROTOCOL, sent=time.monotonic_ns(), received=0
        )
        said = self.heart.beats[Heart.place(self.beaten)]
        self.beaten += 1
        self.send(said.model_copy(update={"changed_links": (*said.changed_links, stamp)}))


class Outbox:
    """Queue of messages to be written to the socket."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._wake = trio.Event()

    def push(self, header: bytes) -> None:
        self._frames.append(header)
        self._wake.set()

    async def write_all(self, stream: FramedStream) -> None:
        while True:
            while self._frames:
                await stream.send(self._frames.popleft(), timeout_seconds=60.0)
            self._wake = trio.Event()
            await self._wake.wait()


async def live(node: Node, invite: Invite, volunteer: SocketVolunteer) -> None:
    """Run a volunteer until the coordinator closes the stream."""
    try:
        stream = await node.open_stream(
            invite.coordinator, CONTROL_PROTOCOL, LIMITS, invite.addresses, timeout_seconds=60.0
        )
        volunteer.attach()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volunteer.stream.write_all, stream)
            while True:
                volunteer.hear((await stream.receive()).header)
    except* NetworkError as errors:
        print(f"a volunteer has lost its link: {errors.exceptions[0]}", file=sys.stderr)


async def main(
    text: str, volunteers: int, manifest_path: str, step_seconds: float, members: int
) -> None:
    invite = Invite.decode(text)
    manifest = Manifest.model_validate_json(Path(manifest_path).read_bytes())
    tokens = RunTokens(manifest, Path(manifest_path).parent / "run" / "data")
    world = World(run_id_of(manifest), manifest, step_seconds, OwnTime(), members, tokens)
    everybody: list[SocketVolunteer] = []
    setattr(change_watch, "POLL_SECONDS", LOOK_SECONDS)  # noqa: B010
    async with contextlib.AsyncExitStack() as stack, trio.open_nursery() as nursery:
        nursery.start_soon(world.act)
        nursery.start_soon(beat_for_ever, everybody)
        for _ in range(volunteers):
            identity = Identity.generate()
            node = await stack.enter_async_context(open_node(identity))
            volunteer = SocketVolunteer(world, identity, invite.coordinator)
            everybody.append(volunteer)
            nursery.start_soon(live, node, invite, volunteer)
            await trio.sleep(JOIN_SECONDS)
        print("joined", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
