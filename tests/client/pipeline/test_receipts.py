"""The receipt book: the receipts of each step, and those not reported yet."""

from __future__ import annotations

import base64

from swarm_client.pipeline.receipts import ReceiptBook
from swarm_shared.base.types import Generation, MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.credentials import open_receipt
from swarm_shared.identity.keys import Identity


def book_of(*held: tuple[int, int]) -> ReceiptBook:
    """(step, microbatch) each."""
    book = ReceiptBook(
        Identity.from_seed(b"r" * 32), RunId("ab" * 32), StageIndex(0), lambda: Generation(1)
    )
    for step, microbatch in held:
        book.add(Step(step), MicrobatchIndex(microbatch), 1, 4, None)
    return book


def named(envelopes: tuple[str, ...]) -> list[tuple[int, int]]:
    receipts = [open_receipt(base64.b64decode(envelope)) for envelope in envelopes]
    return [(receipt.step, receipt.microbatch) for receipt in receipts]


def test_the_same_microbatch_of_two_steps_is_two_receipts() -> None:
    book = book_of((1, 7), (2, 7), (1, 3))
    assert named(book.all()) == [(1, 7), (1, 3), (2, 7)]
    assert book.get(Step(1), MicrobatchIndex(7)) != book.get(Step(2), MicrobatchIndex(7))
    assert book.get(Step(2), MicrobatchIndex(3)) is None
    assert [book.count(Step(step)) for step in (1, 2, 3)] == [2, 1, 0]


def test_both_steps_are_reported_once_in_the_order_in_which_they_were_signed() -> None:
    book = book_of((1, 7), (2, 7), (1, 3))
    assert named(book.take_unreported()) == [(1, 7), (2, 7), (1, 3)]
    assert book.take_unreported() == ()
    assert len(book.all()) == 3


def test_a_step_that_is_over_leaves_the_other_s_receipts_and_reports() -> None:
    book = book_of((1, 7), (2, 7), (1, 3), (2, 4))
    book.drop(Step(2), (MicrobatchIndex(4), MicrobatchIndex(99)))
    book.clear(Step(1))
    book.clear(Step(9))
    assert named(book.all()) == [(2, 7)]
    assert named(book.take_unreported()) == [(2, 7), (2, 4)]
