"""The tables of a run a third of whose members lie, in docs/trust.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.pages.markdown import markdown_table


def strangers_markdown(document: Mapping[str, Any]) -> str:
    """The two runs side by side, and what became of the kinds of liars."""
    alone, among = document["alone"], document["among_liars"]
    rows = [
        (
            name, str(run["steps"]), f"{run['tokens_per_second']:,.0f}",
            f"{run['tokens_per_second'] / alone['tokens_per_second']:.2f}",
            f"{run['heldout_loss']:.6f}",
            "yes" if run["equal_to_one_process"] else "**no**",
        )
        for name, run in (("honest members alone", alone), ("a third are liars", among))
    ]  # fmt: skip
    turns = among["turns"]
    text = (
        f"{len(turns)} identities of {len({turn['kind'] for turn in turns})} kinds, "
        f"{document['liars_per_stage']} beside {document['honest_per_stage']} honest members in "
        f"each of {document['stages']} stages at any time; each stays until it has lost an audit, "
        f"or for {document['stay_steps']} steps. Honest members that lost an audit: "
        f"{len(among['wrongly_lost'])}. {document['microbatches']} microbatches a step, forward "
        f"passes paced to {document['forward_seconds']} s, every cell audited, "
        f"{document['measured_at'][:10]}."
    )
    columns = ("", "steps", "tokens/s", "over honest alone", "held-out loss", "one process's bits")
    sides = markdown_table(columns, "lrrrrl", rows)
    return "\n".join([text, "", *sides, "", *_kinds(document)])


def _kinds(document: Mapping[str, Any]) -> list[str]:
    """What became of each kind, and the rate while it took part beside three others."""
    among = document["among_liars"]
    alone_seconds = document["alone"]["median_step_seconds"]
    turns: dict[str, list[Mapping[str, Any]]] = {}
    for turn in among["turns"]:
        if turn["until"]:
            turns.setdefault(turn["kind"], []).append(turn)
    rows = []
    for kind, of_kind in turns.items():
        seconds = [
            second
            for turn in of_kind
            for second in among["step_seconds"][turn["since"] : turn["until"]]
        ]
        rows.append(
            (
                kind,
                _fate(of_kind),
                f"{median(turn['until'] - turn['since'] for turn in of_kind):.0f}",
                f"{alone_seconds / median(seconds):.2f}" if seconds else "",
            )
        )
    columns = ("kind", "what became of it", "steps it took part", "rate over honest alone")
    return markdown_table(columns, "llrr", rows)


def _fate(turns: Sequence[Mapping[str, Any]]) -> str:
    if any(turn["lost"] for turn in turns):
        return "lost an audit"
    if any(turn["lied"] for turn in turns):
        return "nothing false counted"
    return "had no occasion to lie"
