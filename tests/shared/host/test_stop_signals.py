"""Which signals ask a program to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swarm_shared.host.stop_signals import asks_again, on_stop_signals, stop_signals

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGHUP"), reason="this machine's kernel has no hang-ups"
)


@contextmanager
def hangup(handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_a_program_that_is_not_started_to_outlive_it() -> None:
    with hangup(signal.SIG_DFL):
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with hangup(signal.SIG_IGN):  # as `nohup` starts a program
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)


def test_a_hangup_is_no_second_request() -> None:
    assert asks_again(signal.SIGINT)
    assert asks_again(signal.SIGTERM)
    assert not asks_again(signal.SIGHUP)


def test_a_handler_is_in_the_place_of_what_the_signals_do_for_a_while() -> None:
    before = [signal.getsignal(number) for number in stop_signals()]
    asked: list[str] = []
    with on_stop_signals(lambda: asked.append("stop")):
        for number in stop_signals():
            signal.raise_signal(number)
    assert len(asked) == len(before)
    assert [signal.getsignal(number) for number in stop_signals()] == before
