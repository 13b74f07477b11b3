"""The table of honest machines' audits in docs/trust.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import headed_table

COLUMNS = (
    "dtype, codecs", "audits", "equal to the bit", "median distance of others",
    "largest distance", "tolerance", "false verdicts", "cells cleared", "lies found",
)  # fmt: skip


def honest_markdown(document: Mapping[str, Any]) -> str:
    """Audits of honest machines, and of one that lies."""
    machine, rows = document["machine"], document["rows"]
    shown = [
        (
            row["setting"], f"{row['audits']:,}",
            f"{row['alike'] / max(1, row['alike'] + row['unlike']):.0%}",
            f"{row['median_distance']:.1e}", f"{row['largest_distance']:.1e}",
            f"{row['tolerance']:g}", str(row["false_verdicts"]), str(row["cleared"]),
            f"{row['lies_found']} of {row['lies']} (x {row['factor']:g})",
        )
        for row in rows
    ]  # fmt: skip
    head = (
        f"{document['measured_at'][:10]}, {machine['processor']}; "
        f"{sum(row['audits'] for row in rows):,} audits of honest peers with kernels and threads "
        f"as of {', '.join(document['kinds'])}, after {', '.join(map(str, document['versions']))} "
        "steps."
    )
    return headed_table(head, COLUMNS, "lrrrrrrrr", shown)
