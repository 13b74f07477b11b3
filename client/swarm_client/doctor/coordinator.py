"""The checks of the invite and of its coordinator: reachable, authentic, willing.

From the cheapest to the most expensive: the invite's text, TCP, Noise with the expected peer, a
probe session (`swarm_shared.probe.client`). The measurements of a session are in
`swarm_client.doctor.links`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

import psutil
import trio

from swarm_client.doctor.report import Check, Results, ok, problem, skipped, warning
from swarm_shared.base.endpoint import Endpoint
from swarm_shared.base.error_groups import leaves
from swarm_shared.base.errors import (
    AdmissionError,
    NetworkError,
    ProtocolError,
    SwarmError,
    VersionError,
)
from swarm_shared.base.types import PeerId
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node
from swarm_shared.probe.client import Probe, ProbeBusy, open_probe
from swarm_shared.protocol import SOFTWARE_VERSION, DoctorHello, DoctorWelcome

logger = logging.getLogger(__name__)

TCP_SECONDS = 5.0
CONNECT_SECONDS = 8.0
BUSY_TRIES = 3
LONGEST_BUSY_SECONDS = 3.0
MAX_ADDRESSES = 8

AFTER_CONNECTING = ("version", "admission", "clock", "link", "peers")

_NAME = re.compile(r"/dns[46]?/([A-Za-z0-9.-]{1,253})/tcp/([0-9]{1,5})")


def check_invite(invite: Invite) -> Check:
    count = len(invite.addresses)
    return ok(
        "invite",
        f"run {invite.run_id[:12]}, coordinator …{invite.coordinator[-8:]} at {count} "
        f"{'address' if count == 1 else 'addresses'}",
        run=invite.run_id, coordinator=invite.coordinator,
    )  # fmt: skip


# ---------------------------------------------------------------- connection


async def connect(node: Node, invite: Invite) -> Check:
    """TCP first, then Noise with the peer that the invite names: they fail for different
    reasons."""
    reached, reasons = await _try_tcp(invite.addresses[:MAX_ADDRESSES])
    if not reached:
        return _unreached(invite.addresses, reasons)
    try:
        await node.connect(invite.coordinator, invite.addresses, CONNECT_SECONDS)
    except NetworkError as error:
        logger.info("the coordinator is not at its address: %s", error)
        return problem(
            "coordinator", NetworkError,
            f"another peer than the coordinator of this invite answers at {reached[0]}",
            "Ask the organiser for a new invite: the coordinator's address or key has changed.",
        )  # fmt: skip
    return ok("coordinator", f"reached at {reached[0]}, with the key that the invite names")


async def _try_tcp(addresses: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(addresses that accept connections, the fastest first; the remaining ones by reason)."""
    reached: list[str] = []
    reasons: dict[str, list[str]] = {}

    async def attempt(address: str) -> None:
        place = _host_and_port(address)
        if place is None:
            return
        try:
            with trio.fail_after(TCP_SECONDS):
                stream = await trio.open_tcp_stream(*place)
        except trio.TooSlowError:
            reasons.setdefault("no answer", []).append(address)
        except OSError as error:
            reasons.setdefault(_reason(error), []).append(address)
        else:
            reached.append(address)
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(attempt, address)
    return reached, reasons


def _reason(error: OSError) -> str:
    """trio wraps one error per attempt, of which there is one here."""
    cause = next(leaves(error.__cause__ or error))
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno).lower()
    return str(cause)


def _unreached(addresses: Sequence[str], reasons: Mapping[str, Sequence[str]]) -> Check:
    tried = [f"{', '.join(where)} ({reason})" for reason, where in reasons.items()]
    seen = f"no answer at {'; '.join(tried) or ', '.join(addresses)}"
    fix = (
        "Try again in a few minutes; if it still fails, ask the organiser whether the "
        "coordinator is running and whether a firewall blocks the connection."
    )
    if all(_is_loopback(address) for address in addresses):
        fix = (
            "This invite leads to this machine itself: start the coordinator here, or ask the "
            "organiser for an invite that other machines can use."
        )
    elif not has_network():
        seen = f"this machine has no network connection; {seen}"
        fix = "Connect this machine to the internet: check the cable or the Wi-Fi."
    return problem("coordinator", NetworkError, seen, fix)


def has_network() -> bool:
    """Whether any interface but the loopback is up and has a routable address."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return any(
        not entry.address.startswith(("127.", "::1", "fe80:"))
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family.name in ("AF_INET", "AF_INET6")
    )


def _is_loopback(address: str) -> bool:
    endpoint = Endpoint.parse(address)
    return endpoint is not None and endpoint.ip.is_loopback


def _host_and_port(address: str) -> tuple[str, int] | None:
    endpoint = Endpoint.parse(address)
    if endpoint is not None:
        return str(endpoint.ip), endpoint.port
    match = _NAME.fullmatch(address)
    return None if match is None else (match[1], int(match[2]))


# ---------------------------------------------------------------- probe session


def hello_of(invite: Invite) -> DoctorHello:
    return DoctorHello(run=invite.run_id, software=SOFTWARE_VERSION, token=invite.token)


async def visit_coordinator(
    node: Node, invite: Invite, inside: Callable[[Probe], Awaitable[None]], results: Results
) -> DoctorWelcome | None:
    """Run `inside` during a probe session; return its welcome, or None when there was no session.

    A busy coordinator is asked again for a moment. What keeps it from answering goes into
    `results`.
    """
    for last_try in (False,) * (BUSY_TRIES - 1) + (True,):
        try:
            async with open_probe(
                node, invite.coordinator, hello_of(invite), invite.addresses
            ) as probe:  # fmt: skip
                await inside(probe)
                return probe.welcome
        except ProbeBusy as error:
            if last_try or error.retry_after_seconds > LONGEST_BUSY_SECONDS:
                results.put(no_answer_check(error))
                break
            await trio.sleep(error.retry_after_seconds)
        except SwarmError as error:
            results.put(no_answer_check(error))
            break
    results.skip(AFTER_CONNECTING, "the coordinator did not answer")
    return None


def no_answer_check(error: SwarmError) -> Check:
    """The coordinator is reachable but does not answer the doctor, or stops in the middle."""
    if isinstance(error, AdmissionError):
        return problem(
            "admission", AdmissionError, str(error),
            "Ask the organiser for a new invite, and whether this machine may participate.",
        )  # fmt: skip
    if isinstance(error, ProtocolError):
        return problem(
            "version", ProtocolError, f"the coordinator's answer is invalid: {error}",
            "Install the version of swarmtrain that the organiser uses.",
        )  # fmt: skip
    if "does not serve" in str(error):
        return problem(
            "version", VersionError, "the coordinator is too old for this check",
            "Ask the organiser which version of swarmtrain the run needs.",
        )  # fmt: skip
    return warning("link", f"no answer: {error}", "Run this again in a minute.")


def version_and_admission(
    welcome: DoctorWelcome, peer: PeerId | None, client_running: bool
) -> tuple[Check, Check]:
    """The coordinator's statement about this machine's version and admission.

    `peer` is the peer it was asked about; None: an unadmitted client, because there is no identity
    here, or because only a running client may use it.
    """
    details = {"ours": SOFTWARE_VERSION, "coordinator": welcome.software}
    if welcome.software_fits:
        version = ok("version", f"{SOFTWARE_VERSION}; the run uses {welcome.software}")
    else:
        version = problem(
            "version", VersionError,
            f"{SOFTWARE_VERSION} is installed here, but the run needs {welcome.software}",
            f"Install swarmtrain {welcome.software} on this machine.", **details,
        )  # fmt: skip
    if not welcome.admission:
        return version, ok("admission", "the run would admit this machine")
    if client_running:
        return version, skipped(
            "admission", "not checked: a client is already running in this home"
        )
    fix = f"Ask the organiser to admit this machine, which is peer {peer}."
    if peer is None:
        fix = (
            "Start `swarm-client join` once: it prints this machine's peer ID, which the "
            "organiser needs to admit it."
        )
    return version, problem("admission", AdmissionError, welcome.admission, fix)
