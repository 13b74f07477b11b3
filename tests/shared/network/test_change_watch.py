"""Noticing that this machine has other addresses, or that it slept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network

import pytest
import trio

from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.network import change_watch
from swarm_shared.network.change_watch import SLEEP_GAP_SECONDS, ChangeWatch

CABLE = Interfaces((ip_network("192.168.1.0/24"),), frozenset({ip_address("192.168.1.2")}))
PHONE = Interfaces((ip_network("172.20.10.0/28"),), frozenset({ip_address("172.20.10.3")}))


class Machine:
    """Its addresses, and its wall clock, which goes on while the process stands still."""

    def __init__(self) -> None:
        self.interfaces = CABLE
        self.slept_seconds = 0.0
        self.looks = 0
        self.changes = 0
        self.watch: ChangeWatch

    def look(self) -> Interfaces:
        self.looks += 1
        return self.interfaces

    def wall_clock(self) -> float:
        return 1e9 + trio.current_time() + self.slept_seconds

    def changed(self) -> None:
        self.changes += 1

    async def looks_again(self) -> None:
        """Two looks: the first of them may have begun before."""
        seen = self.looks
        while self.looks < seen + 2:
            await trio.sleep(0.001)


@asynccontextmanager
async def watched(
    monkeypatch: pytest.MonkeyPatch, on_change: Callable[[], None] | None = None
) -> AsyncIterator[Machine]:
    monkeypatch.setattr(change_watch, "POLL_SECONDS", 0.005)
    machine = Machine()
    machine.watch = ChangeWatch(on_change or machine.changed, machine.look, machine.wall_clock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(machine.watch.run)
        await machine.looks_again()
        yield machine
        nursery.cancel_scope.cancel()


async def test_nothing_is_told_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as machine:
        assert machine.watch.interfaces == CABLE
        await machine.looks_again()
        assert machine.changes == 0


async def test_other_addresses_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as machine:
        machine.interfaces = PHONE
        await machine.looks_again()
        assert machine.watch.interfaces == PHONE
        await machine.looks_again()
        assert machine.changes == 1
        machine.interfaces = CABLE
        await machine.looks_again()
        assert machine.changes == 2


async def test_addresses_are_those_of_now_when_the_change_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Interfaces] = []
    async with watched(monkeypatch, lambda: seen.append(machine.watch.interfaces)) as machine:
        machine.interfaces = PHONE
        await machine.looks_again()
        assert seen == [PHONE]


async def test_a_machine_that_slept_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch) as machine:
        machine.slept_seconds = SLEEP_GAP_SECONDS + 1
        await machine.looks_again()
        await machine.looks_again()
        assert machine.changes == 1


@pytest.mark.parametrize("seconds", [SLEEP_GAP_SECONDS - 1, -3600.0])
async def test_a_clock_that_is_put_right_is_no_sleep(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    async with watched(monkeypatch) as machine:
        machine.slept_seconds = seconds
        await machine.looks_again()
        assert machine.changes == 0
