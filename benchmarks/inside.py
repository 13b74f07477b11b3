"""One of our programs with an instrument inside it, unchanged: some of its methods are wrapped.

    python -m MODULE-OF-THE-INSTRUMENT FOLDER PYTHON -m MODULE WORDS...

runs MODULE with WORDS in this process, as PYTHON -m would, and leaves FOLDER/PID.json at its end:
the first words are a prefix that can be put before the command of any of our programs.
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

ROOT = Path(__file__).parents[1]

Wrapping = tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]
"""A class, the name of its method, and what makes another method of it."""


@contextmanager
def wrapped(methods: Sequence[Wrapping]) -> Iterator[None]:
    """These methods are others within the block."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in methods]
    for owner, name, wrap in methods:
        setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def prefix_of(instrument: str, folder: Path | None = None) -> tuple[str, ...]:
    """Words that put the instrument, a module, inside the program whose command follows."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ("env", f"PYTHONPATH={path}", sys.executable, "-m", instrument,
            *([] if folder is None else [str(folder)]))  # fmt: skip


def run_inside(
    words: Sequence[str], instrument: AbstractContextManager[None], document: Callable[[str], Any]
) -> None:
    """Run the module that `words` name; `document`, given its name, is what is left behind."""
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
