"""Ratios of a bench-wan result for docs/benchmarks.md: one row per mix of links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def ratios_markdown(document: Mapping[str, Any]) -> str:
    """Tokens per second of the swarm over those of each opponent, and over the bound."""
    mixes = document["mixes"]
    opponents = [
        name for name in _OPPONENTS if any(name in mix["contenders"] for mix in mixes.values())
    ]
    head = ["lines", "on the wire", *(f"over {_OPPONENTS[name]}" for name in opponents)]
    lines = [
        f"Four stages on four machines, {document['microbatches_per_step']} microbatches a step, "
        f"{document['measured_at'][:10]}. The swarm's tokens/s over others' on the same lines, and "
        f"over the bound of float32 (aim {_AIM_OF_BOUND:g}):",
        "",
        f"| {' | '.join(head)} | over the bound |",
        "|---|---|" + "---:|" * (len(opponents) + 1),
    ]
    for name, mix in mixes.items():
        for ours, written in _OURS.items():
            if ours in mix["contenders"]:
                lines.append(_row(name, written, mix, mix["contenders"][ours], opponents))
    return "\n".join(lines)


def times(mix: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """When a mix was measured, and how busy the machine was before; the earliest first."""
    one = {name: mix[name] for name in ("measured_at", "load_before")}
    return list(mix.get("times", [one]))


def _row(
    name: str, written: str, mix: Mapping[str, Any], ours: Mapping[str, Any], opponents: list[str]
) -> str:
    rate = ours["tokens_per_second_median"]
    cells = [name, written]
    for opponent in opponents:
        other = mix["contenders"].get(opponent)
        cells.append("" if other is None else f"{rate / other['tokens_per_second_median']:.2f}")
    return f"| {' | '.join(cells)} | {ours['of_bound']:.2f} |"
