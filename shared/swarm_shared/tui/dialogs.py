"""Modal windows over a view: a choice, a line to fill in, a page to read.

Each returns the person's choice, or None when it was cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

T = TypeVar("T")

_FRAME = """
    align: center middle;
    background: $background 50%;
    #window {
        width: 90%; max-width: 76; height: auto; max-height: 90%;
        padding: 1 2; background: $surface; border: round $primary;
    }
    #title { text-style: bold; margin-bottom: 1; }
    #text { width: 1fr; margin-bottom: 1; }
    #trouble { width: 1fr; color: $text-error; text-style: bold; }
    OptionList { height: auto; max-height: 12; padding: 0; background: $surface; }
    OptionList, OptionList:focus { border: none; }
    &:nocolor { OptionList > .option-list--option-highlighted { text-style: reverse; } }
"""


class _Window(ModalScreen[T]):
    """A framed window with a title and a text; Escape cancels."""

    DEFAULT_CSS = f"_Window {{ {_FRAME} }}"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Back")]

    def __init__(self, title: str, text: str, *parts: Widget) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._parts = parts

    def compose(self) -> ComposeResult:
        with Vertical(id="window"):
            yield Label(Content(self._title), id="title")
            if self._text:
                yield Label(Content(self._text), id="text")
            yield from self._parts

    def action_cancel(self) -> None:
        self.dismiss(None)


class Choose(_Window[int | None]):
    """A choice of one option."""

    def __init__(self, title: str, text: str, options: Sequence[str]) -> None:
        super().__init__(title, text, OptionList(*(Option(Content(one)) for one in options)))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index)


class Confirm(Choose):
    """Yes or no; the harmless answer is selected at first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes"),
        Binding("n,escape", "cancel", "No"),
    ]

    def __init__(self, title: str, text: str, yes: str) -> None:
        super().__init__(title, text, ("No, leave it as it is", yes))

    def action_yes(self) -> None:
        self.dismiss(1)


class Fill(_Window[str | None]):
    """A line of text. `check` processes it and returns what is wrong with it; None: it is
    accepted."""

    def __init__(
        self, title: str, text: str, value: str, check: Callable[[str], Awaitable[str | None]]
    ) -> None:
        super().__init__(title, text, Input(value, id="value"), Label("", id="trouble"))
        self._check = check

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        trouble = await self._check(event.value)
        if trouble is None:
            self.dismiss(event.value)
        else:
            self.query_one("#trouble", Label).update(Content(trouble))


class Page(_Window[None]):
    """A page to read; any of the usual keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "cancel", "Back")
    ]
