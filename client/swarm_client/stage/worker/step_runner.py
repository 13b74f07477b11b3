"""The step close on one worker: gradients out, averaged gradients in, norm, optimizer step; and the
state that survives it.

Owns the optimizer and the parameter version. Does not own the all-reduce, which reads `gradients`
and writes `result` in shared host memory, nor computing gradients
(`swarm_client.stage.worker.stage_runner`). Only `apply`, `load` and `reinitialise` change
parameters; until then a failed round leaves the accumulator unchanged. With staleness, the step
after the closing one is computed meanwhile in a parameter set of its own, which only `load` and
`reinitialise` change.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.messages import DigestSums, NormComputed, SumsDigested
from swarm_client.stage.worker.accumulation.digests import slice_digests
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_shared.base.errors import ProtocolError, StorageError
from swarm_shared.base.types import MicrobatchIndex, Step, Version
from swarm_shared.codecs.half_precision import is_finite
from swarm_shared.identity.norm_sketch import Sketcher, to_text, vector_key
from swarm_shared.model import (
    Fingerprint,
    Stage,
    apply_step,
    fingerprint,
    initialise_trained,
    load_frozen,
    load_parameters,
    load_state,
    make_optimizer,
    open_state,
    save_state,
    state_to_tensors,
)
from swarm_shared.model.fixed_point_sums import mean_gradient
from swarm_shared.model.flat_gradients import ordered_sum_of_squares
from swarm_shared.run.schedule import clip_factor


class StepRunner:
    """Closes the steps of one StageRunner, one after another."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._optimizer = make_optimizer(runner.stage, runner.manifest.optimizer)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the stage's parameters and optimizer state."""
        return fingerprint(self._runner.stage, self._optimizer)

    def prepare_round(self, step: Step, gradients: Tensor) -> tuple[MicrobatchIndex, ...]:
        """Copy the accumulated sums out; microbatches that arrive later do not change the copy."""
        accumulator = self._runner.closing_parameter_set(step).accumulator
        accumulator.write_to(gradients)
        return accumulator.contents.microbatches()

    def norm(self, step: Step, step_tokens: int, result: Tensor) -> NormComputed:
        """Return the squared norms of the mean gradient's two parts, from the sums in `result`."""
        self._runner.closing_parameter_set(step)
        if not is_finite(result):
            return NormComputed(own_squared=0.0, tied_squared=0.0, finite=False)
        # On the host for every device: the same operations in the same order everywhere.
        mean = mean_gradient(result, step_tokens, self._runner.parameter_sets.quantum)
        own_count = self._runner.layout.own_count
        return NormComputed(
            own_squared=float(ordered_sum_of_squares(mean[:own_count])),
            tied_squared=float(ordered_sum_of_squares(mean[own_count:])),
            finite=True,
        )

    def digest_sums(self, request: DigestSums, put_in: Tensor, taken_out: Tensor) -> SumsDigested:
        """Answer the request about two flat vectors of sums."""
        self._runner.closing_parameter_set(request.step)
        if self._runner.parameter_sets.quantum is None:
            raise RequestFailed("bad_input", "sums of this run are rounded, and not checked")
        own_count = self._runner.layout.own_count
        cut = slice(0, own_count) if request.part == "own" else slice(own_count, None)
        vectors = [put_in[cut].numpy(), taken_out[cut].numpy()]
        key = vector_key(request.seed, request.part, request.weights)
        parts, results = slice_digests(key, vectors, request.stops)
        if not request.sketches:
            return SumsDigested(parts=parts, results=results)
        part, result = map(to_text, Sketcher(request.seed, request.part).sketches(vectors))
        return SumsDigested(parts=parts, results=results, part_sketch=part, result_sketch=result)

    def apply(
        self, step: Step, step_tokens: int, global_norm: float, learning_rate: float,
        result: Tensor,
    ) -> Fingerprint:  # fmt: skip
        """Take the optimizer step. All refusals come before the first change."""
        parameter_set = self._runner.closing_parameter_set(step)
        if not is_finite(result):
            raise RequestFailed(
                "not_finite",
                f"the averaged gradient of step {step} holds infinities or NaNs; it was not "
                "applied",
            )
        factor = clip_factor(global_norm, self._runner.manifest.optimizer.clip_norm)
        mean = mean_gradient(result, step_tokens, self._runner.parameter_sets.quantum)
        self._runner.parameter_sets.change()
        newest = self._runner.parameter_sets.newest(self._runner.version)
        if parameter_set is not newest:
            parameter_set.take_parameters(newest)
        self._optimizer.parameters = parameter_set.parameters
        apply_step(self._optimizer, self._runner.layout, mean, learning_rate, factor)
        self._runner.reset_step(step)
        self._runner.graphs.keep_more()
        self._runner.version = Version(step)
        return self.fingerprint()

    def save(self, path: Path, version: Version) -> None:
        """Write parameters and optimizer state. Equal states make equal bytes, so that replicas'
        files have one hash."""
        self._check_version(version)
        tensors = state_to_tensors(self._runner.stage, self._optimizer, self._previous(version))
        try:
            save_state(path, tensors, self._metadata(version))
        except (StorageError, OSError) as error:
            raise RequestFailed("storage", str(error)) from error

    def load(self, path: Path, version: Version) -> Fingerprint:
        """Load a file that `save` wrote, here or on a peer, or the manifest's file of version 0.
        All checks come first."""
        tensors = self._tensors(path, version)
        manifest = self._runner.manifest
        self._runner.parameter_sets.change()
        try:
            newest = self._runner.parameter_sets.newest(version).stage
            if version == 0 and manifest.initial and not manifest.model.has_adapters:
                load_parameters(newest, tensors)
                return self._begin(version)
            load_state(newest, self._optimizer, tensors, self._previous(version))
        except ProtocolError as error:
            raise RequestFailed("bad_input", str(error)) from error
        self._runner.reset()
        self._runner.version = version
        return self.fingerprint()

    def reinitialise(self, version: Version) -> Fingerprint:
        """Start again from the manifest's seed; frozen parameters stay."""
        self._runner.parameter_sets.change()
        newest = self._runner.parameter_sets.newest(version).stage
        initialise_trained(newest, self._runner.manifest.training.seed)
        return self._begin(version)

    def load_base(self, path: Path) -> None:
        """Load the stage's frozen parameters from the manifest's file. All checks come first."""
        self._runner.parameter_sets.change()
        try:
            # One copy, which all parameter sets share.
            load_frozen(self._runner.stage, self._tensors(path, Version(0)))
        except ProtocolError as error:
            raise RequestFailed("bad_input", str(error)) from error

    def _tensors(self, path: Path, version: Version) -> dict[str, Tensor]:
        """The tensors of a file that says that it is of this stage and version."""
        try:
            stored = open_state(path)
        except StorageError as error:
            raise RequestFailed("storage", str(error)) from error
        expected = self._metadata(version)
        if stored.metadata != expected:
            raise RequestFailed(
                "bad_input",
                f"{path} holds {stored.metadata}, and {expected} is needed: fetch the "
                "state of this stage and version",
            )
        return stored.tensors

    def _begin(self, version: Version) -> Fingerprint:
        """Train from the newest parameters on, with an optimizer before its first step."""
        newest = self._runner.parameter_sets.newest(version)
        for parameter_set in self._runner.parameter_sets:
            if parameter_set is not newest:
                parameter_set.take_parameters(newest)
        self._optimizer = make_optimizer(self._runner.stage, self._runner.manifest.optimizer)
        self._runner.reset()
        self._runner.version = version
        return self.fingerprint()

    def _previous(self, version: Version) -> Stage | None:
        """The stage with the version before; None where it is no part of the state."""
        parameter_set = self._runner.parameter_sets.previous(version)
        return None if parameter_set is None else parameter_set.stage

    def _check_version(self, version: Version) -> None:
        if version != self._runner.version:
            raise RequestFailed(
                "wrong_step",
                f"this worker has parameters of version {self._runner.version}, not {version}",
            )

    def _metadata(self, version: Version) -> dict[str, str]:
        return {"stage": str(self._runner.stage_index), "version": str(version)}
