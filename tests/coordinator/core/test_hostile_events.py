"""An admitted client that sends arbitrary messages at any time: the core must withstand it.

An exception in the core ends the coordinator, and with it every volunteer's run.
`swarm_coordinator.server.control_protocol` refuses messages that do not parse, and receipts with a
wrong signature or run. The other messages are tried here, with numbers near to meaningful ones.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kits.swarm_world.event_bench import SHA, joined
from kits.swarm_world.facts import TOKENS
from swarm_coordinator.core.events import AppliedStep, ReceiptsVerified
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.memory import MachineBalance, MemoryOffer
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Applied, ClientMessage, client_messages

HOSTILE = "h0"
HONEST = ("a0", "b1")
LAST_STAGE = 1
MICROBATCHES = 2

# Within the bounds that the parser checks; a message beyond them ends the session.
indices = st.integers(0, 4) | st.sampled_from([99, 511])
counts = st.integers(0, 4) | st.sampled_from([2**24 + 1, 2**24 + 2, 2**53 - 1])
# As large as messages allow.
rates, seconds = st.sampled_from([0.0, 1.0, 1e15]), st.sampled_from([0.0, 1.0, 1e9])
squares = st.sampled_from([0.0, 1.0, 1e100])
peers = st.sampled_from([*HONEST, HOSTILE, "nobody", ""])
flags = st.booleans()
near_zero = st.sampled_from([0, 0, 0, -1, 1])


def message(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[ClientMessage]:
    """A message within its bounds, but for the form of peer IDs: they are readable here."""
    return st.fixed_dictionaries(fields).map(
        lambda values: client_messages.validate_python({"kind": kind, **values})
    )


paths = st.lists(
    st.fixed_dictionaries(
        {"remote": peers, "kind": st.sampled_from(["direct", "relayed"]), "rtt_seconds": seconds}
    ),
    max_size=3,
)
messages = st.one_of(
    message("stage_request", stage=indices),
    message("heartbeat", microbatches_per_second=rates, queued=counts, changed_paths=paths),
    message(
        "address_update", addresses=st.lists(st.text(max_size=300), max_size=3),
        reachability=st.sampled_from(["public", "behind_nat"]), offers_relay=flags,
        carrier=st.none() | st.just({"peer": "x" * 200, "addresses": ["a"], "binding": "b"}),
    ),
    message("mask_request", request=counts, step=indices, microbatch=indices),
    message(
        "round_report", step=indices, attempt=counts, ok=flags, own_squared=squares,
        tied_squared=squares, reason=st.just(""), culprit=st.none() | peers, carrier_failed=flags,
        missing=st.lists(indices, max_size=3), reset=flags,
    ),
    message("applied", step=indices, digest=st.sampled_from(["d", "", "e" * 64]), norm=squares),
    message("ready", stage=indices, version=indices, digest=st.just("d")),
    message("sync_failed", stage=indices, version=indices, reason=st.just("")),
    message(
        "snapshot_ready", version=indices, stage=indices, item=st.text(max_size=9), bytes=counts,
        sha256=st.just(SHA),
    ),
    message("snapshot_failed", version=indices, stage=indices, reason=st.just("")),
    message("leaving"),
)  # fmt: skip

HOLDERS = [("a0", 0), ("b1", 1), (HOSTILE, 0), (HOSTILE, 1), ("b1", 0), ("nobody", 1), ("a0", 9)]
"""Peers with the stages that receipts name. A receipt in another peer's name is refused by
`control_protocol` only if the signature is wrong."""

wrong_fields: dict[str, st.SearchStrategy[Any]] = {
    "generation": st.integers(0, 3), "step": st.integers(1, 12), "samples": counts,
    "tokens": counts, "loss_sum": st.none() | squares,
}  # fmt: skip


@st.composite
def receipts(draw: st.DrawFn) -> dict[str, Any]:
    """Right but for at most one field: what is wrong in several is refused for the first."""
    peer, stage = draw(st.sampled_from(HOLDERS))
    fields = {"peer": peer, "stage": stage, "microbatch": draw(st.sampled_from([0, 1, 0, 1, 2]))}
    wrong = draw(st.sampled_from([None, *wrong_fields]))
    return fields if wrong is None else {**fields, wrong: draw(wrong_fields[wrong])}


hellos = st.fixed_dictionaries(
    {
        "stage": st.none() | indices, "version": indices, "wanted_stage": st.none() | indices,
        "averaged_attempt": st.none() | indices, "memory": st.builds(
            MemoryOffer, device_bytes=counts, host_bytes=st.none() | counts,
            balance=st.none() | st.from_type(MachineBalance),
        ),
    }
)  # fmt: skip

ACTIONS: dict[str, st.SearchStrategy[Any]] = {
    "work": st.just(HONEST),
    "cooperate": st.just((*HONEST, HOSTILE)),
    "say": messages,
    "confirm": message("applied", step=st.integers(0, 3), digest=st.just("d"), norm=squares),
    "receipts": st.lists(receipts(), max_size=3),
    "lease": st.fixed_dictionaries(
        {
            "step": near_zero,
            "microbatch": st.integers(0, 2),
            "lease": near_zero,
            "ok": flags,
            "receipts": st.lists(receipts(), max_size=3),
        }
    ),
    "attach": hellos,
    "lose": st.none(),
    "tick": st.floats(0, 30),
}

OFTEN = ("work", "work", "cooperate", "cooperate", "say", "say", "confirm", "receipts", "lease")
"""Most of what happens: steps are made, so that messages meet every phase of them."""


@st.composite
def actions(draw: st.DrawFn) -> tuple[str, Any]:
    kind = draw(st.sampled_from([*OFTEN, *OFTEN, *ACTIONS]))
    return kind, draw(ACTIONS[kind])


lives = st.lists(actions(), min_size=20, max_size=60)


class Stage:
    """Two honest volunteers that do their work, and a third one."""

    def __init__(self, holds: int | None) -> None:
        """`holds`: the stage that the third one has taken before it turns hostile."""
        self.bench = joined(*HONEST, checkpoint_steps=2, evaluation=1, steps=12)
        self.attached = True
        self.reported: dict[tuple[int, int], set[float]] = defaultdict(set)
        """Loss sums that receipts have named, by step and microbatch."""
        if holds is None:
            self.bench.attach(HOSTILE)
        else:
            self.bench.join(HOSTILE, holds)

    def near(self, said: ClientMessage) -> ClientMessage:
        """Count small numbers from the run's step: most messages are refused for their step."""
        run = self.bench.run
        base = {
            "step": run.history.version + 1, "version": run.history.version,
            "attempt": run.steps.current.attempt if run.steps.current is not None else 0,
        }  # fmt: skip
        fields = said.model_dump()
        near = {n: b + fields[n] - 1 for n, b in base.items() if abs(fields.get(n, 99)) <= 4}
        return said.model_copy(update={n: max(0, value) for n, value in near.items()})

    def do(self, action: tuple[str, Any]) -> None:
        bench, (kind, value) = self.bench, action
        if kind == "tick":
            bench.tick(value)
        elif kind in ("work", "cooperate"):
            self.work(value)
        elif kind == "attach":
            self.attached = True
            bench.attach(HOSTILE, **value)
        elif not self.attached:
            return
        elif kind in ("say", "confirm"):
            self.say(self.near(value))
        elif kind == "receipts":
            found = self.receipts(value)
            bench.event(ReceiptsVerified(bench.session(HOSTILE), PeerId(HOSTILE), found))
        elif kind == "lease":
            self.resolve(**value)
        else:
            self.attached = False
            bench.lose(HOSTILE)

    def say(self, message: ClientMessage) -> None:
        """Send it; a confirmation of another step must change nothing of an apply."""
        run = self.bench.run
        applying = run.phase is RunPhase.APPLYING and self.bench.step().closing
        before = dict(applying.applied) if applying else {}
        version = run.history.version
        self.bench.send(HOSTILE, message)
        if applying and isinstance(message, Applied) and message.step != version:
            assert run.phase is RunPhase.APPLYING
            assert applying.applied == before

    def resolve(
        self, step: int, microbatch: int, lease: int, receipts: list[dict[str, Any]], ok: bool
    ) -> None:  # fmt: skip
        """Answer a lease; `step` and `lease` count from the run's own."""
        run = self.bench.run
        current = run.steps.current
        granted = None if current is None else current.leases.get(MicrobatchIndex(microbatch))
        number = (granted.lease if granted is not None else run.steps.last_lease) + lease
        self.bench.resolve(
            HOSTILE, microbatch, number, step=Step(run.history.version + 1 + step), ok=ok,
            receipts=self.receipts(receipts),
        )  # fmt: skip

    def receipts(self, values: list[dict[str, Any]]) -> tuple[Receipt, ...]:
        found = tuple(self.bench.receipt(HOSTILE, r["microbatch"], **r) for r in values)
        self.record(found)
        return found

    def record(self, receipts: tuple[Receipt, ...]) -> None:
        for receipt in receipts:
            if receipt.stage == LAST_STAGE and receipt.loss_sum is not None:
                self.reported[receipt.step, receipt.microbatch].add(receipt.loss_sum)

    def possible_losses(self, step: int) -> set[float]:
        """Return the means of one reported loss sum per microbatch of the step."""
        choices = itertools.product(*(self.reported[step, m] for m in range(MICROBATCHES)))
        return {math.fsum(sums) / (MICROBATCHES * TOKENS) for sums in choices}

    def work(self, peers: tuple[str, ...] = HONEST) -> None:
        """What these peers have to do in the run's phase, as honest ones do it."""
        bench = self.bench
        members = [peer for peer in peers if peer in bench.run.peers]
        for peer in members:
            # They may have lost their stages: a peer that is silent for long misses a step.
            if bench.peer(peer).phase is PeerPhase.SYNCING:
                bench.ready(peer)
        if bench.run.phase is RunPhase.COLLECT:
            for peer in members:
                if bench.peer(peer).stage is not None:
                    self.record(tuple(bench.receipt(peer, m) for m in range(MICROBATCHES)))
                    bench.report(peer, *range(MICROBATCHES))
        elif bench.run.phase is RunPhase.CLOSING:
            for peer in members:
                if bench.run.phase is RunPhase.CLOSING and peer in bench.closing():
                    bench.averaged(peer)
        elif bench.run.phase is RunPhase.APPLYING:
            for peer in members:
                bench.apply(peer)


@settings(max_examples=100)
@given(lives, st.sampled_from([None, 0, 1]))
def test_no_messages_of_one_client_stop_the_core_or_count_a_microbatch_twice(
    said: list[tuple[str, Any]], holds: int | None
) -> None:
    stage = Stage(holds)
    for action in said:
        stage.do(action)
    for applied in stage.bench.records(AppliedStep):
        assert math.isfinite(applied.loss)
        assert applied.loss in stage.possible_losses(applied.step)
        assert applied.tokens == MICROBATCHES * TOKENS
        for of_stage in (0, LAST_STAGE):
            counted = [share.microbatches for share in applied.shares if share.stage == of_stage]
            assert sum(counted) == MICROBATCHES


@settings(max_examples=50)
@given(lives, st.sampled_from([None, 0, 1]))
def test_when_it_is_gone_the_others_make_the_next_step(
    said: list[tuple[str, Any]], holds: int | None
) -> None:
    stage = Stage(holds)
    for action in said:
        stage.do(action)
    bench = stage.bench
    if stage.attached:
        bench.lose(HOSTILE)
    before = bench.run.history.version
    for _ in range(60):
        if bench.run.history.version > before or bench.run.phase is RunPhase.EVALUATING:
            return
        bench.tick(5.0)
        stage.work()
    raise AssertionError(f"stuck in {bench.run.phase}: {bench.run.waiting_reason}")
