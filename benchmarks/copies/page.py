"""The table of docs/tensor-path.md, from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.copies.__main__ import HOPS, KINDS
from benchmarks.markdown import markdown_table


def copies_markdown(document: Mapping[str, Any]) -> str:
    """Bytes copied per byte of the payload, hop by hop."""
    size, hops = document["payload_bytes"], document["hops"]
    packages = document["machine"]["packages"]
    head = (
        f"{document['measured_at'][:10]}, an activation of {size / 2**20:.0f} MiB in float32 "
        f"between two processes on one machine; libp2p {packages['libp2p']}, cryptography "
        f"{packages['cryptography']}, torch {packages['torch']}. Bytes over the payload's:"
    )
    rows = [
        (name, *(f"{hops[hop][kind] / size:.2f}" for kind in KINDS)) for hop, name in HOPS.items()
    ]
    totals = (sum(one[kind] for one in hops.values()) / size for kind in KINDS)
    rows.append(("all", *(f"{total:.2f}" for total in totals)))
    columns = ("hop", "copied in memory", "to the kernel", "from the kernel")
    return "\n".join([head, "", *markdown_table(columns, "lrrr", rows)])
