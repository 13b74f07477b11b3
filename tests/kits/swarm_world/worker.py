"""A simulated stage worker: what a compute process holds, and the queue of its requests.

A gradient is a Counter of (stage, microbatch) pairs, parameters are the tuple of applied (step,
attempt) pairs. What is in a step's sum is decided by the rule that ships
(`swarm_shared.volunteer_rules.accumulated_set`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kits.swarm_world import sums
from kits.swarm_world.checks import check_replicas
from kits.swarm_world.facts import Cell, Params, Violation, own_squared, sha_of, tied_squared
from kits.swarm_world.network import Gradient
from kits.swarm_world.sums import Exchange
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Apply, SaveSnapshot, SnapshotReady
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes
from swarm_shared.volunteer_rules import step_close
from swarm_shared.volunteer_rules.accumulated_set import AccumulatedSet

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer

ResultT = TypeVar("ResultT")

LIED = -1
"""Microbatch m's place in the sum of a liar is LIED - m, beside the true one."""

KEPT_MICROBATCHES = 2
"""Microbatches of a step that can be taken out of its sum again: the newest ones."""


@dataclass(frozen=True, slots=True)
class KeptInput:
    nbytes: int = 1


KEPT = KeptInput()


@dataclass(eq=False, slots=True)
class StepSum:
    """The sum of one step's gradients."""

    contents: AccumulatedSet[KeptInput]
    gradient: Gradient = field(default_factory=Counter)


class SimWorker:
    def __init__(self, peer: SimPeer, stage: StageIndex) -> None:
        self.peer, self.stage = peer, stage
        self.alive = True
        self.stuck = False
        self.last_apply: Apply | None = None
        self._free_at = self._results_at = 0.0
        self.load(())

    def load(self, params: Params) -> None:
        """Take a state; every sum is empty."""
        self.params = params
        self.sums: dict[int, StepSum] = {}
        self.copy: tuple[int, Gradient] = (0, Counter())
        """Step and gradient of the newest copy for averaging."""
        self.averaged: tuple[int, int] | None = None
        """Step and attempt of `averages`."""
        self.averages: dict[str, Gradient] = {}
        """By part."""
        self.exchanges: dict[str, Exchange] = {}
        """By part, as the averages."""
        self.finite = True
        self.lost: set[Cell] = set()
        """(step, microbatch) pairs that vanished from a sum by a fault."""
        self.shrunk = True
        """Whether something was taken out of a sum since the receipts were compared with it."""

    @property
    def version(self) -> int:
        return len(self.params)

    @property
    def digest(self) -> str:
        return sha_of(self.params, self.stage)[:16]

    def request(
        self, seconds: float, work: Callable[[], ResultT], done: Callable[[ResultT], None]
    ) -> None:
        """Carry out one request after the other; its sender gets the result in the same order."""
        world = self.peer.world
        self._free_at = max(self._free_at, world.now) + self.peer.slowness * seconds

        def carry_out() -> None:
            if not self.alive or self.stuck:
                return
            result = work()
            if world.rng.random() < 0.1:
                self._results_at = max(self._results_at, world.now + 0.2 * world.rng.random())
            if self._results_at > world.now:
                self.peer.later(
                    self._results_at - world.now, lambda: self.alive and done(result)
                )  # fmt: skip
            else:
                done(result)

        self.peer.later(self._free_at - world.now, carry_out)

    # ---- microbatches

    def sum_of(self, step: int) -> StepSum:
        found = self.sums.get(step)
        if found is None:
            contents = AccumulatedSet[KeptInput](KEPT_MICROBATCHES)
            found = self.sums[step] = StepSum(contents)
        return found

    def accumulate(self, step: int, microbatch: MicrobatchIndex, accumulate: bool) -> bool:
        """Compute a gradient; whether it was added."""
        if step <= self.version:
            return False
        of_step = self.sum_of(step)
        if not of_step.contents.wants(microbatch, accumulate):
            return False
        of_step.gradient[self.stage, microbatch] += 1
        if self.peer.lies:
            of_step.gradient[self.stage, LIED - microbatch] += 1
        of_step.contents.add(microbatch, KEPT)
        self.lost.discard((step, microbatch))
        return True

    def transcript(self, step: int, microbatch: MicrobatchIndex) -> Transcript | None:
        """That of the microbatch in the step's sum."""
        if step <= self.version or microbatch not in self.sum_of(step).contents:
            return None
        last = StageIndex(self.peer.world.options.stages - 1)
        return simulated_transcript(
            Step(step), microbatch, self.stage, last, 9 if self.peer.lies else self.peer.machine
        )

    def remove(self, step: int, microbatches: Iterable[MicrobatchIndex]) -> bool:
        of_step = self.sum_of(step)
        removal = of_step.contents.removal(microbatches)
        if removal is not None:
            self.shrunk = True
            of_step.contents.remove(removal.microbatches)
            for microbatch in removal.microbatches:
                del of_step.gradient[self.stage, microbatch]
                of_step.gradient.pop((self.stage, LIED - microbatch), None)
        return removal is not None

    # ---- closing

    def carry_out(
        self,
        close: step_close.StepClose[Receipt],
        work: step_close.Work,
    ) -> Callable[[], None]:
        """Carry out everything but an all-reduce; return how to report it."""
        number = work.work
        match work:
            case step_close.PrepareRound(step=step):
                microbatches, finite = self._prepare(step)
                return partial(close.round_prepared, number, microbatches, finite=finite)
            case step_close.Uncommit(step=step, microbatches=extra):
                return partial(close.uncommitted, number, done=self.remove(step, extra))
            case step_close.EmptyAccumulator(step=step):
                self.empty(step)
                return partial(close.emptied, number)
            case step_close.ComputeNorm(step=step):
                tied = tied_squared(step) if "tied" in self.averages else 0.0
                own = own_squared(step, self.stage)
                return partial(
                    close.norm_computed, number, own_squared=own, tied_squared=tied, finite=True
                )
            case step_close.StateSums(order=check, close=averaged):
                answer = sums.state(self, check, averaged)
                if answer is None:
                    return partial(close.failed, number, "its average is gone")
                return partial(close.answered, number, answer)
            case step_close.ApplyStep(order=order) if not self.peer.cannot_apply:
                digest, norm = self._apply(order)
                return partial(close.applied, number, digest=digest, norm=norm)
            case step_close.SaveState(request=request) if self._can_save(request):
                return partial(close.answered, number, self._save(request))
            case step_close.ApplyStep():
                self.peer.cannot_apply = False
                return partial(close.failed, number, "its parameters would not be finite")
            case _:
                return partial(close.failed, number, "elsewhere by now, or no space")

    def _prepare(self, step: int) -> tuple[tuple[MicrobatchIndex, ...], bool]:
        """Copy a sum; its microbatches, and whether it is finite."""
        of_step = self.sum_of(step)
        microbatches = of_step.contents.microbatches()
        if not self.peer.lies and of_step.gradient != Counter(
            (self.stage, m) for m in microbatches
        ):
            raise Violation(f"{self.peer.id}: {of_step.gradient} is not the sum of {microbatches}")
        self.copy, self.averaged, self.averages = (step, Counter(of_step.gradient)), None, {}
        self.exchanges = {}
        return microbatches, self.finite

    def check_averaged(self, step: int, attempt: int) -> None:
        """The gradient to be applied contains every microbatch exactly once."""
        options, stage = self.peer.world.options, self.stage
        if self.averaged != (step, attempt) or self.version != step - 1:
            raise Violation(
                f"{self.peer.id} at version {self.version} of stage {stage} has averaged "
                f"{self.averaged}, not {step, attempt}"
            )
        last, microbatches = options.stages - 1, range(options.microbatches)
        expected = {"own": Counter((stage, m) for m in microbatches)}
        if options.tied and last > 0 and stage in (0, last):
            expected["tied"] = Counter((s, m) for s in (0, last) for m in microbatches)
        averages = {part: Counter(sums) for part, sums in self.averages.items()}
        if options.rolls_back:
            # A lie that is not drawn is averaged; a late verdict takes the step back.
            averages = {
                part: Counter({cell: n for cell, n in sums.items() if cell[1] >= 0})
                for part, sums in averages.items()
            }
        if averages != expected:
            raise Violation(f"stage {stage} of step {step} sums up {self.averages}")

    def empty(self, step: int) -> None:
        self.sums.pop(step, None)
        self.finite = self.shrunk = True

    def _apply(self, order: Apply) -> tuple[str, float]:
        """The fingerprint of the new parameters."""
        peer, self.last_apply = self.peer, order
        self.check_averaged(order.step, order.attempt)
        if (peer.id, order.attempt) in peer.world.aborted:
            raise Violation(f"{peer.id} applies the aborted attempt {order.attempt}")
        self.params += ((int(order.step), order.attempt),)
        self.empty(order.step)
        self.averaged = None
        peer.world.has_applied.add((peer.id, int(order.step)))
        check_replicas(peer.world, self)
        norm, peer.differs = 2.0 if peer.differs else 1.0, False
        return self.digest, norm

    def _can_save(self, request: SaveSnapshot) -> bool:
        peer, here = self.peer, (self.version, self.stage)
        return (request.version, request.stage) == here and peer.world.now >= peer.unsaving_until

    def _save(self, request: SaveSnapshot) -> SnapshotReady:
        version, stage = request.version, request.stage
        item, sha = f"snapshot/{version}/{stage}", sha_of(self.params, stage)
        self.peer.snapshots[item] = (sha, self.params)
        size = stage_sizes(self.peer.world.manifest)[stage].state_bytes
        return SnapshotReady(version=version, stage=stage, item=item, bytes=size, sha256=sha)
