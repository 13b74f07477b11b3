"""A real UPnP and NAT-PMP daemon on a router of the lab: Debian's miniupnpd."""

from __future__ import annotations

import uuid
from pathlib import Path

from kits.network_lab.commands import LabError
from kits.network_lab.namespace import Namespace
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, wait_until

START_SECONDS = 10.0


def start(
    namespace: Namespace,
    outside: str,
    inside: str,
    gateway: str,
    children: Subprocesses,
    folder: Path,
) -> Subprocess:
    """Runs it until the children end, with its files in `folder`; answers when it returns."""
    _add_chains(namespace, outside)
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "miniupnpd.conf"
    configuration.write_text(
        f"ext_ifname={outside}\n"
        f"listening_ip={inside}\n"
        "ipv6_disable=yes\n"
        "enable_natpmp=yes\n"
        "enable_upnp=yes\n"
        "secure_mode=yes\n"
        "min_lifetime=1\n"
        "max_lifetime=86400\n"
        f"lease_file={folder / 'leases'}\n"
        f"uuid={uuid.uuid4()}\n"
        "allow 1024-65535 192.168.0.0/16 1024-65535\n"
        "deny 0-65535 0.0.0.0/0 0-65535\n"
    )
    log = folder / "miniupnpd.out"
    words = ["miniupnpd", "-d", "-f", str(configuration), "-P", str(folder / "miniupnpd.pid")]
    daemon = children.start("miniupnpd", [*namespace.prefix, *words], log)
    wait_until(
        lambda: _listens(namespace, gateway, 5351) and daemon.exit_code() is None,
        children, START_SECONDS, "miniupnpd to listen for NAT-PMP",
    )  # fmt: skip
    return daemon


def _add_chains(namespace: Namespace, outside: str) -> None:
    """What Debian's start script makes; miniupnpd fills them."""
    rules = [
        "*filter", ":MINIUPNPD - [0:0]", f"-A FORWARD -i {outside} ! -o {outside} -j MINIUPNPD",
        "COMMIT",
        "*nat", ":MINIUPNPD - [0:0]", ":MINIUPNPD-POSTROUTING - [0:0]",
        f"-A PREROUTING -i {outside} -j MINIUPNPD",
        f"-I POSTROUTING 1 -o {outside} -j MINIUPNPD-POSTROUTING",
        "COMMIT", "*mangle", ":MINIUPNPD - [0:0]", f"-A PREROUTING -i {outside} -j MINIUPNPD",
        "COMMIT", "",
    ]  # fmt: skip
    namespace.run(["iptables-legacy-restore", "-w", "--noflush"], "\n".join(rules))


def _listens(namespace: Namespace, gateway: str, port: int) -> bool:
    """Whether something holds the UDP port. A bound socket is what ss lists."""
    try:
        lines = namespace.run(["ss", "-Hlun", f"sport = :{port}"])
    except LabError:
        return False
    return gateway in lines or f"0.0.0.0:{port}" in lines
