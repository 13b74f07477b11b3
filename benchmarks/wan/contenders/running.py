"""Contenders of bench-wan. Each starts its programs on the machines, waits for them, and returns
the times of its steps. Contenders are independent of each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.instruments.handicap import EQUAL_SHARES_VARIABLE, INSTRUMENT
from benchmarks.instruments.inside import own_command, prefix_of
from benchmarks.instruments.pace import PACE_VARIABLE
from benchmarks.run_data import TimedStep, read_steps, timed_steps
from benchmarks.wan.contenders.borders import border_table
from benchmarks.wan.contenders.field import COORDINATOR, TRAINER, Field, wait_for, wait_for_all
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_shared.run.codec_sizes import ActivationCodec


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one contender's run."""

    steps: Sequence[TimedStep]
    details: Mapping[str, Any] = dataclass_field(default_factory=dict)
    """Further data of this contender for the result file."""


Run = Callable[[Field, Path], Outcome]


@dataclass(frozen=True, slots=True)
class Contender:
    title: str
    run: Run
    exact: bool = True
    """True when its losses must equal those of one process."""
    why_not: Callable[[Field], str | None] = lambda field: None
    """Returns the reason why it cannot train on this fleet, or None."""


def swarm(
    field: Field, work: Path, *, codec: ActivationCodec = "none", equal_shares: bool = False,
    staleness: int = 0, volunteer_prefix: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Run this project's programs as organisers and volunteers do, volunteers with a prefix."""
    run_dir = work / "run"
    shutil.copytree(field.run_folder(codec=codec, staleness=staleness), run_dir)
    with Subprocesses() as children:
        local = LocalSwarm(run_dir, children)
        local.prefix = field.network.hosts[COORDINATOR].prefix
        invite = local.start_coordinator()
        for member in field.members:
            instrument = volunteer_prefix or prefix_of(INSTRUMENT)
            local.prefix = (*field.host(member).prefix, *instrument)
            local.environment = {PACE_VARIABLE: repr(member.flops_per_second)}
            if equal_shares:
                local.environment[EQUAL_SHARES_VARIABLE] = "1"
            local.start_volunteer(invite, stage=member.stage)
        finished = local.watch()
        local.wait_for_exit()
    # Byte counts of links are written last.
    told = local.history() or finished
    # Volunteers are started and named in the order of the members.
    stage_of = {f"volunteer-{n}": one.stage for n, one in enumerate(field.members, 1)}
    return Outcome(timed_steps(finished), {"borders": border_table(told, stage_of, field.sizes)})


def torch_single(field: Field, work: Path) -> Outcome:
    """Run one process with the pace of all machines together, without a network."""
    out = work / "steps.jsonl"
    words = [str(field.run_folder()), "--steps", str(field.steps)]
    words += ["--threads", "2", "--out", str(out)]
    fleet = sum(member.flops_per_second for member in field.members)
    with Subprocesses() as children:
        children.start(
            "torch", own_command("benchmarks.throughput.torch_single", *words),
            work / "torch.out", {**field.environment(fleet), "OMP_NUM_THREADS": "2"},
        )  # fmt: skip
        wait_for_all(children, "the torch process")
    return Outcome(read_steps(out))


def pipeline(field: Field, work: Path, chunks: int = 1) -> Outcome:
    """Run torch.distributed.pipelining over gloo: 1F1B, or interleaved with `chunks` per rank."""
    out = work / "steps.jsonl"
    template = field.run_folder(chunks)
    taken = [0] * field.stages
    with Subprocesses() as children:
        for member in field.members:
            # Machines of one stage belong to different pipelines.
            rank = taken[member.stage] * field.stages + member.stage
            taken[member.stage] += 1
            words = [str(template), "--rank", str(rank), "--steps", str(field.steps)]
            words += ["--threads", "1", "--store", str(work / "store"), "--out", str(out)]
            words += ["--chunks", str(chunks), "--pipelines", str(field.pipelines)]
            command = own_command("benchmarks.throughput.torch_pipeline", *words)
            children.start(
                f"rank {rank}", (*field.host(member).prefix, *command), work / f"rank-{rank}.out",
                field.environment(member.flops_per_second),
            )  # fmt: skip
        wait_for_all(children, "the pipeline")
    return Outcome(read_steps(out))


def interleaved(field: Field, work: Path) -> Outcome:
    return pipeline(field, work, chunks=2)


def experts(field: Field, work: Path, *, fp16: bool) -> Outcome:
    """Run stages behind hivemind's MoE servers, and a trainer through which all tensors pass."""
    out = work / "steps.jsonl"
    template = str(field.run_folder())
    precision = "--fp16" if fp16 else "--fp32"
    with Subprocesses() as children:
        for member in field.members:
            host = field.host(member)
            words = [template, "--stage", str(member.stage), "--address", host.ipv4]
            command = own_command(
                "benchmarks.wan.contenders.expert_server", *words, "--folder", str(work), precision
            )
            server = children.start(
                f"server {member.stage}", (*host.prefix, *command),
                work / f"server-{member.stage}.out", field.environment(member.flops_per_second),
            )  # fmt: skip
            children.exit_expected.append(server)
        host = field.network.hosts[TRAINER]
        words = [template, "--address", host.ipv4, "--folder", str(work)]
        words += ["--steps", str(field.steps), "--out", str(out)]
        command = own_command("benchmarks.wan.contenders.expert_trainer", *words)
        trainer = children.start(
            "trainer", (*host.prefix, *command), work / "trainer.out", field.environment(1e15)
        )
        wait_for(trainer, children, "the trainer")
    return Outcome(read_steps(out))


def data_parallel(field: Field, work: Path) -> Outcome:
    """Run the whole model on every machine, averaged by hivemind.Optimizer."""
    out = work / "steps.jsonl"
    with Subprocesses() as children:
        started = []
        for index, member in enumerate(field.members):
            host = field.host(member)
            words = [str(field.run_folder()), "--member", str(index)]
            words += ["--members", str(len(field.members)), "--address", host.ipv4]
            words += ["--folder", str(work), "--steps", str(field.steps), "--out", str(out)]
            command = own_command("benchmarks.wan.contenders.data_parallel", *words)
            started.append(
                children.start(
                    f"member {index}", (*host.prefix, *command), work / f"member-{index}.out",
                    field.environment(member.flops_per_second),
                )
            )  # fmt: skip
        children.exit_expected.extend(started[1:])
        wait_for(started[0], children, "the first member")
    return Outcome(read_steps(out))


def several_to_choose_from(field: Field) -> str | None:
    return None if field.pipelines > 1 else "each stage has one machine only"


def one_pipeline(field: Field) -> str | None:
    return None if field.pipelines == 1 else "it does not average within a stage"


CONTENDERS: dict[str, Contender] = {
    "torch": Contender("one torch process as fast as all together", torch_single),
    "swarm": Contender("swarm", swarm),
    "swarm-fp16": Contender(
        "swarm, float16 on the wire", partial(swarm, codec="float16"), exact=False
    ),
    "swarm-int8": Contender("swarm, int8 on the wire", partial(swarm, codec="int8"), exact=False),
    "swarm-late": Contender(
        "swarm, staleness 1", partial(swarm, staleness=1), exact=False
    ),
    "swarm-late-int8": Contender(
        "swarm, staleness 1, int8 on the wire", partial(swarm, codec="int8", staleness=1),
        exact=False,
    ),
    "swarm-equal": Contender(
        "swarm, routing by equal shares", partial(swarm, equal_shares=True),
        why_not=several_to_choose_from,
    ),
    "1f1b": Contender("torch 1F1B over gloo", pipeline),
    "interleaved": Contender("torch interleaved 1F1B over gloo", interleaved),
    "expert": Contender(
        "trainer in the middle, RemoteExpert fp32", partial(experts, fp16=False),
        why_not=one_pipeline,
    ),
    "expert-fp16": Contender(
        "trainer in the middle, RemoteExpert fp16", partial(experts, fp16=True),
        exact=False, why_not=one_pipeline,
    ),
    "data-parallel": Contender("hivemind.Optimizer, whole model each", data_parallel, exact=False),
}  # fmt: skip
