"""Real network stacks on one machine: namespaces joined by virtual cables, behind real NAT.

For tests and benchmarks of what happens between machines. Needs root, iproute2 and iptables;
`why_not_here()` says what is missing, for a test's skip.
"""

from __future__ import annotations

from kits.network_lab.commands import LabError, why_no_port_mapping, why_not_here
from kits.network_lab.counting import TrafficCounter
from kits.network_lab.lab import Lab
from kits.network_lab.machines import Host, Nat, Router
from kits.network_lab.namespace import Namespace, own_namespaces, sweep
from kits.network_lab.segment import Shape

__all__ = [
    "Host", "Lab", "LabError", "Namespace", "Nat", "Router", "Shape", "TrafficCounter",
    "own_namespaces", "sweep", "why_no_port_mapping", "why_not_here",
]  # fmt: skip
