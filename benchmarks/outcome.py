"""Common parts of the benchmarks: work folder, head of the result file, writing and showing it."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.machine import describe_machine
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import SwarmError

RESULTS = Path(__file__).parent / "results"
"""The folder of the committed results."""

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def out_option(name: str) -> Callable[[CommandT], CommandT]:
    """The option `--out` of a benchmark whose committed result has this name."""
    return click.option(
        "--out", default=RESULTS / name, show_default=True,
        type=click.Path(path_type=Path, dir_okay=False),
    )  # fmt: skip


@contextmanager
def work_folder(name: str, *failures: type[Exception]) -> Iterator[Path]:
    """Yield a folder for all files of the benchmark and remove it afterwards.

    On a SwarmError or one of `failures` the folder stays, the error is printed with its path, and
    the program ends with the error's exit code.
    """
    work = Path(tempfile.mkdtemp(prefix=f"swarm-bench-{name}-"))
    expected: tuple[type[Exception], ...] = (SwarmError, *failures)
    try:
        yield work
    except expected as error:
        click.echo(f"benchmark: {error}\n(everything it wrote is in {work})", err=True)
        sys.exit(error.exit_code if isinstance(error, SwarmError) else 1)
    except KeyboardInterrupt:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def result_head(packages: Sequence[str]) -> dict[str, Any]:
    """Return the first entries of a result file: time and machine."""
    return {
        "version": 1,
        "measured_at": now(),
        "machine": describe_machine(packages),
    }


def exit_if(failures: Sequence[str]) -> None:
    """End with exit code 1 and the failures as one line, if there are any."""
    if failures:
        click.echo(f"benchmark: {'; '.join(failures)}", err=True)
        sys.exit(1)


def refuse_other_losses(disagreements: Sequence[str]) -> None:
    """End with exit code 1 where contenders have other losses than they must have."""
    found = [one for one in disagreements if one]
    exit_if([f"the losses disagree: {'; '.join(found)}"] if found else [])


def write_result(out: Path, document: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps(document, indent=1) + "\n").encode())


def conclude(
    out: Path, document: Mapping[str, Any], markdown: Callable[[Mapping[str, Any]], str]
) -> None:
    """Write a result and print its tables."""
    write_result(out, document)
    click.echo(f"\n{markdown(document)}\n\nwritten to {out}")
