"""Sums of vectors of one number, as members and auditors state them."""

from __future__ import annotations

import numpy as np

from swarm_shared.base.types import CHECKS_PER_SECRET, NormSketch
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import MODULUS, to_text
from swarm_shared.identity.work_statements import SumDigests


def sketch_of(number: int) -> NormSketch:
    """A sketch that tells the norm `abs(number)`; such sketches add up as the numbers do."""
    sketch_B = np.zeros(norm_sketch.BUCKETS, np.uint64)
    sketch_B[0] = number % MODULUS
    return norm_sketch.to_text(sketch_B)


def stated(part: int, result: int, sketched: int | None = None) -> SumDigests:
    """What a member states that put in one number and took out another; `sketched`: of what it
    states the sketch, if not of what it put in."""
    return SumDigests(
        part=to_text(part % MODULUS), result=to_text(result % MODULUS),
        part_sketch=sketch_of(part if sketched is None else sketched),
        result_sketch=sketch_of(result),
    )  # fmt: skip


def audited(number: int) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The fields of an auditor's statement about a gradient of one number, for every check."""
    return {
        "sums": ((to_text(number % MODULUS),) * CHECKS_PER_SECRET,),
        "sketches": ((sketch_of(number),) * CHECKS_PER_SECRET,),
    }
