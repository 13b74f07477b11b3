"""Drawing for terminals: what stands in the lines, whatever the terminal can show."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.text import printable
from swarm_shared.tui.bars import bar, sparkline
from swarm_shared.tui.formatting import peer_text, percent, short_number
from swarm_shared.tui.plot import columns_plot, plot
from swarm_shared.tui.stage_bars import StageBar, stage_lines
from swarm_shared.tui.styled_text import (
    Span,
    beside,
    cut,
    ends,
    fill,
    line,
    plain,
    width_of,
    wrapped,
)
from swarm_shared.tui.table import Column, table
from swarm_shared.tui.terminal_style import ThemeName, look_of
from swarm_shared.tui.themes import ascii_of
from swarm_shared.tui.time_series import TimeSeries

SHARES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
WIDTHS = st.integers(min_value=3, max_value=60)

# ---------------------------------------------------------------- what the terminal can show


@pytest.mark.parametrize(
    ("environment", "coerced", "unicode"),
    [
        ({"LANG": "en_GB.UTF-8"}, False, True),
        ({"LANG": "de_DE.utf8"}, False, True),
        ({"LANG": "C"}, False, False),
        ({}, False, False),
        ({"LANG": "de_DE.ISO-8859-1"}, False, False),
        ({"LC_ALL": "C", "LANG": "en_GB.UTF-8"}, False, False),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, True, False),
        ({"LC_CTYPE": "UTF-8"}, False, True),
        ({"LC_ALL": "", "LC_CTYPE": "", "LANG": "C.UTF-8"}, False, True),
    ],
)
def test_unicode_is_drawn_where_the_locale_says_so_and_not_where_python_does(
    environment: dict[str, str], coerced: bool, unicode: bool
) -> None:
    look = look_of({"TERM": "xterm-256color", **environment}, coerced=coerced)
    assert look.unicode is unicode


@pytest.mark.parametrize(
    ("environment", "theme"),
    [
        ({"TERM": "xterm-256color"}, ThemeName.DARK),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, ThemeName.DARK),
        ({"TERM": "xterm"}, ThemeName.TERMINAL),
        ({"TERM": "linux"}, ThemeName.TERMINAL),
        ({"TERM": "vt100"}, ThemeName.NONE),
        ({"TERM": "dumb"}, ThemeName.NONE),
        ({}, ThemeName.NONE),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, ThemeName.NONE),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, ThemeName.DARK),
    ],
)
def test_the_theme_asks_for_no_more_colours_than_the_terminal_has(
    environment: dict[str, str], theme: ThemeName
) -> None:
    assert look_of(environment).theme is theme


def test_a_persons_own_word_on_unicode_outweighs_the_locales() -> None:
    assert look_of({"LANG": "C"}, unicode=True).unicode
    assert not look_of({"LANG": "C.UTF-8"}, unicode=False).unicode


@given(st.text(max_size=30))
def test_what_comes_out_in_ascii_is_as_wide_as_before(text: str) -> None:
    shown = ascii_of(text)
    assert shown.isascii()
    assert width_of(line(shown)) == width_of(line(text))


# ---------------------------------------------------------------- bars and curves


@given(SHARES, WIDTHS)
def test_a_bar_is_as_wide_as_asked_for_whatever_the_share(share: float | None, width: int) -> None:
    drawn = bar(share, width)
    assert width_of(drawn) == width
    assert "?" not in ascii_of(plain(drawn))


def test_a_bar_shows_its_share() -> None:
    assert plain(bar(0.5, 8)) == "████░░░░"
    assert ascii_of(plain(bar(0.5, 10))) == "#####....."
    assert plain(bar(0.3125, 4)) == "█▎░░"
    assert plain(bar(2.0, 4)) == "████"
    assert plain(bar(None, 4)) == "░░░░"


@given(st.lists(SHARES, max_size=80), WIDTHS)
def test_a_sparkline_is_as_wide_as_asked_for(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == width


def test_a_sparkline_shows_the_newest_at_the_right_and_leaves_gaps() -> None:
    assert sparkline([0.0, 0.0, 0.0, 4.0, None, 7.0], 4) == "▁▅ █"
    assert sparkline([5.0, 6.0], 4, from_zero=False) == "  ▁█"
    assert ascii_of(sparkline([0.0, 7.0], 2)) == "_#"


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=40),
    st.integers(min_value=20, max_value=60),
    st.integers(min_value=0, max_value=12),
)
def test_a_curve_keeps_to_its_room_whatever_it_is_given(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    drawn = plot(sorted(points), width, height, label=lambda y: "label")
    assert len(drawn) == height
    assert all(width_of(one) <= width for one in drawn)
    assert "?" not in ascii_of("".join(plain(one) for one in drawn))


def test_a_curve_that_falls_starts_at_the_top_and_ends_at_the_bottom() -> None:
    points = [(float(n), 10.0 - n) for n in range(11)]
    drawn = plot(points, 16, 6, label=lambda y: f"{y:2.0f}")
    assert [ascii_of(plain(one)) for one in drawn] == [
        "10 |***         ",
        "   |  ***       ",
        "   |    ****    ",
        "   |       ***  ",
        " 0 |         ***",
        "    0         10",
    ]


def test_columns_stand_as_high_as_their_values() -> None:
    assert columns_plot([1.0, 2.0, 0.0, 4.0], 4, 2) == ["   █", "▄█ █"]
    assert [ascii_of(row) for row in columns_plot([2.0, 4.0], 6, 2)] == ["  # ", "# # "]


def test_the_slowest_stage_is_named_and_one_without_peers_stands_out() -> None:
    rows = [StageBar(0, 1, 2.0), StageBar(1, 2, 4.0, mine=True), StageBar(2, 0, 0.0)]
    drawn = [plain(one) for one in stage_lines(rows, 80)]
    assert drawn[0].endswith("1 peer      2.00 microbatches/s")
    assert "mine" in drawn[1]
    assert drawn[2].endswith("no peer holds it")
    assert plain(stage_lines(rows[:2], 80)[0]).endswith("slowest")


# ---------------------------------------------------------------- lines and tables


@given(st.lists(st.text(max_size=20), max_size=5), WIDTHS)
def test_a_line_is_cut_and_filled_to_an_exact_width(texts: list[str], width: int) -> None:
    drawn = tuple(Span(printable(text)) for text in texts)
    assert width_of(cut(drawn, width)) <= width
    assert width_of(fill(drawn, width)) == width


def test_what_is_cut_ends_in_an_ellipsis() -> None:
    assert plain(cut(line("some words"), 6)) == "some …"
    assert ascii_of(plain(cut(line("some words"), 6))) == "some ~"
    assert plain(cut(line("some"), 4)) == "some"


def test_a_character_of_two_cells_is_not_cut_in_half() -> None:
    assert width_of(fill(line("漢字漢字"), 6)) == 6


def test_of_two_ends_the_right_one_stays_whole() -> None:
    assert plain(ends(line("a long beginning"), line("end"), 12)) == "a long … end"


def test_two_blocks_stand_side_by_side() -> None:
    drawn = beside([line("a"), line("b")], [line("x")], 10)
    assert [plain(one) for one in drawn] == ["a     x", "b     "]


@given(st.text(alphabet=st.sampled_from("ab 漢"), max_size=60), st.integers(2, 20))
def test_words_are_wrapped_and_none_is_lost(text: str, width: int) -> None:
    drawn = [plain(one) for one in wrapped(text, width)]
    assert "".join("".join(drawn).split()) == "".join(text.split())


def test_a_table_leaves_out_its_least_important_columns_first() -> None:
    columns = (
        Column("name", flexible=True, smallest=6, keep=9),
        Column("amount", right=True, keep=5),
        Column("remark", keep=1),
    )
    rows = [(line("a long name"), line("12"), line("none"))]
    assert [plain(one) for one in table(columns, rows, 42)] == [
        "  name         amount  remark",
        "  a long name      12  none  ",
    ]
    assert [plain(one) for one in table(columns, rows, 18)] == [
        "  name      amount",
        "  a long …      12",
    ]


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (short_number(1234), "1.23 k"),
        (short_number(999_700), "1 M"),
        (short_number(math.nan), "-"),
        (percent(0.255), "26 %"),
        (peer_text("12D3KooWannaanna", None), "…annaanna"),
        (peer_text("12D3KooWannaanna", "an\x1b[2Jna"), "an�[2Jna"),
    ],
)
def test_numbers_and_names_read_well(shown: str, text: str) -> None:
    assert shown == text


def test_a_trace_keeps_the_newest_points_and_one_for_each_time() -> None:
    trace = TimeSeries(3)
    for at, value in [(1.0, 1.0), (2.0, 2.0), (2.0, 2.5), (3.0, None), (4.0, 4.0)]:
        trace.add(at, value)
    assert trace.values() == [2.5, None, 4.0]
    assert trace.points() == [(2.0, 2.5), (4.0, 4.0)]
