"""For tests of the terminal views: a source that tells what a test says, keys, and the screen.

Textual runs on asyncio: `drive` runs a whole session of a view under it, from a plain test. The
clock is the source's and stands still until the test moves it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic

from rich.segment import Segment
from textual.pilot import Pilot

from swarm_shared.base.errors import SwarmError
from swarm_shared.tui.app import ViewApp
from swarm_shared.tui.source import D, DocumentReceived, Event, LogEntry, LogReceived, SourceLost
from swarm_shared.tui.terminal_style import Look, ThemeName

_MOST_ROUNDS = 50
START = 1_790_000_000.0
ASCII = Look(unicode=False, theme=ThemeName.NONE)
FORMS: dict[str, tuple[int, int, Look]] = {
    "80x24": (80, 24, Look()),
    "120x40": (120, 40, Look()),
    "60x20": (60, 20, Look()),
    "80x24-ascii": (80, 24, ASCII),
}
"""Terminals in which every pane has to look right."""


class Script(Generic[D]):
    """Tells what it is told to, at once; keeps what it was asked to do."""

    def __init__(self) -> None:
        self.clock = START
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Mapping[str, Any] | SwarmError] = {}
        self._events: asyncio.Queue[Event[D] | SwarmError] = asyncio.Queue()

    def now(self) -> float:
        return self.clock

    def tell(self, document: D) -> None:
        self._events.put_nowait(DocumentReceived(self.clock, document))

    def log(self, *entries: LogEntry) -> None:
        self._events.put_nowait(LogReceived(self.clock, entries))

    def leave(self, sentence: str) -> None:
        self._events.put_nowait(SourceLost(self.clock, sentence))

    def break_off(self, error: SwarmError) -> None:
        self._events.put_nowait(error)

    async def events(self) -> AsyncIterator[Event[D]]:
        while True:
            event = await self._events.get()
            if isinstance(event, SwarmError):
                raise event
            yield event

    async def act(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append((method, dict(arguments)))
        answer = self.answers.get(method, {})
        if isinstance(answer, SwarmError):
            raise answer
        return answer


SCREENS = Path(__file__).parent / "screens"


def compare(name: str, shown: str) -> None:
    """The screen is the one in the file of that name. SCREENS=write makes the files anew: look at
    what has changed in them before it is committed.
    """
    path = SCREENS / f"{name}.txt"
    if os.environ.get("SCREENS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown + "\n")
    assert shown == path.read_text().removesuffix("\n")


def colours(pilot: Pilot[None]) -> set[str]:
    """Every colour that the screen uses, but the terminal's own of text and background."""
    strips = pilot.app.screen._compositor.render_strips()
    styles = [segment.style for strip in strips for segment in strip if segment.style]
    found = [colour for style in styles for colour in (style.color, style.bgcolor) if colour]
    return {colour.name for colour in found if not colour.is_default}


Session = Callable[[Pilot[None]], Awaitable[None]]


def drive(app: ViewApp[Any], session: Session, columns: int = 80, rows: int = 24) -> None:
    """Run the view without a terminal, in UTC, and the test's part beside it."""

    async def main() -> None:
        async with app.run_test(size=(columns, rows), notifications=True) as pilot:
            await settle(pilot)
            await session(pilot)

    with _utc():
        asyncio.run(main())


@contextmanager
def _utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


def walk(view: str, panes: Sequence[str], form: str) -> Session:
    """Through every pane by its key: each looks as its file has it."""

    async def session(pilot: Pilot[None]) -> None:
        for key, name in enumerate(panes, 1):
            await press(pilot, str(key))
            shown = screen(pilot)
            assert "\x1b" not in shown
            if FORMS[form][2] is ASCII:
                assert shown.isascii()
                assert colours(pilot) == set()
            compare(f"{view}-{name}-{form}", shown)

    return session


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settle(pilot)


async def settle(pilot: Pilot[None]) -> None:
    """Until everything that was said has been taken in and drawn: the screen changes no more."""
    view = pilot.app
    assert isinstance(view, ViewApp)
    await pilot.pause()
    before: list[list[Segment]] = []
    same = 0
    for _ in range(_MOST_ROUNDS):
        view.show()
        await pilot.pause()
        now = [list(strip) for strip in view.screen._compositor.render_strips()]
        same = same + 1 if now == before and not _has_mail(view) else 0
        if same == 2:
            return
        before = now
    raise AssertionError("the screen does not come to rest")


def _has_mail(view: ViewApp[Any]) -> bool:
    """Somebody has still to act on something. A pause may end before that where the machine is so
    busy that this process seems idle."""
    everybody = (view, view.screen, *view.screen.walk_children())
    return any(node.message_queue_size for node in everybody)


def screen(pilot: Pilot[None]) -> str:
    """What is on the screen, without colours, and without blanks at the ends of lines."""
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)
