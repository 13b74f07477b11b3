"""The self-test of a device: what it finds, and what it says about it."""

from __future__ import annotations

import itertools

import pytest
import torch

from kits.client.fake_accelerator import FakeAccelerator
from swarm_client.stage.worker import self_test
from swarm_client.stage.worker.accelerator import processor
from swarm_client.stage.worker.self_test import (
    ROUNDS_PER_PASS,
    WORD_BYTES,
    FixedWork,
    MemoryPattern,
    arithmetic_class,
    difference,
    distant,
    run_self_test,
)

CPU = processor()
HIDDEN_SIZE = 32
CHUNK_WORDS = 1024
CHUNK_BYTES = CHUNK_WORDS * WORD_BYTES
DOWN = "the gradient of model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "HIDDEN_SIZE", HIDDEN_SIZE)
    monkeypatch.setattr(self_test, "CHUNK_WORDS", CHUNK_WORDS)


def flip_one_bit(tensor: torch.Tensor, element: int = 7) -> None:
    """What a fault of a memory does: the lowest bit of one number."""
    tensor.view(-1).view(torch.int32)[element] ^= 1


def test_a_machine_in_order_passes_and_its_test_ends_in_time() -> None:
    seconds = itertools.count(step=0.25)
    found = run_self_test(CPU, 10.0, 3 * CHUNK_BYTES, clock=lambda: next(seconds))
    assert (found.fault, found.memory_bytes) == ("", 3 * CHUNK_BYTES)
    assert found.rounds > 2
    assert 10.0 <= found.seconds <= 12.0


def test_a_test_has_two_rounds_at_least_and_needs_no_memory() -> None:
    found = run_self_test(CPU, 1e-9, 0)
    assert (found.rounds, found.memory_bytes, found.fault) == (2, 0, "")


def test_a_single_wrong_bit_of_a_gradient_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, calls = FixedWork.compute, itertools.count(1)

    def compute(self: FixedWork) -> dict[str, torch.Tensor]:
        found = honest(self)
        if next(calls) == 4:
            flip_one_bit(found[DOWN])
        return found

    monkeypatch.setattr(FixedWork, "compute", compute)
    found = run_self_test(CPU, 600.0, CHUNK_BYTES)
    assert found.fault == (
        f"in round 4 {DOWN} differed from the first round's in 1 of {32 * 96:,} values"
    )
    assert found.rounds == 4


def test_work_is_the_same_wherever_it_is_made_and_each_tensor_is_compared() -> None:
    first, second = (
        FixedWork(CPU.device, HIDDEN_SIZE).compute(),
        FixedWork(CPU.device, HIDDEN_SIZE).on_processor().compute(),
    )
    assert difference(first, second) == ""
    assert distant(first, second) == ""
    assert len(first) == 2 + 2 * 9, "output, input, and nine parameters of each layer"
    for name, tensor in second.items():
        flip_one_bit(tensor)
        assert difference(first, second).startswith(f"{name} differed")
        flip_one_bit(tensor)


def test_what_is_not_a_number_is_a_fault() -> None:
    first, second = (
        FixedWork(CPU.device, HIDDEN_SIZE).compute(),
        FixedWork(CPU.device, HIDDEN_SIZE).compute(),
    )
    second["the output"][0, 0, 0] = float("nan")
    assert difference(first, second)
    assert distant(first, second)


@pytest.mark.parametrize(("error", "is_found"), [(1e-5, False), (1e-3, True)])
def test_a_gpu_may_round_otherwise_than_the_processor_within_a_tolerance(
    error: float, is_found: bool
) -> None:
    reference, found = (
        FixedWork(CPU.device, HIDDEN_SIZE).compute(),
        FixedWork(CPU.device, HIDDEN_SIZE).compute(),
    )
    found[DOWN] *= 1.0 + error
    assert bool(distant(reference, found)) == is_found
    if is_found:
        assert distant(reference, found) == (
            f"{DOWN} was at a relative distance of 0.001 from the processor's"
        )


def test_a_class_is_the_same_where_the_results_are_and_another_for_one_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_test, "CLASS_HIDDEN_SIZE", HIDDEN_SIZE)
    expected, fake = arithmetic_class(CPU), FakeAccelerator("mps")
    with fake.at_work():
        assert arithmetic_class(fake) == expected
    assert run_self_test(CPU, 1e-9, 0).arithmetic == expected
    honest = FixedWork.compute

    def compute(self: FixedWork) -> dict[str, torch.Tensor]:
        found = honest(self)
        flip_one_bit(found[DOWN])
        return found

    monkeypatch.setattr(FixedWork, "compute", compute)
    assert arithmetic_class(CPU) != expected


# ---------------------------------------------------------------- memory


def filled(chunks: int) -> MemoryPattern:
    pattern = MemoryPattern(CPU.device, chunks * CHUNK_BYTES + CHUNK_BYTES - 1)
    pattern.fill(lambda: True)
    assert pattern.nbytes == chunks * CHUNK_BYTES
    return pattern


def test_every_word_is_read_in_both_states_and_a_wrong_bit_is_found_wherever_it_is() -> None:
    for chunk, checks_before in itertools.product(range(3), range(7)):
        pattern = filled(3)
        for _ in range(checks_before):
            assert pattern.check_some() == ""
        pattern._chunks[chunk][checks_before] ^= 1 << 40
        said = [pattern.check_some() for _ in range(3)]
        expected = (
            f"1 of {CHUNK_WORDS:,} words of memory in part {chunk + 1} of 3 were not what had been "
            "written there"
        )
        assert expected in said


def test_memory_that_answers_at_two_addresses_is_found() -> None:
    pattern = filled(2)
    pattern._chunks[1] = pattern._chunks[0]
    assert any(pattern.check_some() for _ in range(2))


def test_all_of_a_large_memory_is_read_within_so_many_rounds() -> None:
    pattern = filled(ROUNDS_PER_PASS + 1)
    pattern._chunks[-1][0] += 1
    assert any(pattern.check_some() for _ in range(ROUNDS_PER_PASS))


def test_memory_is_filled_while_there_is_time() -> None:
    pattern = MemoryPattern(CPU.device, 100 * CHUNK_BYTES)
    answers = iter([True, True, False])
    pattern.fill(lambda: next(answers))
    assert pattern.nbytes == 2 * CHUNK_BYTES
