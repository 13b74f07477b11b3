"""Large tensors of a device, read piece by piece: all of them, in order, and after their copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kits.client.fake_accelerator import FakeAccelerator, FakeEvent
from swarm_client.stage.worker.accelerator import processor
from swarm_client.stage.worker.accumulation.digests import GradientDigest
from swarm_client.stage.worker.transfer import pieces_to_host as module
from swarm_client.stage.worker.transfer.pieces_to_host import PiecesToHost, pieces_to_host

PIECE_ELEMENTS = 4


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 4 * PIECE_ELEMENTS)
        yield


def reader_of(fake: FakeAccelerator) -> PiecesToHost:
    reader = pieces_to_host(fake)
    assert reader is not None
    return reader


def test_a_device_without_copy_engines_has_no_reader() -> None:
    assert pieces_to_host(processor()) is None
    assert pieces_to_host(FakeAccelerator("mps")) is None


@given(sizes=st.lists(st.integers(0, 3 * PIECE_ELEMENTS), max_size=6))
def test_all_is_read_in_order(sizes: list[int]) -> None:
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        reader, seen = reader_of(fake), list[float]()
        tensors = [torch.arange(n, dtype=torch.float32) + 100 * i for i, n in enumerate(sizes)]
        for one in tensors:
            reader.read(one.to(fake.device), lambda piece: seen.extend(piece.tolist()))
        reader.finish(lambda piece: seen.extend(piece.tolist()))
    assert seen == [value for one in tensors for value in one.tolist()]


@given(sizes=st.lists(st.tuples(st.integers(0, 3 * PIECE_ELEMENTS), st.booleans()), max_size=6))
def test_a_digest_is_the_same_wherever_the_gradient_is(sizes: list[tuple[int, bool]]) -> None:
    fake, here, there = FakeAccelerator("cuda"), GradientDigest(), list[str]()
    with fake.at_work():
        digest = GradientDigest(reader_of(fake))
        for number, (size, is_on_host) in enumerate(sizes):
            one = torch.arange(size, dtype=torch.float32) + number
            here.update(one)
            digest.update(one if is_on_host else one.to(fake.device))
        there.append(digest.hex())
    assert there == [here.hex()]


def test_what_an_error_left_unread_is_forgotten(fake: FakeAccelerator) -> None:
    reader = reader_of(fake)
    reader.read(torch.ones(2, device=fake.device), lambda _: None)
    assert GradientDigest(reader).hex() == GradientDigest().hex()


def test_a_piece_that_is_read_before_it_has_arrived_is_found(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(fake)
    reader.read(torch.ones(2, device=fake.device), lambda _: None)
    monkeypatch.setattr(FakeEvent, "synchronize", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"without waiting|reads what is"):
        reader.finish(lambda piece: piece.sum())
