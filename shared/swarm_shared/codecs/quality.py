"""The measured cost in loss of each pair of codecs, as `benchmarks/loss/quality.py` wrote it.

quality.json beside this file is never edited by hand: `make bench-quality` measures and writes it,
together with its result file, whose date it repeats.
"""

from __future__ import annotations

import functools
from importlib.resources import files

from pydantic import Field

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.codecs.choice import CodecPair

FILE_NAME = "quality.json"


class QualityTable(FrozenModel):
    source: str
    measured_at: str
    steps: int
    seeds: int = Field(ge=2)
    noise_relative: float = Field(gt=0)
    """Standard deviation of the final loss over seeds without codecs, relative to that loss."""
    pairs: dict[str, CodecPair]


@functools.cache
def quality_table() -> QualityTable:
    text = (files(__package__) / FILE_NAME).read_text("utf-8")
    return QualityTable.model_validate_json(text)


def measured_noise() -> float:
    """Return the relative gap that cannot be told from another seed's, rounded to four digits."""
    return round(quality_table().noise_relative, 4)
