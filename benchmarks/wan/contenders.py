"""The ways of training one run over the network. Each starts its programs on the machines, waits
for them, and returns the times of its steps. None knows of the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.run_data import TimedStep, read_steps
from benchmarks.wan.field import COORDINATOR, Field, wait_for_all
from swarm_client.worker.pace import PACE_VARIABLE
from swarm_coordinator.local_swarm import LocalSwarm
from swarm_coordinator.processes import Children, module_command

Run = Callable[[Field, Path], Sequence[TimedStep]]


@dataclass(frozen=True, slots=True)
class Contender:
    title: str
    run: Run
    exact: bool = True
    """Its losses must equal those of one process."""


def swarm(field: Field, work: Path) -> Sequence[TimedStep]:
    """Ours: the programs that organisers and volunteers start."""
    run_dir = work / "run"
    shutil.copytree(field.templates[field.stages], run_dir)
    with Children() as children:
        local = LocalSwarm(run_dir, children)
        local.prefix = field.network.hosts[COORDINATOR].prefix
        invite = local.start_coordinator()
        for member in field.members:
            local.prefix = field.host(member).prefix
            local.environment = {PACE_VARIABLE: repr(member.flops_per_second)}
            local.start_volunteer(invite, stage=member.stage)
        finished = local.watch(lambda seen, status: None)
        local.wait_for_goodbye()
    return [
        TimedStep(step.step, step.loss, step.tokens, step.seconds, step.written_at)
        for step in finished.steps
    ]


def torch_single(field: Field, work: Path) -> Sequence[TimedStep]:
    """One process as fast as all machines together, and no network."""
    out = work / "steps.jsonl"
    words = [str(field.templates[field.stages]), "--steps", str(field.steps)]
    words += ["--threads", "2", "--out", str(out)]
    fleet = sum(member.flops_per_second for member in field.members)
    with Children() as children:
        children.start(
            "torch", module_command("benchmarks.torch_single", *words), work / "torch.out",
            {**field.environment(fleet), "OMP_NUM_THREADS": "2"},
        )  # fmt: skip
        wait_for_all(children, "the torch process")
    return read_steps(out)


def pipeline(field: Field, work: Path, chunks: int = 1) -> Sequence[TimedStep]:
    """torch.distributed.pipelining over gloo: 1F1B, or interleaved with chunks of each rank."""
    out = work / "steps.jsonl"
    template = field.templates[field.stages * chunks]
    taken = [0] * field.stages
    with Children() as children:
        for member in field.members:
            # Machines of one stage are in different pipelines.
            rank = taken[member.stage] * field.stages + member.stage
            taken[member.stage] += 1
            words = [str(template), "--rank", str(rank), "--steps", str(field.steps)]
            words += ["--threads", "1", "--store", str(work / "store"), "--out", str(out)]
            words += ["--chunks", str(chunks), "--pipelines", str(field.pipelines)]
            command = module_command("benchmarks.torch_pipeline", *words)
            children.start(
                f"rank {rank}", (*field.host(member).prefix, *command), work / f"rank-{rank}.out",
                field.environment(member.flops_per_second),
            )  # fmt: skip
        wait_for_all(children, "the pipeline")
    return read_steps(out)


def interleaved(field: Field, work: Path) -> Sequence[TimedStep]:
    return pipeline(field, work, chunks=2)


CONTENDERS: dict[str, Contender] = {
    "torch": Contender("one torch process as fast as all together", torch_single),
    "swarm": Contender("swarm", swarm),
    "1f1b": Contender("torch 1F1B over gloo", pipeline),
    "interleaved": Contender("torch interleaved 1F1B over gloo", interleaved),
}
