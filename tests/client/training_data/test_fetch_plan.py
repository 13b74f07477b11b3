"""What is fetched next: nothing twice, nothing forgotten, what a microbatch waits for first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm_client.training_data.fetch_plan import LeafQueue, Lookahead, Need, Sample
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.data.sample_ranges import LeafId

LEAVES = st.integers(0, 12).map(lambda number: LeafId(number % 3, number))
NEEDS = st.sampled_from(Need)


class Queue(RuleBasedStateMachine):
    """The queue against two sets: what is queued with its need, and what is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LeafQueue()
        self.queued: dict[LeafId, Need] = {}
        self.taken: set[LeafId] = set()

    @rule(leaf=LEAVES, need=NEEDS)
    def want(self, leaf: LeafId, need: Need) -> None:
        self.queue.want(leaf, need)
        if leaf not in self.taken:
            self.queued[leaf] = min(need, self.queued.get(leaf, need))

    @rule(limit=st.integers(1, 5))
    def take(self, limit: int) -> None:
        found = self.queue.take(limit)
        assert len(found) == len(set(found)) == min(limit, len(self.queued))
        needs = [self.queued.pop(leaf) for leaf in found]
        assert needs == sorted(needs)
        assert all(need >= needs[-1] for need in self.queued.values() if needs)
        assert not self.taken & set(found)
        self.taken |= set(found)

    @rule(leaf=LEAVES)
    def arrived(self, leaf: LeafId) -> None:
        self.queue.arrived(leaf)
        self.taken.discard(leaf)
        self.queued.pop(leaf, None)

    @rule(leaf=LEAVES, need=NEEDS)
    def put_back(self, leaf: LeafId, need: Need) -> None:
        self.queue.put_back([leaf], need)
        if leaf in self.taken:
            self.taken.discard(leaf)
            self.queued[leaf] = need

    @rule(leaf=LEAVES)
    def withdraw(self, leaf: LeafId) -> None:
        self.queue.withdraw([leaf])
        self.queued.pop(leaf, None)

    @rule(need=NEEDS)
    def withdraw_all(self, need: Need) -> None:
        self.queue.withdraw_all(need)
        self.queued = {leaf: known for leaf, known in self.queued.items() if known is not need}

    @invariant()
    def none_is_lost(self) -> None:
        assert len(self.queue) == len(self.queued)


TestQueue = Queue.TestCase


def lookahead(last_step: int = 100) -> Lookahead:
    return Lookahead(Step(last_step))


def indices(*numbers: int) -> list[MicrobatchIndex]:
    return [MicrobatchIndex(number) for number in numbers]


def samples(step: int, *numbers: int) -> list[Sample]:
    return [Sample(Step(step), index) for index in indices(*numbers)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=12), st.integers(0, 20))
def test_leased_microbatches_come_first_each_once_and_an_older_step_before_a_newer_one(
    leased: list[tuple[int, int]], limit: int
) -> None:
    plan = lookahead()
    for step, index in leased:
        plan.expect(Step(step), indices(index), heldout=False)
    found = plan.ahead(limit)
    wanted = {Sample(Step(step), MicrobatchIndex(index)) for step, index in leased}
    assert len(found) == len(set(found)) <= limit
    first = found[: len(wanted)]
    assert set(first) <= wanted
    assert [one.step for one in first] == sorted(one.step for one in first)
    newest = max((step for step, _ in leased), default=0)
    assert all(one.step == newest + 1 for one in found[len(wanted) :])


def test_the_same_indices_of_the_next_step_are_foreseen_while_that_holds() -> None:
    plan = lookahead()
    plan.expect(Step(1), indices(4, 1), heldout=False)
    assert plan.ahead(9) == [*samples(1, 4, 1), *samples(2, 1, 4)]
    for sample in samples(1, 4, 1):
        plan.begun(sample)
    assert plan.ahead(9) == samples(2, 1, 4)
    plan.expect(Step(2), indices(1, 7), heldout=False)  # half of it was right
    assert plan.ahead(9) == [*samples(2, 1, 7), *samples(3, 1, 7)]
    plan.expect(Step(3), indices(0, 2, 7), heldout=False)
    assert plan.ahead(9) == [*samples(2, 1, 7), *samples(3, 0, 2, 7)]
    plan.expect(Step(4), indices(0, 2, 7), heldout=False)
    assert plan.ahead(99)[-3:] == samples(5, 0, 2, 7)


def test_nothing_is_foreseen_after_the_last_step_nor_for_an_evaluation() -> None:
    plan = lookahead(last_step=2)
    plan.expect(Step(2), indices(1), heldout=False)
    plan.begun(*samples(2, 1))
    assert plan.ahead(9) == []
    plan.expect(Step(2), indices(3), heldout=True)
    assert plan.ahead(9) == [Sample(Step(2), MicrobatchIndex(3), heldout=True)]


def test_what_is_over_or_was_handed_back_is_fetched_for_no_more() -> None:
    plan = lookahead()
    plan.expect(Step(1), indices(1, 2), heldout=False)
    plan.expect(Step(2), indices(3), heldout=False)
    plan.over(Step(2))
    plan.expect(Step(1), indices(4), heldout=False)  # a lease on its way
    assert plan.ahead(1) == samples(2, 3)
    plan.clear()
    assert plan.ahead(9) == []
