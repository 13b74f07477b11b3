"""Addresses of the coordinator: where it listens and what peers dial.

Owns the meaning of `listen_host` and the order of the addresses in invites: those that the
organiser announces, then this machine's own, loopback last.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from pydantic import ValidationError

from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.endpoint import IpAddress
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.json_messages import first_error
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.run.manifest import Manifest

MAX_ADDRESSES = 16
"""Addresses in an invite; each adds nine characters. Machines with more run containers."""


def listen_address(host: str, port: int) -> str:
    """The multiaddr to listen on; ConfigurationError when `host` is not an IP address."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigurationError(
            f"run.toml: [network] listen_host must be an IP address of this machine, or 0.0.0.0 "
            f"for all of them, not {host!r}"
        ) from error
    return f"/ip{ip.version}/{ip}/tcp/{port}"


def dialable_addresses(host: str, port: int, announced: Sequence[str] = ()) -> tuple[str, ...]:
    """The addresses of an invite. For a loopback host these are only loopback addresses."""
    ip = ipaddress.ip_address(host)
    own = [f"/ip{ip.version}/{ip}/tcp/{port}"]
    if ip.is_unspecified:
        own = [f"/ip{a.version}/{a}/tcp/{port}" for a in interface_addresses(ip.version)]
    return tuple(dict.fromkeys([*announced, *own]))[:MAX_ADDRESSES]


def dual_stack(addresses: Sequence[str], port: int) -> tuple[str, ...]:
    """The addresses of a node that also listens on IPv6; loopback stays last."""
    six = [f"/ip6/{a}/tcp/{port}" for a in interface_addresses(6) if not a.is_loopback]
    loopback = [a for a in addresses if "/ip4/127." in a]
    others = [a for a in addresses if a not in loopback]
    return tuple(dict.fromkeys([*others, *six, *loopback]))[:MAX_ADDRESSES]


def interface_addresses(version: int) -> list[IpAddress]:
    """This machine's addresses of one IP version, the most useful first."""
    addresses = [ip for ip in Interfaces.of_this_machine().hosts if ip.version == version]
    return sorted(addresses, key=lambda ip: (ip.is_loopback, ip.is_private, ip.packed))


def invite_for(manifest: Manifest, addresses: tuple[str, ...], token: str | None) -> Invite:
    """The run's invite; ConfigurationError when an announced address is invalid."""
    try:
        return Invite(
            coordinator=manifest.organiser, addresses=addresses, run_id=run_id_of(manifest),
            organiser=manifest.organiser, token=token,
        )  # fmt: skip
    except ValidationError as error:
        raise ConfigurationError(
            f"run.toml: [network] announce: {first_error(error)}; "
            f"write addresses like /ip4/192.0.2.1/tcp/4001 or /dns4/example.org/tcp/4001"
        ) from error
