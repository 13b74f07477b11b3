"""The base of every value that is parsed from outside the process."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Base of every value parsed at an edge: immutable, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
