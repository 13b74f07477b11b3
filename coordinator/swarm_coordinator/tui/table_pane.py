"""A pane with a table: its order is a column's, its cursor is on a row, and stays with its peer."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from swarm_coordinator.status.document import RunDocument
from swarm_coordinator.tui.tables import TableColumn, TableRow, TableSpec
from swarm_shared.tui.styled_text import Line, plain
from swarm_shared.tui.widgets import ROLE_CLASSES, ROLE_CSS


class TablePane(DataTable[Text]):
    """The rows of a table, as of the newest document."""

    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLE_CLASSES.values())
    DEFAULT_CSS = f"""
    TablePane {{
        background: $background;
        scrollbar-size-horizontal: 1;
        scrollbar-size-vertical: 1;
        {ROLE_CSS}
        & > .datatable--even-row {{ background: $background; }}
        & > .datatable--fixed {{ background: $background; color: $foreground; }}
        &:nocolor > .datatable--cursor {{ text-style: reverse; }}
        &:nocolor > .datatable--fixed-cursor {{ text-style: reverse; }}
    }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "next_order", "Sort"),
        Binding("S", "reverse_order", "Reverse"),
    ]

    def __init__(self, spec: TableSpec, *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", fixed_columns=1)
        self._spec = spec
        self._sorted_by, self._descending = spec.sorted_by, spec.descending
        self._rows: dict[str, TableRow] = {}
        self._drawn: dict[str, list[Text]] = {}
        self._faded = False
        self._document: RunDocument | None = None
        self._look: tuple[bool, str] | None = None

    def on_mount(self) -> None:
        for index in range(len(self._spec.columns)):
            self.add_column(self._label(index), key=str(index))

    @property
    def chosen(self) -> TableRow | None:
        """The row under the cursor."""
        return None if self._chosen_peer is None else self._rows[self._chosen_peer]

    @property
    def _chosen_peer(self) -> str | None:
        return list(self._drawn)[self.cursor_row] if self._drawn else None

    def renew(self, document: RunDocument, *, faded: bool) -> None:
        """Draw what has changed; nothing where no newer document has come, whose rows are many."""
        look = (faded, self.app.theme)
        if document is self._document and look == self._look:
            return
        self._document, self._look, self._faded = document, look, faded
        self._rows = {row.peer: row for row in self._spec.rows(document)}
        self._draw()

    def details(self, row: TableRow) -> str:
        """Return all of a row, which a narrow terminal cuts, as lines."""
        cells = zip(self._spec.columns, row.cells, strict=True)
        known = [(column.title, plain(cell.shown)) for column, cell in cells if cell.shown]
        return "\n".join(f"{name:<13} {text}" for name, text in (("peer ID", row.peer), *known))

    # ---------------------------------------------------------------- order

    def action_next_order(self) -> None:
        self._sort_by((self._sorted_by + 1) % len(self._spec.columns))

    def action_reverse_order(self) -> None:
        self._order(self._sorted_by, not self._descending)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if event.column_index == self._sorted_by:
            self.action_reverse_order()
        else:
            self._sort_by(event.column_index)

    def _sort_by(self, column: int) -> None:
        self._order(column, self._spec.columns[column].numbers)

    def _order(self, column: int, descending: bool) -> None:
        self._sorted_by, self._descending = column, descending
        for index, one in enumerate(self.ordered_columns):
            one.label = self._label(index)
        self._draw(anew=True)

    def _label(self, index: int) -> Text:
        column = self._spec.columns[index]
        # Blanks keep the mark's place, so that the column keeps its width.
        mark = "  " if index != self._sorted_by else " ▼" if self._descending else " ▲"
        return Text(column.title + mark, justify="right" if column.numbers else "left")

    # ---------------------------------------------------------------- drawing

    def _draw(self, *, anew: bool = False) -> None:
        # First by ID, so that rows with the same value keep their order.
        rows = sorted(self._rows.values(), key=lambda row: row.peer)
        rows.sort(key=lambda row: row.cells[self._sorted_by].by, reverse=self._descending)
        styles = self._styles()
        drawn = {
            row.peer: [
                self._text(cell.shown, column, styles)
                for cell, column in zip(row.cells, self._spec.columns, strict=True)
            ]
            for row in rows
        }
        if anew or list(drawn) != list(self._drawn):
            self._rebuild(drawn)
        else:
            self._update(drawn)
        self._drawn = drawn

    def _styles(self) -> dict[str, Style]:
        """The foreground of each role; the background is the row's or the cursor's."""
        styles = {"": Style()}
        for role, component in ROLE_CLASSES.items():
            style = self.get_component_rich_style(component)
            styles[role] = Style(color=style.color, bold=style.bold, dim=style.dim)
        return styles

    def _text(self, shown: Line, column: TableColumn, styles: dict[str, Style]) -> Text:
        text = Text(justify="right" if column.numbers else "left", no_wrap=True)
        for span in shown:
            text.append(span.text, styles["dim" if self._faded else span.role])
        return text

    def _update(self, drawn: dict[str, list[Text]]) -> None:
        for peer, texts in drawn.items():
            for index, (before, now) in enumerate(zip(self._drawn[peer], texts, strict=True)):
                if before != now:
                    self.update_cell(peer, str(index), now, update_width=True)

    def _rebuild(self, drawn: dict[str, list[Text]]) -> None:
        """Fill the table anew; the cursor stays with its peer, or else at its place."""
        peers, chosen, place, top = list(drawn), self._chosen_peer, self.cursor_row, self.scroll_y
        self.clear()
        for peer, texts in drawn.items():
            self.add_row(*texts, key=peer)
        self.call_after_refresh(self.scroll_to, y=top, animate=False)
        if peers:
            kept = peers.index(chosen) if chosen in drawn else min(place, len(peers) - 1)
            self.move_cursor(row=kept)
