"""What stays of an earlier result when a part of the mixes is measured again."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.wan.kept import kept_mixes
from swarm_shared.errors import UsageError


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
