"""The check of how other peers reach this machine, by the same logic as the daemon's.

A node with a new key listens on the port that joining would use, because the question is which
address a router gives to that port.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import trio

from swarm_client.connectivity.listening import listen
from swarm_client.connectivity.port_mapping import PortMapper
from swarm_client.connectivity.reachability import (
    PeerObserver,
    ReachabilityFinding,
    examine,
)
from swarm_client.doctor.coordinator import hello_of
from swarm_client.doctor.report import Check, Detail, ok, skipped, warning
from swarm_shared.base.errors import NetworkError
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.network import open_node
from swarm_shared.protocol import Reachability


async def check_reachability(
    invite: Invite, remembered_port: int | None, mapper: PortMapper
) -> Check:
    """Ask the coordinator and, for a second opinion, a volunteer. A mapping is released
    afterwards."""
    async with open_node(Identity.generate()) as node:
        with contextlib.suppress(NetworkError):
            await listen(node, "/ip4/0.0.0.0/tcp/0", remembered_port)
        port = node.listening_port
        if port is None:
            return skipped("reachability", "this machine does not allow programs to listen")
        hello = hello_of(invite)
        coordinator = PeerObserver(node, invite.coordinator, invite.addresses, lambda: hello)

        def others() -> Sequence[PeerObserver]:
            welcome = coordinator.welcome
            if welcome is None or welcome.probe_pass is None:
                return ()
            shown = hello.model_copy(
                update={"token": None, "probe_pass": welcome.probe_pass}
            )  # fmt: skip
            return [
                PeerObserver(node, neighbour.peer, neighbour.addresses, lambda: shown)
                for neighbour in welcome.neighbours
            ]

        try:
            finding = await examine(port, coordinator, others, mapper)
            return judge(finding, port, mapper)
        finally:
            with trio.CancelScope(shield=True):
                await mapper.release()


def judge(finding: ReachabilityFinding, port: int, mapper: PortMapper) -> Check:
    details: dict[str, Detail] = {
        "class": finding.reachability.value,
        "port": port,
        "observed": str(finding.observed) if finding.observed is not None else None,
        "behind_router": finding.behind_router,
        "port_preserved": finding.port_preserved,
        "endpoint_independent": finding.endpoint_independent,
        "hole_punching": finding.hole_punching,
        "mapping": mapper.mapping.protocol if mapper.mapping is not None else None,
        "double_nat": mapper.double_nat,
    }
    note = f" ({finding.note})" if finding.note else ""
    match finding.reachability:
        case Reachability.PUBLIC:
            return ok(
                "reachability",
                f"public: other peers can connect to {finding.addresses[0]}",
                **details,
            )
        case Reachability.MAPPED:
            protocol = "NAT-PMP" if details["mapping"] == "nat-pmp" else "UPnP"
            seen = f"the router forwards {finding.addresses[0]} to this machine ({protocol})"
            return ok("reachability", seen, **details)
        case Reachability.BEHIND_NAT:
            return _behind_nat(finding, port, note, details)
    return skipped("reachability", f"not known: {finding.note}").model_copy(
        update={"details": details}
    )


def _behind_nat(
    finding: ReachabilityFinding, port: int, note: str, details: dict[str, Detail]
) -> Check:
    what = "behind a router" if finding.behind_router else "behind a firewall"
    keeps = {
        True: "it keeps ports",
        False: "it changes ports",
        None: "whether it keeps ports is unknown",
    }
    seen = f"{what}; {keeps[finding.port_preserved]}"
    open_it = f"turn on UPnP or NAT-PMP in the router, or forward TCP port {port} to this machine"
    if finding.hole_punching:
        return ok(
            "reachability", f"{seen}; most direct paths can be opened by hole punching{note}",
            **details,
        )  # fmt: skip
    if finding.hole_punching is None:
        return ok(
            "reachability", f"{seen}; joining will show whether direct paths can be opened{note}",
            **details,
        )  # fmt: skip
    return warning(
        "reachability", f"{seen}, to another one for each path; paths go through relays{note}",
        f"It works through relays, more slowly; for direct paths {open_it}.", **details,
    )  # fmt: skip
