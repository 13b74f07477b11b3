"""Audits within a class: equality to the bit, and what follows where it is missing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.swarm_world.event_bench import joined
from swarm_coordinator.core.events import Note, ReceiptsVerified, Send, VerdictRecord
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.arithmetic_classes import AGREED_CELLS, DEVIATION_SECONDS, Machine
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Audit

MICROBATCHES = 8
ROUNDING, BELOW_TOLERANCE = 1e-6, 5e-5
LIE = 50
"""The variant of a transcript that is a lie just below the tolerance."""


def variant(transcript: Transcript) -> int:
    return int(transcript.gradient[:4], 16) - 2


@dataclass
class Fleet:
    """A run whose first stage has machines of several kinds; every cell is audited."""

    kinds: dict[str, int]
    """By peer of stage 0; machines of one kind compute alike."""
    seed: int = 0
    lies: dict[str, float] = field(default_factory=dict)
    """Share of the cells in which a peer lies below the tolerance, by peer."""
    false_statements: dict[str, float] = field(default_factory=dict)
    """Share of the audits in which a peer states such a lie, by peer."""
    mimics: frozenset[str] = frozenset()
    """Peers that have machines of all kinds, and audit with one like the audited one's."""
    read: int = 0
    stated: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        book = AuditBook(AuditSettings(audit_share=1.0, probation_cells=0), self.rng.random)
        self.bench = joined(
            *self.kinds, "x1", "y1", audits=book, microbatches=MICROBATCHES, steps=10_000
        )

    def kind(self, peer: str) -> int:
        return self.kinds.get(peer, 0)

    def report(
        self, peer: str, microbatch: int, lies: bool | None = None,
        stated: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        """The peer counts a microbatch, and its auditors answer; `stated` are their distances."""
        self.stated = stated or {}
        state = self.bench.peer(peer)
        assert state.stage is not None
        lies = self.rng.random() < self.lies.get(peer, 0.0) if lies is None else lies
        signed = simulated_transcript(
            Step(self.bench.run.history.version + 1), MicrobatchIndex(microbatch), state.stage,
            StageIndex(1), LIE if lies else self.kind(peer),
        )  # fmt: skip
        receipt = self.bench.receipt(peer, microbatch, transcript=signed)
        self.bench.event(ReceiptsVerified(self.bench.session(peer), PeerId(peer), (receipt,)))
        self.answer_all(signed)

    def answer_all(self, signed: Transcript) -> None:
        while self.read < len(self.bench.log):
            command = self.bench.log[self.read]
            self.read += 1
            if isinstance(command, Send) and isinstance(command.message, Audit):
                self.answer(command.peer, command.message, signed)

    def answer(self, auditor: str, order: Audit, signed: Transcript) -> None:
        states = self.kind(auditor)
        if auditor in self.mimics:
            states = variant(signed)
        # The same order with the claim gets the same answer.
        rng = random.Random(f"{auditor} {order.step} {order.microbatch} {self.seed}")
        if rng.random() < self.false_statements.get(auditor, 0.0):
            states = LIE + 1
        computed = simulated_transcript(
            order.step, order.microbatch, order.stage, StageIndex(1), states
        )
        distance = None
        if order.comparison is not None:
            lied = LIE in (states, variant(signed)) or states == LIE + 1
            distance = self.stated.get(auditor, BELOW_TOLERANCE if lied else ROUNDING)
        self.bench.audited(auditor, order, computed, distance=distance)

    def ready(self, stage: int) -> list[str]:
        return sorted(peer.peer for peer in self.bench.run.peers.ready(StageIndex(stage)))

    def step(self) -> None:
        """The microbatches of a step are counted by peers at random, until all are."""
        bench, number = self.bench, self.bench.run.history.version
        while bench.run.phase is RunPhase.COLLECT:
            for microbatch in range(MICROBATCHES):
                for stage in (0, 1):
                    if (microbatch, stage) not in bench.step().table:
                        self.report(self.rng.choice(self.ready(stage)), microbatch)
            bench.tick(0.25)
        bench.average_all()
        bench.apply_all()
        assert bench.run.history.version == number + 1

    @property
    def losers(self) -> set[str]:
        return {record.peer for record in self.bench.records(VerdictRecord)}

    @property
    def left_their_class(self) -> list[str | None]:
        notes = self.bench.commands(Note, self.bench.log)
        return [note.peer for note in notes if "has left its class" in note.text]

    def learn(self, *peers: str) -> None:
        """These have agreed in enough audited cells."""
        for one in peers:
            for other in peers:
                for _ in range(AGREED_CELLS if one < other else 0):
                    self.bench.run.audits.classes.note_agreement(
                        self.machine(one), self.machine(other)
                    )

    def machine(self, peer: str) -> Machine:
        return Machine(StageIndex(0), PeerId(peer), "cpu")

    def alike(self, one: str, other: str) -> bool:
        return self.bench.run.audits.classes.alike(self.machine(one), self.machine(other))


MIXED = {"a0": 0, "b0": 0, "c0": 0, "d0": 1, "e0": 1, "f0": 2}


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_honest_machines_of_several_kinds_never_lose_an_audit_and_find_their_like(
    seed: int,
) -> None:
    fleet = Fleet(MIXED, seed)
    for _ in range(25):
        fleet.step()
    assert not fleet.losers
    assert not fleet.left_their_class
    for one, kind in MIXED.items():
        for other in MIXED:
            assert not fleet.alike(one, other) or kind == MIXED[other]
    assert sum(fleet.alike("a0", other) for other in ("b0", "c0")) >= 1


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_a_liar_just_below_the_tolerance_is_found_by_its_own_class_and_nobody_else_is(
    seed: int,
) -> None:
    """Its class is most of the stage's owners without it."""
    fleet = Fleet({"a0": 0, "b0": 0, "c0": 0, "d0": 1, "l0": 0}, seed, lies={"l0": 0.1})
    for _ in range(300):
        fleet.step()
        if fleet.losers:
            break
    assert fleet.losers == {"l0"}
    assert fleet.left_their_class == ["l0"], "the first time it had only left its class"


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_neither_false_statements_nor_a_mimic_of_all_kinds_make_an_honest_machine_lose(
    seed: int,
) -> None:
    """The mimic agrees to the bit with everybody, so that all seem like it, and lies at times."""
    fleet = Fleet(
        {**MIXED, "l0": 0, "m0": 0}, seed, lies={"m0": 0.05}, false_statements={"l0": 0.1},
        mimics=frozenset(("m0",)),
    )  # fmt: skip
    for _ in range(60):
        fleet.step()
    assert fleet.losers <= {"m0"}
    assert set(fleet.left_their_class) <= {"m0"}


def test_what_differs_within_a_class_is_decided_by_a_further_owner_of_it() -> None:
    fleet = Fleet({"a0": 0, "b0": 0, "c0": 0, "d0": 0, "e0": 1})
    fleet.learn("a0", "b0", "c0", "d0")
    while not fleet.left_their_class:
        # The first auditor may be of another kind.
        fleet.report("a0", 0, lies=True)
    assert fleet.left_their_class == ["a0"]
    assert not fleet.bench.step().table, "the cell is computed again"
    assert not fleet.losers
    assert not fleet.alike("a0", "b0")
    assert fleet.alike("b0", "c0")


@pytest.mark.parametrize(("pause", "loses"), [(0.0, True), (DEVIATION_SECONDS + 1.0, False)])
def test_the_second_deviation_within_half_a_day_is_a_lost_audit(pause: float, loses: bool) -> None:
    fleet = Fleet({"a0": 0, "b0": 0, "c0": 0})
    for microbatch in (0, 1):
        fleet.learn("a0", "b0", "c0")
        fleet.report("a0", microbatch, lies=True)
        fleet.bench.now += pause
        for peer in list(fleet.bench.run.peers):
            fleet.bench.beat(peer)
    assert fleet.losers == ({"a0"} if loses else set())
    if not loses:
        return
    (record,) = fleet.bench.records(VerdictRecord)
    assert "what others compute that have computed like it before" in record.reason
    assert record.evidence is not None
    assert (record.evidence.tolerance, record.evidence.entitled) == (0.0, 3)
    assert len(record.evidence.statements) == 2


def test_in_a_class_of_two_nobody_decides_and_what_is_within_the_tolerance_passes() -> None:
    fleet = Fleet({"a0": 0, "b0": 0})
    fleet.learn("a0", "b0")
    fleet.report("a0", 0, lies=True)
    assert fleet.bench.step().table.held_by(PeerId("a0"))
    assert not fleet.left_their_class
    assert not fleet.alike("a0", "b0"), "what they agreed in before is over"


def test_an_auditor_that_alone_contradicts_its_class_is_no_more_of_it_and_loses_nothing() -> None:
    """It may be honest, and the audited one have stated the bits of another machine to it."""
    fleet = Fleet({"a0": 0, "b0": 0, "c0": 0}, false_statements={"c0": 1.0})
    fleet.learn("a0", "b0", "c0")
    for microbatch in range(4):
        fleet.report("a0", microbatch)
    assert len(fleet.bench.step().table.held_by(PeerId("a0"))) == 4
    assert not fleet.left_their_class
    assert not fleet.losers
    assert fleet.alike("a0", "b0")
    assert not fleet.alike("a0", "c0")


def test_two_owners_that_state_what_another_one_has_signed_do_not_become_its_judges() -> None:
    """They need no machine of its kind, and are its whole class: but not most of the owners."""
    fleet = Fleet({"f0": 2, **MIXED, "l0": 0, "m0": 0}, mimics=frozenset(("l0", "m0")))
    fleet.learn("f0", "l0", "m0")
    fleet.mimics, fleet.false_statements = frozenset(), {"l0": 1.0, "m0": 1.0}
    for microbatch in range(MICROBATCHES):
        fleet.report("f0", microbatch)
    assert len(fleet.bench.step().table.held_by(PeerId("f0"))) == MICROBATCHES
    assert not fleet.losers
    assert not fleet.left_their_class


def test_a_liar_is_not_saved_by_an_accomplice_that_says_it_is_within_the_tolerance() -> None:
    """The accomplice is of its class; all owners decide as ever once another one is asked."""
    asked_first: set[str] = set()
    for seed in range(12):
        fleet = Fleet({"a0": 0, "b0": 0, "c0": 0, "d0": 1, "e0": 1}, seed)
        fleet.learn("a0", "b0", "c0")
        stated = {"b0": BELOW_TOLERANCE, "c0": 1.0, "d0": 1.0, "e0": 1.0}
        fleet.report("a0", 0, lies=True, stated=stated)
        orders = fleet.bench.commands(Send, fleet.bench.log)
        asked_first.add(next(c.peer for c in orders if isinstance(c.message, Audit)))
        assert fleet.losers == {"a0"}
    assert {"b0", "d0"} <= asked_first


def test_machines_that_are_not_alike_are_compared_with_the_tolerance() -> None:
    fleet = Fleet(MIXED)
    fleet.learn("a0", "b0", "c0")
    fleet.report("f0", 0, lies=True)
    assert fleet.bench.step().table.held_by(PeerId("f0"))
    assert not fleet.left_their_class


def test_agreement_of_another_device_counts_for_nothing() -> None:
    fleet = Fleet({"a0": 0, "b0": 0, "c0": 0})
    fleet.learn("a0", "b0", "c0")
    fleet.bench.attach("a0", stage=0, version=0, device="cuda")
    fleet.report("a0", 0, lies=True)
    assert fleet.bench.step().table.held_by(PeerId("a0"))


def test_half_of_the_audits_go_to_machines_that_have_agreed_before() -> None:
    fleet = Fleet({"a0": 0, "b0": 0, **{f"{letter}0": 1 for letter in "cdefghijk"}})
    fleet.learn("a0", "b0")
    asked: list[str] = []
    for _ in range(12):
        for microbatch in range(MICROBATCHES):
            fleet.bench.log.clear()
            fleet.read = 0
            fleet.report("a0", microbatch)
            orders = fleet.bench.commands(Send, fleet.bench.log)
            asked.append(next(c.peer for c in orders if isinstance(c.message, Audit)))
        fleet.step()
    assert 0.35 < asked.count("b0") / len(asked) < 0.75


def test_classes_are_known_after_a_restart_of_the_coordinator() -> None:
    fleet = Fleet({"a0": 0, "b0": 0, "c0": 0})
    fleet.learn("a0", "b0", "c0")
    fleet.step()
    fleet.bench.restart(audits=AuditBook(AuditSettings(1.0, 0), lambda: 0.0))
    assert fleet.alike("a0", "b0")
