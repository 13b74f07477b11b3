"""Reuse of an earlier result: its mixes (`--keep`), or also their runs (`--add`). Pure.

A complete run of the benchmark takes more than an hour. Mixes are independent: contenders are
compared within one, where they ran in turn. Each mix therefore has its time of measurement, and one
with added repetitions has all times. A repetition includes every contender measured in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.wan.contenders.running import CONTENDERS
from benchmarks.wan.page import times
from benchmarks.wan.report import compare
from swarm_shared.base.errors import UsageError
from swarm_shared.run.model_config import ModelConfig

_SAME = (
    "preset", "changes", "model", "stages", "steps", "warmup_steps", "cooldown_steps",
    "microbatches_per_step", "microbatch_seconds",
)  # fmt: skip
"""Settings that must be equal. Repetitions may differ: each mix has its number of rates."""


def kept_mixes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mixes of `before`, each with its own time; raises UsageError when their settings
    differ."""
    unlike = [name for name in _SAME if _plain(before.get(name)) != _plain(now[name])]
    if unlike:
        raise UsageError(
            f"the file's mixes were measured with another {', '.join(unlike)}; leave out --keep, "
            "or write to another file with --out"
        )
    head = {"measured_at": before["measured_at"], "load_before": before["load_before"]}
    return {name: {**head, **mix} for name, mix in before["mixes"].items()}


def _plain(value: Any) -> Any:
    """Normalise a model's sizes from results of different versions; return other values as is."""
    if isinstance(value, Mapping) and "hidden_size" in value:
        return ModelConfig.model_validate(value)
    return value


def added(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mix `now` with the earlier runs of `before`, which must have the same machines
    and training.

    Link checks and forwarder statistics are those of `now`; all times are kept.
    """
    for what in ("machines", "training"):
        if before.get(what) != now.get(what):
            raise UsageError(
                f"the file's {now['name']} was measured with other {what}; leave out --add"
            )
    rows: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name in CONTENDERS:
        runs = [run for mix in (before, now) for run in _runs(mix, name)]
        if runs:
            rows[name] = runs
    return {**now, "times": [*times(before), *times(now)], **compare(now, rows)}


def _runs(mix: Mapping[str, Any], contender: str) -> Sequence[Mapping[str, Any]]:
    found = mix["contenders"].get(contender)
    return [] if found is None else list(found["runs"])
