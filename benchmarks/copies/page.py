"""The table of docs/tensor-path.md, from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.copies.__main__ import HOPS, KINDS


def copies_markdown(document: Mapping[str, Any]) -> str:
    """Copies per byte of the payload, hop by hop."""
    size, hops = document["payload_bytes"], document["hops"]
    packages = document["machine"]["packages"]
    lines = [
        f"{document['measured_at'][:10]}, an activation of {size / 2**20:.0f} MiB in float32 "
        f"between two processes on one machine; libp2p {packages['libp2p']}, cryptography "
        f"{packages['cryptography']}, torch {packages['torch']}. Bytes over the payload's:",
        "",
        "| hop | copied in memory | to the kernel | from the kernel |",
        "|---|---:|---:|---:|",
    ]
    for hop, name in HOPS.items():
        cells = " | ".join(f"{hops[hop][kind] / size:.2f}" for kind in KINDS)
        lines.append(f"| {name} | {cells} |")
    totals = (sum(one[kind] for one in hops.values()) / size for kind in KINDS)
    lines.append("| all | " + " | ".join(f"{total:.2f}" for total in totals) + " |")
    return "\n".join(lines)
