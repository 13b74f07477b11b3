"""The tables of docs/benchmarks.md about bytes on the wire, from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import markdown_table

COLUMNS = ("least", "tensors", "targets", "headers", "below")


def wire_bytes_markdown(document: Mapping[str, Any]) -> str:
    """Bytes per microbatch at each stage boundary, and all bytes of the run by kind."""
    microbatches, gossip = document["microbatches"], document["gossip_bytes"]
    boundaries = [
        (
            f"{one['stage']} to {one['stage'] + 1} and back",
            *(f"{one[column] / microbatches:,.0f}" for column in COLUMNS),
            f"{one['over_least']:.4f}",
        )
        for one in document["boundaries"]
    ]
    total = sum(document["kinds"].values())
    kinds = [(name, f"{size:,}", f"{size / total:.2%}") for name, size in document["kinds"].items()]
    sent = (
        "was not measured: `ss` is missing."
        if gossip is None
        else f"sent {gossip:,} bytes for all volunteers and the coordinator together, in a run "
        f"whose steps took {document['seconds']:.0f} s."
    )
    lines = [
        f"{document['measured_at'][:10]}, preset `{document['preset']}`, {document['steps']} "
        f"steps, {microbatches} microbatches of {document['border_bytes']:,} bytes each way. "
        "Bytes per microbatch:",
        "",
        *markdown_table(("boundary", *COLUMNS, "all, over the least"), "lrrrrrr", boundaries),
        "",
        *markdown_table(("all bytes sent", "bytes", "share"), "lrr", kinds),
        "",
        f"hivemind's DHT, which runs in p2pd, is not in the table; it {sent}",
    ]
    return "\n".join(lines)
