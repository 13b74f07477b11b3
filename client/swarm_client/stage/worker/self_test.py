"""The self-test of a device: whether it computes the same each time, and keeps what is in memory.

Each round computes forward and backward pass of one small stage and compares output and gradients
with those of the first round, to the bit; and it reads a part of the memory on offer, which is full
of a pattern, and writes it anew with every bit flipped. On an accelerator the first round is also
compared with the processor's, within a tolerance. All of it is computed as a worker computes its
stage.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from swarm_client.stage.protocol.messages import SelfTested
from swarm_client.stage.worker.accelerator import Accelerator, processor
from swarm_client.stage.worker.duty_cycle import DutyCycle
from swarm_shared.model import Stage, initialise
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

HIDDEN_SIZE = 256
ACCELERATOR_HIDDEN_SIZE = 1024
"""Hidden size of the work in a round on an accelerator, where it takes some hundredths of a second,
as HIDDEN_SIZE does on the processor."""
CLASS_HIDDEN_SIZE = 128
"""Hidden size of the work whose results class a machine. Every worker computes it once, in some 20
ms."""
CLASS_BYTES = 4
"""Length of a class's name in bytes. People compare these names."""
LAYERS = 2
SEQUENCES = 8
POSITIONS = 64
SEED = 36

CHUNK_WORDS = 2 * 2**20
"""Words of 8 bytes in a chunk of the pattern."""
WORD_BYTES = 8
MULTIPLIER = 0x9E37_79B9_7F4A_7C15
"""Odd, so that no two chunks have the same pattern: memory at a wrong address is found as well."""
ROUNDS_PER_PASS = 16
"""Rounds in which the whole pattern is read once."""
FREE_SHARE = 0.5
"""Largest share of the free memory that the pattern takes."""
FILL_SHARE = 0.25
"""Largest share of the time in which it is filled."""

ACCELERATOR_TOLERANCE = 1e-4
"""Largest relative distance of a tensor from the processor's, as audits allow it by default."""

Clock = Callable[[], float]
Tensors = dict[str, Tensor]


def run_self_test(
    accelerator: Accelerator, seconds: float, memory_bytes: int, duty_cycle: float = 1.0,
    clock: Clock = time.perf_counter,
) -> SelfTested:  # fmt: skip
    """Test a device for so many seconds, at least two rounds, or until the first fault.

    The pattern takes at most `memory_bytes` of the device's memory.
    """
    began = clock()
    device = accelerator.device
    work = FixedWork(device, HIDDEN_SIZE if accelerator.is_processor else ACCELERATOR_HIDDEN_SIZE)
    expected = work.compute()
    fault = "" if accelerator.is_processor else distant(work.on_processor().compute(), expected)
    free_bytes = accelerator.memory().free_bytes
    pattern = MemoryPattern(device, min(memory_bytes, int(free_bytes * FREE_SHARE)))
    filled_until = clock() + FILL_SHARE * seconds
    pattern.fill(lambda: clock() < filled_until)
    duty, rounds = DutyCycle(clock), 1
    duty.change(duty_cycle)
    while not fault and (rounds < 2 or clock() - began < seconds):
        round_began = clock()
        rounds += 1
        problem = difference(expected, work.compute()) or pattern.check_some()
        fault = problem and f"in round {rounds} {problem}"
        duty.computed(clock() - round_began)
        time.sleep(duty.rest_seconds())
    arithmetic = arithmetic_class(accelerator)
    return SelfTested(
        rounds=rounds, seconds=clock() - began, memory_bytes=pattern.nbytes, fault=fault,
        arithmetic=arithmetic,
    )  # fmt: skip


# ---------------------------------------------------------------- arithmetic


def arithmetic_class(accelerator: Accelerator) -> str:
    """Return a short digest of what fixed work gives on a device, with as many threads as torch has
    now: the same on machines whose arithmetic is the same to the bit, as far as this work shows
    it."""
    hashed = hashlib.blake2b(digest_size=CLASS_BYTES)
    for name, tensor in FixedWork(accelerator.device, CLASS_HIDDEN_SIZE).compute().items():
        hashed.update(name.encode())
        hashed.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


class FixedWork:
    """A stage in the middle of a model, and a microbatch; of one size they are always the same."""

    def __init__(self, device: torch.device, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        config = ModelConfig(
            vocabulary_size=2, hidden_size=self._hidden_size,
            intermediate_size=3 * self._hidden_size, layers=LAYERS, heads=8, key_value_heads=8,
            sequence_length=POSITIONS,
        )  # fmt: skip
        everything = StageRange(first_layer=0, end_layer=LAYERS)
        with device:
            self._stage = Stage(config, everything, is_first=False, is_last=False)
        initialise(self._stage, SEED)
        generator = torch.Generator().manual_seed(SEED)
        shape = (SEQUENCES, POSITIONS, self._hidden_size)
        self._input = torch.randn(shape, generator=generator).to(device)
        self._output_gradient = torch.randn(shape, generator=generator).to(device)

    def on_processor(self) -> FixedWork:
        """Return the same work for the processor."""
        return FixedWork(processor().device, self._hidden_size)

    def compute(self) -> Tensors:
        """The output, and the gradients of the input and of each parameter, by their names."""
        entry = self._input.detach().requires_grad_()
        parameters = self._stage.all_parameters()
        output = self._stage(entry)
        gradients = torch.autograd.grad(
            output, [entry, *(parameter for _, parameter in parameters)], self._output_gradient
        )
        names = ("the input", *(name for name, _ in parameters))
        named_gradients = {
            f"the gradient of {name}": gradient
            for name, gradient in zip(names, gradients, strict=True)
        }
        return {"the output": output.detach(), **named_gradients}


def difference(expected: Tensors, computed: Tensors) -> str:
    """The first tensor that is not the same to the bit, as part of a sentence; empty if none."""
    for name, tensor in expected.items():
        if not torch.equal(tensor, computed[name]):
            count = int((tensor != computed[name]).sum())
            return (
                f"{name} differed from the first round's in {count:,} of {tensor.numel():,} values"
            )
    return ""


def distant(reference_tensors: Tensors, tensors: Tensors) -> str:
    """The first tensor that is too far from the processor's, as a sentence; empty if none is."""
    for name, reference in reference_tensors.items():
        distance = float((tensors[name].cpu().double() - reference.double()).norm())
        relative = distance / float(reference.double().norm())
        if not relative <= ACCELERATOR_TOLERANCE:
            return f"{name} was at a relative distance of {relative:.2g} from the processor's"
    return ""


# ---------------------------------------------------------------- memory


class MemoryPattern:
    """Chunks of a device's memory with a known content."""

    def __init__(self, device: torch.device, memory_bytes: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        words = torch.randint(-(2**63), 2**63 - 1, (CHUNK_WORDS,), generator=generator)
        self._words = words.to(device)
        self._chunks: list[Tensor] = []
        self._max_chunks = memory_bytes // (CHUNK_WORDS * WORD_BYTES)
        self._checked = 0

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are filled."""
        return len(self._chunks) * CHUNK_WORDS * WORD_BYTES

    def fill(self, go_on: Callable[[], bool]) -> None:
        """Take memory up to the size, or until `go_on` says no."""
        while len(self._chunks) < self._max_chunks and go_on():
            self._chunks.append(self._content(len(self._chunks), flipped=False))

    def check_some(self) -> str:
        """Check the next chunks and flip all of their bits; a fault as part of a sentence."""
        for _ in range(-(-len(self._chunks) // ROUNDS_PER_PASS)):
            passes, number = divmod(self._checked, len(self._chunks))
            chunk = self._chunks[number]
            wrong = int((chunk != self._content(number, flipped=passes % 2 == 1)).sum())
            if wrong:
                return (
                    f"{wrong:,} of {CHUNK_WORDS:,} words of memory in part {number + 1} of "
                    f"{len(self._chunks)} were not what had been written there"
                )
            chunk.bitwise_not_()
            self._checked += 1
        return ""

    def _content(self, number: int, *, flipped: bool) -> Tensor:
        key = number * MULTIPLIER % 2**63
        return self._words ^ (~key if flipped else key)
