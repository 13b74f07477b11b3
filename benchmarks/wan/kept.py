"""What stays of an earlier result: mixes (`--keep`), or their runs, too (`--add`). Pure.

A whole run of the benchmark takes more than an hour. Mixes do not depend on each other: contenders
are compared within one, where they took turns. So each says when it was measured; and one to which
repetitions were added says it of all times. A repetition holds every contender that it is of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.wan.contenders import CONTENDERS
from benchmarks.wan.page import times
from benchmarks.wan.report import compare
from swarm_shared.base.errors import UsageError
from swarm_shared.run.model_config import ModelConfig

_SAME = (
    "preset", "changes", "model", "stages", "steps", "warmup_steps", "cooldown_steps",
    "microbatches_per_step", "microbatch_seconds",
)  # fmt: skip
"""How it was measured. Repetitions may differ: each mix's rates say how many there were."""


def kept_mixes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The mixes of `before`, each with its own time. UsageError when they were measured in
    another way."""
    unlike = [name for name in _SAME if _plain(before.get(name)) != _plain(now[name])]
    if unlike:
        raise UsageError(
            f"the file's mixes were measured with another {', '.join(unlike)}; leave out --keep, "
            "or write to another file with --out"
        )
    head = {"measured_at": before["measured_at"], "load_before": before["load_before"]}
    return {name: {**head, **mix} for name, mix in before["mixes"].items()}


def _plain(value: Any) -> Any:
    """A model as its sizes say it, whenever the result was written; anything else as it is."""
    if isinstance(value, Mapping) and "hidden_size" in value:
        return ModelConfig.model_validate(value)
    return value


def added(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The mix `now` with the earlier runs of `before`, which must be of the same machines.

    Lines as they were checked and what was forwarded are those of `now`; every time is kept.
    """
    if before["machines"] != now["machines"]:
        raise UsageError(
            f"the file's {now['name']} was measured with other machines; leave out --add"
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
