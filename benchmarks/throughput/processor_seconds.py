"""What the processors do in a step of the swarm and of torch alone: `make bench-processor-seconds`.

Runs contenders of `make bench` once each while perf samples all processors, takes the samples of
the steps after the warm-up, and sorts them into categories by process, shared object and symbol.
A category's core seconds of a step are its share of the samples times the processors times the
step's seconds. Linux, with perf and the right to sample every process (root). Nothing else should
run on the machine meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.outcome import (
    conclude,
    out_option,
    refuse_other_losses,
    result_head,
    work_folder,
)
from benchmarks.pages.markdown import headed_table, when_and_where
from benchmarks.run_data import TimedStep, loss_disagreement
from benchmarks.throughput.__main__ import PACKAGES, make_template, tokens_per_second
from benchmarks.throughput.contenders import CONTENDERS, Contender, run_contender
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.model_config import PRESETS

COMPARED = ("torch", "1f1b-4", "swarm-4x1")
SAMPLES_PER_SECOND = 199
"""Of each processor; a prime, so that nothing periodic keeps its pace."""
ROLE_SECONDS = 0.5
"""Between two looks at which processes there are."""
IDLE_PROCESS = 0
"""The process id under which perf counts a processor that has nothing to do."""


class Role(StrEnum):
    """What a process is in a contender. A volunteer's averaging worker counts as its daemon."""

    STAGE = "stage workers"
    DAEMON = "daemons"
    COORDINATOR = "coordinator"
    IDLE = "idle"
    OTHER = "other programs"


MODULES = {
    "swarm_client.stage.worker": Role.STAGE,
    "benchmarks.throughput.torch_": Role.STAGE,
    "swarm_coordinator": Role.COORDINATOR,
    "swarm_client": Role.DAEMON,
    "p2pd": Role.DAEMON,
}
"""What the command line of a role's processes holds; the first match counts."""

PRODUCTS, CHECKS, KERNELS = "matrix products", "checks for finiteness", "other kernels of torch"
THREADS, DIGESTS, ENCRYPTION = "torch's threads waiting", "digests", "encryption"
FAULTS, SYSTEM, LIBRARY = "page faults", "kernel, other", "C library"
CATEGORIES = (
    PRODUCTS, KERNELS, THREADS, CHECKS, DIGESTS, FAULTS, SYSTEM, LIBRARY, ENCRYPTION,
    *(f"Python, {role}" for role in (Role.STAGE, Role.DAEMON, Role.COORDINATOR)),
    Role.OTHER.value, Role.IDLE.value,
)  # fmt: skip
_OBJECTS = (
    (r"\[kernel|\[guest", SYSTEM),
    (r"libgomp|libomp|libiomp", THREADS),
    (r"libtorch|libc10|libmkl", KERNELS),
    (r"blake", DIGESTS),
    (r"libcrypto|libssl|_rust\.abi3", ENCRYPTION),
    (r"libc\.so|libc-|ld-linux|libpthread|libm\.so|libstdc|\[vdso\]", LIBRARY),
)
_FAULT = re.compile(r"page_fault|clear_page|do_anonymous_page")


def category(role: Role, shared_object: str, symbol: str) -> str:
    """Return the category of a sample. What no library explains is Python: the interpreter and its
    extension modules."""
    if role in (Role.IDLE, Role.OTHER):
        return role.value
    found = next((name for pattern, name in _OBJECTS if re.search(pattern, shared_object)), None)
    if found is None:
        return f"Python, {role}"
    if found == SYSTEM and _FAULT.search(symbol):
        return FAULTS
    if found == KERNELS and "gemm" in symbol:
        return PRODUCTS
    if found == KERNELS and "aminmax" in symbol:
        return CHECKS
    return found


def role_of(command_line: str) -> Role:
    """Return the role of a process of a contender."""
    return next((role for word, role in MODULES.items() if word in command_line), Role.OTHER)


def counted(script: str, roles: Mapping[int, Role], begin: float, end: float) -> Counter[str]:
    """Count the samples between two times by category, in what `perf script` prints.

    A sample is a line with process and time, then one line per frame, the innermost first. All of a
    page fault counts as such, whichever function of the kernel it is in.
    """
    samples: Counter[str] = Counter()
    for sample in script.split("\n\n"):
        head, *frames = sample.strip().splitlines() or [""]
        if (found := re.match(r"(\d+)\s+([\d.]+):", head)) is None or not frames:
            continue
        if not begin <= float(found[2]) < end:
            continue
        role = Role.IDLE if int(found[1]) == IDLE_PROCESS else roles.get(int(found[1]), Role.OTHER)
        symbol, shared_object = _parts(frames[0])
        if any(_FAULT.search(_parts(frame)[0]) for frame in frames if "[kernel" in frame):
            symbol, shared_object = "page_fault", "[kernel.kallsyms]"
        samples[category(role, shared_object, symbol)] += 1
    return samples


def _parts(frame: str) -> tuple[str, str]:
    """The symbol and the shared object of a line `ADDRESS SYMBOL (OBJECT)`."""
    symbol, _, shared_object = frame.strip().partition(" ")[2].rpartition(" (")
    return symbol, Path(shared_object.rstrip(")")).name


@contextmanager
def recording(out: Path) -> Iterator[dict[int, Role]]:
    """Sample all processors until the block ends; yield the roles of this process's descendants,
    which fill meanwhile."""
    if shutil.which("perf") is None:
        raise SwarmError("perf is needed, and is not installed (Debian: linux-perf)")
    # Only with the monotonic clock do the samples' times compare with those of the steps.
    command = ["perf", "record", "-q", "-a", "-g", "-e", "cpu-clock", "-k", "CLOCK_MONOTONIC"]
    command += ["-F", str(SAMPLES_PER_SECOND), "-o", str(out)]
    perf = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    roles: dict[int, Role] = {}
    ended = threading.Event()
    watch = threading.Thread(target=_watch_roles, args=(roles, ended))
    watch.start()
    try:
        yield roles
    finally:
        ended.set()
        watch.join()
        perf.send_signal(signal.SIGINT)
        _, errors = perf.communicate()
    if not out.exists() or not out.stat().st_size:
        raise SwarmError(f"perf recorded nothing (it needs root): {errors.strip()}")


def _watch_roles(roles: dict[int, Role], ended: threading.Event) -> None:
    while not ended.wait(ROLE_SECONDS):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if command_line := process.cmdline():  # one that has ended has none
                    roles[process.pid] = role_of(" ".join(command_line))


def measure(contender: Contender, work: Path, steps: int, warmup: int, preset: str) -> Any:
    """Run a contender once; return its timed steps and its entry of the result file."""
    template, samples = work / "template", work / "perf.data"
    make_template(template, contender, steps, preset)
    # Both clocks in one moment: steps are timed by the one, samples by the other.
    offset = time.monotonic() - time.time()
    with recording(samples) as roles:
        timed = run_contender(contender, template, work / "run", steps)
    command = ["perf", "script", "-i", str(samples), "--no-inline", "-F", "pid,time,ip,sym,dso"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    begin, end = timed[warmup - 1].ended_at + offset, timed[-1].ended_at + offset
    found, measured = counted(script, roles, begin, end), timed[warmup:]
    total = (os.cpu_count() or 1) * (end - begin) / len(measured)
    return timed, {
        "name": contender.name,
        "tokens_per_second": tokens_per_second(measured),
        "samples": found.total(),
        "core_seconds_per_step": {
            name: total * found[name] / max(1, found.total()) for name in CATEGORIES
        },
    }


@click.command()
@click.option("--steps", default=6, show_default=True, type=click.IntRange(2))
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(1))
@click.option("--preset", default="small", show_default=True, type=click.Choice(list(PRESETS)))
@out_option("processor-seconds.json")
def main(steps: int, warmup: int, preset: str, out: Path) -> None:
    """Measure what the processors do in a step of torch, of its pipeline and of the swarm."""
    if warmup >= steps:
        raise click.UsageError("--steps must exceed --warmup")
    losses: dict[str, list[list[float]]] = {}
    entries: dict[str, Any] = {}
    with work_folder("processor-seconds") as work:
        for name in COMPARED:
            timed: list[TimedStep]
            (work / name).mkdir()
            timed, entries[name] = measure(CONTENDERS[name], work / name, steps, warmup, preset)
            losses[name] = [[step.loss for step in timed]]
            click.echo(f"{name}: {entries[name]['tokens_per_second']:,.0f} tokens/s")
            shutil.rmtree(work / name)
    document = {
        **result_head(PACKAGES), "preset": preset, "steps": steps, "warmup_steps": warmup,
        "contenders": entries, "loss_disagreement": loss_disagreement(losses),
    }  # fmt: skip
    conclude(out, document, processor_markdown)
    refuse_other_losses([document["loss_disagreement"]])


def processor_markdown(document: Mapping[str, Any]) -> str:
    """Core seconds of a step by category, for the contenders side by side."""
    entries = [document["contenders"][name] for name in COMPARED]
    steps = document["steps"] - document["warmup_steps"]
    seconds = [entry["core_seconds_per_step"] for entry in entries]
    rows = [(name, [one[name] for one in seconds]) for name in CATEGORIES]
    rows.append(("together", [sum(one.values()) for one in seconds]))
    columns = ("core seconds of a step", *(entry["name"] for entry in entries), "swarm less 1F1B")
    shown = [
        (name, *(f"{v:.2f}" for v in values), f"{values[2] - values[1]:+.2f}")
        for name, values in rows
    ]
    rates = ", ".join(f"{entry['tokens_per_second']:,.0f}" for entry in entries)
    head = (
        f"Means of {steps} steps of preset `{document['preset']}`, {when_and_where(document)}, "
        f"sampled by perf: {rates} tokens/s."
    )
    foot = "`make bench-processor-seconds` repeats it."
    return headed_table(head, columns, "lrrrr", shown, foot)


if __name__ == "__main__":
    main()
