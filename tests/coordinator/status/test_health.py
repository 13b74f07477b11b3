"""The run's health: a state and its reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kits.coordinator.http_server import ANNA, BERT, peer, status
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.status import document
from swarm_coordinator.status.document import STALE_SECONDS, current_health

HEALTHY = "Every stage has reachable peers."
UNREACHABLE = "No reachable peer holds stage 1."
STAGES = [{"stage": stage, "peers": 2} for stage in range(2)]


@pytest.mark.parametrize(
    ("changes", "state", "sentence"),
    [
        ({}, "healthy", HEALTHY),
        (
            {"stages": [{"stage": 0, "peers": 1}, {"stage": 1, "peers": 2}]},
            "healthy",
            "Every stage has a reachable peer; stage 0 has only one.",
        ),
        ({"peers": []}, "degraded", "No reachable peer holds stages 0, 1."),
        ({"peers": [peer(ANNA, 0), peer(BERT, 0)]}, "degraded", UNREACHABLE),
        ({"peers": [peer(ANNA, 0), peer(BERT, 1, phase="syncing")]}, "degraded", UNREACHABLE),
        ({"peers": [peer(ANNA, 0), peer(BERT, 1, version=4)]}, "degraded", UNREACHABLE),
        (
            {"peers": [peer(ANNA, 0), peer(BERT, 1, version=4)], "phase": "applying"},
            "healthy",
            HEALTHY,
        ),
        ({"peers": [peer(ANNA, 0), peer(BERT, 1, silent_seconds=1e3)]}, "degraded", UNREACHABLE),
        ({"peers": [peer(ANNA, 0), peer(BERT, None)]}, "degraded", UNREACHABLE),
        ({"waiting_for": "a peer"}, "waiting", "Waiting for a peer."),
        ({"phase": "waiting for peers", "peers": []}, "waiting", "Training has not begun."),
        (
            {"phase": "waiting for peers", "peers": [], "waiting_for": "stage 1 needs 1"},
            "waiting",
            "Waiting for stage 1 needs 1.",
        ),
        ({"loss": None}, "healthy", HEALTHY),  # after a rollback
        ({"diverged": "Training has diverged."}, "degraded", "Training has diverged."),
        ({"phase": "finished", "peers": []}, "finished", "All 9 steps are applied."),
        (
            {"phase": "finished", "heldout_loss": 3.5},
            "finished",
            "All 9 steps are applied, held-out loss 3.5000.",
        ),
    ],
)
def test_health_is_a_state_and_its_reason(
    changes: dict[str, Any], state: str, sentence: str
) -> None:
    found = status(**{"stages": STAGES, **changes}).health
    assert (found.state, found.sentence) == (state, sentence)
    assert (found.unreachable_stages == (1,)) == (sentence == UNREACHABLE)


@pytest.mark.parametrize(
    ("age_seconds", "changes", "state"),
    [
        (STALE_SECONDS - 5, {}, "healthy"),
        (STALE_SECONDS + 5, {}, "degraded"),
        (0.0, {"running": False}, "stopped"),
        (1e6, {"phase": "finished"}, "finished"),
    ],
)
def test_an_overdue_document_says_nothing_of_a_run_that_has_not_finished(
    age_seconds: float, changes: dict[str, Any], state: str
) -> None:
    written = status(**changes)
    found = current_health(written, written.time + age_seconds)
    assert found.state == state
    assert ("has written no status" in found.sentence) == (state == "degraded")


def test_a_loss_that_is_no_number_is_none() -> None:
    assert status(loss=math.nan).loss is None


def test_the_phases_have_the_names_that_the_coordinator_gives_them() -> None:
    assert {document.FINISHED, document.WAITING, document.APPLYING} <= {
        phase.value for phase in RunPhase
    }
    assert {document.READY, document.SYNCING} <= {phase.value for phase in PeerPhase}
