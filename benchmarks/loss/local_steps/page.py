"""Tables of docs/local-steps.md from the result file. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.loss.local_steps.search import (
    LARGER_BATCH,
    SYNCHRONOUS,
    TUNING_SEED,
    Method,
    Training,
    training_of,
)
from benchmarks.pages.markdown import headed_table

_COLUMNS = (
    "method", "cohorts", "moments", "averages", "rates tried", "best rate", "held-out loss",
    "over synchronous", "over the batch x 4", "training loss", "seeds",
)  # fmt: skip

Rows = Mapping[Training, Mapping[str, Any]]


def local_steps_markdown(document: Mapping[str, Any]) -> str:
    """Loss at equal tokens of every method, a table per model."""
    rows = {training_of(row): row for row in document["trainings"]}
    models = dict.fromkeys(training.model for training in rows)
    parts = [_model_markdown(name, document, rows) for name in models]
    return "\n\n".join(parts)


def _model_markdown(model: str, document: Mapping[str, Any], rows: Rows) -> str:
    own = {training: row for training, row in rows.items() if training.model == model}
    settings = document["models"][model]
    dates = sorted(row["finished_at"][:10] for row in own.values())
    tokens = max(row["tokens"] for row in own.values())
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    head = (
        f"{days}: model of {model}, sequences of {settings['model.sequence_length']} bytes, "
        f"{settings['training.steps']} steps and {tokens:,} tokens, warm-up over "
        f"{settings['optimizer.warmup_steps']} steps; {len(own)} trainings, "
        f"{document['machine']['processor']}, torch {document['machine']['packages']['torch']}. "
        "Means over the seeds, in nats per token; gaps are of equal seeds, with the least and the "
        "largest. A row with one rate is not tuned."
    )
    best = _best(own)
    table = [_row(training, own, best) for training in best.values()]
    return headed_table(head, _COLUMNS, "lllrrrrrrrr", table)


def _best(rows: Rows) -> dict[Method, Training]:
    """Return each method's training with the least loss of the tuning seed."""
    best: dict[Method, Training] = {}
    for training, row in rows.items():
        if training.seed == TUNING_SEED and row["heldout_loss"] is not None:
            before = best.get(training.method)
            if before is None or row["heldout_loss"] < rows[before]["heldout_loss"]:
                best[training.method] = training
    return dict(sorted(best.items(), key=lambda one: _order(one[0])))


def _order(method: Method) -> tuple[object, ...]:
    local = method.local
    outer = local.outer_rate / (1 - local.outer_momentum)
    return (
        local != SYNCHRONOUS.local,
        method.batch,
        local.inner_steps,
        outer,
        local.moments,
        local.cohorts,
    )


def _row(training: Training, rows: Rows, best: Mapping[Method, Training]) -> tuple[str, ...]:
    mine = _by_seed(training, rows)
    local = training.method.local
    return (
        _name(training.method),
        str(local.cohorts),
        "" if local == SYNCHRONOUS.local else local.moments,
        # A single cohort averages the gradients of each step.
        f"1/{training.method.batch * (local.inner_steps if local.cohorts > 1 else 1)}",
        str(len({other.learning_rate for other in rows if other.method == training.method})),
        f"{training.learning_rate:g}",
        f"{_mean(mine, 'heldout_loss'):.4f}",
        *(
            _gap(mine, _by_seed(best[of], rows)) if of in best else ""
            for of in (SYNCHRONOUS, LARGER_BATCH)
        ),
        f"{_mean(mine, 'training_loss'):.4f}",
        str(len(mine)),
    )


def _name(method: Method) -> str:
    local = method.local
    if local == SYNCHRONOUS.local:
        return "synchronous" + (f", batch x {method.batch}" if method.batch > 1 else "")
    outer = (
        f"Nesterov {local.outer_rate:g}, {local.outer_momentum:g}"
        if local.outer_momentum
        else "plain averaging"
    )
    return f"H = {local.inner_steps}, {outer}"


def _by_seed(training: Training, rows: Rows) -> dict[int, Mapping[str, Any]]:
    """Return the rows that differ from a training in their seed alone, without diverged ones."""
    return {
        other.seed: row
        for other, row in rows.items()
        if (other.method, other.learning_rate) == (training.method, training.learning_rate)
        and row["heldout_loss"] is not None
    }


def _mean(rows: Mapping[int, Mapping[str, Any]], key: str) -> float:
    return statistics.mean(float(row[key]) for row in rows.values())


def _gap(mine: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]) -> str:
    shares = [
        100 * (mine[seed]["heldout_loss"] / others[seed]["heldout_loss"] - 1)
        for seed in mine.keys() & others.keys()
    ]
    if not shares or not any(shares):
        return ""
    spread = f" ({min(shares):+.1f} to {max(shares):+.1f})" if len(shares) > 1 else ""
    return f"{statistics.mean(shares):+.1f} %{spread}"
