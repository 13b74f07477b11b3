"""How long an audited peer may take to show what it has computed.

Pure. What it shows has megabytes, and its uplink may be slow: an auditor that waited less would say
of an honest member that it withholds something. One that waited longer would hold up the step for
a liar.
"""

from __future__ import annotations

from swarm_shared.base.transcript import GRADIENT_BLOCK_BYTES
from swarm_shared.base.types import MAX_SAMPLED_BLOCKS, StageIndex
from swarm_shared.identity.work_statements import DIGEST_BYTES
from swarm_shared.run.codec_sizes import DTYPE_BYTES
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

SLOW_UPLINK_BYTES_PER_SECOND = 2**18
"""A slow home's uplink of 2 Mbit/s."""

AVERAGE_SHARE = 1 / 8
"""A member of an average sends this share of its gradient at least: half of it where there are two,
in a quarter of the bytes with the codec int8. So its uplink carries as much in the time that an
average takes."""


def shown_bytes(manifest: Manifest, stage: StageIndex) -> int:
    """Bytes of what a peer shows: output and input gradient before they are encoded, the digests of
    its gradient's blocks, and a sample of these."""
    sizes = stage_sizes(manifest)[stage]
    tensors = bool(sizes.output_bytes) + bool(sizes.input_gradient_bytes)
    elements = manifest.tokens_per_microbatch * manifest.model.boundary_size
    blocks = -(-sizes.gradient_bytes // GRADIENT_BLOCK_BYTES)
    return (
        tensors * elements * DTYPE_BYTES[manifest.training.dtype]
        + blocks * DIGEST_BYTES
        + min(blocks, MAX_SAMPLED_BLOCKS) * GRADIENT_BLOCK_BYTES
    )


def showing_seconds(manifest: Manifest, stage: StageIndex, averaging_seconds: float) -> float:
    """Seconds that showing takes over the slowest uplink that a member of the stage may have, by
    what the averages of the last step took; 0 if that is not known."""
    uplink = float(SLOW_UPLINK_BYTES_PER_SECOND)
    if averaging_seconds:
        gradient_bytes = stage_sizes(manifest)[stage].gradient_bytes
        uplink = max(uplink, AVERAGE_SHARE * gradient_bytes / averaging_seconds)
    return shown_bytes(manifest, stage) / uplink
