"""The faults of a simulated swarm: each happens to one peer, to one of its links, or to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kits.swarm_world.facts import Fault

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.world import World

MOST_DEAF_SECONDS = 15.0
"""Longest time until both ends of a dead link notice."""

MOST_LAG_SECONDS = 2.0
"""Longest additional delay of a session; members whose closes arrive further apart than the stall
limit of an all-reduce never average."""

STUCK_SECONDS = 6.0
"""Seconds after which a daemon ends a worker that does not answer."""


def inject(world: World, fault: Fault) -> None:
    """Let a fault happen, if there is something that it can happen to."""
    alive = [peer for peer in world.peers.values() if peer.alive]
    if fault.kind in OF_THE_RUN:
        OF_THE_RUN[fault.kind](world, fault)
    elif alive:
        OF_A_PEER[fault.kind](alive[fault.target % len(alive)], fault.seconds)


# ---- of the run


def _crash_between(world: World, fault: Fault) -> None:
    """The coordinator dies after so many more commands."""
    world.crash_countdown = fault.target


def _disk(world: World, fault: Fault) -> None:
    world.disk_full_until = world.now + fault.seconds


def _leave(world: World, fault: Fault) -> None:
    staying = [peer for peer in world.peers.values() if peer.alive and not peer.leaving]
    if staying:
        staying[fault.target % len(staying)].leave()


def _pair(world: World, fault: Fault) -> frozenset[object] | None:
    alive = [peer for peer in world.peers.values() if peer.alive]
    if len(alive) < 2:
        return None
    one, other = alive[fault.target % len(alive)], alive[(fault.target + 1) % len(alive)]
    for edge in [*one.edges]:
        if fault.kind == "block" and other in (edge.sender.peer, edge.receiver):
            edge.end()
    return frozenset((one.id, other.id))


def _block(world: World, fault: Fault) -> None:
    """Two peers cannot reach each other, and their links break."""
    if pair := _pair(world, fault):
        world.blocked.add(pair)
        world.later(fault.seconds, lambda: world.blocked.discard(pair))


def _swallow(world: World, fault: Fault) -> None:
    """The links of two peers lose everything, and break when that is noticed."""

    def notice() -> None:
        world.silent.discard(pair)
        for peer in world.peers.values():
            for edge in list(peer.edges):
                if frozenset((edge.sender.peer.id, edge.receiver.id)) == pair:
                    edge.end()

    if pair := _pair(world, fault):
        world.silent.add(pair)
        world.later(min(fault.seconds, MOST_DEAF_SECONDS), notice)


# ---- of a process


def _restart(peer: SimPeer, seconds: float) -> None:
    peer.kill()
    if not peer.leaving:
        peer.world.later(seconds, lambda: peer.alive or peer.gone or peer.start())


def _hang(peer: SimPeer, seconds: float) -> None:
    life, peer.hung = peer.life, True
    peer.world.later(seconds, lambda: peer.alive and life == peer.life and peer.wake())


def _pause(peer: SimPeer, seconds: float) -> None:
    peer.pause()
    peer.later(seconds, peer.resume)


def _wedge(peer: SimPeer, seconds: float) -> None:
    """Averaging stands still while heartbeats continue."""

    def end() -> None:
        peer.wedged = False
        for stage in list(peer.stages.values()):
            stage.go_on()

    peer.wedged = True
    peer.later(4 * seconds, end)


def _stall(peer: SimPeer, seconds: float) -> None:
    """As a trainer it drives nothing; as a stage server it works."""

    def end() -> None:
        peer.trainer.stalled = False
        peer.trainer.start_more()

    peer.trainer.stalled = True
    peer.later(4 * seconds, end)


def _for_a_time(name: str, value: object, default: object) -> Callable[[SimPeer, float], None]:
    def happen(peer: SimPeer, seconds: float) -> None:
        setattr(peer, name, value)
        peer.later(seconds, lambda: setattr(peer, name, default))

    return happen


def _next_time(name: str) -> Callable[[SimPeer, float], None]:
    return lambda peer, _seconds: setattr(peer, name, True)


# ---- of a worker


def _worker(peer: SimPeer, _seconds: float) -> None:
    """A compute process dies: its state is lost."""
    if peer.stages:
        peer.die(peer.world.rng.choice(list(peer.stages.values())))


def _stick(peer: SimPeer, _seconds: float) -> None:
    """A compute process stops answering; the daemon ends it after a while."""
    for stage in peer.stages.values():
        stage.worker.stuck = True
        peer.later(STUCK_SECONDS, lambda stage=stage: peer.die(stage))


def _lose(peer: SimPeer, _seconds: float) -> None:
    """A microbatch with a signed receipt is lost without the peer noticing."""
    if peer.holding is not None:
        worker = peer.holding.worker
        for step, of_step in worker.sums.items():
            found = of_step.contents.microbatches()
            if found and worker.remove(step, found[-1:]):
                worker.lost.add((step, found[-1]))
                return


def _nan_sum(peer: SimPeer, _seconds: float) -> None:
    """The sum of its gradients will not be a number."""
    if peer.holding is not None:
        peer.holding.worker.finite = False


# ---- of the link to the coordinator


def _cut(peer: SimPeer, _seconds: float) -> None:
    if peer.link is not None and peer.link.open:
        peer.world.cut(peer.link)


def _deafen(peer: SimPeer, seconds: float) -> None:
    """The link loses everything, and breaks when that is noticed."""
    if (link := peer.link) is not None and link.open:
        link.deaf = True
        peer.world.later(
            min(seconds, MOST_DEAF_SECONDS), lambda: link.open and peer.world.cut(link)
        )  # fmt: skip


def _lag(peer: SimPeer, seconds: float) -> None:
    """All messages of the session take longer, in both directions."""
    if peer.link is not None:
        peer.link.lag_seconds = min(seconds, MOST_LAG_SECONDS)


def _ghost(peer: SimPeer, seconds: float) -> None:
    """The link breaks, and its newest messages arrive again in the next session."""
    if (link := peer.link) is not None and link.open:
        peer.world.cut(link)
        for event in list(link.sent):
            peer.world.later(
                2.0 + seconds * peer.world.rng.random(),
                lambda event=event: peer.world.deliver_late(link, event),
            )  # fmt: skip


OF_THE_RUN: dict[str, Callable[[World, Fault], None]] = {
    "join": lambda world, _: world.join() and None,
    "small": lambda world, _: world.join(memory_bytes=50) and None,
    "crash": lambda world, fault: world.crash(fault.seconds),
    "crash_between": _crash_between,
    "disk": _disk,
    "leave": _leave,
    "block": _block,
    "swallow": _swallow,
}

OF_A_PEER: dict[str, Callable[[SimPeer, float], None]] = {
    "kill": lambda peer, _: peer.kill(),
    "restart": _restart,
    "revoke": lambda peer, seconds: peer.world.ban(peer, seconds),
    "carrier": lambda peer, _: peer.world.broken_carriers.add(peer.id),
    "move": lambda peer, _: peer.move_address(),
    "hang": _hang,
    "pause": _pause,
    "wedge": _wedge,
    "stall": _stall,
    "slow": _for_a_time("slowness", 100.0, 1.0),
    "echo": _for_a_time("echoes", True, False),
    "nan": _next_time("gives_nan"),
    "differ": _next_time("differs"),
    "unapplied": _next_time("cannot_apply"),
    "other_apply": _next_time("expects_other_apply"),
    "old_apply": _next_time("expects_old_apply"),
    "unsaving": lambda peer, seconds: setattr(peer, "unsaving_until", peer.world.now + seconds),
    "worker": _worker,
    "stick": _stick,
    "lose": _lose,
    "nan_sum": _nan_sum,
    "cut": _cut,
    "deafen": _deafen,
    "lag": _lag,
    "ghost": _ghost,
}

FAULTS = (*OF_THE_RUN, *OF_A_PEER)
"""All kinds."""
