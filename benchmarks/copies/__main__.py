"""Counts the copies of one activation, hop by hop: `make bench-copies`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.copies.counting import build
from benchmarks.outcome import conclude, out_option, result_head
from benchmarks.pages.markdown import headed_table
from swarm_shared.base.errors import SwarmError

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "libp2p", "cryptography", "trio")
PROGRAM_SECONDS = 120.0

HOPS = {
    "write": "worker: a tensor into its slot",
    "send": "daemon: from the slot to the socket",
    "receive": "daemon: from the socket to a frame",
    "fill": "daemon: from the frame to a slot",
    "read_input": "worker: from the slot to a tensor",
}
"""Hops in the order of the tensor's path, with their titles."""
KINDS = ("memory", "to_kernel", "from_kernel")


@click.command()
@click.option("--mebibytes", default=16, show_default=True, type=click.IntRange(1, 32))
@out_option("copies.json")
def main(mebibytes: int, out: Path) -> None:
    """Count the copies of one activation between two volunteers."""
    try:
        hops = measure(mebibytes * 2**20)
    except SwarmError as error:
        click.echo(f"copies: {error}", err=True)
        sys.exit(error.exit_code)
    document = {
        **result_head(PACKAGES),
        "payload_bytes": mebibytes * 2**20,
        "hops": hops,
    }
    conclude(out, document, copies_markdown)


def measure(size: int) -> dict[str, dict[str, int]]:
    """Return the bytes copied in each of HOPS for a payload of `size` bytes.

    Raises CapacityError without a compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        with _start(library, "program", "receive") as receiver:
            try:
                place = _answer(receiver)
                found = _run(
                    library, "program", "send", str(size), place["peer"], *place["addresses"]
                )
                receiver.wait(PROGRAM_SECONDS)
            finally:
                receiver.kill()
        found |= _run(library, "worker_program", str(size))
    return {hop: found[hop] for hop in HOPS}


def _start(library: Path, module: str, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path}
    command = [sys.executable, "-m", f"benchmarks.copies.{module}", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _run(library: Path, *words: str) -> dict[str, dict[str, int]]:
    with _start(library, *words) as program:
        try:
            answer = _answer(program)
            program.wait(PROGRAM_SECONDS)
        finally:
            program.kill()
    return answer


def _answer(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        raise SwarmError("a measuring process ended early; its output is above")
    answer: dict[str, Any] = json.loads(line)
    return answer


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
    return headed_table(head, columns, "lrrr", rows)


if __name__ == "__main__":
    main()
