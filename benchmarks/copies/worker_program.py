"""Copies between the daemon and its worker: `... worker_program SIZE` writes one line of JSON.

This process starts a real worker, acts as its daemon and counts its own copies. torch copies with
its own loops; those are counted by the operations that it dispatches.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import trio
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.copies.counting import Copied, Counter
from benchmarks.counts.world import manifest as large_manifest
from swarm_client.stage.handle.worker_handle import open_worker
from swarm_client.stage.protocol.slot_sizes import slot_sizes
from swarm_client.stage.worker.payloads import PayloadCodec
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.run.manifest import Manifest, StageRange

STAGE = StageIndex(1)
"""The stage under test, a middle one: activations come in and go out."""

_COPYING = ("copy_", "clone", "_to_copy", "contiguous")


class TorchCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes written by torch's copying operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _COPYING and isinstance(result, torch.Tensor):
            self.bytes += result.nbytes
        return result


def manifest(size: int) -> Manifest:
    """Return a run of three stages of one small layer with activations of `size` float32 bytes."""
    base = large_manifest()
    width = length = 64
    model = base.model.model_copy(
        update={
            "vocabulary_size": 64, "hidden_size": width, "intermediate_size": 64, "layers": 3,
            "heads": 2, "key_value_heads": 2, "sequence_length": length,
        }
    )  # fmt: skip
    training = base.training.model_copy(
        update={"sequences_per_microbatch": size // (4 * width * length), "dtype": "float32"}
    )
    cuts = tuple(StageRange(first_layer=n, end_layer=n + 1) for n in range(3))
    return base.model_copy(update={"model": model, "training": training, "stages": cuts})


async def worker(size: int) -> None:
    """Count the daemon's copies from a payload to its worker and back from the output, and the
    worker's copies between a slot and its tensors."""
    run, counter = manifest(size), Counter()
    payload = memoryview(bytearray(size))
    with tempfile.TemporaryDirectory() as folder:
        async with open_worker(
            run, STAGE, "cpu", 1, 0, "swarm-copies", Path(folder) / "worker.log"
        ) as stage:
            for microbatch in range(2):
                index = MicrobatchIndex(microbatch)
                with counter.counting() as copied:
                    output = await stage.forward(Step(1), index, True, (payload,))
                assert output.payload is not None
                assert output.payload.nbytes == size
                output.release()
    print(json.dumps({"fill": asdict(copied), **_slot_copies(run, size)}))


def _slot_copies(run: Manifest, size: int) -> dict[str, Any]:
    codec = PayloadCodec(run, slot_sizes(run, STAGE), is_first=False, is_last=False)
    slot = memoryview(bytearray(size))
    with TorchCopies() as read:
        held = codec.read_input(slot)
    with TorchCopies() as written:
        codec.write_output(held.inputs, slot)
    return {
        "read_input": asdict(Copied(memory=read.bytes)),
        "write": asdict(Copied(memory=written.bytes)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    trio.run(worker, int(sys.argv[1]))
