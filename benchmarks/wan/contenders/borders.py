"""Bytes over every stage boundary, as counted by the swarm's volunteers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.wan.fleet import Sizes
from swarm_coordinator.storage.history import History
from swarm_shared.protocol import STAGE_PROTOCOL


def border_table(
    history: History, stage_of: Mapping[str, int], sizes: Sizes
) -> list[dict[str, Any]]:
    """Return for each boundary the bytes of a step in both directions, and their minimum.

    `stage_of` maps volunteers by name. Counts cover the whole run, frames with their headers,
    except the traffic after a volunteer's last heartbeat, less than a second's. A row includes
    token ids sent to stage 0 where the trainer is a peer of the adjacent stage.
    """
    stages = {peer: stage_of.get(name or "") for peer, name in history.names.items()}
    steps = max(1, len(history.steps))
    sent = [[0] * sizes.stages for _ in range(sizes.stages)]
    for link in history.links:
        source, target = stages.get(link.reporter), stages.get(link.remote)
        if link.protocol == STAGE_PROTOCOL and source is not None and target is not None:
            sent[source][target] += link.sent
    least = sizes.border_bytes * sizes.microbatches
    return [
        {
            "from": stage, "to": stage + 1,
            "activation_bytes_per_step": round(sent[stage][stage + 1] / steps),
            "gradient_bytes_per_step": round(sent[stage + 1][stage] / steps),
            "least_bytes_per_step_each_way": least,
            "over_least": (sent[stage][stage + 1] + sent[stage + 1][stage]) / steps / (2 * least),
        }
        for stage in range(sizes.stages - 1)
    ]  # fmt: skip
