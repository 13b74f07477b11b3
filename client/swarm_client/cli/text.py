"""The status document and the contribution as text for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from swarm_client.control.status_document import ContributionView, DeviceView, RunView, Status
from swarm_client.control.status_sentence import clock_text
from swarm_shared.base.text import printable, size_text
from swarm_shared.tui.formatting import short_number

REACHED = {
    "public": "other peers can connect directly",
    "mapped": "other peers can connect through the router",
    "behind_nat": "behind a router: relays and hole punching",
    "unknown": "it is not known yet whether other peers can connect",
}


def status_text(status: Status) -> str:
    return "\n".join(printable(line) for line in _lines(status))


def _lines(status: Status) -> Iterator[str]:
    yield f"{status.state.value}: {status.sentence}"
    if status.run is not None:
        yield _row("run", _run_text(status.run))
    name = f" ({status.name})" if status.name else ""
    yield _row("this peer", f"…{status.peer[-8:]}{name}")
    for device in status.devices:
        yield _row("device" if len(status.devices) == 1 else device.id, _device_text(device))
    for stage in status.stages:
        rate = stage.microbatches_per_second
        made = f", {rate:.2f} microbatches/s" if rate else ""
        yield _row(f"stage {stage.stage}", f"{stage.peers} peer(s){made}")
    if status.run is not None:
        traffic = status.traffic
        reached = REACHED.get(traffic.reachability, traffic.reachability)
        yield _row(
            "network",
            f"{reached}; {size_text(traffic.sent_bytes)} sent, "
            f"{size_text(traffic.received_bytes)} received",
        )
    if status.away is not None:
        ended = status.away.began + status.away.seconds
        yield _row("away", f"{status.away.sentence}, until {clock_text(ended, status.time)}")
    yield _row("given", contribution_text(status.contribution))


def _row(label: str, text: str) -> str:
    return f"  {label:<10} {text}"


def _run_text(run: RunView) -> str:
    text = f"{run.name or run.id[:12]}: step {run.version} of {run.steps}"
    if run.loss is not None:
        text += f", loss {run.loss:.4f}"
    if run.tokens_per_second:
        text += f", {run.tokens_per_second:,.0f} tokens/s"
    return text + ("" if run.coordinator_attached else " (last known state)")


def _device_text(device: DeviceView) -> str:
    if device.stage is None:
        return f"{device.label}: {device.phase}"
    text = f"{device.label}: stage {device.stage}, {device.phase}"
    if device.phase == "downloading":
        return text  # the sentence has its progress
    text += f", {device.microbatches_per_second:.2f} microbatches/s, {device.queued} in flight"
    if device.arithmetic is not None:
        text += f", class {device.arithmetic}"
    return "; ".join([text, *(f"downloading {one}" for one in device.downloads)])


def contribution_text(given: ContributionView) -> str:
    if not given.steps:
        return "nothing yet"
    days = f", {given.streak_days} day(s) in a row" if given.streak_days else ""
    return (
        f"{given.microbatches:,} microbatches, {short_number(given.tokens)} tokens in "
        f"{given.steps:,} steps; credit {short_number(given.credit)}, recently "
        f"{short_number(given.recent_credit)} a day{days}"
    )
