"""What a third of liars costs a run: `make bench-strangers`.

Real runs of two stages on this machine, one after the other: four honest volunteers in each stage
alone, and the same beside two liars in each stage (`tests/kits/attack/mixed_run.py`), which are
replaced by other kinds of liars as they are found, until every kind of modified client was there.
Every cell is audited in both, and volunteers have a pace that leaves the processor idle for the
most part, so that the liars' processes take little from the honest ones.

Both runs must have the losses of their reference to the bit, the held-out one included, and only
liars may have lost audits. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.outcome import result_head, work_folder, write_result
from benchmarks.tables import strangers_markdown
from kits.attack.mixed_run import (
    HONEST_PER_STAGE,
    LIARS_PER_STAGE,
    PACE_SECONDS,
    STAGES,
    STEPS,
    MixedRun,
    settings,
)
from kits.attack.strangers import verdicts
from kits.runs.real_run import runs

RESULT = Path(__file__).parent / "results" / "strangers.json"
PACKAGES = ("torch", "numpy", "libp2p", "hivemind", "swarmtrain")


@click.command()
@click.option("--steps", default=STEPS, show_default=True, type=click.IntRange(3), help="Per run.")
@click.option("--repetitions", default=1, show_default=True, type=click.IntRange(1))
@click.option("--out", type=click.Path(path_type=Path), default=RESULT)
def main(steps: int, repetitions: int, out: Path) -> None:
    """Measure tokens/s of honest volunteers with and without liars beside them."""
    rows: dict[str, list[dict[str, Any]]] = {"alone": [], "strangers": []}
    load_before = os.getloadavg()[0]
    with work_folder("strangers", AssertionError) as work:
        for repetition in range(1, repetitions + 1):
            for name, measured in rows.items():
                place = work / f"{name} {repetition}"
                measured.append(_measure(place, steps, liars=name == "strangers"))
                click.echo(f"{repetition}/{repetitions}  {name:<12}{measured[-1]}")
    document = {
        **result_head(PACKAGES), "load_before": load_before, "steps": steps,
        "repetitions": repetitions, "stages": STAGES, "honest_per_stage": HONEST_PER_STAGE,
        "liars_per_stage": LIARS_PER_STAGE, "pace_seconds": PACE_SECONDS, **rows,
        "over_alone": median(
            with_liars["tokens_per_second"] / alone["tokens_per_second"]
            for with_liars, alone in zip(rows["strangers"], rows["alone"], strict=True)
        ),
    }  # fmt: skip
    write_result(out, document)
    click.echo(f"\n{strangers_markdown(document)}\n\nwritten to {out}")


def _measure(place: Path, steps: int, *, liars: bool) -> dict[str, Any]:
    """Train one run; AssertionError if a bit differs or an honest volunteer lost an audit."""
    place.mkdir()
    with runs(place) as make:
        mixed = MixedRun(make(STAGES, steps, **settings(liars=liars)))
        mixed.start(liars=liars)
        mixed.train()
        if liars:
            mixed.check()
        else:
            mixed.run.assert_equals_reference()
        return {
            "tokens_per_second": mixed.tokens_per_second(),
            "liars": len(mixed.liars),
            "kinds": len(set(mixed.through.values())),
            "share_of_liars": mixed.share_of_liars(),
            "verdicts": len(verdicts(mixed.run)),
            "losses": list(mixed.run.losses()),
        }


if __name__ == "__main__":
    main()
