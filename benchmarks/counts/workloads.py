"""Small workloads with fixed seeds, one per frequent operation of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from benchmarks.counts.exchange import LIMITS, STAGE, exchanged
from benchmarks.counts.instructions import Cost, cost_of
from benchmarks.counts.messages import NEIGHBOURS, backward, forward, heartbeat
from benchmarks.counts.world import (
    MICROBATCHES,
    PEERS_PER_STAGE,
    RUN,
    STAGE_MEMORY,
    STAGES,
    MidStep,
    certificate,
    envelope,
    identity,
    manifest,
    receipt,
)
from swarm_client.membership.membership import CurrentMembership, Membership
from swarm_client.pipeline.receipts import receipt_signer
from swarm_coordinator.core.events import (
    HeartbeatsReceived,
    LeaseResolved,
    PeerHeartbeat,
    ReceiptsVerified,
    Tick,
)
from swarm_coordinator.server.control_protocol import ReceiptChecker
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.network.libp2p.send_queue import SendQueue
from swarm_shared.network.libp2p.yamux_frames import MAX_FRAME_PAYLOAD_BYTES, data_header
from swarm_shared.protocol import client_messages, encode, parse, stage_answers, stage_requests
from swarm_shared.protocol.framing import FrameDecoder, encode_frame
from swarm_shared.scheduling.placement import MovePolicy, PeerLoad, StageLoad, choose_moves
from swarm_shared.scheduling.routing import Observation, StageRouting
from swarm_shared.volunteer_rules.stage_account import Counted

Prepare = Callable[[], Callable[[], object]]

MACHINES = 400
ROUTES = 32


def workload_costs() -> dict[str, Cost]:
    costs = {name: cost_of(prepare) for name, prepare in WORKLOADS.items()}
    costs["network: a forward of 4 MiB from the sender's frame to the receiver's"] = exchanged(
        forward(STAGE)
    ).cost
    return costs


# ---------------------------------------------------------------- the coordinator


def _heartbeat_heard() -> Callable[[], object]:
    world, said = MidStep(), encode(heartbeat(NEIGHBOURS))

    def work() -> None:
        message = parse(client_messages, said)
        beat = PeerHeartbeat(world.session(5), identity(5).peer_id, message)  # type: ignore[arg-type]
        world.event(HeartbeatsReceived((beat,)))

    return work


def _receipt_heard() -> Callable[[], object]:
    world, said = MidStep(), envelope(5, 0)
    number, peer = 5, identity(5).peer_id
    checker = ReceiptChecker(RUN, lambda sender, receipt: True, MICROBATCHES)

    def work() -> None:
        checking = checker.check((said,), peer)
        try:
            checking.send(None)
        except StopIteration as checked:
            world.event(ReceiptsVerified(world.session(number), peer, checked.value))
        else:
            raise AssertionError("one receipt is checked without waiting")

    return work


def _lease_resolved() -> Callable[[], object]:
    """Resolve a lease; its trainer gets the next one, if there is one."""
    world = MidStep()
    peer, lease = world.leases[5]
    number = next(n for n in range(STAGES * PEERS_PER_STAGE) if identity(n).peer_id == peer)
    microbatch = lease.microbatches[0].microbatch
    receipts = tuple(receipt(stage, microbatch) for stage in range(STAGES))
    resolved = LeaseResolved(
        world.session(number), peer, Step(1), MicrobatchIndex(microbatch), lease.lease, True, "",
        receipts,
    )  # fmt: skip
    return lambda: world.event(resolved)


def _tick() -> Callable[[], object]:
    world = MidStep()
    world.now += 0.25
    return lambda: world.event(Tick())


def _last_receipt() -> Callable[[], object]:
    """Handle the receipt that completes the step's table and starts the step close."""
    world = MidStep()
    missing = receipt(0, MICROBATCHES - 1)
    for number in range(STAGES):
        held = tuple(receipt(number, m) for m in range(MICROBATCHES))
        held = tuple(one for one in held if one != missing)
        world.event(ReceiptsVerified(world.session(number), identity(number).peer_id, held))
    last = ReceiptsVerified(world.session(0), identity(0).peer_id, (missing,))
    return lambda: world.event(last)


def _stage_requested() -> Callable[[], object]:
    """Attach a peer that leaves the choice of its stage to the coordinator."""
    world, number = MidStep(), STAGES * PEERS_PER_STAGE
    certificate(number)  # signed once, and kept
    return lambda: world.attach(number)


def _placement() -> Callable[[], object]:
    rng = random.Random("a placement decision")
    stages = tuple(
        StageLoad(StageIndex(s), 3e12, STAGE_MEMORY, 2**30, 2**22) for s in range(2 * STAGES)
    )
    thinned = [rng.uniform(0.7, 1.0) for _ in stages]
    peers: list[PeerLoad] = []
    while len(peers) < MACHINES:
        stage = rng.randrange(len(stages))
        if rng.random() < thinned[stage]:
            peers.append(
                PeerLoad(
                    PeerId(f"peer-{len(peers)}"), StageIndex(stage),
                    1.8e13 * math.exp(rng.gauss(0, 0.4)), MemoryOffer(device_bytes=2**34),
                    rng.uniform(1e7, 1e8),
                )
            )  # fmt: skip
    return lambda: choose_moves(stages, peers, MovePolicy(margin=0.0, rate_noise=0.0))


# ---------------------------------------------------------------- a volunteer


def _heartbeat_said() -> Callable[[], object]:
    said = heartbeat(NEIGHBOURS)
    return lambda: encode(said)


def _receipt_signed() -> Callable[[], object]:
    membership = Membership(RUN, identity(0).peer_id, "", manifest(), Generation(1))
    sign = receipt_signer(identity(5), CurrentMembership(membership), StageIndex(1))
    counted = Counted(Step(1), MicrobatchIndex(200), 1024, None, receipt(5, 200).transcript)
    return lambda: sign(counted)


def _route() -> Callable[[], object]:
    table = StageRouting(random.Random(1), 4096)
    peers = [identity(n).peer_id for n in range(ROUTES)]
    # Without rates there is no plan, so that all peers are compared.
    table.update(dict.fromkeys(peers, 0.0))
    for position, peer in enumerate(peers):
        table.observe(peer, Observation(0.5 + 0.01 * position, 0.3, 0.2, 2), 0.0)
    in_flight = {peer: position % 4 for position, peer in enumerate(peers)}
    return lambda: table.choose(0.0, in_flight, MicrobatchIndex(0))


def _stage_headers() -> Callable[[], object]:
    request, answer = forward(STAGE), backward(STAGE)

    def work() -> None:
        parse(stage_requests, encode(request))
        parse(stage_answers, encode(answer))

    return work


def _muxer_frame() -> Callable[[], object]:
    queue, view = SendQueue(), memoryview(bytes(MAX_FRAME_PAYLOAD_BYTES))

    def work() -> None:
        queue.put(data_header(1, len(view)) + view)
        queue.next_messages()

    return work


def _frame() -> Callable[[], object]:
    """Decode a payload of a megabyte that arrives in pieces of the muxer's size."""
    header, payload = encode(forward(STAGE)), bytes(2**20)
    size = MAX_FRAME_PAYLOAD_BYTES

    def work() -> None:
        decoder = FrameDecoder(LIMITS)
        for piece in encode_frame(header, payload):
            view = memoryview(piece)
            for start in range(0, len(view), size):
                decoder.feed(view[start : start + size])

    return work


WORKLOADS: Mapping[str, Prepare] = {
    f"coordinator: a heartbeat with {NEIGHBOURS} links, parsed and taken in": _heartbeat_heard,
    "coordinator: a receipt, checked and counted": _receipt_heard,
    "coordinator: a lease resolved": _lease_resolved,
    f"coordinator: a tick with {STAGES * PEERS_PER_STAGE} members": _tick,
    "coordinator: the last receipt of a step, with the close of its stage": _last_receipt,
    f"coordinator: a stage for a joining peer, with {STAGES * PEERS_PER_STAGE} members": (
        _stage_requested
    ),
    f"coordinator: a placement decision over {MACHINES} machines": _placement,
    f"volunteer: a heartbeat with {NEIGHBOURS} links, encoded": _heartbeat_said,
    "volunteer: a receipt, signed": _receipt_signed,
    f"volunteer: a choice among {ROUTES} routes": _route,
    "volunteer: headers of a forward and a backward, encoded and parsed": _stage_headers,
    "network: a muxer's frame, queued and taken": _muxer_frame,
    "network: a frame of 1 MiB, encoded and decoded": _frame,
}
