"""Makes docs/demo.png from the output and the loss curve of a real demo run.

    make demo ARGS="--run-dir /tmp/shown" | tee /tmp/shown.txt
    python -m benchmarks.pages.demo_picture /tmp/shown.txt /tmp/shown/loss.png docs/demo.png

Lines are omitted and long ones cut to fit, marked by dots; the verdict is wrapped, and nothing else
is changed.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import click
import matplotlib.image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = 110
PROGRESS_LINES = 2
"""Lines shown before the kill, after the newcomer's first step, and at the end of the run."""

WIDTH_INCHES, DOTS_PER_INCH = 9.6, 110
LINE_INCHES = 0.17
BACKGROUND_COLOR, TEXT_COLOR, MUTED_COLOR = "#16191d", "#e4e6e8", "#8b949e"
FONT_POINTS = 8.6


@click.command()
@click.argument("output", type=click.Path(path_type=Path, exists=True))
@click.argument("curve", type=click.Path(path_type=Path, exists=True))
@click.argument("picture", type=click.Path(path_type=Path))
def main(output: Path, curve: Path, picture: Path) -> None:
    """Put the text of OUTPUT and the image CURVE one above the other into PICTURE."""
    lines = shown_lines(output.read_text().splitlines())
    image = matplotlib.image.imread(curve)
    curve_inches = WIDTH_INCHES * image.shape[0] / image.shape[1]
    text_inches = LINE_INCHES * (len(lines) + 2)
    height_inches = text_inches + curve_inches
    figure = Figure((WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, facecolor=BACKGROUND_COLOR)
    FigureCanvasAgg(figure)
    for number, line in enumerate(lines):
        figure.text(
            0.02, 1 - LINE_INCHES * (number + 1.6) / height_inches, line,
            family="DejaVu Sans Mono", fontsize=FONT_POINTS, parse_math=False,
            color=MUTED_COLOR if line.strip() == "..." else TEXT_COLOR,
        )  # fmt: skip
    axes = figure.add_axes((0, 0, 1, curve_inches / height_inches))
    axes.imshow(image, aspect="auto")
    axes.axis("off")
    figure.savefig(picture)


def shown_lines(lines: list[str]) -> list[str]:
    """Return the lines of a demo's output that the picture shows."""
    kill = _first(lines, "step ", containing="killing")
    joined = _first(lines, "  ", containing="its gradients count from step")
    end = _first(lines, "steps ")
    links = lines.index("Bytes per link")
    sample = _first(lines, "Text sampled")
    verdict = _first(lines, "", containing="losses are the same, to the bit")
    shown = [
        "$ make demo", lines[0], "  ...",
        *lines[kill - PROGRESS_LINES : joined + 1 + PROGRESS_LINES], "  ...",
        *lines[end - 1 - PROGRESS_LINES : links], "  ...", "", *lines[sample:verdict],
        *textwrap.wrap(lines[verdict], COLUMNS),
    ]  # fmt: skip
    return [f"{line[: COLUMNS - 1]}…" if len(line) > COLUMNS else line for line in shown]


def _first(lines: list[str], start: str, *, containing: str = "") -> int:
    found = (n for n, line in enumerate(lines) if line.startswith(start) and containing in line)
    return next(found)


if __name__ == "__main__":
    main()
