"""The first pane: the run, this machine's devices, their use, and the contribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_client.control.reasons import DaemonState
from swarm_client.tui.model import ClientModel, seconds_left, share_of_run, share_of_stage
from swarm_shared.base.text import (
    MISSING,
    duration_text,
    excerpt,
    memory_text,
    printable,
    rate_text,
    size_text,
)
from swarm_shared.tui.bars import bar, gauge_role, sparkline
from swarm_shared.tui.formatting import counted, number, percent, short_number
from swarm_shared.tui.plot import plot
from swarm_shared.tui.styled_text import EMPTY, Line, Role, beside, heading, joined, line

if TYPE_CHECKING:
    from swarm_client.control.status_document import DeviceView, EvaluationView, Status

TWO_COLUMNS = 116
"""Width from which two blocks stand side by side."""
_NARROW = 76
"""Width of a block below which its bars are short."""
_TALLEST_CURVE = 14
_NAME = 12
"""Cells of a line's name, so that the values are aligned."""

WORD_ROLES: dict[DaemonState, Role] = {
    DaemonState.CONTRIBUTING: "good",
    DaemonState.SYNCING: "accent",
    DaemonState.QUEUED: "accent",
    DaemonState.DEGRADED: "bad",
    DaemonState.PAUSED: "warn",
    DaemonState.STOPPED: "warn",
}


def overview(model: ClientModel, width: int, height: int) -> list[Line]:
    status = model.status
    if status is None:
        return [EMPTY, line(("  waiting for the daemon's first status ...", "dim"))]
    half = (width - 2) // 2 if width >= TWO_COLUMNS else width
    run = _run(model, status, half)
    devices = _devices(status, half)
    machine = _machine(status, half)
    network = _network(model, status, half)
    given = _given(model, status, half)
    if width >= TWO_COLUMNS:
        left, right = [*run, EMPTY, *devices], [*machine, EMPTY, *network, EMPTY, *given]
        lines = beside(left, right, width)
    else:
        lines = [*run, *devices, *machine, *network, *given]
    room = height - len(lines) - 2
    return [*lines, *_curve(model, width, min(room, _TALLEST_CURVE))] if room >= 5 else lines


def _curve(model: ClientModel, width: int, height: int) -> list[Line]:
    """Draw the loss over the observed steps, where a tall terminal has room for it."""
    return [
        EMPTY,
        heading("Loss by step", width),
        *plot(model.loss.points(), width, height, label=lambda loss: f"{loss:8.3f}"),
    ]


def _bar_cells(width: int) -> int:
    return 16 if width >= _NARROW else 10


def _named(name: str, *parts: Line) -> Line:
    return (*line((f"  {name:<{_NAME - 2}}", "dim")), *joined(parts, "  "))


def _evaluation(evaluation: EvaluationView | None, width: int) -> list[Line]:
    if evaluation is None:
        return []
    loss = number(evaluation.heldout_loss, 4)
    lines = [_named("held-out", line(f"{loss} after step {evaluation.version:,}"))]
    if evaluation.sample:
        lines.append(_named("it writes", line(excerpt(evaluation.sample, width - _NAME))))
    return lines


def _run(model: ClientModel, status: Status, width: int) -> list[Line]:
    run = status.run
    if run is None:
        return [
            heading("Run", width),
            _named("none", line("`swarm-client join INVITE` joins one")),
        ]
    done = run.version / run.steps if run.steps > 0 else None
    left = seconds_left(model)
    spark = max(8, min(40, width - 44))
    lines = [
        heading(f"Run {printable(run.name)}", width),
        _named(
            "steps",
            bar(done, _bar_cells(width)),
            line(f"{run.version:,} of {run.steps:,} ({percent(done)})"),
            line(f"{duration_text(left)} left") if left else EMPTY,
        ),
        _named(
            "loss",
            line((f"{number(run.loss, 4):<16}", "strong")),
            line((sparkline(model.loss.values(), spark, from_zero=False), "accent")),
        ),
        _named(
            "speed",
            line(f"{short_number(run.tokens_per_second) + ' tokens/s':<16}"),
            line((sparkline(model.tokens_per_second.values(), spark), "accent")),
        ),
        *_evaluation(run.evaluation, width),
        _named("my share", *_share(status, width)),
    ]
    if not run.coordinator_attached:
        lines.append(_named("", line(("no connection to the coordinator", "bad"))))
    return lines


def _share(status: Status, width: int) -> list[Line]:
    share = share_of_run(status)
    parts = [bar(share, _bar_cells(width)), line(f"{percent(share)} of the work now")]
    for device in status.devices:
        of_stage = share_of_stage(status, device)
        if of_stage is not None:
            parts.append(line((f"{percent(of_stage)} of stage {device.stage}", "dim")))
    return parts


def _devices(status: Status, width: int) -> list[Line]:
    lines = [heading("Devices", width)]
    for device in status.devices:
        lines += _device(device, width)
    if not status.devices:
        lines.append(_named("none", line(("no device is in use", "dim"))))
    return [*lines, *_classes(status)]


def _classes(status: Status) -> list[Line]:
    """Draw the classes of arithmetic, each with its devices where there are several."""
    devices: dict[str, list[str]] = {}
    for device in status.devices:
        if device.arithmetic is not None:
            devices.setdefault(device.arithmetic, []).append(device.id)
    if not devices:
        return []
    several = len(devices) > 1
    texts = [f"{name} ({', '.join(ids)})" if several else name for name, ids in devices.items()]
    return [_named("class", *(line(printable(text)) for text in texts))]


def _device(device: DeviceView, width: int) -> list[Line]:
    stage = "no stage" if device.stage is None else f"stage {device.stage}"
    used, whole = device.memory_used_bytes, device.memory_bytes
    memory = used / whole if used is not None and whole > 0 else None
    unit = "microbatches/s" if width >= _NARROW else "a second"
    narrow = 10 if width >= _NARROW else 4
    gauges = [
        joined((line(("memory ", "dim")), bar(memory, narrow, gauge_role(memory, 0.95, 1.01))
                ), ""),
        line(f"{memory_text(used)} of {memory_text(whole)}"),
        joined((line(("busy ", "dim")), bar(device.utilization, narrow)), ""),
        line(percent(device.utilization)),
    ]  # fmt: skip
    rest = [line(f"{device.temperature_celsius:.0f} C")] if device.temperature_celsius else []
    if device.duty_cycle < 1.0:
        rest.append(line((f"may compute {percent(device.duty_cycle)} of the time", "warn")))
    return [
        _named(
            printable(device.id)[: _NAME - 3],
            line(stage),
            line(printable(device.phase)),
            line((f"{device.microbatches_per_second:.2f} {unit}", "strong")),
            line(f"{device.queued} queued"),
            line((printable(device.label), "dim")),
        ),
        _named("", *gauges, *rest),
        *(_named("download", line(printable(str(one)))) for one in device.downloads),
    ]


def _machine(status: Status, width: int) -> list[Line]:
    machine = status.machine
    total, free = machine.memory_total_bytes, machine.memory_available_bytes
    memory = 1 - free / total if total > 0 else None
    facts = []
    if machine.on_batteries is not None:
        facts.append(
            line(("on batteries", "warn")) if machine.on_batteries else line("on mains power")
        )
    if machine.user_idle_seconds is not None:
        idle = duration_text(machine.user_idle_seconds)
        facts.append(line(f"unattended for {idle}"))
    facts.append(line(f"{size_text(machine.disk_free_bytes)} of disk free"))
    return [
        heading("This machine", width),
        _named(
            "processor",
            bar(machine.cpu_share, _bar_cells(width)),
            line(f"{percent(machine.cpu_share)}, {percent(machine.own_cpu_share)} of it mine"),
        ),
        _named(
            "memory",
            bar(memory, _bar_cells(width), gauge_role(memory, 0.9, 0.97)),
            line(
                f"{memory_text(total - free)} of {memory_text(total)}, "
                f"{memory_text(machine.own_memory_bytes)} mine"
            ),
        ),
        _named("", *facts),
    ]


def _network(model: ClientModel, status: Status, width: int) -> list[Line]:
    traffic = status.traffic
    spark = max(8, min(40, width - 34))
    lines = [
        heading(f"Network{_reached(traffic.reachability)}", width),
        _named(
            "sent",
            line((sparkline(model.sent.values(), spark), "accent")),
            line(f"{rate_text(traffic.sent_bytes_per_second):>9}"),
            line((size_text(traffic.sent_bytes), "dim")),
        ),
        _named(
            "received",
            line((sparkline(model.received.values(), spark), "accent")),
            line(f"{rate_text(traffic.received_bytes_per_second):>9}"),
            line((size_text(traffic.received_bytes), "dim")),
        ),
    ]
    if traffic.quota_bytes:
        used = traffic.quota_used_bytes / traffic.quota_bytes
        of = f"{size_text(traffic.quota_used_bytes)} of {size_text(traffic.quota_bytes)}"
        lines.append(_named("quota", bar(used, _bar_cells(width), gauge_role(used, 0.8)), line(of)))
    return lines


def _given(model: ClientModel, status: Status, width: int) -> list[Line]:
    given = status.contribution
    return [
        heading("Given", width),
        _named(
            "tokens",
            line((short_number(given.tokens), "strong")),
            line(f"in {counted(given.steps, 'step', 'steps')}"),
            line(f"credit {short_number(given.credit) if given.credit else MISSING}"),
            line(f"{given.streak_days}-day streak") if given.streak_days else EMPTY,
        ),
    ]


def _reached(reachability: str) -> str:
    """Return how peers can dial in; nothing while that is being measured."""
    return "" if reachability == "unknown" else f" ({printable(reachability.replace('_', ' '))})"
