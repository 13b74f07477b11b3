"""Common parts of the programs that draw a result file: command line and matplotlib."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

Draw = Callable[[Mapping[str, Any], Path], None]


def picture_command(draw: Draw) -> click.Command:
    """Return a command with the arguments RESULT and PICTURE that calls `draw`."""

    @click.command(help="Draw RESULT, a file that a benchmark wrote, as PICTURE.")
    @click.argument("result", type=click.Path(path_type=Path, exists=True))
    @click.argument("picture", type=click.Path(path_type=Path))
    def command(result: Path, picture: Path) -> None:
        draw(json.loads(result.read_text()), picture)

    return command


def pyplot() -> Any:
    """Return matplotlib's pyplot without a display; imported only for drawing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
