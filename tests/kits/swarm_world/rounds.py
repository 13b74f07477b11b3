"""A simulated volunteer's close, norm and apply, as in `swarm_client.pipeline.step_close`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kits.swarm_world.checks import check_replicas
from kits.swarm_world.facts import Violation, own_squared, sha_of, tied_squared
from kits.swarm_world.peer_base import Holding, PeerBase, RoundFailure
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.protocol import AbortRound, Applied, Apply, Close, Reduction, RoundReport


class Averaging(PeerBase):
    # ---- close, average, apply

    def _close(self, close: Close) -> None:
        holding = self.holding
        if holding is None or close.step != holding.version + 1:
            self.send(
                RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, reason="not at this step",
                    missing=close.committed,
                )
            )  # fmt: skip
            return
        self._cancel_round()
        holding.closing, holding.averaged = close, None
        if close.moving:
            prepared = self.prepared
            if prepared is None or prepared.version != holding.version:
                self._failed(close, reason="nothing is prepared here")
                return
            prepared.closing, prepared.averaged = close, None
        if not self.wedged and not self.stuck:
            self.later(0.05 * self.world.rng.random(), lambda: self._reconcile(holding, close))

    def _reconcile(self, holding: Holding, close: Close) -> None:
        if self.holding is not holding or holding.closing is not close:
            return
        held = holding.of(close.step)
        if self.sums_nan:
            self.sums_nan = False
            holding.forget(close.step)
            self._failed(close, reset=True, not_finite=True, reason="a NaN")
            return
        extra = set(held) - set(close.committed)
        missing = set(close.committed) - set(held)
        if extra and self.world.rng.random() < self.world.options.uncommit_fails:
            holding.forget(close.step)
            self._failed(close, reset=True, reason="extras cannot be taken out")
            return
        for microbatch in extra:
            del held[microbatch]
        if missing:
            self._failed(
                close, missing=tuple(MicrobatchIndex(m) for m in sorted(missing)), reason="missing"
            )
            return
        self.averaging = True
        own = Counter((holding.stage, m) for m in held)
        self._average(holding, close, close.reductions, own, {})
        if close.moving and self.prepared is not None:
            self._average(self.prepared, close, close.moving, Counter(), {})

    def _failed(self, close: Close, **details: Any) -> None:
        self.send(RoundReport(step=close.step, attempt=close.attempt, ok=False, **details))

    def _average(
        self,
        holding: Holding,
        close: Close,
        reductions: tuple[Reduction, ...],
        own: Counter[Any],
        results: dict[str, Any],
    ) -> None:
        """One stage's reductions in sequence; both stages of a moving peer concurrently."""
        if not self._holds(holding) or holding.closing is not close:
            return
        if len(results) == len(reductions):
            holding.averaged = (close.attempt, results["own"], results.get("tied"))
            self._averaged(close)
            return
        reduction = reductions[len(results)]

        def done(result: Counter[Any] | RoundFailure) -> None:
            if not self._holds(holding) or holding.closing is not close:
                return
            if isinstance(result, RoundFailure):
                self._cancel_round()
                self._failed(
                    close, reason="a member was lost", culprit=result.culprit,
                    carrier_failed=result.carrier_failed,
                )  # fmt: skip
                return
            results[reduction.part] = result
            self._average(holding, close, reductions, own, results)

        # The stage is part of the key: two stages that exchange peers have the same members.
        where = "tied" if reduction.part == "tied" else holding.stage
        key = (close.step, close.attempt, where, reduction.members)
        self.world.join_round(self, key, reduction.members, own, done)

    def _holds(self, holding: Holding) -> bool:
        return holding is self.holding or holding is self.prepared

    def _averaged(self, close: Close) -> None:
        """Report once everything that this close requires is averaged."""
        holding = self.holding
        assert holding is not None
        wanted = [holding, self.prepared] if close.moving else [holding]
        if any(h is None or h.averaged is None for h in wanted):
            return
        assert holding.averaged is not None
        self.averaging = False
        tied = 0.0 if holding.averaged[2] is None else tied_squared(close.step)
        self.send(
            RoundReport(
                step=close.step, attempt=close.attempt, ok=True,
                own_squared=own_squared(close.step, holding.stage), tied_squared=tied,
            )
        )  # fmt: skip

    def _cancel_round(self) -> None:
        if self.averaging:
            self.averaging = False
            self.world.end_rounds_of(self)

    def _unprepare(self) -> None:
        self.preparation = self.prepared = None

    def _abort(self, message: AbortRound) -> None:
        for holding in (self.holding, self.prepared):
            if holding is None:
                continue
            if holding.closing is not None and holding.closing.attempt == message.attempt:
                self._cancel_round()
                holding.closing = None
            if holding.averaged is not None and holding.averaged[0] == message.attempt:
                holding.averaged = None

    def check_averaged(self, step: int, attempt: int, stage: int) -> None:
        """The gradient to be applied contains every microbatch exactly once."""
        holding, options = self.holding, self.world.options
        prepared = self.prepared
        if prepared is not None and prepared.averaged is not None and prepared.stage == stage:
            holding = prepared
        if holding is None or holding.averaged is None or holding.averaged[0] != attempt:
            raise Violation(f"{self.id} has not averaged attempt {attempt} of step {step}")
        if (holding.stage, holding.version) != (stage, step - 1):
            raise Violation(f"{self.id} is at {holding.stage}, {holding.version}, not {stage}")
        _, own, tied = holding.averaged
        last, microbatches = options.stages - 1, range(options.microbatches)
        if own != Counter((stage, m) for m in microbatches):
            raise Violation(f"stage {stage} of step {step} sums up {own}")
        has_tied = options.tied and last > 0 and stage in (0, last)
        expected = Counter((s, m) for s in (0, last) for m in microbatches) if has_tied else None
        if tied != expected:
            raise Violation(f"the tied part of step {step} sums up {tied}")

    def _apply(self, message: Apply) -> None:
        holding = self.holding
        if holding is None or holding.version >= message.step:
            return  # it arrived twice, or this peer has been assigned another stage
        self.check_averaged(message.step, message.attempt, holding.stage)
        if (self.id, message.attempt) in self.world.aborted:
            raise Violation(f"{self.id} applies the aborted attempt {message.attempt}")
        prepared = self.prepared
        if prepared is not None and prepared.averaged is not None:
            # It switches to its next stage, which it has averaged as a member of that one.
            self.check_averaged(message.step, message.attempt, prepared.stage)
            self.holding = holding = prepared
        self._unprepare()
        holding.params += ((message.step, message.attempt),)
        holding.version = message.step
        holding.forget(message.step)
        holding.closing = holding.averaged = None
        self.waiting = [entry for entry in self.waiting if entry[0].step > message.step]
        check_replicas(self.world, self)
        digest = sha_of(holding.params, holding.stage)[:16]
        if not self.wedged:
            norm, self.differs = 2.0 if self.differs else 1.0, False
            self.send(Applied(step=Step(message.step), digest=digest, norm=norm))
