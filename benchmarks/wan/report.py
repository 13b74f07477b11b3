"""Result file of bench-wan from steps and bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.run_data import loss_disagreement
from benchmarks.wan.contenders.running import CONTENDERS, Outcome
from benchmarks.wan.fleet import Member, Sizes, compute_bound, minimum_bytes, pipeline_bound
from benchmarks.wan.links.check import LinkCheck
from benchmarks.wan.links.network import Sample
from benchmarks.wan.links.traffic import busy_cores, bytes_between
from benchmarks.wan.mixes import Mix


def result_row(
    outcome: Outcome, warmup: int, cooldown: int, samples: Sequence[Sample]
) -> dict[str, Any]:
    """Return the result of one run of one contender, timed between the ends of steps.

    A contender that works ahead has done a part of the first measured step before it and as much of
    the step after the last; without such a step its rate would be overestimated.
    """
    timed = outcome.steps
    last = len(timed) - 1 - cooldown
    begin, end = timed[warmup - 1].ended_at, timed[last].ended_at
    seconds = end - begin
    steps = last + 1 - warmup
    sent, received = bytes_between(samples, begin, end)
    return {
        "tokens_per_second": sum(one.tokens for one in timed[warmup : last + 1]) / seconds,
        "step_seconds": seconds / steps,
        "all_step_seconds": [one.seconds for one in timed],
        "sent_bytes_per_step": {name: round(count / steps) for name, count in sent.items()},
        "received_bytes_per_step": {name: round(count / steps) for name, count in received.items()},
        "losses": [one.loss for one in timed],
        "busy_cores": busy_cores(samples, begin, end),
        **outcome.details,
    }


def mix_document(
    mix: Mix, members: Sequence[Member], sizes: Sizes, checks: Sequence[LinkCheck],
    rows: Mapping[str, Sequence[Mapping[str, Any]]], forwarder: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the result of one mix; `rows` has the runs of each contender."""
    bound = pipeline_bound(sizes, members)
    limits = {
        "bound_tokens_per_second": bound.tokens_per_second,
        "bound_stage": bound.stage,
        "compute_tokens_per_second": compute_bound(sizes, members),
        "minimum_bytes_per_step": minimum_bytes(sizes, members),
    }
    return {
        "name": mix.name,
        "machines": [
            {
                "name": member.name, "link": member.peer.link_name, "stage": member.stage,
                "speed": member.peer.speed, "flops_per_second": member.flops_per_second,
            }
            for member in sorted(members, key=lambda one: one.name)
        ],
        "checks": [one.document() for one in checks],
        **limits,
        "forwarder": dict(forwarder),
        **compare(limits, rows),
    }  # fmt: skip


def compare(
    limits: Mapping[str, Any], rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Summarise the runs of each contender relative to the limits of the mix."""
    bound, fleet, least = (
        limits[name]
        for name in (
            "bound_tokens_per_second", "compute_tokens_per_second", "minimum_bytes_per_step",
        )
    )  # fmt: skip
    return {
        "contenders": {name: _summary(runs, bound, fleet, least) for name, runs in rows.items()},
        "loss_disagreement": loss_disagreement(
            {
                name: [run["losses"] for run in runs]
                for name, runs in rows.items()
                if CONTENDERS[name].exact
            }
        ),
    }


def _summary(
    runs: Sequence[Mapping[str, Any]], bound: float, fleet: float, least: int
) -> dict[str, Any]:
    rates = [run["tokens_per_second"] for run in runs]
    moved = [sum(run["sent_bytes_per_step"].values()) for run in runs]
    return {
        "tokens_per_second_median": median(rates),
        "tokens_per_second_all": rates,
        "step_seconds_median": median(run["step_seconds"] for run in runs),
        "of_bound": median(rates) / bound,
        "compute_share": median(rates) / fleet,
        "bytes_per_step_median": median(moved),
        "bytes_over_minimum": median(moved) / least if least else None,
        "busy_cores_median": median(run["busy_cores"] for run in runs),
        "runs": list(runs),
    }
