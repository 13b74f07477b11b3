"""Distance of a swarm's losses from those of one process, by codec: `make bench-agreement`.

Compares a real run per codec, two stages of two peers each over loopback, with `swarm-coordinator
reference` on the same manifest. With float32 sums they differ by the order in which gradients are
added, about 1e-6. A codec amplifies such a difference: a value between two levels is rounded to
the other one. The reference with its microbatches in reverse order shows how much of the distance
has this cause alone. With exact sums there is no initial difference. The loss of a lossy
all-reduce is not part of the reference.
"""

from __future__ import annotations

import os
import statistics
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.pages.markdown import headed_table, when_and_where
from benchmarks.run_data import RunData
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_coordinator.offline.reference import StepRecord, train_reference
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.storage.history import HistoryStep
from swarm_shared.run.manifest import CodecsConfig

PACKAGES = ("torch", "numpy", "hivemind")
STEPS = 50
STAGES = 2
PEERS_PER_STAGE = 2
WARMUP_STEPS = 5
AIM = 1e-4
MODULES = ("argparse.py", "difflib.py", "inspect.py", "pickle.py", "typing.py", "datetime.py")

CODECS: dict[str, CodecsConfig] = {
    "none": CodecsConfig(),
    "float16": CodecsConfig(activation="float16", gradient="float16"),
    "int8": CodecsConfig(activation="int8", gradient="int8"),
    "exact": CodecsConfig(average="exact"),
    "exact-int8": CodecsConfig(activation="int8", gradient="int8", average="exact"),
    "exact-int8-int4": CodecsConfig(activation="int8", gradient="int4", average="exact"),
    "average-float16": CodecsConfig(average="float16"),
    "average-int8": CodecsConfig(average="int8"),
}

SETTINGS: dict[str, object] = {
    "run.name": "agreement",
    "run.seed": 11,
    "model.hidden_size": 96,
    "model.intermediate_size": 256,
    "model.layers": 6,
    "model.heads": 4,
    "model.key_value_heads": 2,
    "model.sequence_length": 128,
    "training.microbatches_per_step": 8,
    "training.sequences_per_microbatch": 2,
    "training.evaluation_microbatches": 0,
    # A rate at which training is smooth (decision 0002).
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 5,
    "limits.starting_peers_per_stage": PEERS_PER_STAGE,
    "network.listen_host": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Measured:
    losses: tuple[float, ...]
    tokens_per_second: float


@click.command()
@click.option(
    "--only", multiple=True, type=click.Choice(list(CODECS)), help="Codecs to measure; repeatable."
)
@click.option("--steps", type=click.IntRange(WARMUP_STEPS + 2), default=STEPS, show_default=True)
@out_option("agreement.json")
def main(only: Sequence[str], steps: int, out: Path) -> None:
    """Measure the distance of a real run's losses from the reference's, per codec."""
    chosen = {name: codecs for name, codecs in CODECS.items() if not only or name in only}
    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    with work_folder("agreement") as work:
        corpus = work / "corpus"
        corpus.mkdir()
        for module in MODULES:
            source = Path(sysconfig.get_paths()["stdlib"]) / module
            (corpus / module).write_bytes(source.read_bytes())
        for name, codecs in chosen.items():
            run_dir = work / name
            changes = {f"codecs.{field}": value for field, value in codecs.model_dump().items()}
            overrides = {**SETTINGS, **changes, "training.steps": steps}
            initialise_run(run_dir, "tiny", str(corpus), STAGES, overrides)
            found[name] = {**codecs.model_dump(), **compared(run_dir, steps)}
            click.echo(f"{name}: {found[name]['farthest']:.1e}", err=True)
    document = {
        **result_head(PACKAGES),
        "load_before": load,
        "settings": SETTINGS,
        "stages": STAGES,
        "peers_per_stage": PEERS_PER_STAGE,
        "steps": steps,
        "codecs": found,
    }
    conclude(out, document, agreement_markdown)


def compared(run_dir: Path, steps: int) -> dict[str, Any]:
    swarm = of_the_swarm(run_dir)
    reference = of_one_process(run_dir, steps, backwards=False)
    backwards = of_one_process(run_dir, steps, backwards=True)
    distances = relative(swarm.losses, reference)
    return {
        "tokens_per_second": swarm.tokens_per_second,
        "farthest": max(distances),
        "median": statistics.median(distances),
        "last": distances[-1],
        "steps_within_aim": sum(distance <= AIM for distance in distances),
        "reference_backwards_farthest": max(relative(backwards, reference)),
        "relative_differences": distances,
        "losses": swarm.losses,
        "reference_losses": reference,
    }


def relative(losses: Sequence[float], base: Sequence[float]) -> list[float]:
    return [abs(one - other) / other for one, other in zip(losses, base, strict=True)]


def of_the_swarm(run_dir: Path) -> Measured:
    with Subprocesses() as children:
        swarm = LocalSwarm(run_dir, children)
        invite = swarm.start_coordinator()
        for stage in range(STAGES):
            for _ in range(PEERS_PER_STAGE):
                swarm.start_volunteer(invite, stage=stage)
        steps: Sequence[HistoryStep] = swarm.watch().steps
    timed = steps[WARMUP_STEPS:]
    # The median, because a shared machine may stall for a while.
    rate = statistics.median(step.tokens / step.seconds for step in timed)
    return Measured(tuple(step.loss for step in steps), rate)


def of_one_process(run_dir: Path, steps: int, *, backwards: bool) -> tuple[float, ...]:
    """Return the reference's losses; `backwards` reverses the microbatches of each step."""
    data = RunData(run_dir)
    records: list[StepRecord] = []
    train_reference(
        data.manifest,
        lambda step: data.microbatches(step)[:: -1 if backwards else 1],
        steps,
        records.append,
        threads=1,
    )
    return tuple(record.loss for record in records)


def rows_of(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the printed table and of the page's."""
    return [
        (
            f"{one['activation']} / {one['gradient']}",
            one["average"],
            f"{one['farthest']:.1e}",
            f"{one['median']:.1e}",
            f"{one['steps_within_aim']} of {document['steps']}",
            f"{one['reference_backwards_farthest']:.1e}",
        )
        for one in document["codecs"].values()
    ]


HEAD: Sequence[str] = (
    "activation / gradient", "average", "largest difference", "median difference",
    "steps within 1e-4", "one process, reversed order",
)  # fmt: skip


def agreement_markdown(document: Mapping[str, Any]) -> str:
    """Distance of real runs from the reference."""
    head = (
        f"{when_and_where(document)}, load {document['load_before']:.1f} before; "
        f"{document['stages']} stages with {document['peers_per_stage']} peers each, "
        f"{document['steps']} steps, one run per codec."
    )
    return headed_table(head, HEAD, "llrrrr", rows_of(document))


if __name__ == "__main__":
    main()
