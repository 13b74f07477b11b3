"""Draws a result file: for each mix, every contender's throughput over the fleet's bound.

.venv/bin/python -m benchmarks.wan.picture benchmarks/results/wan.json docs/wan.png
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.pictures import picture_command, pyplot


def draw(document: Mapping[str, Any], path: Path) -> None:
    plt = pyplot()
    mixes = list(document["mixes"].values())
    # Each contender has one row in all panes, also where a mix omits it.
    anywhere = {name for mix in mixes for name in mix["contenders"]}
    names = [name for name in document["contenders"] if name in anywhere][::-1]
    figure, panes = plt.subplots(
        1, len(mixes), figsize=(1.5 + 3.6 * len(mixes), 3.4), sharey=True, squeeze=False
    )
    for axis, mix in zip(panes[0], mixes, strict=True):
        for place, name in enumerate(names):
            one = mix["contenders"].get(name)
            if one is None:
                continue
            bound = mix["bound_tokens_per_second"]
            shares = [rate / bound for rate in one["tokens_per_second_all"]]
            axis.barh(place, one["of_bound"], color=_colour(name))
            axis.plot(shares, [place] * len(shares), "k|", markersize=9)
        axis.set_yticks(range(len(names)), [document["contenders"][name] for name in names])
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        axis.set(title=mix["name"], xlabel="tokens/s over the bound", xlim=(0, None))
        axis.grid(True, axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _colour(contender: str) -> str:
    return "#2a7f62" if contender.startswith("swarm") else "#9aa5b1"


if __name__ == "__main__":
    picture_command(draw)()
