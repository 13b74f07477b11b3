"""The tables of docs/benchmarks.md, from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("least", "tensors", "targets", "headers", "below")


def wire_bytes_markdown(document: Mapping[str, Any]) -> str:
    """Bytes per microbatch at each boundary, and everything that the run sent, by kind."""
    microbatches = document["microbatches"]
    lines = [
        f"{document['measured_at'][:10]}, preset `{document['preset']}`, {document['steps']} "
        f"steps, {microbatches} microbatches of {document['border_bytes']:,} bytes each way. "
        "Bytes per microbatch:",
        "",
        "| boundary | least | tensors | targets | headers | below | all, over the least |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in document["boundaries"]:
        cells = " | ".join(f"{one[column] / microbatches:,.0f}" for column in COLUMNS)
        lines.append(
            f"| {one['stage']} to {one['stage'] + 1} and back | {cells} | {one['over_least']:.4f} |"
        )
    total = sum(document["kinds"].values())
    lines += ["", "| all that was sent | bytes | share |", "|---|---:|---:|"]
    lines += [
        f"| {name} | {size:,} | {size / total:.2%} |" for name, size in document["kinds"].items()
    ]
    gossip = document["gossip_bytes"]
    seconds = document["seconds"]
    lines += [
        "",
        "hivemind's DHT is beside these, in p2pd: "
        + (
            "not measured, for want of `ss`."
            if gossip is None
            else f"{gossip:,} bytes of all volunteers and the coordinator together, in a run "
            f"whose steps took {seconds:.0f} s."
        ),
    ]
    return "\n".join(lines)
