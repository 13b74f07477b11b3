"""The account of a held stage against a worker whose answers arrive late, or after a cancellation.

The worker is a model of the stage worker: it carries out requests in order, each gradient is a
count per microbatch, and its set of microbatches is the shipped one. Both directions are queues, so
that the account decides on what it knows and not on what is the case.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kits.transcripts import TRANSCRIPT
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.volunteer_rules.accumulated_set import AccumulatedSet, Removal
from swarm_shared.volunteer_rules.stage_account import Computation, Counted, StageAccount

STAGE = StageIndex(1)
MICROBATCHES = 4
KEPT_BUDGET_BYTES = 2
microbatches = st.integers(0, MICROBATCHES - 1).map(MicrobatchIndex)
some = st.sampled_from([8, 0, 1, 3])


@dataclass(frozen=True)
class Inputs:
    """Inputs of one byte, so that the budget keeps those of two microbatches."""

    nbytes: int = 1


class Sum:
    """One step's accumulator: a count per microbatch in place of a gradient."""

    def __init__(self) -> None:
        self.contents: AccumulatedSet[Inputs] = AccumulatedSet(KEPT_BUDGET_BYTES)
        self.total: Counter[int] = Counter()

    def compute(self, microbatch: MicrobatchIndex, accumulate: bool) -> bool:
        added = self.contents.wants(microbatch, accumulate)
        if added:
            self.contents.add(microbatch, Inputs())
            self.total[microbatch] += 1
        return added

    def uncommit(self, microbatches: tuple[MicrobatchIndex, ...]) -> bool:
        removal = self.contents.removal(microbatches)
        if removal is None:
            return False
        self.contents.remove(removal.microbatches)
        for microbatch in removal.microbatches:
            del self.total[microbatch]
        return True


@dataclass
class Compute:
    computation: Computation
    removals: int
    """Removals of its microbatch before the request, by the machine's own count."""
    cancelled: bool = False
    added: bool = False


@dataclass
class CloseWork:
    """One request of the step close, and its answer."""

    attempt: int
    kind: Literal["prepare", "uncommit", "reset"]
    microbatches: tuple[MicrobatchIndex, ...] = ()
    total: Counter[int] = field(default_factory=Counter)
    """The prepared copy of the sum."""
    done: bool = False


class AccountMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.signed: list[Counted] = []
        self.account = StageAccount(STAGE, Version(0), 1, self._sign)
        self.sums: dict[int, Sum] = {1: Sum(), 2: Sum()}
        self.below: list[Compute] = []
        """Requests that the stages below compute first; a close may come and go meanwhile."""
        self.to_worker: deque[Compute | CloseWork] = deque()
        self.from_worker: deque[Compute | CloseWork] = deque()
        self.reported: dict[int, set[int]] = {}
        self.removals: Counter[tuple[int, int]] = Counter()
        """How often each (step, microbatch) may have been taken out."""
        self.committed: set[int] | None = None
        """The commit set of the close in progress."""
        self.attempt = 0
        self.averaged = False

    def _sign(self, counted: Counted) -> Counted:
        self.signed.append(counted)
        return counted

    # ---- requests

    @rule(
        wanted=st.lists(microbatches, min_size=1, max_size=6),
        ahead=st.sampled_from([0, 0, 1]), counts=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def request(self, wanted: list[MicrobatchIndex], ahead: int, counts: bool) -> None:
        for microbatch in wanted:
            self._request(Step(self.account.step + ahead), microbatch, counts)

    def _request(self, step: Step, microbatch: MicrobatchIndex, counts: bool) -> None:
        mask = (STAGE,) if counts else (StageIndex(0),)
        computation = self.account.begin(step, microbatch, mask)
        settled = self.committed is not None and step == self.account.step
        known = self.account.receipt(step, microbatch) is not None
        assert computation.accumulate == (counts and not settled and not known)
        self.below.append(Compute(computation, self.removals[step, microbatch]))

    @rule(position=st.integers(0, 7))
    def cancel(self, position: int) -> None:
        """The sender goes: the worker may have computed, and its answer is not looked at."""
        waiting = [
            w for w in (*self.below, *self.to_worker, *self.from_worker) if isinstance(w, Compute)
        ]
        if waiting:
            waiting[position % len(waiting)].cancelled = True

    @rule(returned=some, works=some, answers=some)
    def progress(self, returned: int, works: int, answers: int) -> None:
        self.to_worker.extend(self.below[:returned])
        del self.below[:returned]
        for _ in range(min(works, len(self.to_worker))):
            self._work(self.to_worker.popleft())
        for _ in range(min(answers, len(self.from_worker))):
            self._answer(self.from_worker.popleft())

    def _work(self, job: Compute | CloseWork) -> None:
        if isinstance(job, Compute):
            step, microbatch = job.computation.step, job.computation.microbatch
            if step in self.sums:
                job.added = self.sums[step].compute(microbatch, job.computation.accumulate)
            else:
                job.cancelled = True  # the worker refuses: its step is applied
        else:
            closing = self.sums[self.account.step]
            if job.kind == "prepare":
                job.microbatches = closing.contents.microbatches()
                job.total = closing.total.copy()
            elif job.kind == "uncommit":
                job.done = closing.uncommit(job.microbatches)
            else:
                self.sums[self.account.step] = Sum()
        self.from_worker.append(job)

    def _answer(self, job: Compute | CloseWork) -> None:
        if isinstance(job, CloseWork):
            self._closed(job)
            return
        computation = job.computation
        step, microbatch = computation.step, computation.microbatch
        if job.cancelled:
            return
        before = self.account.receipt(step, microbatch)
        receipt = self.account.finish(
            computation, added=job.added, tokens=4, loss_sum=None, transcript=TRANSCRIPT
        )
        if before is not None and self.account.works_on(step):
            assert receipt is before
        closing = self.account.closes(step) and not job.added
        if computation.accumulate and step in self.sums and not closing:
            removed = self.removals[step, microbatch] != job.removals
            assert (receipt is None) == (removed and before is None)

    # ---- closes

    @rule()
    def report(self) -> None:
        for counted in self.account.take_unreported():
            of_step = self.reported.setdefault(counted.step, set())
            of_step.add(counted.microbatch)

    @precondition(lambda self: self.committed is None)
    @rule(lost=st.sets(st.integers(0, MICROBATCHES - 1)))
    def close(self, lost: set[int]) -> None:
        """Commit what was reported, but for cells that another peer of the stage has."""
        self.committed = self.reported.get(self.account.step, set()) - lost
        self.attempt += 1
        self.account.settle()
        self._ask_worker("prepare")

    def _ask_worker(
        self, kind: Literal["prepare", "uncommit", "reset"],
        microbatches: tuple[MicrobatchIndex, ...] = (),
    ) -> None:  # fmt: skip
        self.to_worker.append(CloseWork(self.attempt, kind, microbatches))

    def _closed(self, job: CloseWork) -> None:
        if self.committed is None or job.attempt != self.attempt:
            return  # aborted meanwhile
        step = self.account.step
        if job.kind == "prepare":
            held = set(job.microbatches)
            if extra := tuple(held - self.committed):
                self._remove(step, extra)
                self._ask_worker("uncommit", extra)
            elif missing := tuple(self.committed - held):
                self._remove(step, missing)
                self.reported[step] -= set(missing)
                self._reopen()
            else:
                assert job.total == Counter(self.committed)
                self.averaged = True
        elif job.kind == "uncommit" and job.done:
            self._ask_worker("prepare")
        elif job.kind == "uncommit":
            self.account.emptied(step)
            self.removals.update((step, microbatch) for microbatch in range(MICROBATCHES))
            self._ask_worker("reset")
        elif job.kind == "reset":
            self.reported[step] = set()
            self._reopen()

    def _remove(self, step: Step, microbatches: tuple[MicrobatchIndex, ...]) -> None:
        """The receipts go before the worker is asked to remove: it may be aborted meanwhile."""
        self.account.removed(step, microbatches)
        self.removals.update((step, microbatch) for microbatch in microbatches)

    def _reopen(self) -> None:
        self.committed, self.averaged = None, False
        self.account.reopen()

    @precondition(lambda self: self.committed is not None)
    @rule()
    def abort(self) -> None:
        """What the worker has begun it goes on with."""
        self._reopen()

    @precondition(lambda self: self.averaged)
    @rule()
    def apply(self) -> None:
        """Apply what was averaged: the copy, whatever has been added since."""
        step, committed = self.account.step, self.committed or ()
        while self.to_worker or self.from_worker:
            self.progress(0, len(self.to_worker), len(self.from_worker))
        del self.sums[step]
        self.sums[step + 2] = Sum()
        receipts = self.account.count(step)
        assert receipts >= len(committed)
        self.account.applied(Version(step))
        self.committed, self.averaged = None, False
        assert self.account.count(step) == 0

    # ---- what holds after every event

    @invariant()
    def a_receipt_is_of_what_the_accumulator_is_known_to_hold(self) -> None:
        for counted in self.account.receipts():
            assert counted.microbatch in self.sums[counted.step].contents

    @invariant()
    def every_gradient_is_in_the_sum_once(self) -> None:
        for one in self.sums.values():
            assert one.total == Counter(one.contents.microbatches())

    @invariant()
    def a_microbatch_is_signed_once_between_two_removals(self) -> None:
        pairs = [(counted.step, counted.microbatch) for counted in self.account.receipts()]
        assert len(pairs) == len(set(pairs))


TestAccount = AccountMachine.TestCase
TestAccount.settings = settings(max_examples=150, stateful_step_count=80)


def account(staleness: int = 0) -> StageAccount[Counted]:
    return StageAccount(STAGE, Version(0), staleness, lambda counted: counted)


def test_a_microbatch_that_a_cancelled_request_added_is_signed_at_the_next_one() -> None:
    held = account()
    held.begin(Step(1), MicrobatchIndex(3), (STAGE,))  # cancelled after the worker had added it
    again = held.begin(Step(1), MicrobatchIndex(3), (STAGE,))
    assert (
        held.finish(again, added=False, tokens=4, loss_sum=None, transcript=TRANSCRIPT) is not None
    )


def test_without_a_transcript_of_what_is_held_nothing_is_signed() -> None:
    held = account()
    computation = held.begin(Step(1), MicrobatchIndex(3), (STAGE,))
    assert held.finish(computation, added=False, tokens=4, loss_sum=None, transcript=None) is None


def test_an_answer_from_before_a_removal_signs_nothing() -> None:
    held = account()
    computation = held.begin(Step(1), MicrobatchIndex(3), (STAGE,))
    other = held.begin(Step(1), MicrobatchIndex(2), (STAGE,))
    held.settle()
    held.removed(Step(1), (MicrobatchIndex(3),))
    held.reopen()
    assert (
        held.finish(computation, added=False, tokens=4, loss_sum=None, transcript=TRANSCRIPT)
        is None
    )
    assert (
        held.finish(other, added=True, tokens=4, loss_sum=None, transcript=TRANSCRIPT) is not None
    )


def test_an_answer_from_before_the_accumulator_was_emptied_signs_nothing() -> None:
    held = account()
    computation = held.begin(Step(1), MicrobatchIndex(3), (STAGE,))
    held.settle()
    held.emptied(Step(1))
    held.reopen()
    assert (
        held.finish(computation, added=True, tokens=4, loss_sum=None, transcript=TRANSCRIPT) is None
    )


def test_a_removed_receipt_is_not_reported_any_more() -> None:
    held = account(staleness=1)
    for step, microbatch in ((1, 7), (2, 7), (1, 3), (2, 4)):
        computation = held.begin(Step(step), MicrobatchIndex(microbatch), (STAGE,))
        held.finish(computation, added=True, tokens=4, loss_sum=None, transcript=TRANSCRIPT)
    held.removed(Step(2), (MicrobatchIndex(4), MicrobatchIndex(99)))
    held.emptied(Step(1))
    assert [(c.step, c.microbatch) for c in held.take_unreported()] == [(2, 7)]
    assert held.take_unreported() == ()
    assert [(c.step, c.microbatch) for c in held.receipts()] == [(2, 7)]


def test_the_end_of_a_step_leaves_the_computations_of_the_next_one() -> None:
    held = account(staleness=1)
    ahead = held.begin(Step(2), MicrobatchIndex(0), (STAGE,))
    over = held.begin(Step(1), MicrobatchIndex(0), (STAGE,))
    held.applied(Version(1))
    assert held.finish(over, added=True, tokens=4, loss_sum=None, transcript=TRANSCRIPT) is None
    assert (
        held.finish(ahead, added=True, tokens=4, loss_sum=None, transcript=TRANSCRIPT) is not None
    )


def test_steps_that_are_not_open_and_versions_out_of_turn_are_errors_of_the_caller() -> None:
    held = account()
    with pytest.raises(ValueError, match="step 2 is not open"):
        held.begin(Step(2), MicrobatchIndex(0), (STAGE,))
    with pytest.raises(ValueError, match="version 2 does not follow version 0"):
        held.applied(Version(2))


def test_a_removal_names_what_to_compute_again_or_takes_out_nothing() -> None:
    contents: AccumulatedSet[Inputs] = AccumulatedSet(KEPT_BUDGET_BYTES)
    for microbatch in range(3):
        contents.add(MicrobatchIndex(microbatch), Inputs())
    one, two = MicrobatchIndex(1), MicrobatchIndex(2)
    assert contents.removal((two, one, MicrobatchIndex(9))) == Removal(
        (one, two), (Inputs(), Inputs())
    )
    assert contents.removal((MicrobatchIndex(0), two)) is None  # its inputs are over the budget
    assert contents.removal(contents.microbatches()) == Removal(contents.microbatches(), ())
    with pytest.raises(ValueError, match="in the accumulator already"):
        contents.add(one, Inputs())
