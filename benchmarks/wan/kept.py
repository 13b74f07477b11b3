"""Mixes of an earlier result that stand beside those that are measured now (`--keep`). Pure.

A whole run of the benchmark takes more than an hour. Mixes do not depend on each other: contenders
are compared within one, where they took turns. So each says when it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_shared.errors import UsageError

_SAME = (
    "preset", "changes", "model", "stages", "steps", "warmup_steps", "cooldown_steps",
    "microbatches_per_step", "microbatch_seconds",
)  # fmt: skip
"""How it was measured. Repetitions may differ: each mix's rates say how many there were."""


def kept_mixes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The mixes of `before`, each with its own time. UsageError when they were measured in
    another way."""
    unlike = [name for name in _SAME if before.get(name) != now[name]]
    if unlike:
        raise UsageError(
            f"the file's mixes were measured with another {', '.join(unlike)}; leave out --keep, "
            "or write to another file with --out"
        )
    head = {"measured_at": before["measured_at"], "load_before": before["load_before"]}
    return {name: {**head, **mix} for name, mix in before["mixes"].items()}
