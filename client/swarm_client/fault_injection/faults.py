"""Fault injection: faults of a volunteer at an exact step and point, for tests and benchmarks.

Off unless the environment names a plan. With a plan, every process of the volunteer logs at its
start that fault injection is on, and logs each fault. The plan is a JSON file, read again whenever
it has changed, so that one run can carry many cases:

    {"faults": [{"id": "a", "peer": "volunteer-3", "step": 4, "phase": "forward",
                 "action": "freeze", "seconds": 8}]}

By default a fault happens once, to the first process of that peer that reaches the point of that
step, and leaves a file PLAN.ID.fired before it acts. `step` is the step that the peer works on
(version + 1); for a checkpoint, the version that is saved; without `step`, the first step that
reaches the point.

The calls mark the points: `inject` where a process may die, freeze or lose its disk or clock,
`inject_outage` where the daemon, the only process with a network, may lose it, and `corrupt` (or
`corrupt_file`) where a tensor may be altered. All return at once while no plan is in force.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import ValidationError

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.frozen_model import FrozenModel

PLAN_VARIABLE = "SWARM_FAULTS"
PEER_VARIABLE = "SWARM_FAULTS_PEER"
"""The peer's name, set by the daemon for its workers, which do not know it."""


ANY_PEER = "*"
"""Stands for the first peer that reaches the point: the run chooses which peer saves a checkpoint
or moves."""


class FaultPoint(StrEnum):
    """A point in the life of a step, in the order of that life."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECEIPT = "receipt"
    """The microbatch is accumulated and its receipt signed, but the receipt has not been sent."""
    ALL_REDUCE = "all-reduce"
    """In the middle of the all-reduce: the members' streams are open and sums are in flight."""
    NORM = "norm"
    APPLY = "apply"
    CHECKPOINT = "checkpoint"
    STATE_DOWNLOAD = "state download"
    STAGE_MIGRATION = "stage migration"
    """One stage has been released and the next one is not held yet."""


class FaultAction(StrEnum):
    """What a fault does."""

    KILL = "kill"
    """SIGKILL to the daemon, and to the process at the point."""
    KILL_WORKER = "kill worker"
    """SIGKILL to the process at the point, which may be a worker of the daemon."""
    FREEZE = "freeze"
    """SIGSTOP to every process of the volunteer, and SIGCONT after `seconds`."""
    FREEZE_WORKER = "freeze worker"
    """SIGSTOP to the process at the point, without end: another process has to notice."""
    PARTITION = "partition"
    """Nothing arrives from the network and nothing reaches it, for `seconds`."""
    DELAY = "delay"
    """The process at the point sleeps for `seconds`."""
    CORRUPT = "corrupt"
    """One number of the tensor is replaced by another finite one."""
    NAN = "nan"
    """The tensor holds NaN."""
    DISK_FULL = "disk full"
    """No file of any process can grow for `seconds`."""
    OUT_OF_MEMORY = "out of memory"
    """An allocation of the process at the point fails."""
    CLOCK_JUMP = "clock jump"
    """The wall clock is `seconds` ahead from now on; behind, if negative."""


CORRUPTING_ACTIONS = frozenset({FaultAction.CORRUPT, FaultAction.NAN})
HERE_ACTIONS = frozenset(FaultAction) - CORRUPTING_ACTIONS - {FaultAction.PARTITION}
"""What befalls the process at the point, or the whole volunteer."""


class Fault(FrozenModel):
    """One fault of the plan."""

    id: str
    peer: str
    """Name of the volunteer as given on its command line, or ANY_PEER."""
    phase: FaultPoint
    action: FaultAction
    step: int | None = None
    seconds: float = 0.0
    repeats: bool = False
    """Happens every time, without a log line or file: a delay then makes a slow device."""


class _FaultPlan(FrozenModel):
    faults: tuple[Fault, ...]


class FaultInjector:
    """Carries out the plan in one process of one volunteer."""

    def __init__(self, plan: Path, peer: str, daemon_pid: int) -> None:
        self._plan = plan
        self._peer = peer
        self._daemon_pid = daemon_pid
        self._faults: tuple[Fault, ...] = ()
        self._read: tuple[int, int] | None = None
        self._clock = time.time
        self.drop_network: Callable[[float], None] | None = None
        """Set by the daemon, the only process with a network
        (`swarm_client.fault_injection.network_outage`)."""
        self._reload()

    def claimed(
        self, phase: FaultPoint, step: int, actions: Container[FaultAction]
    ) -> Iterator[Fault]:
        """The faults of these actions that are due here and that no other process has claimed."""
        self._reload()
        for fault in self._faults:
            if (
                fault.phase is phase
                and fault.action in actions
                and fault.peer in (self._peer, ANY_PEER)
                and (fault.step is None or fault.step == step)
                and self._claim(fault, step)
            ):
                yield fault

    def _reload(self) -> None:
        try:
            status = self._plan.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen == self._read:
                return
            plan = _FaultPlan.model_validate_json(self._plan.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigurationError(
                f"{PLAN_VARIABLE} names {self._plan}, which is not a valid fault plan ({error}); "
                f"correct it, or take {PLAN_VARIABLE} out of the environment"
            ) from error
        self._faults, self._read = plan.faults, seen

    def _claim(self, fault: Fault, step: int) -> bool:
        """Whether this process is the first to claim the fault. The file is complete before it gets
        its name."""
        if fault.repeats:
            return True
        fired = fired_path(self._plan, fault.id)
        if fired.exists():
            return False
        own = fired.with_name(f"{fired.name}.{os.getpid()}")
        record = {"peer": self._peer, "pid": os.getpid(), "step": step, "at": time.monotonic()}
        own.write_text(json.dumps(record))
        try:
            os.link(own, fired)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        _log(f"{fault.action} at {fault.phase} of step {step} ({fault.id})")
        return True

    def carry_out(self, fault: Fault) -> None:
        match fault.action:
            case FaultAction.KILL:
                self._signal([self._daemon_pid], signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultAction.KILL_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultAction.FREEZE:
                self._freeze(fault.seconds)
            case FaultAction.FREEZE_WORKER:
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultAction.DELAY:
                time.sleep(fault.seconds)
            case FaultAction.DISK_FULL:
                _fill_disk(fault.seconds)
            case FaultAction.OUT_OF_MEMORY:
                raise MemoryError
            case FaultAction.CLOCK_JUMP:
                real, ahead_seconds = self._clock, fault.seconds
                time.time = lambda: real() + ahead_seconds

    def _freeze(self, seconds: float) -> None:
        """Stop the other processes first: a stopped process cannot stop others."""
        daemon = psutil.Process(self._daemon_pid)
        pids = [daemon.pid, *(child.pid for child in daemon.children(recursive=True))]
        continue_later(pids, seconds)
        self._signal([pid for pid in pids if pid != os.getpid()], signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


active: FaultInjector | None = None
"""None unless fault injection is on."""


def activate(peer: str | None, daemon_pid: int) -> FaultInjector | None:
    """Switch fault injection on if the environment names a plan. Each process calls this first.

    The daemon gives its name, which its workers inherit. Returns None without a plan.
    ConfigurationError if the plan is invalid: a fault plan is never silently ignored.
    """
    global active
    plan = os.environ.get(PLAN_VARIABLE)
    if not plan:
        return None
    if peer is not None:
        os.environ[PEER_VARIABLE] = peer
    name = os.environ.get(PEER_VARIABLE, "")
    active = FaultInjector(Path(plan), name, daemon_pid)
    _log(
        f"is ON in this process, by {PLAN_VARIABLE}={plan}; do not use this volunteer in a real run"
    )
    return active


def inject(phase: FaultPoint, step: int) -> None:
    """A point where this process may die, freeze, or lose its disk or clock."""
    if active is not None:
        for fault in active.claimed(phase, step, HERE_ACTIONS):
            active.carry_out(fault)


def inject_outage(phase: FaultPoint, step: int) -> None:
    """A point where the daemon may lose its network."""
    if active is not None and active.drop_network is not None:
        for fault in active.claimed(phase, step, {FaultAction.PARTITION}):
            active.drop_network(fault.seconds)


def corrupt(phase: FaultPoint, step: int, tensor: memoryview, *, as_float64: bool = False) -> None:
    """A point where a float tensor may be altered in place; `as_float64`: its elements are
    float64."""
    if active is not None and tensor.nbytes:
        for fault in active.claimed(phase, step, CORRUPTING_ACTIONS):
            _alter(fault.action, tensor, as_float64)


def corrupt_file(phase: FaultPoint, step: int, path: Path) -> None:
    """A point where the first number of a file of tensors (safetensors) may be altered in place."""
    if active is not None:
        with (
            path.open("r+b") as file,
            mmap.mmap(file.fileno(), 0) as content,
            memoryview(content) as whole,
            whole[8 + int.from_bytes(whole[:8], "little") :] as numbers,
        ):
            corrupt(phase, step, numbers)


def continue_later(pids: Iterable[int], seconds: float) -> None:
    """Have stopped processes continue after a time."""
    command = f"sleep {seconds}; kill -CONT {' '.join(str(pid) for pid in pids)}"
    # In a session of its own, or it would be stopped too.
    subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True, stderr=subprocess.DEVNULL)


def fired_path(plan: Path, fault_id: str) -> Path:
    """The file that a fault leaves when it happens."""
    return plan.with_name(f"{plan.name}.{fault_id}.fired")


def _log(what: str) -> None:
    # A full disk may be the fault itself.
    with contextlib.suppress(OSError):
        print(f"FAULT INJECTION {what}", file=sys.stderr, flush=True)


def _alter(action: FaultAction, tensor: memoryview, as_float64: bool) -> None:
    number, size = ("<d", 8) if as_float64 else ("<f", 4)
    with tensor.cast("B") as octets:
        if action is FaultAction.NAN:
            octets[:size] = b"\xff" * size  # all bits set is NaN in every float format
            return
        (value,) = struct.unpack_from(number, octets)
        # A float64 counts small quanta: this many are a tenth and more of a mean gradient
        # (`swarm_shared.model.fixed_point_sums`, with the default epsilon).
        struct.pack_into(number, octets, 0, value + (2.0**34 if as_float64 else 1.0))


def _fill_disk(seconds: float) -> None:
    """Make the kernel refuse to grow any file of this process, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    timer = threading.Timer(seconds, free)
    timer.daemon = True
    timer.start()
