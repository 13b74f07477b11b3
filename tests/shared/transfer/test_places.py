"""Places of answers in memory: those that take long give way, and only while others wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio
import trio.testing

from swarm_shared.transfer.places import Places

TURN = 15


def on_virtual_time(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))


async def takes(seconds: float) -> bool:
    await trio.sleep(seconds)
    return True


def test_an_answer_takes_as_long_as_it_likes_while_no_other_one_waits() -> None:
    ended: list[bool] = []

    async def body() -> None:
        places = Places(2, TURN)

        async def run(seconds: float) -> None:
            ended.append(await places.run(partial(takes, seconds)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 10.0 * TURN)
            for _ in range(20):
                await run(1.0)

    on_virtual_time(body)
    assert ended == [True] * 21


def test_as_many_give_way_as_wait_and_those_that_were_begun_first() -> None:
    ended: dict[str, tuple[bool, int]] = {}

    async def body() -> None:
        places, begun = Places(3, TURN), trio.current_time()

        async def run(name: str, seconds: float) -> None:
            done = await places.run(partial(takes, seconds))
            ended[name] = done, round(trio.current_time() - begun)

        async with trio.open_nursery() as nursery:
            for name in ("first", "second", "third"):
                nursery.start_soon(run, name, 1000.0)
                await trio.sleep(1)
            nursery.start_soon(run, "fourth", 10.0)
            await trio.sleep(1)
            nursery.start_soon(run, "fifth", 1000.0)

    on_virtual_time(body)
    assert ended == {
        "first": (False, TURN), "second": (False, TURN + 1), "fourth": (True, TURN + 10),
        "third": (True, 1002), "fifth": (True, TURN + 1001),
    }  # fmt: skip
