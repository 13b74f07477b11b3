"""The shared memory of one worker on the worker's side: slots, and two flat vectors.

Owns its segments and their checks. The daemon owns the use of the slots (rule 3 of
`swarm_client.stage.protocol.messages`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_client.ipc import shared_memory
from swarm_client.stage.protocol.errors import RequestFailed


class WorkerMemory:
    """The three segments of one worker."""

    def __init__(
        self, namespace: str, slots_bytes: int, slot_bytes: int, elements: int,
        totals: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Create the segments; each of the two flat vectors has `elements` of type `totals`."""
        self.segments: list[shared_memory.Segment] = []
        try:
            self.slots = self._create(f"{namespace}.slots", slots_bytes)
            # The flat vector of a stage without parameters is empty, but a segment cannot be.
            flat_bytes = totals.itemsize * max(1, elements)
            self.gradients_segment = self._create(f"{namespace}.gradients", flat_bytes)
            self.result_segment = self._create(f"{namespace}.result", flat_bytes)
        except BaseException:
            self.unlink()
            raise
        self.slot_bytes = slot_bytes
        self.gradients = _flat(self.gradients_segment, elements, totals)
        self.result = _flat(self.result_segment, elements, totals)

    def _create(self, name: str, nbytes: int) -> shared_memory.Segment:
        segment = shared_memory.create(name, nbytes)
        self.segments.append(segment)
        return segment

    def slot(self, slot: int, nbytes: int | None = None) -> memoryview:
        """One slot, or the first `nbytes` of it."""
        start = slot * self.slot_bytes
        end = start + self.slot_bytes
        if end > self.slots.nbytes:
            raise RequestFailed("bad_input", f"there is no slot {slot}")
        if nbytes is None:
            return self.slots.buffer[start:end]
        if nbytes > self.slot_bytes:
            raise RequestFailed(
                "bad_input", f"{nbytes} bytes do not fit a slot of {self.slot_bytes}"
            )
        return self.slots.buffer[start : start + nbytes]

    def unlink(self) -> None:
        """Remove the names of the shared memory, which lives on as long as a process uses it."""
        for segment in self.segments:
            segment.unlink()


def _flat(segment: shared_memory.Segment, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(segment.buffer, dtype=dtype)[:elements]
