"""The pane of the machine's limits, as the daemon describes them, and changing them at run time.

The daemon defines which settings exist, what they mean and which values are allowed: none of that
is known here, so that a view of one version serves a daemon of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.text import printable
from swarm_shared.tui.styled_text import Line, line, wrapped
from swarm_shared.tui.widgets import Block


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the daemon reports it."""

    value: Any = None
    layer: str = "default"
    """`flag`, `environment`, `file` or `default`."""
    where: str = ""
    group: str = ""
    text: str = ""
    """Its meaning."""
    allowed: str = ""
    """Its allowed values."""

    @property
    def meaning(self) -> str:
        return f"{self.text} Allowed: {self.allowed}." if self.allowed else self.text


def parse_settings(answer: Mapping[str, Any]) -> dict[str, Setting]:
    """Each setting by its name, from the answer to `config_show`."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(dict[str, Setting]).validate_python(answer.get("preferences"))
    except ValidationError as error:
        raise ProtocolError(
            "the daemon sent its settings in a form that this program does not know; use the "
            "swarm-client that came with it"
        ) from error


def value_text(value: Any) -> str:
    """Format a value as it is typed in."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value)
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return "" if value is None else str(value)


def setting_row(name: str, setting: Setting, width: int) -> str:
    value = printable(value_text(setting.value)) or "(nothing)"
    layer = "" if setting.layer == "default" else f"by {setting.layer}"
    named = 40 if width >= 70 else 34
    room = max(6, width - named - 16)
    cut = value if len(value) < room else f"{value[: room - 4]}..."
    return f"{printable(name)[: named - 1]:<{named}}{cut:<{room}}{layer[:16]}"


class SettingsPane(Vertical):
    """A row for each setting; Enter or a click changes it."""

    DEFAULT_CSS = """
    SettingsPane > OptionList {
        height: 1fr; padding: 0; background: $background;
    }
    SettingsPane > OptionList, SettingsPane > OptionList:focus { border: none; }
    SettingsPane > #setting-help { height: 4; background: $surface; }
    SettingsPane:nocolor OptionList > .option-list--option-highlighted { text-style: reverse; }
    """

    class Picked(Message):
        """A person wants to change this setting."""

        def __init__(self, name: str, setting: Setting) -> None:
            super().__init__()
            self.name = name
            self.setting = setting

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._settings: dict[str, Setting] = {}
        self._trouble = ""

    def compose(self) -> ComposeResult:
        yield OptionList(id="setting-list")
        yield Block(self._draw_help, id="setting-help")

    def tell(self, settings: dict[str, Setting]) -> None:
        self._settings = settings
        self._trouble = ""
        self._fill()

    def fail(self, sentence: str) -> None:
        self._trouble = sentence
        self.query_one("#setting-help", Block).redraw()

    def on_resize(self) -> None:
        self._fill()

    def _fill(self) -> None:
        rows = self.query_one("#setting-list", OptionList)
        if self._settings:
            before = rows.highlighted
            rows.set_options(self._options(self._settings))
            rows.highlighted = before if before is not None else self._first(rows)
        self.query_one("#setting-help", Block).redraw()

    def _options(self, settings: Mapping[str, Setting]) -> list[Option]:
        options: list[Option] = []
        group = ""
        for name, setting in settings.items():
            if setting.group != group:
                group = setting.group
                options.append(Option(Content(f" {printable(group)}"), disabled=True))
            row = setting_row(name, setting, max(40, self.size.width - 4))
            options.append(Option(Content(f"   {row}"), id=name))
        return options

    @staticmethod
    def _first(rows: OptionList) -> int | None:
        places = (i for i in range(rows.option_count) if rows.get_option_at_index(i).id)
        return next(places, None)

    def _highlighted(self) -> Setting | None:
        rows = self.query_one("#setting-list", OptionList)
        option = rows.highlighted_option
        return None if option is None else self._settings.get(option.id or "")

    def _draw_help(self, width: int, height: int) -> list[Line]:
        if self._trouble:
            return wrapped(printable(self._trouble), width - 2, "bad", " ")
        setting = self._highlighted()
        if setting is None:
            return [line((" asking the daemon ...", "dim"))]
        where = f" It comes from {setting.where}." if setting.where else ""
        where += " Enter changes it."
        return wrapped(printable(f"{setting.meaning}{where}"), width - 2, "", " ")[:height]

    def on_option_list_option_highlighted(self) -> None:
        self.query_one("#setting-help", Block).redraw()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        name = event.option.id or ""
        setting = self._settings.get(name)
        if setting is not None:
            self.post_message(self.Picked(name, setting))
