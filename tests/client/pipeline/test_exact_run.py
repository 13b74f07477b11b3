"""A swarm's arithmetic without its processes: whichever peer computes a microbatch, in whatever
order, with the weights' gradients sooner or later and with whatever removed again, the parameters
equal the reference's bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kits.client.stage_runners import CPU, PLENTY, make_manifest, tokens_of
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_coordinator.offline.reference import StepRecord, train_reference
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.model import global_norm
from swarm_shared.run.manifest import CodecsConfig, Manifest
from swarm_shared.run.model_config import AdapterConfig, RopeScaling
from swarm_shared.run.schedule import learning_rate

STEPS = 4
PEERS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def slot_of(payload: bytes) -> memoryview:
    return memoryview(bytearray(payload))


def sent(write: Callable[[torch.Tensor, memoryview], int], tensor: torch.Tensor) -> bytes:
    """As it is on the wire."""
    slot = memoryview(bytearray(tensor.nbytes + 4096))
    return bytes(slot[: write(tensor, slot)])


class Peer:
    def __init__(self, manifest: Manifest, stage: int) -> None:
        self.runner = StageRunner(manifest, StageIndex(stage), CPU, PLENTY, PLENTY)
        self.steps = StepRunner(self.runner)


class Churning:
    """Peers of all stages; dice decide who does what."""

    def __init__(self, manifest: Manifest, seed: int) -> None:
        self.manifest = manifest
        self.dice = random.Random(seed)
        self.requests = 0
        self.owed: list[tuple[Peer, int]] = []
        """Computations whose weights' gradients are not counted yet."""
        self.stages = [
            [Peer(manifest, stage) for _ in range(PEERS)] for stage in range(manifest.stage_count)
        ]

    def step(self, step: Step) -> float:
        """The mean loss."""
        microbatches = list(range(self.manifest.training.microbatches_per_step))
        self.dice.shuffle(microbatches)
        losses = [self._microbatch(step, microbatch) for microbatch in microbatches]
        tokens = len(microbatches) * self.manifest.tokens_per_microbatch
        self._pay(lambda: True)
        self._close(step, tokens)
        return math.fsum(losses) / tokens

    def _microbatch(self, step: Step, microbatch: int) -> float:
        way = [self.dice.choice(peers) for peers in self.stages]
        loss = self._drive(step, microbatch, way)
        # Another peer has computed a part of it too, and it does not count.
        twice = self.dice.randrange(len(self.stages))
        other = self.dice.choice(self.stages[twice])
        if other is not way[twice]:
            again = [*way[:twice], other, *way[twice + 1 :]]
            self._drive(step, microbatch, again)
            self._pay(lambda: True)
            assert other.runner.uncommit(step, (MicrobatchIndex(microbatch),))
        self._pay(lambda: self.dice.random() < 0.5)
        return loss

    def _pay(self, more: Callable[[], bool]) -> None:
        """Have weights' gradients computed, in any order."""
        self.dice.shuffle(self.owed)
        while self.owed and more():
            peer, request = self.owed.pop()
            peer.runner.count_weights(request)

    def _owe(self, peer: Peer, result: BackwardResult, wire: bytes | None) -> None:
        if result.owed is not None:
            self.owed.append((peer, self.requests))
            peer.runner.transcribe(self.requests, result, None if wire is None else slot_of(wire))

    def _drive(self, step: Step, microbatch: int, way: Sequence[Peer]) -> float:
        self.requests += 1
        inputs, targets = tokens_of(self.manifest, 1000 * step + microbatch)
        index = MicrobatchIndex(microbatch)
        payload = inputs.tobytes()
        for peer in way[:-1]:
            result = peer.runner.forward(self.requests, step, index, True, slot_of(payload))
            assert isinstance(result, ForwardResult)
            payload = sent(peer.runner.codec.write_output, result.output)
            peer.runner.output_sent(self.requests, slot_of(payload))
        payload += targets.tobytes()
        last = way[-1].runner.forward(self.requests, step, index, True, slot_of(payload))
        assert isinstance(last, BackwardResult)
        assert last.loss_sum is not None
        result = last
        for sender, peer in zip(way[:0:-1], way[-2::-1], strict=True):
            assert result.input_gradient is not None
            payload = sent(sender.runner.codec.write_input_gradient, result.input_gradient)
            self._owe(sender, result, payload)
            result = peer.runner.backward(self.requests, slot_of(payload))
        self._owe(way[0], result, None)
        return last.loss_sum

    def _close(self, step: Step, tokens: int) -> None:
        totals = [self._total(step, peers) for peers in self.stages]
        first, last = (self.stages[place][0].runner.layout for place in (0, -1))
        if first.tied_count and len(self.stages) > 1:
            tied = totals[0][first.own_count :] + totals[-1][last.own_count :]
            totals[0][first.own_count :] = tied
            totals[-1][last.own_count :] = tied
        norms = [
            peers[0].steps.norm(step, tokens, total)
            for peers, total in zip(self.stages, totals, strict=True)
        ]
        norm = global_norm([part.own_squared for part in norms] + [norms[0].tied_squared])
        rate = learning_rate(self.manifest.optimizer, self.manifest.training.steps, step)
        for peers, total in zip(self.stages, totals, strict=True):
            digests = {peer.steps.apply(step, tokens, norm, rate, total).digest for peer in peers}
            assert len(digests) == 1

    def _total(self, step: Step, peers: Sequence[Peer]) -> torch.Tensor:
        found = torch.zeros(peers[0].runner.layout.count, dtype=torch.float64)
        for peer in self.dice.sample(peers, len(peers)):
            part = torch.empty_like(found)
            peer.steps.prepare_round(step, part)
            found += part
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach()
            for peers in self.stages
            for name, parameter in peers[0].runner.stage.all_parameters()
        }


BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": "qkv"},
    "qwen3": {
        "query_key_norm": True, "attention_bias": "all", "attention_head_size": 12,
        "rope_scaling": RopeScaling(kind="llama3", factor=8, original_length=32),
    },
    "adapters": {"adapters": AdapterConfig(rank=3), "attention_bias": "qkv"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "tied", "family"),
    [
        (1, False, "llama"), (1, True, "llama"), (2, False, "llama"), (3, True, "llama"),
        (2, False, "qwen2"), (3, True, "qwen2"), (1, True, "qwen3"), (3, True, "qwen3"),
        (1, False, "adapters"), (3, True, "adapters"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("border", ["none", "int8"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_parameters_are_the_references_to_the_bit_whichever_peer_computed_what(
    stages: int, tied: bool, family: str, border: str, staleness: int
) -> None:
    plain = make_manifest(stages, tied=tied, **BLOCKS[family])
    manifest = plain.model_copy(
        update={
            "codecs": CodecsConfig(activation=border, gradient=border, average="exact"),
            "training": plain.training.model_copy(update={"staleness": staleness}),
        }
    )
    swarm = Churning(manifest, seed=stages)
    losses = [swarm.step(Step(step)) for step in range(1, STEPS + 1)]

    records: list[StepRecord] = []
    reference = train_reference(
        manifest,
        lambda step: [
            tokens_of(manifest, 1000 * step + microbatch)
            for microbatch in range(manifest.training.microbatches_per_step)
        ],
        STEPS,
        records.append,
        threads=1,
    )
    expected = dict(reference.all_parameters())
    found = swarm.parameters()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert losses == [record.loss for record in records]
