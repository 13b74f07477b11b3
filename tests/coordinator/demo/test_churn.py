from __future__ import annotations

from typing import Any

import pytest

from swarm_coordinator.demo.churn import choose_victim, kill_step

ALL = ("anna", "bert", "cleo", "dora")


def peer(name: str | None, stage: int | None, phase: str = "ready") -> dict[str, Any]:
    return {"name": name, "stage": stage, "phase": phase}


def test_the_kill_is_in_the_middle_of_a_run_of_any_length() -> None:
    assert all(1 <= kill_step(steps) < steps for steps in range(2, 100))


@pytest.mark.parametrize(
    ("stages", "victims"),
    [
        ([0, 0, 1, 1], ALL),
        ([0, 0, 1], ("anna", "bert")),
        ([1, 0, 1], ("anna", "cleo")),
        ([0, 1, 1, 1], ("bert", "cleo", "dora")),
        ([0, 1], ("anna", "bert")),
        ([0], ("anna",)),
    ],
)
def test_no_stage_loses_its_only_peer_while_another_one_has_two(
    stages: list[int], victims: tuple[str, ...]
) -> None:
    status = {"peers": [peer(name, stage) for name, stage in zip(ALL, stages, strict=False)]}
    assert choose_victim(status, ALL) in victims


def test_peers_that_hold_no_stage_yet_are_neither_counted_nor_killed() -> None:
    status = {
        "peers": [peer("anna", 0), peer("bert", 1, "syncing"), peer("cleo", 1, "syncing"),
                  peer("dora", None, "admitted")]
    }  # fmt: skip
    assert choose_victim(status, ALL) == "anna"


def test_a_peer_that_the_demo_did_not_start_is_never_killed() -> None:
    status = {"peers": [peer("anna", 0), peer("stranger", 1), peer(None, 1)]}
    assert choose_victim(status, ALL) == "anna"
    assert choose_victim({"peers": [peer("stranger", 1)]}, ALL) is None


def test_without_a_status_there_is_no_victim() -> None:
    assert choose_victim({}, ALL) is None
