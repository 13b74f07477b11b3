"""The self-test of a device, in a process that computes nothing else, and what it found as text."""

from __future__ import annotations

from pathlib import Path

import trio

from swarm_client.machine.devices import Device
from swarm_client.stage.handle.warm_worker import worker_process
from swarm_client.stage.protocol import messages
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_shared.base.errors import MachineError
from swarm_shared.base.text import duration_text, memory_text

LATE_SECONDS = 120.0
"""Seconds beyond its own after which a self-test counts as hung."""

MEMORY_SHARE = 0.5
"""Share of the memory on offer that is tested."""

ADVICE = "Undo any overclocking, and check the cooling and the memory"
"""Advice for people whose device has a fault, as a sentence without its full stop."""


async def run_self_test(
    device: Device, threads: int, seconds: float, log_folder: Path, duty_cycle: float = 1.0
) -> messages.SelfTested:
    """Test a device; on leaving, early as well, the process of the test is dead.

    WorkerDied or RequestFailed if the test could not be carried out.
    """
    request = messages.RunSelfTest(
        device=device.name, threads=threads, seconds=seconds, duty_cycle=duty_cycle,
        memory_bytes=int(device.memory_bytes * MEMORY_SHARE),
    )  # fmt: skip
    log_path = log_folder / "self-test.log"
    async with worker_process(threads, log_path) as child:
        try:
            with trio.move_on_after(seconds / duty_cycle + LATE_SECONDS):
                await child.link.send(request)
                answer = await child.link.receive()
                if isinstance(answer, messages.SelfTested):
                    return answer
                if isinstance(answer, messages.Failed):
                    raise answer.error()
                status = await child.wait()
                raise WorkerDied(f"its process ended with status {status}; its log is {log_path}")
            raise WorkerDied(f"it gave no answer; its log is {log_path}")
        finally:
            child.kill()  # its machine may be needed at once


def passed_text(result: messages.SelfTested) -> str:
    """Describe what a self-test without a fault has done, as part of a sentence."""
    return (
        f"{result.rounds} rounds of computing in {duration_text(result.seconds)} gave the same to "
        f"the bit, and {memory_text(result.memory_bytes)} of memory kept their content; this "
        f"device computes as class {result.arithmetic}"
    )


def fault_error(device: Device, result: messages.SelfTested) -> MachineError:
    """Return the error of a device with a fault."""
    return MachineError(
        f"{device.id} ({device.label}) has failed its self-test: {result.fault}. {ADVICE}; "
        "`swarm-client doctor --self-test` tests it again"
    )
