"""What the tests of the stage worker share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kits.client.fake_accelerator import FakeAccelerator
from swarm_client.stage.worker.graph_memory import GraphMemory


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    """A GPU that is at work."""
    accelerator = FakeAccelerator("cuda")
    with accelerator.at_work():
        yield accelerator


@pytest.fixture(autouse=True)
def answers_with_all_gradients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Compute the weights' gradients before the answer, unless a test has `splits`: most tests are
    about what is computed, and not when."""
    if "splits" not in request.fixturenames:
        monkeypatch.setattr(GraphMemory, "may_owe", lambda *_: False)


@pytest.fixture
def splits() -> None:
    """Backward passes are split where memory allows it, as in production."""
