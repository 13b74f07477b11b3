"""The loss curve of a run as a PNG.

Owns the drawing only. One hue shows the data (the loss per step); the reference line, the
held-out marker and events are neutral and labelled in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from swarm_shared.base.errors import StorageError

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8.0, 4.5, 120

SERIES_COLOR = "#2a6fbb"
INK_COLOR = "#222222"
MUTED_COLOR = "#6b6b6b"
GRID_COLOR = "#e4e4e4"
EVENT_LINE_POINTS = 14
"""Distance of the texts of two events, in points."""


def draw_loss_curve(
    path: Path,
    title: str,
    steps: Sequence[int],
    losses: Sequence[float],
    unigram_entropy: float | None = None,
    heldout_loss: float | None = None,
    events: Mapping[int, str] | None = None,
) -> None:
    """Write the curve of `losses` (nats per token) over `steps` to `path`, with events at steps.

    Drawn without pyplot, which has global state and looks for a display.
    """
    assert len(steps) == len(losses)
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, losses, color=SERIES_COLOR, linewidth=2, marker=marker, label="training loss")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=MUTED_COLOR, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"unigram entropy {unigram_entropy:.3f}",
            xy=(1.0, unigram_entropy), xycoords=("axes fraction", "data"),
            xytext=(-4, 4), textcoords="offset points", ha="right", va="bottom",
            color=MUTED_COLOR, fontsize=9,
        )  # fmt: skip
    if heldout_loss is not None and steps:
        axes.plot(
            [steps[-1]], [heldout_loss], linestyle="none", marker="D", markersize=8,
            color=INK_COLOR, markeredgecolor="white", clip_on=False, zorder=3,
        )  # fmt: skip
        axes.annotate(
            f"held-out loss {heldout_loss:.3f}",
            xy=(steps[-1], heldout_loss), xytext=(-10, 0), textcoords="offset points",
            ha="right", va="center", color=INK_COLOR, fontsize=9,
        )  # fmt: skip
    _draw_events(axes, events or {})
    axes.set_title(title, loc="left", color=INK_COLOR, fontsize=11)
    axes.set_xlabel("optimizer step", color=INK_COLOR)
    axes.set_ylabel("cross entropy (nats per token)", color=INK_COLOR)
    axes.grid(True, color=GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED_COLOR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Markers at the lowest values need room below.
    axes.margins(x=0.02, y=0.12)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise StorageError(
            f"the loss curve could not be written to {path}: {error.strerror}; "
            "free some space or name another folder"
        ) from error


def _draw_events(axes: Axes, events: Mapping[int, str]) -> None:
    """Mark events at their steps, one text below the other at the top, which a falling curve leaves
    free to the right of its beginning."""
    middle = sum(axes.get_xlim()) / 2
    for number, (step, text) in enumerate(sorted(events.items())):
        axes.axvline(step, color=MUTED_COLOR, linewidth=1.2, linestyle=(0, (1, 2)))
        side, offset_points = ("left", 4) if step < middle else ("right", -4)
        axes.annotate(
            text, xy=(step, 1.0), xycoords=("data", "axes fraction"),
            xytext=(offset_points, -4 - EVENT_LINE_POINTS * number), textcoords="offset points",
            ha=side, va="top", color=INK_COLOR, fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
