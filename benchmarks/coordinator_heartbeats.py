"""What the hearts of simulated volunteers say, worked out by what real ones use for it.

A volunteer of a large run speaks with the others of its stage and with those of the stages beside
it; all of these links count on, and delays and rates of their paths are never the same. What of
that a heartbeat says is `swarm_client.volunteer.heartbeat`'s: beats are made here beforehand, with
the first
word of a session first, since on the core that is measured nothing should be made but words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from swarm_client.volunteer.heartbeat import HeartbeatDelta, HeartbeatSnapshot
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import STAGE_PROTOCOL, Heartbeat, LinkBytes, LinkPath, PathKind, encode

REMOTES = 200
"""A hundred and fifty of its stage, and some of the stages beside it."""
HEARTS = 16
"""That differ; thousands have the same one, at another point of it."""
BEATS = 48
"""Of each, from its first on; then those after the first come again."""


@dataclass(frozen=True, slots=True)
class Heart:
    beats: tuple[Heartbeat, ...]
    encoded: tuple[bytes, ...]

    @staticmethod
    def place(number: int) -> int:
        """Of the beat with this number, of however many."""
        return number if number < BEATS else 1 + (number - 1) % (BEATS - 1)


def hearts(members: int, heartbeat_seconds: float) -> list[Heart]:
    rng = random.Random(1)
    remotes = [Identity.generate().peer_id for _ in range(REMOTES)]
    return [_heart(rng, remotes, members, heartbeat_seconds) for _ in range(HEARTS)]


def _heart(
    rng: random.Random, remotes: list[PeerId], members: int, heartbeat_seconds: float
) -> Heart:  # fmt: skip
    telling, rate = HeartbeatDelta(heartbeat_seconds), rng.uniform(1.0, 1.2)
    sent = [0] * REMOTES
    beats = []
    for _ in range(BEATS):
        sent = [count + rng.randrange(10_000, 1_000_000) for count in sent]
        rate *= rng.uniform(0.98, 1.02)
        present = HeartbeatSnapshot(
            microbatches_per_second=rate,
            queued=rng.randrange(4),
            up_bytes_per_second=rng.uniform(2.4e6, 2.6e6),
            links=tuple(
                LinkBytes(remote=remote, protocol=STAGE_PROTOCOL, sent=count, received=count // 2)
                for remote, count in zip(remotes, sent, strict=True)
            ),
            paths=tuple(
                LinkPath(
                    remote=remote, kind=PathKind.DIRECT, rtt_seconds=rng.uniform(0.02, 0.08),
                    bytes_per_second=rng.uniform(0.0, 1e6),
                )
                for remote in remotes
            ),
            paused=False,
            computed=2,
            busy_seconds=rng.uniform(0.7, 0.9) * heartbeat_seconds,
        )  # fmt: skip
        beats.append(telling.heartbeat(present, members))
    return Heart(tuple(beats), tuple(encode(beat) for beat in beats))
