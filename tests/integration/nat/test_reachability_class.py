"""What the doctor says of real routers: an observer outside, a second one, and a machine behind.

The checks run as `swarm-client doctor` runs them, less those of torch and hivemind.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kits.network_lab import Host, Lab, Nat, why_no_port_mapping
from swarm_coordinator.demo.subprocesses import wait_until

pytestmark = pytest.mark.lab

PORT = 4001
START_SECONDS = 30.0
PROGRAM = Path(__file__).parent / "doctor_program.py"


class Outside:
    """A coordinator and a volunteer on the public segment."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._folder = folder
        self.coordinator, volunteer = lab.public_host("coordinator"), lab.public_host("volunteer")
        log = folder / "coordinator.out"
        for role, host, out in (
            ("coordinator", self.coordinator, log),
            ("volunteer", volunteer, folder / "volunteer.out"),
        ):
            words = [sys.executable, str(PROGRAM), role, host.ipv4, volunteer.ipv4]
            host.start(role, words, out)
            wait_until(
                lambda out=out: out.exists() and "swarm1" in out.read_text(),  # type: ignore[misc]
                lab.children, START_SECONDS, f"the {role} to serve",
            )  # fmt: skip
        self.invite = log.read_text().split()[0]

    def checks_of(self, host: Host) -> dict[str, Any]:
        """The network checks on this host, whose home remembers PORT."""
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        (home / "port").write_text(f"{PORT}\n")
        words = [sys.executable, str(PROGRAM), "check", self.invite, str(home)]
        found: dict[str, Any] = json.loads(host.run(words, timeout_seconds=60))
        return found


def reachability_of(outside: Outside, host: Host) -> dict[str, Any]:
    check = outside.checks_of(host)["reachability"]
    details: dict[str, Any] = check["details"]
    return {**details, "state": check["state"], "seen": check["seen"]}


@pytest.mark.nightly
def test_a_machine_on_the_internet_is_public(lab: Lab, tmp_path: Path) -> None:
    outside = Outside(lab, tmp_path)
    host = lab.public_host("host")
    found = reachability_of(outside, host)
    assert (found["class"], found["state"]) == ("public", "ok"), found
    assert found["behind_router"] is False
    assert f"/ip4/{host.ipv4}/tcp/{PORT}" in found["seen"]


def test_a_port_preserving_router_lets_holes_be_punched(lab: Lab, tmp_path: Path) -> None:
    outside = Outside(lab, tmp_path)
    router, host = lab.home("home", Nat.PORT_PRESERVING)
    checks = outside.checks_of(host)
    found = checks["reachability"]["details"]
    assert (found["class"], checks["reachability"]["state"]) == ("behind_nat", "ok"), checks
    assert found["observed"] == router.wan_ipv4
    assert found["port_preserved"] is True
    assert found["endpoint_independent"] is True
    assert found["hole_punching"] is True
    for id in ("coordinator", "version", "admission", "clock", "link", "peers"):
        assert checks[id]["state"] == "ok", checks[id]


def test_a_symmetric_router_leaves_relays_only(lab: Lab, tmp_path: Path) -> None:
    outside = Outside(lab, tmp_path)
    _, host = lab.home("home", Nat.SYMMETRIC)
    found = reachability_of(outside, host)
    assert (found["class"], found["state"]) == ("behind_nat", "warning"), found
    assert found["port_preserved"] is False
    assert found["endpoint_independent"] is False
    assert found["hole_punching"] is False


def test_a_router_that_maps_ports_is_used_and_left_as_it_was(lab: Lab, tmp_path: Path) -> None:
    if (reason := why_no_port_mapping()) is not None:
        pytest.skip(reason)
    outside = Outside(lab, tmp_path)
    router, host = lab.home("home", Nat.SYMMETRIC)
    router.offer_port_mapping(lab.children, tmp_path / "miniupnpd")
    found = reachability_of(outside, host)
    assert (found["class"], found["state"]) == ("mapped", "ok"), found
    assert found["mapping"] == "nat-pmp"
    assert f"/ip4/{router.wan_ipv4}/tcp/{PORT}" in found["seen"]
    rules = router.namespace.run(["iptables-legacy", "-t", "nat", "-S", "MINIUPNPD"])
    assert rules.split() == ["-N", "MINIUPNPD"]


@pytest.mark.nightly
def test_a_port_forwarded_by_hand_is_found(lab: Lab, tmp_path: Path) -> None:
    outside = Outside(lab, tmp_path)
    router, host = lab.home("home", Nat.SYMMETRIC)
    if (reason := why_no_port_mapping()) is not None:
        pytest.skip(reason)
    tool = ["iptables-legacy", "-w"]
    to_host = ["-p", "tcp", "--dport", str(PORT), "-j"]
    router.namespace.run(
        [*tool, "-t", "nat", "-A", "PREROUTING", "-i", "wan0", *to_host, "DNAT",
         "--to-destination", f"{host.ipv4}:{PORT}"]
    )  # fmt: skip
    router.namespace.run([*tool, "-A", "FORWARD", "-i", "wan0", *to_host, "ACCEPT"])
    found = reachability_of(outside, host)
    assert (found["class"], found["state"]) == ("public", "ok"), found
    assert found["behind_router"] is True


@pytest.mark.nightly
def test_without_any_network_that_is_what_is_said(lab: Lab, tmp_path: Path) -> None:
    outside = Outside(lab, tmp_path)
    host = lab.public_host("host")
    host.namespace.ip("link set eth0 down")
    begun = time.monotonic()
    found = outside.checks_of(host)["coordinator"]
    assert found["state"] == "problem"
    assert "no network" in found["seen"]
    assert time.monotonic() - begun < 25
