"""A constructed run in the middle of a step: members, manifest and the coordinator's state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from swarm_coordinator.core.events import (
    Command,
    Event,
    MessageReceived,
    PeerAttached,
    Restored,
    Send,
    SessionNumber,
)
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.transition import begin, transition
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    Version,
)
from swarm_shared.identity.credentials import (
    MembershipCertificate,
    Receipt,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    CarrierAddress,
    Hello,
    Lease,
    PeerRecord,
    Reachability,
    Ready,
    StageRequest,
)
from swarm_shared.run.manifest import (
    DataConfig,
    LimitsConfig,
    Manifest,
    OptimizerConfig,
    ShardInfo,
    StageRange,
    TrainingConfig,
)
from swarm_shared.run.model_config import ModelConfig

STAGES, PEERS_PER_STAGE = 4, 16
MICROBATCHES = 256
RUN = RunId("7d" * 32)
STARTED = 1000.0
"""Monotonic seconds of the start; the run is past the first minute, which has special rules."""


STAGE_MEMORY = StageMemory(device_bytes=2**32, comfortable_bytes=2**32, host_bytes=2**33)


@cache
def identity(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


ORGANISER = identity(10_000)


def address(number: int) -> str:
    return f"/ip4/203.0.113.{number}/tcp/{40_000 + number}/p2p/{identity(number).peer_id}"


@cache
def certificate(number: int) -> str:
    signed = MembershipCertificate(
            peer=identity(number).peer_id, run=RUN, generation=Generation(1),
            not_before=1.76e9, expires=1.76e9 + 14_400, role="volunteer",
        ).sign(ORGANISER)  # fmt: skip
    return encode_envelope(signed)


def record(number: int) -> PeerRecord:
    return PeerRecord(
        peer=identity(number).peer_id, stage=StageIndex(number % STAGES),
        addresses=(address(number),), certificate=certificate(number),
        microbatches_per_second=1.25, reachability=Reachability.PUBLIC,
    )  # fmt: skip


@cache
def manifest() -> Manifest:
    """Return the manifest of a 1-billion-parameter model, which is never built."""
    shard = {"tokens": 10**9, "merkle_root": "0" * 64}
    return Manifest(
        name="counted",
        organiser=ORGANISER.peer_id,
        model=ModelConfig(
            vocabulary_size=32_000, hidden_size=2048, intermediate_size=5632, layers=24, heads=16,
            key_value_heads=16, sequence_length=1024, tie_embeddings=False,
        ),
        stages=tuple(
            StageRange(first_layer=6 * s, end_layer=6 * s + 6, memory=STAGE_MEMORY, work_flops=3e12)
            for s in range(STAGES)
        ),
        data=DataConfig(
            token_bytes=2, tokenizer="bpe", unigram_entropy_nats=7.0,
            shards=(
                ShardInfo(name="train.tokens", split="train", **shard),
                ShardInfo(name="heldout.tokens", split="heldout", **shard),
            ),
        ),
        training=TrainingConfig(
            steps=1000, microbatches_per_step=MICROBATCHES, sequences_per_microbatch=1, seed=0,
            dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
        limits=LimitsConfig(starting_peers_per_stage=PEERS_PER_STAGE),
    )  # fmt: skip


def receipt(number: int, microbatch: int) -> Receipt:
    """Return a receipt of member `number` for the current step."""
    stage = number % STAGES
    return Receipt(
        run=RUN, generation=Generation(1), step=Step(1), microbatch=MicrobatchIndex(microbatch),
        stage=StageIndex(stage), peer=identity(number).peer_id, samples=1, tokens=1024,
        loss_sum=7168.25 if stage == STAGES - 1 else None,
        transcript=simulated_transcript(
            Step(1), MicrobatchIndex(microbatch), StageIndex(stage), StageIndex(STAGES - 1)
        ),
    )  # fmt: skip


def envelope(number: int, microbatch: int) -> str:
    return encode_envelope(receipt(number, microbatch).sign(identity(number)))


class MidStep:
    """The coordinator's core with all members ready and their trainers working."""

    def __init__(self) -> None:
        restored = Restored(1, Version(0), None, None, False, None)
        self.run: RunState = begin(manifest(), "manifest", record(10_000 % 251), restored, STARTED)
        self.now = STARTED + 60.0
        self.leases: list[tuple[PeerId, Lease]] = []
        for number in range(STAGES * PEERS_PER_STAGE):
            self._join(number)

    def event(self, event: Event) -> Sequence[Command]:
        commands = transition(self.run, event, self.now)
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Lease):
                self.leases.append((command.peer, command.message))
        return commands

    def session(self, number: int) -> SessionNumber:
        return SessionNumber(number + 1)

    def attach(self, number: int, wanted_stage: StageIndex | None = None) -> None:
        """Attach a peer and request a stage for it."""
        peer, session = identity(number).peer_id, self.session(number)
        carrier = CarrierAddress(peer=f"p2pd-{number}", addresses=("a",), binding="b")
        hello = Hello(
            run=RUN, software=SOFTWARE_VERSION, name=f"volunteer-{number}",
            addresses=(address(number),), carrier=carrier, device="a device",
            memory=MemoryOffer(device_bytes=2**33, host_bytes=2**34), wanted_stage=wanted_stage,
            reachability=Reachability.PUBLIC,
        )  # fmt: skip
        self.event(PeerAttached(session, peer, hello, certificate(number), (), None))
        request = StageRequest(stage=StageIndex(number % STAGES))
        self.event(MessageReceived(session, peer, request))

    def _join(self, number: int) -> None:
        peer = identity(number).peer_id
        self.attach(number, StageIndex(number % STAGES))
        taken = self.run.peers.syncing[peer]
        ready = Ready(stage=taken.stage, version=taken.version, digest="d" * 32)
        self.event(MessageReceived(self.session(number), peer, ready))
