"""Bytes of the messages of a steady-state step, with realistic contents; headers without the
twelve bytes that precede every frame."""

from __future__ import annotations

from benchmarks.counts.world import (
    MICROBATCHES,
    PEERS_PER_STAGE,
    RUN,
    STAGES,
    MidStep,
    certificate,
    envelope,
    identity,
    manifest,
    record,
)
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import LeaseTicket
from swarm_shared.protocol import (
    STAGE_PROTOCOL,
    Applied,
    Apply,
    Backward,
    Close,
    Forward,
    Heartbeat,
    LeaderboardEntry,
    LeaseResult,
    LinkBytes,
    LinkPath,
    PathKind,
    Receipts,
    Reduction,
    Roster,
    RosterChange,
    RoundReport,
    RunNews,
    StageHello,
    StageRefused,
    encode,
)
from swarm_shared.protocol.stage import RefusalReason

NEIGHBOURS = 8
"""Number of peers that one volunteer has links to."""


def message_bytes() -> dict[str, int]:
    messages = {**_control(), **_closing(), **_for_everybody(), **_stage()}
    return {name: len(encode(message)) for name, message in messages.items()}


def heartbeat(neighbours: int = 0) -> Heartbeat:
    """Return the heartbeat of a computing volunteer that reports on `neighbours` links."""
    others = range(1, neighbours + 1)
    return Heartbeat(
        microbatches_per_second=1.2537, queued=3, up_bytes_per_second=2_512_345.6, computed=1,
        busy_seconds=0.8123,
        changed_links=tuple(
            LinkBytes(
                remote=identity(n).peer_id, protocol=STAGE_PROTOCOL, sent=12_345_678_901,
                received=12_345_678_901,
            )
            for n in others
        ),
        changed_paths=tuple(
            LinkPath(
                remote=identity(n).peer_id, kind=PathKind.DIRECT, rtt_seconds=0.0234,
                bytes_per_second=2_512_345.6,
            )
            for n in others
        ),
    )  # fmt: skip


def forward(stage: int) -> Forward:
    tokens = manifest().tokens_per_microbatch
    return Forward(
        request=1234, step=Step(1), microbatch=MicrobatchIndex(200), stage=StageIndex(stage),
        accumulate=tuple(StageIndex(s) for s in range(stage, STAGES)),
        input_bytes=2 * tokens * manifest().model.hidden_size if stage else 4 * tokens,
        target_bytes=4 * tokens, ticket=leased_ticket(),
    )  # fmt: skip


def leased_ticket() -> str:
    content = LeaseTicket(
        run=RUN, step=Step(1), microbatch=MicrobatchIndex(200), tokens="0" * 32,
        targets="1" * 32,
    )  # fmt: skip
    return encode_envelope(content.sign(identity(0)))


def backward(stage: int) -> Backward:
    """Return the answer of stage `stage`, with the receipts of all later stages."""
    return Backward(
        request=1234, receipts=tuple(envelope(s, 200) for s in range(stage, STAGES)),
        service_seconds=0.8123, total_seconds=2.5123, loss_sum=7168.25, tokens=1024,
    )  # fmt: skip


def _control() -> dict[str, FrozenModel]:
    lease = MidStep().leases[0][1]
    return {
        "heartbeat without links": heartbeat(),
        f"heartbeat with {NEIGHBOURS} links": heartbeat(NEIGHBOURS),
        "receipts, one": Receipts(receipts=(envelope(0, 200),)),
        f"lease of {len(lease.microbatches)} microbatches": lease,
        f"lease result of {STAGES} stages": LeaseResult(
            step=Step(1), microbatch=MicrobatchIndex(200), lease=lease.lease, ok=True,
            receipts=tuple(envelope(s, 200) for s in range(STAGES)),
        ),
    }  # fmt: skip


def _closing() -> dict[str, FrozenModel]:
    members = tuple(identity(n * STAGES).peer_id for n in range(PEERS_PER_STAGE))
    held = tuple(MicrobatchIndex(m) for m in range(0, MICROBATCHES, PEERS_PER_STAGE))
    return {
        f"close in a stage of {PEERS_PER_STAGE}": Close(
            step=Step(1), attempt=16_777_217, committed=held,
            reductions=(Reduction(part="own", members=members),),
        ),
        "round report": RoundReport(
            step=Step(1), attempt=16_777_217, ok=True, own_squared=0.123456789012345
        ),
        "apply": Apply(
            step=Step(1), attempt=16_777_217, global_norm=1.23456789012345, learning_rate=3e-4
        ),
        "applied": Applied(step=Step(1), digest="d" * 32, norm=123.456789012345),
    }  # fmt: skip


def _for_everybody() -> dict[str, FrozenModel]:
    everybody = tuple(record(number) for number in range(STAGES * PEERS_PER_STAGE))
    row = LeaderboardEntry(peer=identity(1).peer_id, name="a volunteer", tokens=10**9, credit=2.5e8)
    return {
        f"roster of {len(everybody)}": Roster(serial=7, peers=everybody),
        "roster change of one": RosterChange(serial=8, since=7, changed=everybody[:1], removed=()),
        "news, ten in the leaderboard": RunNews(
            version=Version(1), loss=7.0012, tokens_per_second=12_345.6, leaderboard=(row,) * 10
        ),
    }


def _stage() -> dict[str, FrozenModel]:
    return {
        "stage hello": StageHello(run=RUN, certificate=certificate(1)),
        "forward to stage 1": forward(1),
        "backward from stage 1": backward(1),
        "stage refused": StageRefused(
            request=1234, reason=RefusalReason.BUSY, detail="8 microbatches are queued"
        ),
    }
