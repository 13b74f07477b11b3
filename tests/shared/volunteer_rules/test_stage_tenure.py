"""Taking, moving and giving up a stage: by example, then in every course of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm_shared.base.types import StageIndex, Version
from swarm_shared.protocol import AssignStage, Ready, SyncFailed
from swarm_shared.volunteer_rules.stage_tenure import (
    Action,
    EndTenure,
    ForgetSnapshots,
    Install,
    Load,
    PreparedLost,
    PreparedReady,
    RejoinAfter,
    Reload,
    Send,
    StageTenures,
    StartTenure,
    TenureNumber,
)


def assignment(stage: int, version: int = 0, *, prepare: bool = False) -> AssignStage:
    return AssignStage(
        stage=StageIndex(stage), version=Version(version), source="fresh", prepare=prepare
    )


class Workers:
    """Carries out decisions: workers that start at once, load when they are let, and end when asked
    to. Each decision is checked against the invariants of the module."""

    def __init__(self) -> None:
        self.tenures = StageTenures()
        self.live: dict[TenureNumber, Load] = {}
        """The latest load of each worker that lives."""
        self.loads: list[Load] = []
        """All loads whose result can still arrive."""
        self.ending: list[TenureNumber] = []
        self.installed: TenureNumber | None = None
        self.prepared: TenureNumber | None = None
        self.ready: set[int] = set()
        """Numbers of the loads that Ready was sent for."""
        self.sent: list[Ready | SyncFailed] = []
        self.pauses: list[float] = []

    def assign(self, stage: int, version: int = 0, *, prepare: bool = False) -> list[Action]:
        self.tenures.assigned(assignment(stage, version, prepare=prepare))
        return self.carry_out()

    def load(self, load: Load) -> list[Action]:
        self.loads.remove(load)
        self.tenures.loaded(load, "digest")
        return self.carry_out()

    def load_all(self) -> None:
        while self.loads:
            self.load(self.loads[0])

    def holds(self, stage: int, version: int = 0, *, prepare: bool = False) -> TenureNumber:
        """Assign a stage and let it be loaded."""
        self.assign(stage, version, prepare=prepare)
        while self.ending:
            self.end(self.ending[0])
        self.load_all()
        tenure = self.prepared if prepare else self.installed
        assert tenure is not None
        return tenure

    def end(self, tenure: TenureNumber) -> list[Action]:
        self._forget(tenure)
        self.tenures.ended(tenure)
        return self.carry_out()

    def die(self, tenure: TenureNumber) -> list[Action]:
        self._forget(tenure)
        self.tenures.worker_died(tenure, "killed")
        return self.carry_out()

    def fail(self, tenure: TenureNumber) -> list[Action]:
        self._forget(tenure)
        self.tenures.load_failed(tenure, "out of memory")
        return self.carry_out()

    def preparing(self) -> list[TenureNumber]:
        """The tenures beside the held one, loaded or not, that are not ending."""
        return [
            tenure for tenure, load in self.live.items()
            if load.assignment.prepare and tenure not in (self.installed, *self.ending)
        ]  # fmt: skip

    def _forget(self, tenure: TenureNumber) -> None:
        del self.live[tenure]
        self.loads = [load for load in self.loads if load.tenure != tenure]
        self.ending = [other for other in self.ending if other != tenure]
        self.installed = None if self.installed == tenure else self.installed

    def carry_out(self) -> list[Action]:
        actions = self.tenures.take_actions()
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartTenure():
                assert action.load.tenure not in self.live
                assert len(self.live) < 2, "two workers fit"
                assert not self.ending
                self.live[action.load.tenure] = action.load
                self.loads.append(action.load)
            case Reload():
                self._must_run(action.load.tenure)
                self.live[action.load.tenure] = action.load
                self.loads.append(action.load)
                self.installed = None
            case EndTenure():
                self._must_run(action.tenure)
                self.ending.append(action.tenure)
                self.installed = None if self.installed == action.tenure else self.installed
            case Install():
                self._must_run(action.tenure)
                assert action.switched == (self.prepared == action.tenure)
                self.installed = action.tenure
                self.prepared = None if action.switched else self.prepared
            case PreparedReady():
                self._must_run(action.tenure)
                assert action.tenure != self.installed
                self.prepared = action.tenure
            case PreparedLost():
                assert self.prepared is not None
                self.prepared = None
            case Send():
                self._check_message(action.message)
                self.sent.append(action.message)
            case RejoinAfter():
                self.pauses.append(action.seconds)
            case ForgetSnapshots():
                pass

    def _must_run(self, tenure: TenureNumber) -> None:
        assert tenure in self.live
        assert tenure not in self.ending

    def _check_message(self, message: Ready | SyncFailed) -> None:
        if isinstance(message, Ready):
            (load,) = (
                load for load in self.live.values()
                if (load.assignment.stage, load.assignment.version)
                == (message.stage, message.version)
                and load.number not in self.ready and load not in self.loads
                and load.tenure not in self.ending
            )  # fmt: skip
            self.ready.add(load.number)


def test_a_stage_is_started_loaded_served_and_ready() -> None:
    workers = Workers()
    first = Load(TenureNumber(1), 1, assignment(2))
    assert workers.assign(2) == [ForgetSnapshots(), StartTenure(first, replaces_held=False)]
    assert workers.tenures.loading_stage == 2
    assert workers.load(first) == [
        Install(first.tenure, switched=False),
        Send(Ready(stage=2, version=0, digest="digest")),
    ]
    assert workers.tenures.loading_stage is None
    assert not workers.tenures.all_ended


def test_the_same_stage_assigned_again_keeps_its_worker_and_is_not_served_meanwhile() -> None:
    workers = Workers()
    first = workers.holds(0)
    again = Load(first, 2, assignment(0, 7))
    assert workers.assign(0, 7) == [ForgetSnapshots(), Reload(again)]
    assert workers.tenures.loading_stage == 0
    assert workers.load(again) == [
        Install(first, switched=False),
        Send(Ready(stage=0, version=7, digest="digest")),
    ]


def test_the_result_of_an_earlier_load_is_ignored() -> None:
    workers = Workers()
    workers.assign(0, 3)
    early = workers.loads[0]
    workers.assign(0, 4)
    assert workers.load(early) == []
    workers.load_all()
    assert workers.sent == [Ready(stage=0, version=4, digest="digest")]


def test_an_assignment_that_waits_for_the_end_of_others_can_be_replaced() -> None:
    workers = Workers()
    first = workers.holds(0)
    workers.assign(1)
    workers.assign(2)
    (started,) = workers.end(first)
    assert started == StartTenure(Load(TenureNumber(3), 3, assignment(2)), replaces_held=True)


def test_a_stage_that_waits_and_is_assigned_again_is_started_once_at_the_later_version() -> None:
    workers = Workers()
    first = workers.holds(0)
    workers.assign(1)
    assert workers.assign(1, 7) == [ForgetSnapshots()]
    (started,) = workers.end(first)
    assert started == StartTenure(Load(TenureNumber(2), 3, assignment(1, 7)), replaces_held=True)


def test_a_stage_is_prepared_beside_the_held_one_and_takes_its_place() -> None:
    workers = Workers()
    held = workers.holds(0)
    prepared = workers.holds(1, prepare=True)
    assert len(workers.live) == 2
    workers.tenures.switched()
    assert workers.carry_out() == [Install(prepared, switched=True), EndTenure(held)]
    workers.end(held)
    assert workers.installed == prepared
    assert workers.tenures.loading_stage is None


def test_a_prepared_stage_is_dropped_by_the_next_assignment_an_apply_and_a_lost_session() -> None:
    for name in ("assigned", "prepared_outdated", "session_lost"):
        workers = Workers()
        held = workers.holds(0)
        prepared = workers.holds(1, prepare=True)
        if name == "assigned":
            workers.assign(2, prepare=True)
        else:
            getattr(workers.tenures, name)()
            workers.carry_out()
        assert (workers.prepared, workers.ending) == (None, [prepared])
        assert workers.installed == held


def test_what_is_not_prepared_cannot_be_switched_to() -> None:
    workers = Workers()
    workers.holds(0)
    for _ in ("nothing beside it", "a stage that is being loaded"):
        with pytest.raises(ValueError, match="no stage is prepared"):
            workers.tenures.switched()
        workers.assign(1, prepare=True)


def test_a_stage_that_cannot_be_loaded_is_reported() -> None:
    for prepare in (False, True):
        workers = Workers()
        workers.assign(3, 5, prepare=prepare)
        workers.fail(next(iter(workers.live)))
        assert workers.sent == [SyncFailed(stage=3, version=5, reason="out of memory")]
        assert workers.tenures.all_ended


def test_a_worker_that_dies_again_and_again_is_waited_for_longer_each_time() -> None:
    workers = Workers()
    for _ in range(7):
        workers.die(workers.holds(0))
    assert workers.pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    tenure = workers.holds(0)
    workers.tenures.step_applied()
    workers.die(tenure)
    assert workers.pauses[-1] == 2.0


def test_the_death_of_a_prepared_stage_costs_the_held_one_nothing() -> None:
    workers = Workers()
    held = workers.holds(0)
    prepared = workers.holds(1, prepare=True)
    assert workers.die(prepared) == [PreparedLost()]
    assert (workers.installed, workers.pauses) == (held, [])


def test_a_worker_that_dies_while_it_is_ended_is_not_joined_for_again() -> None:
    workers = Workers()
    held = workers.holds(0)
    workers.tenures.drop()
    workers.carry_out()
    assert not workers.tenures.all_ended, "its worker lives"
    assert workers.die(held) == []
    assert workers.tenures.all_ended


class AnyCourse(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers()

    def _some(self, which: int, among: list[TenureNumber]) -> TenureNumber:
        return among[which % len(among)]

    @rule(stage=st.integers(0, 2), version=st.integers(0, 3), prepare=st.booleans())
    def assign(self, stage: int, version: int, prepare: bool) -> None:
        installed = self.workers.installed
        self.workers.assign(stage, version, prepare=prepare)
        if prepare:
            assert self.workers.installed == installed, "the held stage stays"
        else:
            assert self.workers.installed is None
            assert self.workers.tenures.loading_stage == stage

    @precondition(lambda self: self.workers.installed is not None)
    @rule(stage=st.integers(0, 2))
    def prepare(self, stage: int) -> None:
        self.workers.holds(stage, prepare=True)

    @precondition(lambda self: self.workers.loads)
    @rule(which=st.integers(0, 3))
    def load(self, which: int) -> None:
        self.workers.load(self.workers.loads[which % len(self.workers.loads)])

    @precondition(lambda self: self.workers.ending)
    @rule(which=st.integers(0, 3))
    def end(self, which: int) -> None:
        self.workers.end(self._some(which, self.workers.ending))

    @precondition(lambda self: self.workers.live)
    @rule(which=st.integers(0, 3), fails=st.booleans())
    def lose(self, which: int, fails: bool) -> None:
        """A worker dies, or its stage cannot be loaded."""
        tenure = self._some(which, list(self.workers.live))
        installed, pauses = self.workers.installed, len(self.workers.pauses)
        prepared = self.workers.live[tenure].assignment.prepare and tenure != installed
        asked = tenure in self.workers.ending
        if fails:
            self.workers.fail(tenure)
        else:
            self.workers.die(tenure)
        if installed != tenure:
            assert self.workers.installed == installed, "only its own tenure"
        rejoins = not (fails or prepared or asked)
        assert len(self.workers.pauses) == pauses + rejoins

    @precondition(lambda self: self.workers.prepared is not None)
    @rule()
    def switch(self) -> None:
        prepared = self.workers.prepared
        self.workers.tenures.switched()
        self.workers.carry_out()
        assert self.workers.installed == prepared

    @rule(what=st.sampled_from(("session_lost", "prepared_outdated", "drop", "step_applied")))
    def disturb(self, what: str) -> None:
        installed = self.workers.installed
        getattr(self.workers.tenures, what)()
        self.workers.carry_out()
        assert self.workers.installed == (None if what == "drop" else installed)
        if what != "step_applied":
            assert not self.workers.preparing()

    @invariant()
    def holds(self) -> None:
        workers = self.workers
        assert workers.tenures.all_ended == (not workers.live), "nothing waits for nothing"
        if workers.installed is not None:
            assert workers.tenures.loading_stage is None


AnyCourse.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_in_every_course = AnyCourse.TestCase
