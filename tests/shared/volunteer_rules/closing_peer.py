"""A peer whose step close is the shipped one, around stage workers that are sets of numbers.

Every decision is checked against the invariants of `swarm_shared.volunteer_rules.step_close` when
it is made. The workers carry out requests in order, cancelled ones too, as the real ones do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from kits.transcripts import TRANSCRIPT
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    AbortRound,
    Applied,
    Apply,
    Close,
    Reduction,
    RoundReport,
    SaveSnapshot,
    SnapshotReady,
    SumCheck,
    SumsChecked,
)
from swarm_shared.volunteer_rules.stage_account import Computation, Counted, StageAccount
from swarm_shared.volunteer_rules.step_close import (
    ApplyStep,
    CancelWork,
    ComputeNorm,
    DropPrepared,
    EmptyAccumulator,
    Lane,
    PrepareRound,
    Reduce,
    Rejoin,
    SaveState,
    Send,
    StateSums,
    StepApplied,
    StepClose,
    SwitchToPrepared,
    Uncommit,
    Work,
    WorkNumber,
)

ME, OTHER = PeerId("me"), PeerId("other")
SEED = "5eed" * 8
Attempt = tuple[int, int]
Account = StageAccount[Counted]


def account(stage: int, version: int, staleness: int = 0) -> Account:
    return StageAccount(StageIndex(stage), Version(version), staleness, lambda counted: counted)


def close_order(
    step: int, attempt: int, committed: tuple[int, ...], *, moving: bool = False, parts: int = 1
) -> Close:
    reductions = (
        Reduction(part="own", members=(ME, OTHER)), Reduction(part="tied", members=(ME, OTHER)),
    )[:parts]  # fmt: skip
    return Close(
        step=Step(step), attempt=attempt, committed=tuple(map(MicrobatchIndex, committed)),
        reductions=reductions, moving=reductions[:1] if moving else (),
    )  # fmt: skip


@dataclass
class Worker:
    """One stage's worker."""

    version: int
    accumulated: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    copy: tuple[int, frozenset[int]] | None = None
    """Step and content of the newest copy."""
    copy_finite: bool = True
    result: tuple[Attempt, frozenset[int]] | None = None
    """Attempt and content of what the newest average was made from."""
    requests: deque[Work | Computation] = field(default_factory=deque)
    finite: bool = True
    can_uncommit: bool = True
    can_apply: bool = True


class ClosingPeer:
    def __init__(self, staleness: int = 0) -> None:
        self.account = account(0, 0, staleness)
        self.prepared: Account | None = None
        self.close = StepClose(self.account)
        self.workers = {Lane.HELD: Worker(0), Lane.PREPARED: Worker(0)}
        self.reducing: dict[WorkNumber, Reduce] = {}
        self.live: dict[WorkNumber, Work] = {}
        """Work that is not cancelled and not answered."""
        self.sent: list[object] = []
        self.decided: list[Rejoin | DropPrepared | StepApplied] = []
        self.session = 0
        self.orders: dict[Attempt, Close] = {}
        self.sessions: dict[Attempt, int] = {}
        """Session in which each Close arrived."""
        self.apply_sessions: defaultdict[Attempt, set[int]] = defaultdict(set)
        self.asked: defaultdict[Attempt, set[int]] = defaultdict(set)
        """Sessions in which the sums of an attempt were asked for."""
        self.owed: Attempt | None = None
        """The attempt whose sums are to be stated."""
        self.aborted: set[Attempt] = set()
        self.reports: defaultdict[Attempt, list[RoundReport]] = defaultdict(list)
        self.switched = False
        self.can_state = True

    # ---- the coordinator

    def closes(
        self, *committed: int, step: int = 1, attempt: int = 1, moving: bool = False, parts: int = 1
    ) -> None:
        order = close_order(step, attempt, committed, moving=moving, parts=parts)
        self.orders[step, attempt] = order
        self.sessions[step, attempt] = self.session
        self.close.order(order)
        self.carry()

    def aborts(self, step: int = 1, attempt: int = 1) -> None:
        self.aborted.add((step, attempt))
        self.owed = None
        self.close.order(AbortRound(step=Step(step), attempt=attempt, reason="a member was lost"))
        self.carry()

    def applies(self, step: int = 1, attempt: int = 1) -> None:
        self.apply_sessions[step, attempt].add(self.session)
        order = Apply(step=Step(step), attempt=attempt, global_norm=2.0, learning_rate=0.1)
        self.close.order(order)
        self.carry()

    def checks(
        self, step: int = 1, attempt: int = 1, *, seed: str = SEED, details: bool = False
    ) -> None:
        """The coordinator asks for sums."""
        self.asked[step, attempt].add(self.session)
        averaged = (self.account.step, self.close.averaged_attempt)
        if averaged == (step, attempt) and not self.apply_sessions[step, attempt]:
            self.owed = step, attempt
        order = SumCheck(step=Step(step), attempt=attempt, seed=seed, details=details)
        self.close.order(order)
        self.carry()

    def saves(self) -> None:
        self.close.order(SaveSnapshot(version=Version(0), stage=StageIndex(0)))
        self.carry()

    def loses_session(self) -> None:
        self.session += 1
        self.owed = None
        self.close.session_lost()
        self.carry()
        if self.prepared is not None:
            self.loses_prepared()
        self.check()

    # ---- the stage beside the held one

    def prepares(self) -> None:
        self.prepared = account(1, self.account.version)
        self.workers[Lane.PREPARED] = Worker(self.account.version)
        self.close.stage_prepared(self.prepared)
        self.carry()

    def loses_prepared(self) -> None:
        self.prepared = None
        self.close.prepared_lost()
        self.carry()

    # ---- microbatches

    def computes(self, *microbatches: int, step: int = 1) -> None:
        """Ask the worker for microbatches; it answers in its turn."""
        for microbatch in microbatches:
            if self.account.works_on(Step(step)):
                begun = self.account.begin(
                    Step(step), MicrobatchIndex(microbatch), (StageIndex(0),)
                )
                self.workers[Lane.HELD].requests.append(begun)

    # ---- work

    def run(self) -> None:
        """Carry out everything that is requested, and average with everybody."""
        while self.step_worker(Lane.HELD) or self.step_worker(Lane.PREPARED) or self.reduces():
            pass

    def reduces(self) -> bool:
        """Average one part, of either stage; False when there is none."""
        if self.reducing:
            self.finish_reduce(next(iter(self.reducing)))
            return True
        return False

    def finish_reduce(
        self, number: WorkNumber, failure: str | None = None, culprit: PeerId | None = None
    ) -> None:
        work = self.reducing.pop(number)
        live = self.live.pop(number, None) is not None
        worker = self.workers[work.lane]
        if failure is not None:
            self.close.averaging_failed(number, failure, culprit, carrier_failed=True)
        else:
            if live:
                assert worker.copy is not None
                assert worker.copy[0] == work.step
                worker.result = (work.step, work.attempt), worker.copy[1]
            self.close.averaged(number)
        self.carry()

    def step_worker(self, lane: Lane = Lane.HELD) -> bool:
        """Carry out the worker's next request; False when there is none."""
        worker = self.workers[lane]
        if not worker.requests:
            return False
        request = worker.requests.popleft()
        if isinstance(request, Computation):
            self._compute(worker, request)
        else:
            self._carry_out(worker, request)
        self.carry()
        return True

    def _compute(self, worker: Worker, request: Computation) -> None:
        step = worker.accumulated[request.step]
        added = (
            request.accumulate and request.step > worker.version and request.microbatch not in step
        )
        if added:
            step.add(request.microbatch)
        self.account.finish(request, added=added, tokens=4, loss_sum=None, transcript=TRANSCRIPT)

    def _carry_out(self, worker: Worker, work: Work) -> None:
        number, close = work.work, self.close
        live = self.live.pop(number, None) is not None
        match work:
            case PrepareRound():
                worker.copy = work.step, frozenset(worker.accumulated[work.step])
                worker.copy_finite = worker.finite
                microbatches = tuple(map(MicrobatchIndex, sorted(worker.copy[1])))
                close.round_prepared(number, microbatches, finite=worker.finite)
            case Uncommit():
                if worker.can_uncommit:
                    worker.accumulated[work.step] -= set(work.microbatches)
                close.uncommitted(number, done=worker.can_uncommit)
            case EmptyAccumulator():
                worker.accumulated[work.step].clear()
                close.emptied(number)
            case ComputeNorm():
                close.norm_computed(number, own_squared=4.0, tied_squared=0.0, finite=worker.finite)
            case StateSums() if self.can_state:
                order = work.order
                answer = SumsChecked(
                    step=order.step, attempt=order.attempt, details=order.details,
                    statement=f"of {len(work.close.reductions)}+{len(work.close.moving)}",
                )  # fmt: skip
                close.answered(number, answer)
            case StateSums():
                close.failed(number, "its average is gone")
            case ApplyStep() if not live or not worker.can_apply:
                close.failed(number, "it holds a NaN by now")
            case ApplyStep():
                worker.version = work.order.step
                worker.accumulated.pop(work.order.step, None)
                close.applied(number, digest=f"of {work.lane.name}", norm=1.0)
            case SaveState():
                request = work.request
                snapshot = SnapshotReady(
                    version=request.version, stage=request.stage, item="a", bytes=1,
                    sha256="0" * 64,
                )  # fmt: skip
                close.answered(number, snapshot)

    # ---- decisions

    def carry(self) -> None:
        for action in self.close.take_actions():
            match action:
                case CancelWork():
                    assert action.work in self.live, "only running work is cancelled"
                    del self.live[action.work]
                case Send():
                    self._check_message(action.message)
                    self.sent.append(action.message)
                case SwitchToPrepared():
                    self.switched = True
                case Rejoin() | DropPrepared() | StepApplied():
                    self.decided.append(action)
                case _:
                    self._begin(action)

    def _begin(self, work: Work) -> None:
        running = [other.lane for other in self.live.values()]
        single = isinstance(work, StateSums | ApplyStep | SaveState)
        assert work.lane not in running, "a lane has one piece of work"
        assert not (single and running), "one order is carried out at a time"
        self.live[work.work] = work
        if isinstance(work, Uncommit):
            committed = self._running_close(work.step).committed
            assert not set(work.microbatches) & set(committed), "what is committed stays"
        if isinstance(work, ApplyStep):
            self._check_apply(work)
        if isinstance(work, StateSums):
            self._check_statement(work)
        if isinstance(work, Reduce):
            assert work.lane is Lane.PREPARED or self.workers[Lane.HELD].copy_finite
            self.reducing[work.work] = work
        else:
            self.workers[work.lane].requests.append(work)

    def _running_close(self, step: int) -> Close:
        """The newest Close of this session that neither was aborted nor has been answered."""
        running = [
            order for key, order in self.orders.items()
            if key not in self.aborted and not self.reports[key] and key[0] == step
            and self.sessions[key] == self.session
        ]  # fmt: skip
        return running[0]

    def _check_apply(self, work: ApplyStep) -> None:
        attempt = work.order.step, work.order.attempt
        assert attempt not in self.aborted, "an aborted attempt is not applied"
        assert any(report.ok for report in self.reports[attempt]), "only what was reported"
        assert work.order.step == self.account.step
        switches = bool(self.orders[attempt].moving) and self.sessions[attempt] == self.session
        assert (work.lane is Lane.PREPARED) == switches, "in the stage that it names"
        result = self.workers[work.lane].result
        assert result is not None
        assert result[0] == attempt, "what is applied is the average of this attempt"

    def _check_statement(self, work: StateSums) -> None:
        attempt = work.order.step, work.order.attempt
        assert attempt not in self.aborted, "no sums of an aborted attempt"
        assert self.session in self.asked[attempt]
        assert [report.ok for report in self.reports[attempt]] == [True], "of what stands"
        assert work.close == self.orders[attempt]
        assert self.workers[Lane.HELD].result is not None
        assert self.workers[Lane.HELD].result[0] == attempt, "the result is still there"
        if work.close.moving:
            assert self.prepared is not None
            assert self.workers[Lane.PREPARED].result == (attempt, frozenset())

    def _check_message(self, message: object) -> None:
        if isinstance(message, SumsChecked):
            attempt = message.step, message.attempt
            assert attempt not in self.aborted
            assert self.session in self.asked[attempt], "asked for in this session"
            self.owed = None
        if isinstance(message, Applied):
            sessions = (s for key, s in self.apply_sessions.items() if key[0] == message.step)
            assert any(self.session in each for each in sessions), "Apply came in this session"
        if not isinstance(message, RoundReport):
            return
        attempt = message.step, message.attempt
        assert attempt not in self.aborted, "nothing is reported after an abort"
        earlier = self.reports[attempt]
        if earlier:
            assert [earlier[-1].ok, message.ok] == [True, False]
            asked = self.apply_sessions if message.reset else self.asked
            assert self.session in asked[attempt]
        else:
            assert self.sessions[attempt] == self.session, "of this session's orders"
        earlier.append(message)
        self.owed = None
        if message.ok:
            self._check_ok(attempt)

    def _check_ok(self, attempt: Attempt) -> None:
        order, worker = self.orders[attempt], self.workers[Lane.HELD]
        assert worker.result == (attempt, frozenset(order.committed)), "exactly the commit set"
        if order.moving:
            assert self.workers[Lane.PREPARED].result == (attempt, frozenset())

    def check(self) -> None:
        """What holds after every event."""
        for step in (self.account.step, Step(self.account.step + 1)):
            receipts = {r.microbatch for r in self.account.receipts() if r.step == step}
            held = self.workers[Lane.HELD].accumulated[step]
            assert receipts <= held, "no receipt without a gradient"
        applying = any(isinstance(work, ApplyStep) for work in self.live.values())
        if any(
            not isinstance(work, StateSums | ApplyStep | SaveState) for work in self.live.values()
        ):
            assert self.account.closing, "nothing is added while an attempt runs"
        if self.account.closes(self.account.step) and not applying:
            assert any(
                key[0] == self.account.step and session == self.session and key not in self.aborted
                for key, session in self.sessions.items()
            ), "the step is closing only for an attempt of this session that is not aborted"
        if self.live or self.switched:
            return
        assert self.owed is None, "a check of sums is answered, or work for it runs"
        for attempt, order in self.orders.items():
            if attempt not in self.aborted and self.sessions[attempt] == self.session:
                assert self.reports[attempt], f"{order} is answered, or work for it runs"
