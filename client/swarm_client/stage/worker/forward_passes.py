"""Forward passes of one stage, each with as much of its graph as the memory of graphs allows.

What is kept is decided by `swarm_client.stage.worker.graph_memory`. The sizes are measured on the
first pass: the storages that autograd saves, without the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from swarm_client.stage.worker.accelerator import Accelerator
from swarm_client.stage.worker.backward_pass import Graph
from swarm_client.stage.worker.graph_memory import GraphMemory
from swarm_client.stage.worker.parameter_versions import ParameterSet, ParameterSets
from swarm_client.stage.worker.payloads import MicrobatchInput
from swarm_client.stage.worker.transfer.device_copier import DeviceCopier
from swarm_client.stage.worker.transfer.graph_offload import GraphOffload
from swarm_shared.model.layer_seconds import LayerSeconds
from swarm_shared.model.split_backward import WeightTape
from swarm_shared.run.graph_sizes import GraphSizes


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves in its scope: every storage once, parameters not at
    all."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.total = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        # Detached: an output that its own node saves would otherwise keep itself alive.
        return tensor.detach()


class ForwardPasses:
    """The forward passes of one runner. Not thread-safe."""

    def __init__(
        self, accelerator: Accelerator, copier: DeviceCopier, parameter_sets: ParameterSets,
        graphs: GraphMemory, *, splits: bool,
    ) -> None:  # fmt: skip
        """`splits`: gradients of weights may be computed after a backward pass."""
        self._accelerator = accelerator
        self._copier = copier
        self._graphs = graphs
        self._splits = splits
        self._streams_weights = parameter_sets.weights is not None
        self._offload: GraphOffload | None = None
        if accelerator.streams is not None and graphs.host_bytes:
            stages = [parameter_set.stage for parameter_set in parameter_sets]
            permanent = [tensor for s in stages for tensor in (*s.parameters(), *s.buffers())]
            self._offload = GraphOffload(accelerator.device, accelerator.streams, permanent)

    def run(
        self, parameter_set: ParameterSet, inputs: MicrobatchInput, layers_not_kept: int,
        entry: Tensor | None = None,
    ) -> Graph:  # fmt: skip
        """Run forward with a graph, without some first layers, which are computed again or wait in
        host memory. `entry`: the input on the device, if it is there already."""
        stage = parameter_set.stage
        entry, targets_BT = self._on_device(inputs, entry)
        if not stage.is_first:
            # A new tensor over the same memory, so that the kept input stays free of autograd.
            entry = entry.detach().requires_grad_()
        offload, offloaded = None, self._graphs.offloaded_of(layers_not_kept)
        if self._offload is not None and offloaded:
            offload = self._offload.forward_pass(offloaded)
        recomputed_layers = layers_not_kept - offloaded
        # Layers that are computed again are not recorded: their factors do not exist yet.
        tape: WeightTape | None = None
        if self._splits and not recomputed_layers:
            tape = WeightTape()
        elif self._streams_weights:
            tape = WeightTape(only_of_host=True)
        with nullcontext() if tape is None else tape.recording():
            output = stage(entry, targets_BT, recomputed_layers, offload)
        return Graph(None if stage.is_first else entry, output, recomputed_layers, offloaded, tape)

    def without_graph(
        self, parameter_set: ParameterSet, inputs: MicrobatchInput, entry: Tensor | None
    ) -> Tensor:
        """Run forward without a graph; return the output_BTD, on the last stage the loss."""
        entry, targets_BT = self._on_device(inputs, entry)
        with torch.no_grad():
            output: Tensor = parameter_set.stage(entry, targets_BT)
        return output

    def _on_device(
        self, inputs: MicrobatchInput, entry: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if entry is None:
            entry = self._copier.to_device(inputs.inputs)
        targets_BT = inputs.targets_BT
        return entry, None if targets_BT is None else self._copier.to_device(targets_BT)

    def to_keep(
        self, parameter_set: ParameterSet, inputs: MicrobatchInput, entry: Tensor | None
    ) -> Graph | None:
        """Run forward with as much of a graph as fits beside those in flight; None if nothing
        does."""
        graphs = self._graphs
        if graphs.measured is None:
            graph = self._run_measured(parameter_set, inputs, entry)
            working_bytes = graphs.sizes.working_bytes(graph.recomputed_layers)
            return graph if working_bytes <= graphs.budget_bytes else None
        recomputed = graphs.layers_to_recompute()
        return None if recomputed is None else self.run(parameter_set, inputs, recomputed, entry)

    def now(
        self, parameter_set: ParameterSet, inputs: MicrobatchInput, entry: Tensor | None = None
    ) -> Graph:
        """Run forward for a backward pass that follows at once, whatever memory that takes."""
        if self._graphs.measured is None:
            return self._run_measured(parameter_set, inputs, entry)
        sizes = self._graphs.measured
        self._graphs.make_room(sizes.least_working_bytes)
        recomputed = sizes.fewest_recomputed(self._graphs.room_bytes())
        if recomputed is None:
            recomputed = sizes.layers
        return self.run(parameter_set, inputs, recomputed, entry)

    def _run_measured(
        self, parameter_set: ParameterSet, inputs: MicrobatchInput, entry: Tensor | None
    ) -> Graph:
        """Run forward with the graph of one layer only, as more might not fit, and measure it."""
        layers = list(parameter_set.stage.model.layers.values())
        saved = _SavedBytes(parameter_set.stage.parameters())
        totals, input_bytes = [0, 0], [0]

        def begins(_: object, args: tuple[Tensor, ...]) -> None:
            totals[0], input_bytes[0] = saved.total, args[0].nbytes

        def ends(*_: object) -> None:
            totals[1] = saved.total

        hooks = [layer.register_forward_pre_hook(begins) for layer in layers[-1:]]
        hooks += [layer.register_forward_hook(ends) for layer in layers[-1:]]
        recomputed = max(0, len(layers) - 1)
        try:
            with saved:
                graph = self.run(parameter_set, inputs, recomputed, entry)
        finally:  # also when `between_layers` ends the computation
            for hook in hooks:
                hook.remove()
        layer_bytes = totals[1] - totals[0]
        others_bytes = saved.total - layer_bytes
        self._graphs.measured = GraphSizes(len(layers), layer_bytes, input_bytes[0], others_bytes)
        return graph

    def measure_seconds(self, compute: Callable[[], object]) -> None:
        """Measure what a layer takes, where its graph could wait in host memory: of that depends
        whether it is worth a copy. `compute`: one microbatch."""
        if self._offload is None:
            return
        sizes = self._graphs.sizes
        self._accelerator.synchronise()
        began = time.perf_counter()
        compute()
        self._accelerator.synchronise()
        recomputed = sizes.fewest_recomputed(self._graphs.room_bytes())
        passes = 3 * sizes.layers + (sizes.layers if recomputed is None else recomputed)
        self._graphs.seconds = LayerSeconds(
            (time.perf_counter() - began) / max(1, passes),
            self._offload.copy_seconds(self._accelerator, sizes.layer_bytes),
        )
