"""The cut of the model for an expected fleet: how many stages, and where (`init --fleet`).

For each number of stages it makes a few cuts, and takes from each what the fleet would train. That
is the rate of whole steps: a step is computed at the rate of the best placement of the machines
(`simulator.efficiency`), then averaged (`swarm_shared.scheduling.placement`). Filling and draining
the pipeline are left out. After Whale (Jia et al. 2022, arXiv 2011.09208); docs/decisions, number
0044.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.run_creation.stage_plan import (
    StagePlan,
    in_stages,
    plan_of,
    profile_of,
    with_microbatches_chosen,
)
from swarm_coordinator.simulator.efficiency import best_rate
from swarm_coordinator.simulator.fleet import Hardware
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.base.text import memory_text
from swarm_shared.run.manifest import StageRange, with_bottlenecks
from swarm_shared.run.stage_cut import PartProfile, StageCost, plan_stages
from swarm_shared.scheduling.placement import reduce_weights, round_seconds
from swarm_shared.scheduling.placement.stage_sizes import FLOAT_BYTES, StageSizes, sizes_of_cut

STAGE_COUNTS = range(2, 17)
"""Numbers of stages that are compared."""

MAX_PLACED = 1000
"""Machines of a fleet, which is in random order, that are placed; the rate is scaled up."""

MAX_OFFERS = 8
"""Amounts of memory for which a cut is made, of all that the fleet's machines offer."""


class ExpectedFleet:
    """The machines that are expected, and what they have together."""

    def __init__(self, machines: Sequence[Hardware]) -> None:
        self.size = len(machines)
        self.flops_per_second = math.fsum(one.flops_per_second for one in machines)
        self.up_bytes_per_second = math.fsum(one.up_bytes_per_second for one in machines)
        self._placed = machines[:MAX_PLACED]
        # What they hold does not depend on their rates.
        offers = Counter(one.memory.model_copy(update={"balance": None}) for one in machines)
        self._offers = dict(sorted(offers.items(), key=lambda item: item[0].device_bytes))
        self._averaging: dict[tuple[MemoryOffer, ...], float] = {}

    @property
    def offers(self) -> list[MemoryOffer]:
        """What single machines offer, from the least to the most."""
        return list(self._offers)

    def holders(self, stages: Sequence[StageRange]) -> int:
        """Return the number of machines that hold at least one of the stages."""
        return sum(
            count
            for offer, count in self._offers.items()
            if any(offer.holds(stage.memory) for stage in stages)
        )

    def rate(self, stages: Sequence[StageRange], sizes: Sequence[StageSizes]) -> float:
        """Return the microbatches per second of the best placement; 0 if a stage has no machine."""
        return best_rate(self._placed, stages, sizes) * self.size / len(self._placed)

    def averaging_seconds_per_byte(self, stage: StageMemory) -> float:
        """Return how long the machines of a stage average one byte of its gradients.

        All machines that can hold the stage are counted, because chance decides which of them do,
        and the slowest line of those decides how long it takes.
        """
        able = tuple(offer for offer in self._offers if offer.holds(stage))
        if able not in self._averaging:
            self._averaging[able] = _averaging_seconds(
                [
                    min(one.up_bytes_per_second, one.down_bytes_per_second)
                    for one in self._placed
                    if one.memory.holds(stage)
                ]
            )
        return self._averaging[able]


def _averaging_seconds(bytes_per_second: Sequence[float]) -> float:
    if len(bytes_per_second) < 2:
        return 0.0
    weights = reduce_weights(bytes_per_second) or (1,) * len(bytes_per_second)
    shares = [weight / sum(weights) for weight in weights]
    return round_seconds(1, bytes_per_second, shares)


@dataclass(frozen=True, slots=True)
class FleetRow:
    """A cut into one number of stages, and what the fleet makes of it."""

    settings: RunSettings
    plan: StagePlan
    holders: int
    """Machines that hold at least one of the stages."""
    tokens_per_second: float
    """0 where a stage has no machine."""

    @property
    def stage_count(self) -> int:
        return len(self.plan.stages)


def fleet_rows(settings: RunSettings, fleet: ExpectedFleet, choose_sizes: bool) -> list[FleetRow]:
    """Return the best cut for each number of stages, that of the settings included.

    `choose_sizes`: the microbatches' size follows from the number of stages.
    """
    model = settings.model_shape
    # Without a layer a stage has no adapters, and trains nothing.
    most = model.layers if model.has_adapters else model.layers + 2
    counts = {count for count in STAGE_COUNTS if count <= most} | {settings.stages.count}
    rows: list[FleetRow] = []
    for count in sorted(counts):
        one = in_stages(settings, count)
        one = with_microbatches_chosen(one) if choose_sizes else one
        possible = [fleet_row(one, fleet, plan) for plan in _plans(one, fleet)]
        rows.append(max(possible, key=lambda row: row.tokens_per_second))
    return rows


def recommended(rows: Sequence[FleetRow], fleet: ExpectedFleet) -> FleetRow:
    """Return the row of the highest rate, of equal ones that with the fewest stages.

    CapacityError if the fleet can train none of them.
    """
    best = max(rows, key=lambda row: row.tokens_per_second)
    if best.tokens_per_second > 0:
        return best
    last = rows[-1]
    largest = max((stage.memory for stage in last.plan.stages), key=lambda m: m.device_bytes)
    raise CapacityError(
        f"the {fleet.size} machine(s) of this fleet can hold no cut into {rows[0].stage_count} "
        f"to {last.stage_count} stages: with {last.stage_count}, the largest stage needs {largest} "
        f"and a machine offers at most {fleet.offers[-1]}; expect more or larger machines, use a "
        "smaller model, or give --stages"
    )


def table_lines(rows: Sequence[FleetRow], fleet: ExpectedFleet, used: FleetRow) -> Iterator[str]:
    """Yield the rows as lines of text; `used` has a mark."""
    yield f"cuts for {fleet.size} machine(s); a step's average over their lines included:"
    yield "  stages   machines that hold one   largest stage, device + host   tokens/s"
    for row in rows:
        needs = [stage.memory for stage in row.plan.stages]
        device = memory_text(max(need.device_bytes for need in needs))
        host = memory_text(max(need.host_bytes for need in needs))
        rate = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "none"
        share = f"{row.holders / fleet.size:.0%}"
        mark = "*" if row is used else " "
        yield f"{mark} {row.stage_count:>6}   {share:>22}   {f'{device} + {host}':>28}   {rate:>8}"


def fleet_row(settings: RunSettings, fleet: ExpectedFleet, plan: StagePlan) -> FleetRow:
    """Return what the fleet makes of one cut."""
    training, stages, sizes = settings.training, plan.stages, _sizes(settings, plan.stages)
    holders, rate = fleet.holders(stages), fleet.rate(stages, sizes)
    if rate <= 0:
        return FleetRow(settings, plan, holders, 0.0)
    averaging = max(
        size.gradient_bytes * fleet.averaging_seconds_per_byte(stage.memory)
        for stage, size in zip(stages, sizes, strict=True)
    )
    sequences = training.microbatches_per_step * training.sequences_per_microbatch
    tokens = sequences * settings.model_shape.sequence_length
    seconds = training.microbatches_per_step / rate + averaging
    return FleetRow(settings, plan, holders, tokens / seconds)


def _plans(settings: RunSettings, fleet: ExpectedFleet) -> Iterator[StagePlan]:
    """Yield the cut that `init` makes without a fleet, the one whose slowest stage takes this fleet
    the least time, and the same where all stages fit into an amount of memory that is offered."""
    cost, profile = _stage_cost(settings, fleet), profile_of(settings)
    staleness, exact = settings.training.staleness, settings.codecs.average == "exact"
    plain = plan_of(settings)
    yield plain
    seen = {_ends(plain.stages)}
    few = fleet.offers[:: math.ceil(len(fleet.offers) / MAX_OFFERS)]
    for offer in (None, *few):
        with contextlib.suppress(CapacityError):
            count = settings.stages.count
            cut = plan_stages(profile, count, staleness, exact, cost=cost, offer=offer)
            if _ends(cut) not in seen:
                seen.add(_ends(cut))
                yield plan_of(settings, cut)


def _ends(cut: Sequence[StageRange]) -> tuple[int, ...]:
    return tuple(stage.end_layer for stage in cut)


def _sizes(settings: RunSettings, stages: Sequence[StageRange]) -> tuple[StageSizes, ...]:
    config = with_bottlenecks(settings.model_shape, stages)
    return sizes_of_cut(config, stages, settings.training, settings.codecs.config)


def _stage_cost(settings: RunSettings, fleet: ExpectedFleet) -> StageCost:
    """Return the seconds of a step that a stage takes with an equal part of the fleet: the slower
    of computing and sending its microbatches, then averaging."""
    microbatches = settings.training.microbatches_per_step * settings.stages.count
    averaging = FLOAT_BYTES * fleet.averaging_seconds_per_byte(StageMemory())
    sizes = _sizes(settings, plan_of(settings).stages)

    def seconds(part: PartProfile, is_first: bool, is_last: bool) -> float:
        sent = (0 if is_last else sizes[0].sent_bytes) + (0 if is_first else sizes[-1].sent_bytes)
        busy = max(part.flops / fleet.flops_per_second, sent / fleet.up_bytes_per_second)
        return microbatches * busy + averaging * part.parameters

    return seconds
