"""A transcript for tests to which its digests do not matter."""

from __future__ import annotations

from swarm_shared.base.transcript import Transcript

TRANSCRIPT = Transcript(
    input="0" * 32, output="1" * 32, output_gradient="2" * 32, input_gradient="3" * 32,
    gradient="4" * 32,
)  # fmt: skip
