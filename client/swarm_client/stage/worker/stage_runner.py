"""The torch side of a stage worker, without any process around it.

Owns one stage's parameter sets (`swarm_client.stage.worker.parameter_versions`), the parameter
version, and the microbatches between their forward and backward pass. Does not own slots, messages
or order: one call is one computation, and `swarm_client.stage.worker.compute_loop` chooses the
next; nor the optimizer (`swarm_client.stage.worker.step_runner`).

Graphs are kept from forward to backward within `graph_budget_bytes`, whole or with some layers to
be computed again (`swarm_shared.run.graph_sizes`); beyond it only the input is kept
(`swarm_client.stage.worker.forward_passes`). A backward pass that needs room takes the graph of the
newest microbatch, which is needed last.
Where memory is short nevertheless, because another program takes it, less is kept
(`GraphMemory.keep_less`), and the computation is repeated.

A backward pass answers first and leaves the gradients of the weights for later where memory allows
(`swarm_shared.model.split_backward`): what is kept for them counts as part of a graph.

Where the device's memory is too little for the weights, some of them lie in host memory
(`swarm_client.stage.worker.transfer.weight_stream`).

Every gradient is computed separately, checked for finiteness and only then added, so that a failure
leaves no trace. That costs one more copy of the parameters' size in memory during a backward pass,
and one read of it. On a device with streams a gradient that was left for later is hashed from that
memory while the next microbatch is computed, up to the point at which the next gradient needs it.

Shape suffixes: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.slot_sizes import slot_sizes
from swarm_client.stage.worker.accelerator import Accelerator
from swarm_client.stage.worker.accumulation.accumulator import Accumulator, KeptMicrobatch
from swarm_client.stage.worker.backward_pass import Graph, ParameterGradients, differentiate
from swarm_client.stage.worker.compiling import compile_layers
from swarm_client.stage.worker.flights import CountedWeights, Digests, InFlight, OwedWeights
from swarm_client.stage.worker.forward_passes import ForwardPasses
from swarm_client.stage.worker.graph_memory import GraphMemory
from swarm_client.stage.worker.parameter_versions import ParameterSet, ParameterSets
from swarm_client.stage.worker.payloads import MicrobatchInput, PayloadCodec, all_finite
from swarm_client.stage.worker.transfer.device_copier import device_copier
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.codecs.half_precision import is_finite
from swarm_shared.identity.work_statements import wire_digest
from swarm_shared.model import Stage
from swarm_shared.model.split_backward import Weights
from swarm_shared.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The output activation_BTD, on the stage's device."""

    output: Tensor


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """input_gradient_BTD on the stage's device (None on stage 0), and whether it was
    accumulated."""

    input_gradient: Tensor | None
    added: bool
    loss_sum: float | None = None
    digests: Digests | None = None
    """The digests of what was exchanged so far; None if this call accumulates nothing of the
    microbatch, now or later."""
    counted_transcript: Transcript | None = None
    """The transcript of what the accumulator holds of this microbatch already, if it was added
    before."""
    owed: OwedWeights | None = None
    """The gradients that are still to be computed before the microbatch is accumulated; None if
    there are none."""


@dataclass(frozen=True, slots=True)
class ComputedAgain:
    """Results of computing one microbatch a second time: the output_BTD (on the last stage the
    loss), the input_gradient_BTD (None on stage 0), and the gradients of the parameters."""

    output: Tensor
    input_gradient: Tensor | None
    gradients: list[Tensor]


class StageRunner:
    """One stage, with its newest parameters at one version. Not thread-safe; everything is
    synchronous.

    Open steps are computed side by side, each with its own parameter version.
    """

    def __init__(
        self, manifest: Manifest, stage_index: StageIndex, accelerator: Accelerator,
        graph_budget_bytes: int, kept_budget_bytes: int, compile_backend: str | None = None,
        streamed_bytes: int = 0, host_graph_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.manifest = manifest
        self.stage_index = stage_index
        self._accelerator = accelerator
        self.sizes = slot_sizes(manifest, stage_index)
        self.parameter_sets = ParameterSets(
            manifest, stage_index, accelerator, kept_budget_bytes, streamed_bytes
        )
        if self.parameter_sets.weights is not None:
            # Streamed weights are copied to the device ahead of each product, which torch.compile
            # cannot express.
            compile_backend = None
        self.layout = self.parameter_sets.layout
        self.version = Version(0)
        self.codec = PayloadCodec(manifest, self.sizes, self.stage.is_first, self.stage.is_last)
        largest_bytes = max(self.sizes.slot_bytes, self.sizes.tensor_bytes)
        self.copier = device_copier(accelerator, largest_bytes)
        self._in_flight: dict[int, InFlight] = {}
        self._owed: dict[int, OwedWeights] = {}
        self._counted: CountedWeights | None = None
        """The microbatch counted last, whose gradient may still be hashed in the background."""
        # A device with memory of its own refuses allocations that do not fit. The host's system
        # does not, so that free memory has to be measured there.
        host = None if accelerator.has_own_memory else accelerator
        self.graphs = GraphMemory(
            graph_budget_bytes, self._in_flight, self._owed, host, host_graph_bytes
        )
        # Answering before the gradients of the weights needs a stage before or after this one that
        # waits for the answer, and layers whose products are separate, as compiled ones are not.
        splits = compile_backend is None and not (self.stage.is_first and self.stage.is_last)
        self._passes = ForwardPasses(
            accelerator, self.copier, self.parameter_sets, self.graphs, splits=splits
        )
        self._fetched: dict[int, tuple[MicrobatchInput, Tensor]] = {}
        """Inputs of queued forwards that are copied, or being copied, to the device."""
        self.while_computing: Callable[[], None] = lambda: None
        """Called when a computation has been handed to the device, before waiting for it."""
        self.between_layers: Callable[[], None] = lambda: None
        """Called before every layer, forward and backward; an exception from it ends the
        computation, which leaves no trace."""
        for parameter_set in self.parameter_sets:
            if compile_backend is not None:
                compile_layers(parameter_set.stage, compile_backend)
            for layer in parameter_set.stage.model.layers.values():
                layer.register_forward_pre_hook(lambda *_: self.between_layers())
                layer.register_forward_hook(self._watch_backward)

    def _watch_backward(self, _layer: object, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.between_layers())  # type: ignore[no-untyped-call]

    @property
    def stage(self) -> Stage:
        """The stage with the newest parameters."""
        return self.parameter_sets.newest(self.version).stage

    @property
    def accumulator(self) -> Accumulator:
        """The accumulator of the step that is applied next."""
        return self.parameter_sets.for_step(Step(self.version + 1)).accumulator

    @property
    def copies_while_computing(self) -> bool:
        """Whether the next input can be copied to the device while the device computes."""
        return self._accelerator.streams is not None

    # ---- computations

    def prefetch(self, request: int, payload: memoryview) -> None:
        """Start copying the input of a queued forward to the device, one at a time.

        RequestFailed: bad_input; the forward itself finds the same and reports it.
        """
        if not self._fetched:
            inputs = self.codec.read_input(payload)
            self._fetched[request] = inputs, self.copier.to_device(inputs.inputs)

    def forward(
        self, request: int, step: Step, microbatch: MicrobatchIndex, accumulate: bool,
        payload: memoryview,
    ) -> ForwardResult | BackwardResult:  # fmt: skip
        """Run one microbatch forward; on the last stage its backward pass follows at once.

        RequestFailed: wrong_step, bad_input, not_finite; nothing is kept then.
        """
        inputs, entry = self._fetched.pop(request, (None, None))
        parameter_set = self.open_parameter_set(step)
        self.graphs.measure_free()
        if request in self._in_flight:
            raise RequestFailed("bad_input", f"request number {request} is in flight already")
        if inputs is None:
            inputs = self.codec.read_input(payload)
        wire, digests = bytearray(), None
        if accumulate:
            wire = bytearray(payload)
            digests = self._digests(step, microbatch, wire)
        if parameter_set.stage.is_last:
            return self._forward_backward(
                parameter_set, microbatch, accumulate, inputs, entry, wire, digests
            )
        needs_backward = accumulate or not parameter_set.stage.is_first
        graph = self._passes.to_keep(parameter_set, inputs, entry) if needs_backward else None
        if graph is None:
            output = self._passes.without_graph(parameter_set, inputs, entry)
        else:
            output = graph.output.detach()
        self.while_computing()
        if not is_finite(output):
            raise RequestFailed(
                "not_finite",
                f"stage {self.stage_index}'s output for microbatch {microbatch} holds infinities "
                "or NaNs",
            )
        self._in_flight[request] = InFlight(
            step,
            microbatch,
            accumulate,
            digests,
            wire,
            inputs if needs_backward else None,
            graph,
        )
        return ForwardResult(output)

    def backward(self, forward_request: int, payload: memoryview) -> BackwardResult:
        """Run the backward pass of an earlier forward.

        A refused payload leaves the microbatch in flight, so that another gradient may follow; once
        the computation has begun it is in flight no more, whatever the result.
        """
        flight = self._in_flight.get(forward_request)
        if flight is None:
            raise RequestFailed(
                "unknown_microbatch",
                "this microbatch is not in flight any more: it was discarded, or its step is over",
            )
        output_gradient = self.codec.read_gradient(payload)
        wire_gradient = bytearray()
        if flight.digests is not None:
            wire_gradient = bytearray(payload)
            flight.digests.output_gradient = wire_digest(wire_gradient)
        self.graphs.measure_free()
        del self._in_flight[forward_request]
        if flight.inputs is None:
            return BackwardResult(None, added=False)
        kept = KeptMicrobatch(flight.wire_inputs, wire_gradient)
        try:
            return self._backward(flight, flight.inputs, output_gradient, kept)
        except (MemoryError, RuntimeError):
            # It may be computed again with less memory (`GraphMemory.keep_less`).
            self._in_flight[forward_request] = flight
            raise

    def _backward(
        self, flight: InFlight, inputs: MicrobatchInput, output_gradient: Tensor,
        kept: KeptMicrobatch,
    ) -> BackwardResult:  # fmt: skip
        parameter_set = self.parameter_sets.for_step(flight.step)
        graph, flight.graph = flight.graph, None
        if graph is None:
            graph = self._passes.now(parameter_set, inputs)
        else:
            working_bytes = self.graphs.sizes.working_bytes(
                graph.recomputed_layers, graph.offloaded_layers
            )
            self.graphs.make_room(working_bytes)
        return self._finish(
            parameter_set,
            flight.microbatch,
            flight.accumulate,
            graph,
            self.copier.to_device(output_gradient),
            kept,
            flight.digests,
        )

    def output_sent(self, forward_request: int, wire: memoryview) -> None:
        """Record the output of a forward in the form in which it is sent."""
        flight = self._in_flight.get(forward_request)
        if flight is not None and flight.digests is not None:
            flight.digests.output = wire_digest(wire)

    def transcribe(
        self, request: int, result: BackwardResult, wire: memoryview | None
    ) -> Transcript | None:
        """Return the transcript of the gradient in the accumulator, if the microbatch is in it. If
        the gradients of its weights are still owed, keep them for `count_weights` and return None.

        `wire`: the input's gradient in the form in which it is sent; None on stage 0.
        """
        digests = result.digests
        if digests is None:
            return result.counted_transcript
        digests.input_gradient = "" if wire is None else wire_digest(wire)
        if result.owed is not None:
            self._owed[request] = result.owed
            return None
        return self._record(digests)

    def _record(self, digests: Digests) -> Transcript:
        accumulator = self.parameter_sets.for_step(digests.step).accumulator
        transcript = accumulator.transcripts[digests.microbatch] = digests.transcript()
        return transcript

    def take_back(self, result: BackwardResult) -> None:
        """Take out what was added a moment ago, because its answer cannot be sent."""
        if result.added and result.digests is not None:
            self.uncommit(result.digests.step, (result.digests.microbatch,))

    def count_weights(self, computation: int) -> CountedWeights:
        """Compute and accumulate the gradients of weights that the answer of request `computation`
        left owed. RequestFailed: unknown_microbatch, not_finite."""
        self.finish_hashing()
        owed = self._owed.get(computation)
        if owed is None:
            raise RequestFailed("unknown_microbatch", "nothing is owed of it: its step is over")
        try:
            result = self._count(computation, owed)
        except RequestFailed:
            del self._owed[computation]
            raise
        # Still owed after a lack of memory: less is kept then (`GraphMemory.keep_less`).
        self._owed.pop(computation, None)
        return result

    def _count(self, computation: int, owed: OwedWeights) -> CountedWeights:
        digests = owed.digests
        accumulator = self.parameter_sets.for_step(digests.step).accumulator
        if not accumulator.contents.wants(digests.microbatch, accumulate=True):
            counted_transcript = accumulator.transcripts.get(digests.microbatch)
            return CountedWeights(added=False, transcribe=lambda: counted_transcript)
        gradients = self._computed(owed.gradients)
        if accumulator.can_hash_in_background(gradients):
            return self._count_in_background(computation, owed, gradients)
        digests.gradient = accumulator.add(digests.microbatch, gradients, owed.kept)
        transcript = self._record(digests)
        return CountedWeights(added=True, transcribe=lambda: transcript)

    def _count_in_background(
        self, computation: int, owed: OwedWeights, gradients: list[Tensor]
    ) -> CountedWeights:
        # The gradients become counts: they cannot be added again after a lack of memory.
        del self._owed[computation]
        digests = owed.digests
        accumulator = self.parameter_sets.for_step(digests.step).accumulator
        hashing = accumulator.add_hashed_in_background(digests.microbatch, gradients, owed.kept)

        def transcribe() -> Transcript:
            digests.gradient = hashing.result()
            return self._record(digests)

        self._counted = CountedWeights(added=True, transcribe=transcribe, hashing=hashing)
        return self._counted

    def finish_hashing(self) -> None:
        """Wait until the gradient that was counted last is hashed: before memory is taken for
        another one, and before transcripts are read or forgotten."""
        counted, self._counted = self._counted, None
        if counted is not None:
            counted.transcript()

    def _digests(self, step: Step, microbatch: MicrobatchIndex, wire: bytearray) -> Digests:
        """The digests of a stage's inputs; the last stage's output are the targets."""
        digests = Digests(step, microbatch, wire_digest(memoryview(wire)[: self.sizes.input_bytes]))
        if self.sizes.target_bytes:
            digests.output = wire_digest(memoryview(wire)[self.sizes.input_bytes :])
        return digests

    def discard(self, forward_request: int) -> None:
        """Drop a microbatch that is prefetched, in flight or owed; unknown numbers are ignored."""
        self._fetched.pop(forward_request, None)
        self._in_flight.pop(forward_request, None)
        self._owed.pop(forward_request, None)

    def cell_of(self, request: int) -> tuple[Step, MicrobatchIndex]:
        """The step and the number of a microbatch in flight or owed; if it is neither, the first
        one of the step that is applied next."""
        flight, owed = self._in_flight.get(request), self._owed.get(request)
        if flight is not None:
            return flight.step, flight.microbatch
        if owed is not None:
            return owed.digests.step, owed.digests.microbatch
        return Step(self.version + 1), MicrobatchIndex(0)

    def uncommit(self, step: Step, microbatches: tuple[MicrobatchIndex, ...]) -> bool:
        """Take microbatches out of the step's accumulator; False, with nothing changed, if one of
        them cannot be recomputed. Microbatches that are not in it are skipped."""
        if step not in self.parameter_sets.open_steps(self.version):
            return False
        self.finish_hashing()
        parameter_set = self.parameter_sets.for_step(step)
        accumulator = parameter_set.accumulator
        removal = accumulator.contents.removal(microbatches)
        if removal is None:
            return False
        accumulator.subtract(
            removal,
            (self.compute_again(parameter_set, kept).gradients for kept in removal.recompute),
        )
        return True

    def reset_step(self, step: Step) -> None:
        """Empty the step's accumulator and drop what is in flight of it; other steps continue."""
        self.finish_hashing()
        self.parameter_sets.for_step(step).accumulator.reset()
        for number in [n for n, flight in self._in_flight.items() if flight.step == step]:
            del self._in_flight[number]
        for number in [n for n, owed in self._owed.items() if owed.digests.step == step]:
            del self._owed[number]
        self._fetched.clear()

    def reset(self) -> None:
        """Empty all accumulators and drop everything in flight."""
        self.finish_hashing()
        for parameter_set in self.parameter_sets:
            parameter_set.accumulator.reset()
        self._in_flight.clear()
        self._owed.clear()
        self._fetched.clear()

    def limit_memory(self, vram_bytes: int | None, graph_bytes: int, host_graph_bytes: int) -> None:
        """Limit torch's allocator on an accelerator, where requests beyond the limit fail as out of
        memory, and the memory for graphs."""
        self._accelerator.limit_memory(vram_bytes)
        if self.graphs.offer(graph_bytes, host_graph_bytes):
            self._accelerator.release_cached()

    def open_parameter_set(self, step: Step) -> ParameterSet:
        """The parameter set of a step that can be worked on. RequestFailed: wrong_step."""
        steps = self.parameter_sets.open_steps(self.version)
        if step not in steps:
            raise RequestFailed(
                "wrong_step",
                f"this worker has parameters of version {self.version} and works on step "
                f"{' and '.join(map(str, steps))}, not {step}",
            )
        return self.parameter_sets.for_step(step)

    def closing_parameter_set(self, step: Step) -> ParameterSet:
        """The parameter set of the step that is applied next, the only one that can close."""
        if step != self.version + 1:
            raise RequestFailed(
                "wrong_step",
                f"this worker has parameters of version {self.version} and can close step "
                f"{self.version + 1}, not {step}",
            )
        return self.parameter_sets.for_step(step)

    def _forward_backward(
        self, parameter_set: ParameterSet, microbatch: MicrobatchIndex, accumulate: bool, inputs:
        MicrobatchInput,
        entry: Tensor | None, wire: bytearray, digests: Digests | None,
    ) -> BackwardResult:  # fmt: skip
        """The last stage's forward and backward pass of one microbatch."""
        needs_backward = not parameter_set.stage.is_first or accumulate
        if not needs_backward:
            loss = self._passes.without_graph(parameter_set, inputs, entry)
            return BackwardResult(None, False, self._finite_loss(loss))
        graph = self._passes.now(parameter_set, inputs, entry)
        loss_sum = self._finite_loss(graph.output)
        kept = KeptMicrobatch(wire, bytearray())
        result = self._finish(parameter_set, microbatch, accumulate, graph, None, kept, digests)
        return replace(result, loss_sum=loss_sum)

    def _finish(
        self, parameter_set: ParameterSet, microbatch: MicrobatchIndex, accumulate: bool, graph:
        Graph,
        output_gradient: Tensor | None, kept: KeptMicrobatch, digests: Digests | None,
    ) -> BackwardResult:  # fmt: skip
        """Run the backward pass of a graph. Accumulate the gradients of the parameters, leave those
        of the weights owed, or compute none if the microbatch is not to be accumulated."""
        accumulator = parameter_set.accumulator
        if digests is None or not accumulator.contents.wants(microbatch, accumulate):
            self.finish_hashing()
            input_gradient, _ = self._differentiate(graph, output_gradient, [], Weights.NEVER)
            transcript = accumulator.transcripts.get(microbatch) if accumulate else None
            return BackwardResult(input_gradient, False, counted_transcript=transcript)
        parameters = parameter_set.parameters
        weights = Weights.LATER if self.graphs.may_owe(graph, parameters) else Weights.NOW
        input_gradient, gradients = self._differentiate(graph, output_gradient, parameters, weights)
        if weights is Weights.LATER:
            owed = OwedWeights(digests, kept, gradients, gradients.nbytes)
            return BackwardResult(input_gradient, False, digests=digests, owed=owed)
        digests.gradient = accumulator.add(microbatch, self._computed(gradients), kept)
        return BackwardResult(input_gradient, True, digests=digests)

    def _differentiate(
        self, graph: Graph, output_gradient: Tensor | None, parameters: list[Tensor],
        weights: Weights,
    ) -> tuple[Tensor | None, ParameterGradients]:  # fmt: skip
        """The gradient of the input, checked for finiteness, and those of the parameters."""
        if weights is Weights.NOW:
            self.finish_hashing()
        input_gradient, gradients = differentiate(
            graph, output_gradient, parameters, weights, self.while_computing
        )
        self._check_finite([] if input_gradient is None else [input_gradient])
        return input_gradient, gradients

    def _computed(self, gradients: ParameterGradients) -> list[Tensor]:
        """Return all gradients of the parameters; RequestFailed (not_finite) unless all are
        finite."""
        computed = gradients.computed()
        self.while_computing()
        self._check_finite(computed)
        return computed

    def _check_finite(self, gradients: list[Tensor]) -> None:
        if not all_finite(gradients):
            raise RequestFailed(
                "not_finite",
                f"a gradient of stage {self.stage_index} holds infinities or NaNs; it was not "
                "added to the step's",
            )

    def compute_again(self, parameter_set: ParameterSet, kept: KeptMicrobatch) -> ComputedAgain:
        """Compute a microbatch once more from its inputs; the stage's state does not change.
        RequestFailed: bad_input for inputs that are not a microbatch of this stage, not_finite."""
        graph = self._graph_of(parameter_set, kept)
        input_gradient, gradients = self._differentiate(
            graph, self._kept_gradient(kept), parameter_set.parameters, Weights.NOW
        )
        return ComputedAgain(graph.output.detach(), input_gradient, self._computed(gradients))

    def output_again(self, parameter_set: ParameterSet, kept: KeptMicrobatch) -> Tensor:
        """Return only the output of a microbatch, computed once more. RequestFailed: bad_input."""
        inputs = self.codec.read_input(memoryview(kept.inputs))
        return self._passes.without_graph(parameter_set, inputs, None)

    def input_gradient_again(
        self, parameter_set: ParameterSet, kept: KeptMicrobatch
    ) -> Tensor | None:
        """Return only the gradient of a microbatch's input, computed once more; None on stage 0.
        RequestFailed: bad_input, not_finite."""
        graph = self._graph_of(parameter_set, kept)
        return self._differentiate(graph, self._kept_gradient(kept), [], Weights.NEVER)[0]

    def _graph_of(self, parameter_set: ParameterSet, kept: KeptMicrobatch) -> Graph:
        return self._passes.now(parameter_set, self.codec.read_input(memoryview(kept.inputs)))

    def _kept_gradient(self, kept: KeptMicrobatch) -> Tensor | None:
        """The gradient of the output on the device; None on the last stage."""
        if self.stage.is_last:
            return None
        return self.copier.to_device(self.codec.read_gradient(memoryview(kept.output_gradient)))

    def warm_up(self) -> None:
        """Compute a microbatch of zeros and discard it, so that kernels are loaded and layers
        compiled: the first microbatch of a process on a GPU takes many times as long as later ones,
        and would count as this peer's rate."""
        nothing = KeptMicrobatch(
            bytearray(self.sizes.request_bytes), bytearray(self.sizes.output_gradient_bytes)
        )
        for parameter_set in self.parameter_sets:
            self.compute_again(parameter_set, nothing)
        newest = self.parameter_sets.newest(self.version)
        self._passes.measure_seconds(lambda: self.compute_again(newest, nothing))

    def _finite_loss(self, loss: Tensor) -> float:
        loss_sum = float(loss.detach())
        if not math.isfinite(loss_sum):
            raise RequestFailed("not_finite", f"the loss of a microbatch is {loss_sum}")
        return loss_sum
