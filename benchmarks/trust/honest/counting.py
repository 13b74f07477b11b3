"""What a machine does on order: load a state, count cells, show them, and audit another one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.run_data import RunData
from benchmarks.trust.honest.cells import Setting, cell_file, in_slot, runner_of, state_file
from swarm_client.stage.protocol.gradient_blocks import sampled_blocks
from swarm_client.stage.protocol.messages import ShownFile
from swarm_client.stage.protocol.slot_sizes import GRADIENT_ELEMENT_BYTES
from swarm_client.stage.worker.audits import AuditRunner
from swarm_client.stage.worker.backward_pass import ParameterGradients
from swarm_client.stage.worker.stage_runner import BackwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.transcript import KeptTensors, Transcript
from swarm_shared.base.types import MicrobatchIndex, Step, Version


def _liar(factor: float) -> type[StageRunner]:
    class Liar(StageRunner):
        def _computed(self, gradients: ParameterGradients) -> list[Tensor]:
            return [factor * gradient for gradient in super()._computed(gradients)]

    return Liar


class Counting:
    """The stage that a machine holds, at one version."""

    def __init__(self) -> None:
        self._folder = Path()
        self._runner: StageRunner | None = None

    @property
    def _held(self) -> StageRunner:
        assert self._runner is not None, "the first order is to hold a stage"
        return self._runner

    def hold(
        self, run_dir: str, folder: str, setting: list[Any], stage: int, factor: float
    ) -> None:  # fmt: skip
        """Hold a stage; the gradients of its parameters are multiplied by `factor`, which is 1 at
        an honest machine."""
        self._folder = Path(folder)
        manifest = Setting(*setting).manifest(RunData(Path(run_dir)).manifest)
        self._runner = runner_of(manifest, stage, StageRunner if factor == 1.0 else _liar(factor))

    def load(self, version: int) -> None:
        path = state_file(self._folder, version, self._held.stage_index)
        StepRunner(self._held).load(path, Version(version))

    def count(self, microbatch: int) -> dict[str, Any]:
        """Count a cell, as of a request from the network; the receipt's transcript and loss."""
        runner = self._held
        content = cell_file(
            self._folder, runner.version, microbatch, runner.stage_index
        ).read_bytes()
        size, request = runner.sizes.request_bytes, microbatch + 1
        slot = in_slot(runner, content[:size])
        result = runner.forward(
            request, Step(runner.version + 1), MicrobatchIndex(microbatch), True, slot[:size]
        )
        loss_sum = None
        if isinstance(result, BackwardResult):
            loss_sum = result.loss_sum
        else:
            runner.output_sent(request, slot[: runner.codec.write_output(result.output, slot)])
            gradient = content[size:]
            result = runner.backward(request, in_slot(runner, gradient)[: len(gradient)])
        wire = None
        if result.input_gradient is not None:
            wire = slot[: runner.codec.write_input_gradient(result.input_gradient, slot)]
        transcript = runner.transcribe(request, result, wire)
        if result.owed is not None:
            transcript = runner.count_weights(request).transcript()
        assert transcript is not None, "each cell is counted once"
        return {"transcript": transcript.model_dump(), "loss_sum": loss_sum}

    def show(self, microbatch: int, path: str) -> None:
        """Write what a counted cell gives, for its auditor."""
        step = Step(self._held.version + 1)
        AuditRunner(self._held).save_kept(
            step,
            MicrobatchIndex(microbatch),
            Path(path),
            KeptTensors.COMPUTED,
            self._blocks(microbatch),
        )

    def _blocks(self, microbatch: int) -> tuple[int, ...]:
        """The blocks of a cell's gradient that are compared."""
        layout = self._held.layout
        elements = layout.own_count + layout.tied_count
        return sampled_blocks(f"{microbatch:032x}", elements * GRADIENT_ELEMENT_BYTES)

    def audit(
        self, microbatch: int, computed: str | None, claimed: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Compute a cell again, and compare it with what another machine shows."""
        runner = self._held
        inputs = cell_file(self._folder, runner.version, microbatch, runner.stage_index)
        shown = None
        if computed is not None and claimed is not None:
            shown = ShownFile(
                path=computed, blocks=self._blocks(microbatch), claimed=Transcript(**claimed)
            )
        found = AuditRunner(runner).audit(Step(runner.version + 1), inputs, shown)
        return {
            "transcript": found.transcript.model_dump(), "loss_sum": found.loss_sum,
            "distance": found.distance,
        }  # fmt: skip
