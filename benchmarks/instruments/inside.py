"""Runs one of the project's programs unchanged with an instrument that wraps some methods.

    python -Pm MODULE-OF-THE-INSTRUMENT FOLDER PYTHON -Pm MODULE ARGUMENTS...

runs MODULE with ARGUMENTS in this process, as PYTHON -m would, and writes FOLDER/PID.json at the
end. Everything before PYTHON is a prefix for the command of any program of the project.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from swarm_shared.host.python_modules import module_command

ROOT = Path(__file__).parents[2]

Method = Callable[..., Any]
Wrapping = tuple[type, Method, Callable[[Method], Method]]
"""A class, its method, and the function that wraps the method."""


@contextmanager
def wrapped(methods: Sequence[Wrapping]) -> Iterator[None]:
    """Replace the methods by their wrappers within the block."""
    for owner, method, wrap in methods:
        setattr(owner, method.__name__, wrap(method))
    try:
        yield
    finally:
        for owner, method, _ in methods:
            setattr(owner, method.__name__, method)


def prefix_of(instrument: str, folder: Path | None = None) -> tuple[str, ...]:
    """Return the command prefix that runs a program with the module `instrument` inside it."""
    return own_command(instrument, *([] if folder is None else [str(folder)]))


def own_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of the benchmarks, which are not installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ("env", f"PYTHONPATH={path}", *module_command(module, *arguments))


def run_inside(
    words: Sequence[str], instrument: AbstractContextManager[None], document: Callable[[str], Any]
) -> None:
    """Run the module named by `words` and write what `document` returns for its name."""
    folder, module, arguments = Path(words[0]), words[3], words[4:]

    def write() -> None:
        (folder / f"{os.getpid()}.json").write_text(json.dumps(document(module), indent=1) + "\n")

    atexit.register(write)
    with instrument:
        run_module(module, arguments)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run a module with these arguments in this process, as `python -m` would."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
