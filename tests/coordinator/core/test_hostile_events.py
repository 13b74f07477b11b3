"""An admitted client that sends arbitrary messages at any time: the core must withstand it.

An exception in the core ends the coordinator, and with it every volunteer's run.
`swarm_coordinator.server.control_protocol` refuses messages that do not parse, and receipts with a
wrong signature or run. The other messages are tried here, with numbers near to meaningful ones.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kits.swarm_world.event_bench import SHA, Bench
from swarm_coordinator.core.events import AppliedStep, LeaseResolved, Persist, ReceiptsVerified
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import ClientMessage, client_messages, encode, parse

HOSTILE = "h0"
HONEST = ("a0", "b1")

indices = st.integers(-2, 4) | st.sampled_from([99, 2**31, -(2**63), 2**70])
counts = st.integers(0, 4) | st.sampled_from([2**24 + 1, 2**24 + 2, 2**53 - 1])
# As large as messages allow.
rates, seconds = st.sampled_from([0.0, 1.0, 1e15]), st.sampled_from([0.0, 1.0, 1e9])
squares = st.sampled_from([0.0, 1.0, 1e100])
peers = st.sampled_from([*HONEST, HOSTILE, "nobody", ""])
flags = st.booleans()


def message(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[ClientMessage]:
    """Parse a message as from the network."""

    def made(values: dict[str, Any]) -> ClientMessage:
        draft = client_messages.validate_python({"kind": kind, **values})
        return parse(client_messages, encode(draft))

    return st.fixed_dictionaries(fields).map(made)


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

receipts = st.fixed_dictionaries(
    {
        "generation": st.integers(0, 3), "step": st.integers(1, 4), "microbatch": st.integers(0, 9),
        "stage": st.integers(0, 9), "samples": counts, "tokens": counts,
        "loss_sum": st.none() | squares,
        # In another peer's name: refused by `control_protocol` only if the signature is wrong.
        "peer": peers.filter(bool),
    }
)  # fmt: skip

hellos = st.fixed_dictionaries(
    {
        "stage": st.none() | indices, "version": indices, "wanted_stage": st.none() | indices,
        "averaged_attempt": st.none() | indices, "memory_bytes": counts,
    }
)  # fmt: skip

actions = st.one_of(
    messages.map(lambda said: ("say", said)),
    st.lists(receipts, max_size=3).map(lambda found: ("receipts", found)),
    st.tuples(indices, indices, counts, flags, squares, counts, st.lists(receipts, max_size=2)).map(
        lambda values: ("lease", values)
    ),
    hellos.map(lambda hello: ("attach", hello)),
    st.just(("lose", None)),
    *[st.just(("honest", None))] * 4,
    st.floats(0, 30).map(lambda seconds: ("tick", seconds)),
)


class Stage:
    """Two honest volunteers that do their work, and a third one."""

    def __init__(self, holds: int | None) -> None:
        """`holds`: the stage that the third one has taken before it turns hostile."""
        self.bench = Bench(checkpoint_steps=2, evaluation=1, steps=3)
        self.bench.join_all(*HONEST)
        self.attached = True
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
        elif kind == "honest":
            self.work()
        elif kind == "attach":
            self.attached = True
            bench.attach(HOSTILE, **value)
        elif not self.attached:
            return
        elif kind == "say":
            bench.send(HOSTILE, self.near(value))
        elif kind == "receipts":
            found = tuple(bench.receipt(HOSTILE, r["microbatch"], **r) for r in map(dict, value))
            bench.event(ReceiptsVerified(bench.session(HOSTILE), PeerId(HOSTILE), found))
        elif kind == "lease":
            step, microbatch, lease, ok, loss, tokens, some = value
            found = tuple(bench.receipt(HOSTILE, r["microbatch"], **r) for r in map(dict, some))
            bench.event(
                LeaseResolved(
                    bench.session(HOSTILE), PeerId(HOSTILE), step, microbatch, lease, ok, "",
                    found, loss, tokens,
                )
            )  # fmt: skip
        else:
            self.attached = False
            bench.lose(HOSTILE)

    def work(self) -> None:
        """The honest volunteers' work in the run's phase."""
        bench = self.bench
        members = [peer for peer in HONEST if peer in bench.run.peers]
        for peer in members:
            # They may have lost their stages: a peer that is silent for long misses a step.
            if bench.run.peers[PeerId(peer)].phase is PeerPhase.SYNCING:
                bench.ready(peer)
        if bench.run.phase is RunPhase.COLLECT:
            for peer in members:
                if bench.run.peers[PeerId(peer)].stage is not None:
                    bench.report(peer, 0, 1)
        elif bench.run.phase is RunPhase.CLOSING:
            for peer in members:
                if bench.run.phase is RunPhase.CLOSING and peer in bench.closing():
                    bench.averaged(peer)
        elif bench.run.phase is RunPhase.APPLYING:
            for peer in members:
                bench.apply(peer)


@settings(max_examples=200)
@given(st.lists(actions, min_size=5, max_size=40), st.sampled_from([None, 0, 1]))
def test_no_messages_of_one_client_stop_the_core(
    said: list[tuple[str, Any]], holds: int | None
) -> None:
    stage = Stage(holds)
    for action in said:
        stage.do(action)
    for record in stage.bench.commands(Persist, stage.bench.log):
        if isinstance(record.record, AppliedStep):
            assert math.isfinite(record.record.loss)


@settings(max_examples=100)
@given(st.lists(actions, max_size=20), st.sampled_from([None, 0, 1]))
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
