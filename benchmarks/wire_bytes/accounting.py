"""Purpose of every byte. Pure: counts of all processes in, boundaries and kinds out.

A connection between two peers carries streams of several protocols. Its bytes beyond all frames
belong to the muxer (headers, credits, pings, opening of streams), to Noise (16 bytes of tag and
2 of length per message) and to the handshake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOISE_MESSAGE_BYTES = 16 + 2

TENSORS = ("activation", "gradient")


@dataclass(frozen=True, slots=True)
class Boundary:
    """Bytes of the whole run between stage `stage` and the next one, in both directions.

    `tensors` are activations and gradients, of which `least` is the minimum by the manifest.
    `headers` covers frames, receipts and refusals; `below` covers muxer, Noise and handshake of the
    same connections, for all their streams.
    """

    stage: int
    microbatches: int
    least: int
    tensors: int
    targets: int
    headers: int
    below: int

    @property
    def sent(self) -> int:
        return self.tensors + self.targets + self.headers + self.below


def boundaries(
    processes: Sequence[Mapping[str, Any]],
    stage_of: Mapping[str, int],
    border_bytes: int,
    microbatches: int,
) -> list[Boundary]:
    """Return the boundaries; `border_bytes` is the size of one activation, `microbatches` the
    number that counted, each once in every stage."""
    found: list[Boundary] = []
    for stage in range(max(stage_of.values())):
        pair = {stage, stage + 1}
        frames = [f for s, r, f in _of(processes, stage_of, "frames") if {s, r} == pair]
        lines = [c for s, r, c in _of(processes, stage_of, "connections") if {s, r} == pair]
        staged = [f for f in frames if f["protocol"] == "stage" and f["kind"] != "tokens"]
        staged = [f for f in staged if f["kind"] != "answer"]
        found.append(
            Boundary(
                stage=stage,
                microbatches=sum(f["frames"] for f in staged if f["kind"] == "activation"),
                least=2 * border_bytes * microbatches,
                tensors=sum(
                    f["payload_bytes"] - f["targets_bytes"] for f in staged if f["kind"] in TENSORS
                ),
                targets=sum(f["targets_bytes"] for f in staged),
                headers=sum(f["header_bytes"] for f in staged),
                below=sum(c["socket_bytes"] for c in lines) - sum(_frame_bytes(f) for f in frames),
            )
        )
    return found


def kinds(processes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return all bytes that all processes wrote to their sockets, by purpose."""
    frames = [frame for process in processes for frame in process["frames"]]
    lines = [line for process in processes for line in process["connections"]]
    staged = [frame for frame in frames if frame["protocol"] == "stage"]
    muxer = sum(line["muxer_bytes"] for line in lines)
    noise = NOISE_MESSAGE_BYTES * sum(line["noise_messages"] for line in lines)
    tensors = sum(_tensor_bytes(frame) for frame in staged)
    headers = sum(frame["header_bytes"] for frame in staged)
    named = {
        "activations and gradients": tensors,
        "token ids and targets": sum(frame["payload_bytes"] for frame in staged) - tensors,
        "stage frames' headers, with receipts": headers,
        "control": sum(_frame_bytes(f) for f in frames if f["protocol"] == "control"),
        "transfer of data and states": sum(
            _frame_bytes(f) for f in frames if f["protocol"] == "transfer"
        ),
        "other protocols' frames": sum(
            _frame_bytes(f) for f in frames if f["protocol"] not in ("stage", "control", "transfer")
        ),
    }
    return {
        **named,
        "muxer, and the opening of streams": muxer - sum(named.values()),
        "Noise": noise,
        "handshakes": sum(line["socket_bytes"] for line in lines) - muxer - noise,
    }


def _of(
    processes: Sequence[Mapping[str, Any]], stage_of: Mapping[str, int], what: str
) -> list[tuple[int, int, Mapping[str, Any]]]:
    """Return (sender's stage, receiver's stage, count) for peers that hold stages."""
    return [
        (stage_of[process["peer"]], stage_of[one["remote"]], one)
        for process in processes
        if process["peer"] in stage_of
        for one in process[what]
        if one["remote"] in stage_of
    ]


def _frame_bytes(frame: Mapping[str, Any]) -> int:
    return int(frame["header_bytes"] + frame["payload_bytes"])


def _tensor_bytes(frame: Mapping[str, Any]) -> int:
    if frame["kind"] not in TENSORS:
        return 0
    return int(frame["payload_bytes"] - frame["targets_bytes"])
