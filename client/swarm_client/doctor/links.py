"""The checks that a probe session measures: clocks, and the links to the coordinator and some
peers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from swarm_client.doctor.report import Check, Detail, Results, ok, skipped, warning
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import NetworkError, SwarmError
from swarm_shared.base.text import duration_text, latency_text, rate_text
from swarm_shared.network import Node
from swarm_shared.probe.client import EchoTimes, Probe, open_probe
from swarm_shared.protocol import DoctorHello, DoctorWelcome, Neighbour

logger = logging.getLogger(__name__)

MAX_PEERS = 3
"""Maximum number of volunteers that are measured."""
PEER_SECONDS = 6.0
"""Timeout of one volunteer's measurement."""

SKEW_WARNING_SECONDS = 10.0
"""Clock skew above which a warning is given."""
SLOW_RTT_SECONDS = 0.5
"""RTT above which a link counts as slow."""
SLOW_BYTES_PER_SECOND = 125_000.0
"""Rate below which a link counts as slow: one megabit per second, at which a small model's
activation takes seconds."""


async def measure_coordinator(probe: Probe, wall_clock: Clock, results: Results) -> None:
    """Put the results `clock` and `link`; each independent of the other's failure."""
    try:
        times = await probe.echo(wall_clock)
    except NetworkError as error:
        fix = "Run this again in a minute."
        results.put(
            warning("clock", f"not compared: {error}", fix),
            warning("link", f"not measured: {error}", fix),
        )
        return
    results.put(check_clock(times))
    try:
        up = await probe.upload_rate(times.rtt_seconds)
        down = await probe.download_rate(times.rtt_seconds)
    except NetworkError as error:
        rtt = latency_text(times.rtt_seconds)
        seen = f"{rtt} round trip to the coordinator; rates not measured: {error}"
        fix = "Run this again in a minute."
        results.put(warning("link", seen, fix, rtt_seconds=times.rtt_seconds))
        return
    results.put(check_link(times.rtt_seconds, up, down))


def check_clock(times: EchoTimes) -> Check:
    ahead = times.clock_ahead_seconds
    where = "ahead of" if ahead > 0 else "behind"
    seen = f"{duration_text(abs(ahead))} {where} the coordinator's"
    details = {"ahead_seconds": round(ahead, 3), "uncertainty_seconds": times.rtt_seconds / 2}
    fix = (
        "The run goes by the coordinator's clock, your preferences for hours by this machine's: "
        "turn on the setting that takes the time from the internet."
    )
    if abs(ahead) > SKEW_WARNING_SECONDS:
        return warning("clock", seen, fix, **details)
    return ok("clock", seen, **details)


def check_link(rtt_seconds: float, up: float, down: float) -> Check:
    """`up` and `down` in bytes per second."""
    rtt = latency_text(rtt_seconds)
    seen = f"{rtt} round trip to the coordinator; {_rate(up)} up, {_rate(down)} down"
    details = {
        "rtt_seconds": rtt_seconds,
        "upload_bytes_per_second": round(up),
        "download_bytes_per_second": round(down),
    }
    if min(up, down) < SLOW_BYTES_PER_SECOND or rtt_seconds > SLOW_RTT_SECONDS:
        return warning(
            "link", f"{seen}: slow",
            "Use a cable instead of Wi-Fi, and stop other downloads; a slow uplink gets less work.",
            **details,
        )  # fmt: skip
    return ok("link", seen, **details)


async def check_peers(
    node: Node, hello: DoctorHello, welcome: DoctorWelcome, wall_clock: Clock
) -> Check:
    """The links to a few volunteers that the coordinator named, one after the other."""
    if not welcome.neighbours:
        return skipped("peers", "no volunteer of the run can be measured now")
    hello = hello.model_copy(update={"token": None, "probe_pass": welcome.probe_pass})
    words: list[str] = []
    details: dict[str, Detail] = {}
    for number, neighbour in enumerate(welcome.neighbours[:MAX_PEERS], start=1):
        try:
            with trio.fail_after(PEER_SECONDS):
                rtt_seconds, up, down = await _measure_peer(node, neighbour, hello, wall_clock)
        except (SwarmError, trio.TooSlowError) as error:
            logger.info("%s was not measured: %s", neighbour.peer, error)
            continue
        path = node.path(neighbour.peer)
        kind = path.kind.value if path is not None else "lost"
        words.append(f"{latency_text(rtt_seconds)}, {_rate(up)} up, {_rate(down)} down ({kind})")
        details |= {
            f"peer_{number}": neighbour.peer,
            f"peer_{number}_path": kind,
            f"peer_{number}_rtt_seconds": rtt_seconds,
            f"peer_{number}_upload_bytes_per_second": round(up),
            f"peer_{number}_download_bytes_per_second": round(down),
        }
    return _peers_found(words, welcome.neighbours[:MAX_PEERS], details)


def _peers_found(
    words: Sequence[str], asked: Sequence[Neighbour], details: dict[str, Detail]
) -> Check:
    if not words:
        return warning(
            "peers", f"none of {len(asked)} volunteers could be measured",
            "Run this again in a minute; they may be busy or have just left.",
        )  # fmt: skip
    return ok("peers", f"{len(words)} of {len(asked)} measured: {'; '.join(words)}", **details)


async def _measure_peer(
    node: Node, neighbour: Neighbour, hello: DoctorHello, wall_clock: Clock
) -> tuple[float, float, float]:
    async with open_probe(node, neighbour.peer, hello, neighbour.addresses) as probe:
        rtt_seconds = (await probe.echo(wall_clock)).rtt_seconds
        up = await probe.upload_rate(rtt_seconds)
        down = await probe.download_rate(rtt_seconds)
    return rtt_seconds, up, down


def _rate(bytes_per_second: float) -> str:
    """Format a rate in bytes, and in bits as internet providers state it."""
    return f"{rate_text(bytes_per_second)} ({bytes_per_second * 8 / 1e6:.3g} Mbit/s)"
