"""Tables of README.md and docs/benchmarks.md from a result of bench-wan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import headed_table, markdown_table
from benchmarks.pages.tables import ratio

_AIM_OF_BOUND = 0.85
_OPPONENTS = {
    "1f1b": "torch 1F1B",
    "interleaved": "interleaved 1F1B",
    "expert-fp16": "RemoteExpert fp16",
    "data-parallel": "hivemind.Optimizer",
}
_OURS = {
    "swarm": "float32", "swarm-fp16": "float16", "swarm-int8": "int8",
    "swarm-late": "float32, staleness 1", "swarm-late-int8": "int8, staleness 1",
}  # fmt: skip
_COLUMNS = (
    "", "tokens/s (range)", "of the bound", "of the compute limit", "bytes over the minimum",
    "swarm over it", "busy cores",
)  # fmt: skip


def ratios_markdown(document: Mapping[str, Any]) -> str:
    """Throughput of the swarm over that of each opponent, and over the bound, per mix of links."""
    mixes = document["mixes"]
    opponents = [
        name for name in _OPPONENTS if any(name in mix["contenders"] for mix in mixes.values())
    ]
    columns = ["links", "on the wire", *(f"over {_OPPONENTS[name]}" for name in opponents)]
    rows = [
        _ratios(name, written, mix, mix["contenders"][ours], opponents)
        for name, mix in mixes.items()
        for ours, written in _OURS.items()
        if ours in mix["contenders"]
    ]
    head = (
        f"{document['measured_at'][:10]}. The swarm's tokens/s over those of others on the same "
        f"links, and over the bound of float32 (aim {_AIM_OF_BOUND:g}):"
    )
    alignment = "ll" + "r" * (len(opponents) + 1)
    return headed_table(head, [*columns, "over the bound"], alignment, rows)


def wan_markdown(document: Mapping[str, Any]) -> str:
    """Training over emulated links: a table per mix of machines."""
    machine = document["machine"]
    measured = document["steps"] - document["warmup_steps"] - document["cooldown_steps"]
    lines = [
        f"{machine['cpu_count']} cores ({machine['processor']}); medians of runs of {measured} "
        f"measured steps. Unless a mix says otherwise: {_training(document)}.",
    ]
    for mix in document["mixes"].values():
        counts = [len(one["tokens_per_second_all"]) for one in mix["contenders"].values()]
        runs = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
        when = ", ".join(
            f"{one['measured_at'][:10]} {one['measured_at'][11:16]} (load {one['load_before']:.1f} "
            "before)"
            for one in times(mix)
        )
        lines += [
            "",
            f"**{mix['name']}**, {when}, {runs} run{'s' if max(counts) > 1 else ''} each: "
            f"{_fleet(mix)}.{_own_training(mix)}",
            "",
            *_mix_table(document, mix),
        ]
    return "\n".join(lines)


def _training(training: Mapping[str, Any]) -> str:
    model = training["model"]
    return (
        f"{training['stages']} stages, width {model['hidden_size']}, {model['layers']} layers, "
        f"{training['microbatches_per_step']} microbatches per step, float32; a machine of speed 1 "
        f"computes a stage's microbatch in {training['microbatch_seconds']:g} s"
    )


def _own_training(mix: Mapping[str, Any]) -> str:
    """What a mix trains, and its proportions beside the reference's; empty for the usual."""
    training = mix.get("training")
    if training is None:
        return ""
    own, other = training["proportions"], training["reference"]
    return (
        f" It trains {_training(training)}. Gradients of a stage over the tensors that it sends in "
        f"a step: {own['gradients_over_tensors']:.3f} (preset `{other['preset']}`: "
        f"{other['gradients_over_tensors']:.3f}); seconds of computing a microbatch over those of "
        f"sending its tensors: {own['computing_over_sending']:.3f} "
        f"({other['computing_over_sending']:.3f})."
    )


def times(mix: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return when a mix was measured and the load before, the earliest measurement first."""
    one = {name: mix[name] for name in ("measured_at", "load_before")}
    return list(mix.get("times", [one]))


def _ratios(
    name: str, written: str, mix: Mapping[str, Any], ours: Mapping[str, Any], opponents: list[str]
) -> list[str]:
    rate = ours["tokens_per_second_median"]
    cells = [name, written]
    for opponent in opponents:
        other = mix["contenders"].get(opponent)
        cells.append(ratio(None if other is None else rate / other["tokens_per_second_median"]))
    return [*cells, ratio(ours["of_bound"])]


def _fleet(mix: Mapping[str, Any]) -> str:
    counts = Counter(one["link"] for one in mix["machines"])
    text = ", ".join(f"{count} with {link}" for link, count in counts.items())
    found = "; ".join(
        f"{one['machine']} {one['up_mbit']:.1f}/{one['down_mbit']:.1f} Mbit/s, "
        f"{one['rtt_ms']:.1f} ms ({one['asked']['up_mbit']:g}/{one['asked']['down_mbit']:g}, "
        f"{one['asked']['rtt_ms']:g})"
        for one in mix["checks"]
    )
    if not found:
        return text
    return f"{text}. Links as measured (configured), up/down and round trip: {found}"


def _mix_table(document: Mapping[str, Any], mix: Mapping[str, Any]) -> list[str]:
    ours = mix["contenders"].get("swarm")
    rows = []
    for name, one in mix["contenders"].items():
        rate, rates = one["tokens_per_second_median"], one["tokens_per_second_all"]
        rows.append([
            document["contenders"][name],
            f"{rate:,.0f} ({min(rates):,.0f}-{max(rates):,.0f})",
            ratio(one["of_bound"]),
            ratio(one["compute_share"]),
            ratio(one["bytes_over_minimum"]),
            ratio(None if ours is None else ours["tokens_per_second_median"] / rate),
            f"{one['busy_cores_median']:.1f}",
        ])  # fmt: skip
    bound = f"{mix['bound_tokens_per_second']:,.0f}"
    rows.append(["*the bound*", bound, "1", "", "1", "", ""])
    return markdown_table(_COLUMNS, "lrrrrrr", rows)
