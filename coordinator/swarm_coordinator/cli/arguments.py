"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
