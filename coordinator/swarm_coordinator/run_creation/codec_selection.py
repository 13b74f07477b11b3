"""Selection of the codecs of a new run's stage boundaries: the meaning of `auto` in run.toml.

Owns the measurement of each codec's time on this machine, about one second in total, and the
sentence that explains the selection. The rule is `swarm_shared.codecs.choice`, the measured loss of
each pair `swarm_shared.codecs.quality`. Imports torch, so only the creation of a run imports it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from swarm_coordinator.configuration.run_settings import CodecsSection, RunSettings
from swarm_coordinator.offline.reference import compute_threads
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.text import latency_text
from swarm_shared.codecs.choice import MEGABIT_BYTES, CodecPair, Cost, accepted, choose, seconds
from swarm_shared.codecs.quality import QualityTable, quality_table
from swarm_shared.codecs.tensors import DTYPES, decode, encode
from swarm_shared.run.codec_sizes import CodecName, encoded_bytes
from swarm_shared.run.model_config import ComputeDtype

Clock = Callable[[], float]

MEASURING_SECONDS = 1.0
"""Seconds of measurement, over all codecs."""
MAX_TURNS = 7
"""Maximum number of measured repetitions of one codec."""
SAMPLE_ELEMENTS = 1 << 20
"""Maximum number of elements measured; a codec's time is proportional to the length."""


def select_codecs(
    settings: RunSettings,
    table: QualityTable | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[RunSettings, str]:
    """Replace `auto` by codecs; return the settings and the reason in one sentence.

    ConfigurationError when no pair's loss is within the budget.
    """
    table = table or quality_table()
    section = settings.codecs
    if settings.stages.count == 1:
        return _replace_codecs(
            settings, table.pairs["none / none"]
        ), "codecs: none, because one stage has no boundary"
    within = accepted(table.pairs, section.largest_loss_gap)
    if not within:
        smallest = min(one.gap_relative for one in table.pairs.values())
        raise ConfigurationError(
            f"no pair of codecs was measured to cost at most {section.largest_loss_gap:.2%} of "
            f"loss; [codecs] largest_loss_gap must be at least {max(smallest, 0.0)}"
        )
    model, training = settings.model_shape, settings.training
    width = model.bottleneck_size or model.hidden_size
    elements = training.sequences_per_microbatch * model.sequence_length * width
    plain: CodecName = "none"
    names = {plain, *(name for one in within.values() for name in (one.activation, one.gradient))}
    costs = measure_costs(sorted(names), elements, training.dtype, clock)
    rate = section.up_mbit_per_second * MEGABIT_BYTES
    chosen = choose(table.pairs, costs, rate, section.largest_loss_gap)
    assert chosen is not None, "the pairs within the budget were counted above"
    pair = table.pairs[chosen]
    without = CodecPair(activation=plain, gradient=plain, gap_relative=0.0)
    return _replace_codecs(settings, pair), (
        f"codecs: {pair.activation} for activations, {pair.gradient} for gradients, the fastest of "
        f"{len(within)} pairs measured to cost at most {section.largest_loss_gap:.2%} of loss: a "
        f"boundary takes {latency_text(seconds(pair, costs, rate))} a microbatch both ways at "
        f"{section.up_mbit_per_second:g} Mbit/s, "
        f"{latency_text(seconds(without, costs, rate))} without"
    )


def measure_costs(
    names: Sequence[CodecName],
    elements: int,
    dtype: ComputeDtype,
    clock: Clock = time.perf_counter,
) -> dict[str, Cost]:
    """Measure each codec's time for a tensor of `elements`, in one thread of this machine.

    Each codec gets an equal share of MEASURING_SECONDS and at least two repetitions, of which the
    first warms up caches.
    """
    sample = torch.randn(min(elements, SAMPLE_ELEMENTS), generator=torch.Generator().manual_seed(1))
    tensor_N = sample.to(DTYPES[dtype])
    scale = elements / tensor_N.numel()
    costs: dict[str, Cost] = {}
    # A volunteer's other cores compute while one encodes.
    with compute_threads(1):
        for name in names:
            slot = memoryview(bytearray(encoded_bytes(name, tensor_N.numel(), dtype)))
            deadline = clock() + MEASURING_SECONDS / len(names)
            turns: list[float] = []
            while len(turns) < 2 or (len(turns) <= MAX_TURNS and clock() < deadline):
                began = clock()
                nbytes = encode(name, tensor_N, slot)
                decode(name, slot[:nbytes], tensor_N.shape, dtype)
                turns.append(clock() - began)
            taken = scale * statistics.median(turns[1:])
            costs[name] = Cost(encoded_bytes(name, elements, dtype), taken)
    return costs


def _replace_codecs(settings: RunSettings, pair: CodecPair) -> RunSettings:
    values = settings.codecs.model_dump()
    values |= {"activation": pair.activation, "gradient": pair.gradient}
    return settings.model_copy(update={"codecs": CodecsSection.model_validate(values)})
