"""The only import of hivemind, and a light one.

`import hivemind` loads torch, scipy and its whole mixture-of-experts and optimizer packages: 2.3 s
of CPU and 290 MB per volunteer, for a process that needs its P2P client and its DHT node (0.2 s and
50 MB). `load_hivemind` therefore puts empty packages in place of hivemind's three `__init__`
modules and imports the modules behind them. It is tied to the version that pyproject.toml pins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_UTILITIES = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": (
        "DHTExpiration",
        "MAX_DHT_TIME_DISCREPANCY_SECONDS",
        "TimedStorage",
        "ValueWithExpiration",
        "get_dht_time",
    ),
}


@dataclass(frozen=True, slots=True)
class Hivemind:
    """The parts of hivemind in use. Untyped: hivemind ships no types."""

    P2P: Any
    PeerID: Any
    Multiaddr: Any
    DHTNode: Any
    daemon_errors: tuple[type[Exception], ...]
    """The exceptions of its P2P client when p2pd refuses or has ended."""
    p2pd_binary: Path


class HivemindMissingError(ImportError):
    """hivemind or its daemon is not installed here; the host carrier serves instead."""


def load_hivemind() -> Hivemind:
    """Import the parts in use, once. HivemindMissingError when hivemind is not installed."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise HivemindMissingError("hivemind is not installed")
    root = Path(spec.submodule_search_locations[0])
    binary = root / "hivemind_cli" / "p2pd"
    if not binary.is_file():
        raise HivemindMissingError("hivemind is installed without its daemon p2pd")
    if "hivemind" not in sys.modules:
        _stub_packages(root)
    p2p = importlib.import_module("hivemind.p2p")
    node = importlib.import_module("hivemind.dht.node")
    multiaddr = importlib.import_module("hivemind.utils.multiaddr")
    return Hivemind(
        p2p.P2P,
        p2p.PeerID,
        multiaddr.Multiaddr,
        node.DHTNode,
        (p2p.P2PDaemonError, p2p.P2PHandlerError, OSError, EOFError),
        binary,
    )


def _stub_packages(root: Path) -> None:
    """Register the packages hivemind, hivemind.utils and hivemind.dht without their `__init__`."""
    for name, folder in (
        ("hivemind", root),
        ("hivemind.utils", root / "utils"),
        ("hivemind.dht", root / "dht"),
    ):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        package.__package__ = name
        sys.modules[name] = package
    utilities = sys.modules["hivemind.utils"]
    for module_name, names in _UTILITIES.items():
        module = importlib.import_module(f"hivemind.utils.{module_name}")
        for name in names:
            setattr(utilities, name, getattr(module, name))
