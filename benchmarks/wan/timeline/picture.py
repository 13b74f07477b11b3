"""Draws the parts of every stage's step from a result file of the timeline.

.venv/bin/python -m benchmarks.wan.timeline.picture benchmarks/results/wan-timeline.json OUT.png
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.pictures import picture_command, pyplot

COLOURS = {
    "computing": "#2a7f62",
    "filling": "#c9d6df",
    "between": "#9aa5b1",
    "draining": "#5f6c7b",
    "averaging": "#e0a458",
    "deciding": "#c8553d",
    "applying": "#6d597a",
}


def draw(document: Mapping[str, Any], path: Path) -> None:
    plt = pyplot()
    mixes: Mapping[str, Mapping[str, Any]] = document["mixes"]
    figure, panes = plt.subplots(
        1, len(mixes), figsize=(1.5 + 4.8 * len(mixes), 4.6), sharey=True, squeeze=False
    )
    ways = {name: way["title"] for mix in mixes.values() for name, way in mix.items()}
    stages = max(len(run["stages"]) for mix in document["mixes"].values() for run in mix.values())
    for axis, (title, mix) in zip(panes[0], mixes.items(), strict=True):
        for group, name in enumerate(ways):
            if name in mix:
                _bars(axis, -group * (stages + 1), mix[name]["stages"])
        axis.set(title=title, xlabel="seconds per step", xlim=(0, None))
        axis.grid(True, axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    middles = [-group * (stages + 1) - (stages - 1) / 2 for group in range(len(ways))]
    panes[0][0].set_yticks(middles, [f"{way}\nstages 0 to {stages - 1}" for way in ways.values()])
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), loc="lower center", ncols=len(COLOURS), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _bars(axis: Any, top: int, stages: list[Mapping[str, float]]) -> None:
    """Draw one bar per stage, the first one at the top."""
    for place, parts in enumerate(stages):
        begun = 0.0
        for part, colour in COLOURS.items():
            axis.barh(top - place, parts[part], left=begun, color=colour, height=0.9)
            begun += parts[part]


if __name__ == "__main__":
    picture_command(draw)()
