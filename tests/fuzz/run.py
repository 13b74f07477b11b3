"""Decoders under atheris, which follows the paths through the code and looks for new ones.

    python -m fuzz.run [--seconds 60] [--folder FOLDER] [TARGET…]

What was found in one run (inputs that lead somewhere new, in FOLDER/TARGET) is where the next one
begins. An input that makes a decoder fail is printed, and lies in FOLDER/TARGET/crash-….
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import subprocess
import sys
from pathlib import Path

HOW_TO_INSTALL = (
    "fuzz: atheris is not installed here. It exists for Linux and macOS: "
    f"{sys.executable} -m pip install atheris"
)
MISSING, FAILED = 2, 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all when none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print(HOW_TO_INSTALL, file=sys.stderr)
        return MISSING
    if words.one:
        run_one(words.one, words.folder, words.seconds)
    from fuzz.targets import TARGETS

    unknown = set(words.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    failed = []
    for name in words.targets or TARGETS:
        # libFuzzer ends its process: each target gets one of its own.
        command = [sys.executable, "-m", "fuzz.run", "--one", name]
        command += ["--seconds", str(words.seconds), "--folder", str(words.folder)]
        code = subprocess.run(command, check=False).returncode
        print(f"fuzz: {name}: {'nothing found' if not code else 'FAILED'}", flush=True)
        if code:
            failed.append(name)
    return FAILED if failed else 0


def run_one(name: str, folder: Path, seconds: int) -> None:
    """Does not return."""
    import atheris

    # It names every module that it looks into.
    with (
        contextlib.redirect_stderr(io.StringIO()),
        atheris.instrument_imports(include=["swarm_shared", "swarm_client", "fuzz"]),
    ):
        from fuzz.targets import TARGETS

    logging.disable()  # what is refused is also written down, which takes longer than refusing it
    target = TARGETS[name]
    corpus = folder / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(target.examples):
        (corpus / f"example-{number}").write_bytes(example)
    dictionary = folder / f"{name}.dictionary"
    # libFuzzer takes words in quotes, with \\xAB for a byte.
    words = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
    dictionary.write_text("".join(f'"{word}"\n' for word in words))
    options = [
        f"-max_total_time={seconds}", "-max_len=2000", "-timeout=10", "-rss_limit_mb=1500",
        f"-artifact_prefix={corpus}/", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    if target.words:
        options.append(f"-dict={dictionary}")
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
