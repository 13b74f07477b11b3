"""hivemind's DHT, expert server and optimizer.

The only module of the benchmarks that imports hivemind. hivemind's handlers are forked processes: a
program must import this module before it starts threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hivemind import DHT, Optimizer
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.moe.client.expert import RemoteExpert
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.server import Server
from hivemind.p2p import PeerID
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.proto.runtime_pb2 import Tensor as TensorMessage
from hivemind.utils.tensor_descr import BatchTensorDescriptor

__all__ = [
    "DHT",
    "BatchTensorDescriptor",
    "CompressionType",
    "ModuleBackend",
    "Optimizer",
    "Server",
    "compressed",
    "decompressed",
    "find_expert",
    "open_dht",
    "publish",
    "wait_for_files",
]  # fmt: skip

PORT = 4600
WAIT_SECONDS = 120.0


def open_dht(address: str, initial_peers: Sequence[str]) -> Any:
    """Start a DHT node on this address. TCP only: replies get lost over p2pd's QUIC."""
    return DHT(
        initial_peers=list(initial_peers),
        start=True,
        host_maddrs=[f"/ip4/{address}/tcp/{PORT}"],
        announce_maddrs=[f"/ip4/{address}/tcp/{PORT}"],
    )


def publish(path: Path, dht: Any) -> None:
    """Write the DHT's addresses to `path` for the other processes of the benchmark."""
    document = {
        "peer": dht.peer_id.to_base58(),
        "addresses": [str(address) for address in dht.get_visible_maddrs()],
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


def wait_for_files(paths: Sequence[Path]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            missing = [path.name for path in paths if not path.exists()]
            raise TimeoutError(f"no {', '.join(missing)} after {WAIT_SECONDS:.0f} s")
        time.sleep(0.1)
    return [json.loads(path.read_text()) for path in paths]


def find_expert(dht: Any, uid: str, peer: str) -> Any:
    p2p = RemoteExpertWorker.run_coroutine(dht.replicate_p2p())
    return RemoteExpert(ExpertInfo(uid, PeerID.from_base58(peer)), p2p)


def compressed(tensor: torch.Tensor, kind: int) -> bytes:
    """Return the tensor as hivemind sends it, in its own message."""
    payload: bytes = serialize_torch_tensor(tensor, kind).SerializeToString()
    return payload


def decompressed(payload: bytes) -> torch.Tensor:
    tensor: torch.Tensor = deserialize_torch_tensor(TensorMessage.FromString(payload))
    return tensor
