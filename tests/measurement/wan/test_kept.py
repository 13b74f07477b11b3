"""What stays of an earlier result when a part of the mixes is measured again."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.wan.kept import added, kept_mixes
from benchmarks.wan.page import times
from swarm_shared.base.errors import UsageError


def result(**changes: Any) -> dict[str, Any]:
    plan = dict.fromkeys(
        ("preset", "changes", "model", "stages", "steps", "warmup_steps", "cooldown_steps",
         "microbatches_per_step", "microbatch_seconds"), 1,
    )  # fmt: skip
    return {"measured_at": "then", "load_before": 0.5, "mixes": {}, **plan, **changes}


def test_each_mix_that_is_kept_says_when_it_was_measured() -> None:
    before = result(mixes={"cable": {"name": "cable"}, "dsl": {"measured_at": "earlier"}})
    found = kept_mixes(before, result(measured_at="now"))
    assert {name: mix["measured_at"] for name, mix in found.items()} == {
        "cable": "then", "dsl": "earlier",
    }  # fmt: skip


def test_mixes_that_were_measured_in_another_way_are_not_mixed_with_new_ones() -> None:
    with pytest.raises(UsageError, match="another steps, microbatch_seconds;"):
        kept_mixes(result(steps=2, microbatch_seconds=3), result())


def run(rate: float, *losses: float) -> dict[str, Any]:
    return {
        "tokens_per_second": rate, "step_seconds": 1.0, "busy_cores": 1.0,
        "sent_bytes_per_step": {"peer-1": 10}, "losses": list(losses),
    }  # fmt: skip


def mix(at: str, runs: dict[str, list[dict[str, Any]]], **changes: Any) -> dict[str, Any]:
    limits = {
        "bound_tokens_per_second": 100.0, "compute_tokens_per_second": 200.0,
        "minimum_bytes_per_step": 5,
    }  # fmt: skip
    contenders = {name: {"runs": each} for name, each in runs.items()}
    head = {"name": "cable", "measured_at": at, "load_before": 0.5, "machines": [{"link": "cable"}]}
    return {**head, **limits, "contenders": contenders, **changes}


def test_repetitions_that_are_added_count_like_those_that_were_there() -> None:
    one = mix("then", {"swarm": [run(10.0, 2.0)], "torch": [run(90.0, 2.0)]})
    two = mix("now", {"swarm": [run(30.0, 2.0), run(50.0, 2.0)], "1f1b": [run(20.0, 2.0)]})
    both = added(one, two)
    swarm = both["contenders"]["swarm"]
    assert swarm["tokens_per_second_all"] == [10.0, 30.0, 50.0]
    assert swarm["tokens_per_second_median"] == 30.0
    assert swarm["of_bound"] == pytest.approx(0.3)
    assert list(both["contenders"]) == ["torch", "swarm", "1f1b"]
    assert both["loss_disagreement"] == ""
    assert [each["measured_at"] for each in times(both)] == ["then", "now"]
    again = added(both, mix("later", {"swarm": [run(5.0, 2.0)]}))
    assert [each["measured_at"] for each in times(again)] == ["then", "now", "later"]


def test_other_losses_in_what_is_added_are_found() -> None:
    one = mix("then", {"torch": [run(10.0, 2.0)]})
    both = added(one, mix("now", {"swarm": [run(10.0, 2.1)]}))
    assert both["loss_disagreement"].startswith("step 1: swarm has 2.1")


def test_nothing_is_added_to_what_other_machines_did() -> None:
    with pytest.raises(UsageError, match="other machines"):
        added(mix("then", {}, machines=[]), mix("now", {}))
    with pytest.raises(UsageError, match="other training"):
        added(mix("then", {}), mix("now", {}, training={"stages": 2}))
