"""Networks of namespaces for the tests of this folder, and what runs on their machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.network_lab import Host, Lab, why_not_here
from kits.network_lab.node_process import NodeProcess
from kits.runs.nat_run import STEPS, TINY, NatRun


@pytest.fixture
def namespaces() -> None:
    """Skip the test where no lab can be built. For tests that build one themselves."""
    if (reason := why_not_here()) is not None:
        pytest.skip(reason)


@pytest.fixture
def lab(namespaces: None) -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture
def nat_run(lab: Lab, make_run: Callable[..., Any]) -> Callable[..., NatRun]:
    """A run with its coordinator on a public host, not yet started."""

    def make(peers_per_stage: int, stages: int = 2, **overrides: object) -> NatRun:
        settings = {**TINY, "limits__starting_peers_per_stage": peers_per_stage, **overrides}
        return NatRun(make_run(stages, steps=STEPS, **settings), lab.public_host("organiser"))

    return make


@pytest.fixture
def start_node(tmp_path: Path) -> Callable[..., NodeProcess]:
    """A bare node on a host: the network package alone, without a run around it."""

    def start(host: Host, version: int = 4) -> NodeProcess:
        return NodeProcess(host, tmp_path / "nodes", version)

    return start
