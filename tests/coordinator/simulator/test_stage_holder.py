"""The stages of a volunteer without a machine: orders in, messages out, by the rules that ship."""

from __future__ import annotations

from collections.abc import Callable

from swarm_coordinator.simulator.stage_holder import LoadedStage, StageHolder
from swarm_coordinator.simulator.transcripts import simulated_sums
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.linear_digest import digest_sum, from_text
from swarm_shared.protocol import (
    Applied,
    Apply,
    AssignStage,
    ClientMessage,
    Close,
    Ready,
    Reduction,
    RoundReport,
    SumCheck,
    SumsChecked,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes
from swarm_shared.volunteer_rules.step_close import Uncommit, Work

ME = PeerId("me")


class Holder(StageHolder[Receipt]):
    """Does everything in the order in which it was begun."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(ME, RunId("run"), manifest, stage_sizes(manifest))
        self.sent: list[ClientMessage] = []
        self.done: list[str] = []
        self._due: list[Callable[[], object]] = []

    def run(self) -> None:
        while self._due:
            self._due.pop(0)()

    def counts(self, microbatch: int) -> Receipt | None:
        account = self.serving.account
        computation = account.begin(
            account.step, MicrobatchIndex(microbatch), (account.stage,)
        )  # fmt: skip
        return self.serving.count(computation)

    @property
    def serving(self) -> LoadedStage[Receipt]:
        if self.held is None:
            raise AssertionError("no stage is held")
        return self.held

    def send(self, message: ClientMessage) -> None:
        self.sent.append(message)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._due.append(action)

    def sign(self, receipt: Receipt) -> Receipt:
        return receipt

    def begin_load(self, assignment: AssignStage) -> float:
        return 1.0

    def work_seconds(self, work: Work, stage: StageIndex) -> float:
        self.done.append(type(work).__name__)
        return 1.0 if isinstance(work, Uncommit) else 0.0

    def serves(self, *, switched: bool) -> None:
        self.done.append(f"serves {self.stage}")

    def rejoin(self) -> None:
        self.done.append("rejoin")


def assigned(holder: Holder, stage: int, *, prepare: bool = False) -> None:
    holder.assigned(
        AssignStage(
            stage=StageIndex(stage), version=Version(0), source="fresh", prepare=prepare,
        )
    )  # fmt: skip
    holder.run()


def close(*committed: int, moving: tuple[Reduction, ...] = ()) -> Close:
    return Close(
        step=Step(1), attempt=1, committed=tuple(map(MicrobatchIndex, committed)),
        reductions=(Reduction(part="own", members=(ME,)),), moving=moving,
    )  # fmt: skip


def apply() -> Apply:
    return Apply(step=Step(1), attempt=1, global_norm=1.0, learning_rate=0.1)


def test_an_assigned_stage_is_loaded_reported_and_served(manifest: Manifest) -> None:
    holder = Holder(manifest)
    assigned(holder, 1)
    assert [type(message) for message in holder.sent] == [Ready]
    assert holder.done == ["serves 1"]
    assert not holder.loading


def test_a_microbatch_that_is_not_committed_is_removed_before_the_round_is_reported(
    manifest: Manifest,
) -> None:
    holder = Holder(manifest)
    assigned(holder, 0)
    receipts = [holder.counts(0), holder.counts(1), holder.counts(0)]
    assert receipts[0] == receipts[2] != receipts[1]
    holder.ordered(close(0))
    assert holder.sent[1:] == []
    holder.run()
    report = holder.sent[-1]
    assert isinstance(report, RoundReport)
    assert report.ok
    assert holder.serving.accumulated.microbatches() == (0,)
    holder.ordered(apply())
    holder.run()
    assert isinstance(holder.sent[-1], Applied)
    assert (holder.serving.account.version, len(holder.serving.accumulated)) == (1, 0)


def test_a_move_makes_the_prepared_stage_the_held_one_with_its_apply(manifest: Manifest) -> None:
    holder = Holder(manifest)
    assigned(holder, 0)
    assigned(holder, 1, prepare=True)
    holder.ordered(close(moving=(Reduction(part="own", members=(ME,)),)))
    holder.run()
    assert holder.stage == 0
    holder.ordered(apply())
    holder.run()
    assert (holder.stage, holder.serving.account.version, holder.prepared) == (1, 1, None)
    assert holder.done[-1] == "serves 1"


def test_simulated_sums_of_all_members_agree(manifest: Manifest) -> None:
    count = manifest.training.microbatches_per_step
    order = SumCheck(step=Step(1), attempt=1, seed="5eed" * 8)
    stated = [simulated_sums(order, close(*held), count) for held in (range(1), range(1, count))]
    assert digest_sum(from_text(one.part) for (one,) in stated) == from_text(stated[0][0].result)
    assert len({one.result for (one,) in stated}) == 1
    moving = simulated_sums(order, close(0, moving=close().reductions), count)
    assert moving[1].part == "0" * 16
    assert moving[1].result == stated[0][0].result


def test_a_check_of_sums_is_answered_after_the_average(manifest: Manifest) -> None:
    holder = Holder(manifest)
    assigned(holder, 0)
    holder.counts(0)
    holder.ordered(close(0))
    holder.run()
    holder.ordered(SumCheck(step=Step(1), attempt=1, seed="5eed" * 8))
    holder.run()
    assert [type(message) for message in holder.sent[-2:]] == [RoundReport, SumsChecked]
