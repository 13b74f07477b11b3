"""A round on vectors in shared memory, in the daemon as in its averaging worker."""

from __future__ import annotations

from swarm_client.averaging.all_reduce.carrier import Carrier
from swarm_client.averaging.all_reduce.codec import Totals, dtype_of
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.received import ReceivedPieces
from swarm_client.averaging.all_reduce.reduce import all_reduce
from swarm_client.averaging.all_reduce.routes import StreamTraffic
from swarm_client.ipc import shared_memory


async def all_reduce_in_memory(
    spec: RoundSpec, carrier: Carrier, source_name: str, result_name: str, offset_elements: int,
    kept: dict[str, ReceivedPieces], *, stall_seconds: float, join_seconds: float,
) -> tuple[StreamTraffic, ...]:  # fmt: skip
    """As `all_reduce`, on the vectors at the same offset of two segments. Of a round whose sums can
    be checked, what the others put into this member's slice is `kept` under the round's name."""
    received = ReceivedPieces.for_round(spec)
    with (
        shared_memory.attach(source_name) as source,
        shared_memory.attach(result_name) as result,
    ):
        links = await all_reduce(
            spec,
            carrier,
            _totals(source, spec, offset_elements),
            _totals(result, spec, offset_elements),
            stall_seconds=stall_seconds,
            join_seconds=join_seconds,
            received=received,
        )
    if received is not None:
        kept[spec.round_id] = received
    return links


def _totals(segment: shared_memory.Segment, spec: RoundSpec, offset_elements: int) -> Totals:
    dtype = dtype_of(spec.codec)
    return segment.array(dtype, spec.elements, offset_elements * dtype.itemsize).view(dtype)
