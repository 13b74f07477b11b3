"""One machine: a process with its own kernels and threads, that counts cells and audits others.

`python -m benchmarks.trust.honest.machine` reads orders as JSON lines and answers each with one. It
has the stage worker's own `StageRunner` and `AuditRunner`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import click

ROOT = Path(__file__).parents[3]


class Machine:
    """The parent's side of the process."""

    def __init__(self, environment: Mapping[str, str], threads: int) -> None:
        count = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trust.honest.machine", count],
            # Idle threads sleep: many machines share this one.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": count,
                 "MKL_NUM_THREADS": count, **environment},
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, order: str, **values: Any) -> Any:
        """Send an order, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"order": order, **values}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"a machine has ended at {order} {values}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(threads: int) -> None:
    """The process itself. Only here torch is loaded, with the process's environment."""
    import torch

    from benchmarks.trust.honest.counting import Counting

    torch.set_num_threads(threads)
    counting = Counting()
    for line in sys.stdin:
        values = json.loads(line)
        answer = getattr(counting, values.pop("order"))(**values)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
