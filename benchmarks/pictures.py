"""What programs that draw a result file have in common: their command line, and the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

Draw = Callable[[Mapping[str, Any], Path], None]


def picture_command(draw: Draw) -> click.Command:
    """`RESULT PICTURE`: the file that a benchmark wrote, and where its picture goes."""

    @click.command(help="Draw RESULT, a file that a benchmark wrote, as PICTURE.")
    @click.argument("result", type=click.Path(path_type=Path, exists=True))
    @click.argument("picture", type=click.Path(path_type=Path))
    def command(result: Path, picture: Path) -> None:
        draw(json.loads(result.read_text()), picture)

    return command


def pyplot() -> Any:
    """matplotlib's, without a screen; imported only where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
