"""Chooses the codecs of a new run's borders: what `auto` in [codecs] of run.toml stands for.

Owns measuring what each codec takes on this machine, about a second long, and the sentence that
says why a pair was chosen. The choice itself is `swarm_shared.codecs.choice`'s, the loss that a
pair costs `swarm_shared.codecs.quality`'s. Imports torch: only making a run imports this module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from swarm_coordinator.configuration.run_settings import CodecsSection, RunSettings
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.units import latency_text
from swarm_shared.codecs.choice import MEGABIT_BYTES, CodecPair, Cost, accepted, choose, seconds
from swarm_shared.codecs.quality import QualityTable, quality_table
from swarm_shared.codecs.tensors import DTYPES, decode, encode
from swarm_shared.run.codec_sizes import CodecName, encoded_bytes
from swarm_shared.run.model_config import ComputeDtype

Clock = Callable[[], float]

MEASURING_SECONDS = 1.0
MAX_TURNS = 7
SAMPLE_ELEMENTS = 1 << 20
"""Of larger activations a part is measured: what a codec takes is proportional to the length."""


def select_codecs(
    settings: RunSettings,
    table: QualityTable | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[RunSettings, str]:
    """The settings with codecs in the place of `auto`, and why in one sentence.

    ConfigurationError when no pair's loss is within the budget.
    """
    table = table or quality_table()
    section = settings.codecs
    if settings.stages.count == 1:
        return _replace_codecs(
            settings, table.pairs["none / none"]
        ), "codecs: none, for one stage no border"
    within = accepted(table.pairs, section.largest_loss_gap)
    if not within:
        smallest = min(one.gap_relative for one in table.pairs.values())
        raise ConfigurationError(
            f"no pair of codecs was measured to cost at most {section.largest_loss_gap:.2%} of "
            f"loss; [codecs] largest_loss_gap must be at least {max(smallest, 0.0)}"
        )
    model, training = settings.model.config, settings.training
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
        f"border takes {latency_text(seconds(pair, costs, rate))} a microbatch there and back at "
        f"{section.up_mbit_per_second:g} Mbit/s, "
        f"{latency_text(seconds(without, costs, rate))} without"
    )


def measure_costs(
    names: Sequence[CodecName],
    elements: int,
    dtype: ComputeDtype,
    clock: Clock = time.perf_counter,
    budget_seconds: float = MEASURING_SECONDS,
) -> dict[str, Cost]:
    """What each codec takes for a tensor of so many elements, in one thread of this machine.

    Each has an equal part of the budget, and two turns at least: one warms caches up.
    """
    sample = torch.randn(min(elements, SAMPLE_ELEMENTS), generator=torch.Generator().manual_seed(1))
    tensor_N = sample.to(DTYPES[dtype])
    scale = elements / tensor_N.numel()
    costs: dict[str, Cost] = {}
    with _one_thread():
        for name in names:
            slot = memoryview(bytearray(encoded_bytes(name, tensor_N.numel(), dtype)))
            deadline = clock() + budget_seconds / len(names)
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
    words = settings.codecs.model_dump()
    words |= {"activation": pair.activation, "gradient": pair.gradient}
    return settings.model_copy(update={"codecs": CodecsSection.model_validate(words)})


@contextmanager
def _one_thread() -> Iterator[None]:
    """A volunteer's other cores compute while one encodes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
