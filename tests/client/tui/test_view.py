"""`swarm-client top`: what stands on the screen, and what the keys ask of the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from kits.tui import (
    ASCII,
    FORMS,
    START,
    Script,
    Session,
    colours,
    drive,
    press,
    screen,
    settle,
    walk,
)
from kits.tui.client import run, status
from swarm_client.control.status_document import (
    DaemonState,
    EvaluationView,
    Status,
    SuspendReason,
)
from swarm_client.preferences.control import shown
from swarm_client.preferences.model import GROUPS
from swarm_client.tui.app import ClientApp
from swarm_client.tui.logs import LogLines
from swarm_shared.base.errors import ConfigurationError, DataError
from swarm_shared.transfer.download_meter import DownloadProgress
from swarm_shared.tui.source import LogEntry
from swarm_shared.tui.terminal_style import Look, ThemeName

# A minute of them: with the slow tests, which plain pytest leaves out.
pytestmark = pytest.mark.process

SETTINGS = {
    "preferences": {
        "cpu_percent": {
            "value": 100.0, "layer": "default", "where": "the default",
            "group": "Processor", "text": "Share of the time that the processor computes.",
            "allowed": "from 5 to 100",
        },
        "nice": {
            "value": 10, "layer": "file", "where": "/home/a/preferences.toml",
            "group": "Processor", "text": "How far other programs go first.",
        },
        "run_on_batteries": {
            "value": False, "layer": "environment", "where": "SWARM_RUN_ON_BATTERIES",
            "group": "When to run", "text": "On batteries.",
        },
    }
}  # fmt: skip
LOG = tuple(
    LogEntry(time=START + number, level=level, text=text, number=number)
    for number, (level, text) in enumerate(
        [
            ("event", "holding stage 1 at version 120"),
            ("info", "a connection to …bertbert is open"),
            ("warning", "…bertbert was silent for 4 s"),
            ("error", "the worker has ended \x1b[2J and is started again"),
            ("event", "applied step 121"),
        ]
        * 8
    )
)


def watch(
    session: Session,
    script: Script[Status],
    *,
    columns: int = 80,
    rows: int = 24,
    look: Look | None = None,
) -> ClientApp:
    view = ClientApp(script, look or Look())
    drive(view, session, columns, rows)
    return view


def after(script: Script[Status], *keys: str, columns: int = 80, rows: int = 24) -> str:
    """What stands on the screen after these keys."""
    shown: list[str] = []

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        shown.append(screen(pilot))

    watch(session, script, columns=columns, rows=rows)
    return shown[0]


def running() -> Script[Status]:
    """Six seconds of a volunteer at work, and its log."""
    script: Script[Status] = Script()
    for number in range(6):
        script.clock += 1
        script.tell(status(number))
    script.log(*LOG)
    script.answers["config_show"] = SETTINGS
    return script


# ---------------------------------------------------------------- screens


PANES = ("overview", "pipeline", "contribution", "leaderboard", "logs", "settings")


@pytest.mark.parametrize("form", FORMS)
def test_every_pane_looks_as_it_did(form: str) -> None:
    columns, rows, look = FORMS[form]
    watch(walk("client", PANES, form), running(), columns=columns, rows=rows, look=look)


def test_what_the_model_writes_is_one_printable_line() -> None:
    script: Script[Status] = Script()
    sample = "def f(self):\n    return\x1b[2J"
    evaluation = EvaluationView(version=100, heldout_loss=2.5, sample=sample)
    script.tell(status(run=run(evaluation=evaluation)))
    shown = after(script)
    assert "2.5000 after step 100" in shown
    assert "def f(self): return\N{REPLACEMENT CHARACTER}[2J" in shown


def test_before_the_daemons_first_word_it_says_that_it_waits() -> None:
    async def session(pilot: Pilot[None]) -> None:
        assert "Looking for the daemon." in screen(pilot)
        for key in "23456":
            await press(pilot, key)

    watch(session, Script())


@pytest.mark.parametrize(("columns", "rows"), [(59, 24), (80, 19), (20, 10), (20, 3), (1, 1)])
def test_a_terminal_that_is_too_small_gets_one_sentence(columns: int, rows: int) -> None:
    async def session(pilot: Pilot[None]) -> None:
        words = " ".join(screen(pilot).split())
        assert "This view needs 60 columns and 20 rows".startswith(words[:30])
        assert "Overview" not in words
        await press(pilot, "p", "escape", "2", "question_mark", "escape")

    watch(session, running(), columns=columns, rows=rows)


def test_it_is_there_again_when_the_window_is_made_larger() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(40, 10)
        await settle(pilot)
        assert "Overview" not in screen(pilot)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert "1 Overview" in screen(pilot)
        assert "step 125 of 500" in screen(pilot)

    watch(session, running())


def test_why_nothing_is_computed_and_until_when_stands_at_the_top() -> None:
    script = running()
    script.tell(
        status(
            6, state=DaemonState.PAUSED, reason=SuspendReason.USER_ACTIVE, until=START + 600,
            sentence="Somebody uses this machine.",
        )
    )  # fmt: skip

    first, second = after(script).splitlines()[:2]
    assert first.startswith("● paused (user active) until 14:23:20  my-run")
    assert second == "Somebody uses this machine."


def test_a_volunteer_without_a_run_is_told_how_to_join_one() -> None:
    script: Script[Status] = Script()
    script.tell(
        status(
            state=DaemonState.STOPPED, reason=SuspendReason.NO_RUN,
            sentence="No run is joined.", run=None,
            devices=(), stages=(), peers=(), leaderboard=(),
        )
    )  # fmt: skip

    async def session(pilot: Pilot[None]) -> None:
        assert "`swarm-client join INVITE` joins one" in screen(pilot)
        for key, words in (("2", "no stage is known yet"), ("4", "no credit has been counted yet")):
            await press(pilot, key)
            assert words in screen(pilot)

    watch(session, script)


def test_a_download_has_a_row_with_its_rate_and_the_time_left() -> None:
    script: Script[Status] = Script()
    download = DownloadProgress(
        what="stage 1", received_bytes=250_000_000, total_bytes=10**9, bytes_per_second=5e6
    )
    [device] = status().devices
    loading = device.model_copy(update={"phase": "downloading", "downloads": (download,)})
    script.tell(status(devices=(loading,)))

    [row] = [one for one in after(script).splitlines() if "download " in one]
    assert row.split("  ")[1:] == [
        "download", "stage 1: 250 MB of 1 GB (25 %), 5 MB/s, 2 min left",
    ]  # fmt: skip


# ---------------------------------------------------------------- the daemon goes and comes


def test_a_daemon_that_is_away_leaves_the_last_view_dim_with_its_age_until_it_is_back() -> None:
    script = running()

    async def session(pilot: Pilot[None]) -> None:
        script.leave("the daemon does not answer; `swarm-client join` starts it")
        script.clock += 90
        await settle(pilot)
        shown = screen(pilot)
        first, second = shown.splitlines()[:2]
        assert first.startswith("disconnected, was ● contributing  my-run")
        assert first.endswith("as it was 90 s ago")
        assert second == "the daemon does not answer; `swarm-client join` starts it"
        assert "125 of 500" in shown
        assert faded(pilot)
        script.tell(status(100))
        await settle(pilot)
        assert "Computing microbatches of stage 1." in screen(pilot)
        assert not faded(pilot)

    watch(session, script, columns=120)


def faded(pilot: Pilot[None]) -> bool:
    """Everything in the pane has one look, where otherwise roles have theirs."""
    strips = pilot.app.screen._compositor.render_strips()
    pane = {segment.style for strip in strips[3:-1] for segment in strip if segment.text.strip()}
    return len(pane) == 1


def test_words_that_stop_coming_are_called_old_though_nobody_said_that_the_daemon_is_away() -> None:
    script = running()

    async def session(pilot: Pilot[None]) -> None:
        script.clock += 30
        await settle(pilot)
        first, second = screen(pilot).splitlines()[:2]
        assert first.endswith("as it was 30 s ago")
        assert second == "No new status has arrived lately."

    watch(session, script)


def test_a_source_that_cannot_go_on_ends_the_view_with_its_error() -> None:
    script = running()
    error = DataError("line 3 is damaged")

    async def session(pilot: Pilot[None]) -> None:
        script.break_off(error)
        await settle(pilot)

    assert watch(session, script).failure is error


# ---------------------------------------------------------------- pause, resume, finish


@pytest.mark.parametrize(
    ("downs", "arguments"), [(0, {}), (1, {"seconds": 1800.0}), (3, {"seconds": 7200.0})]
)
def test_p_pauses_for_the_time_that_is_chosen(downs: int, arguments: dict[str, float]) -> None:
    script = running()
    after(script, "p", *["down"] * downs, "enter")
    assert script.asked == [("pause", arguments)]


def test_escape_asks_nothing_of_the_daemon() -> None:
    script = running()
    after(script, "p", "escape", "F", "escape", "F", "enter", "F", "n")
    assert script.asked == []


def test_finish_is_asked_for_once_it_is_confirmed() -> None:
    script = running()
    assert "hands its stage over" in after(script, "F")
    script = running()
    after(script, "F", "y")
    assert script.asked == [("finish", {})]


def test_a_paused_volunteer_is_resumed_and_not_paused_again() -> None:
    script = running()
    script.tell(status(6, state=DaemonState.PAUSED, reason=SuspendReason.PAUSED_BY_USER))

    async def session(pilot: Pilot[None]) -> None:
        assert "r Resume" in screen(pilot)
        await press(pilot, "p")
        await press(pilot, "r", "down", "enter")

    watch(session, script)
    assert script.asked == [("resume", {})]


def test_a_refusal_is_told_in_the_daemons_words() -> None:
    script = running()
    script.answers["finish"] = ConfigurationError("it finishes already")
    assert "it finishes already" in after(script, "F", "y")


# ---------------------------------------------------------------- log


def log_lines(pilot: Pilot[None]) -> list[str]:
    return [row for row in screen(pilot).splitlines()[4:-1] if row.strip()]


def test_the_log_is_filtered_by_words_and_the_filter_is_dropped_again() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "5", "slash")
        await press(pilot, *["space" if letter == " " else letter for letter in "bert SILENT"])
        await press(pilot, "enter")
        assert len(log_lines(pilot)) == 8
        assert all("…bertbert was silent" in row for row in log_lines(pilot))
        assert "8 of 40 lines with 'bert SILENT'" in screen(pilot)
        await press(pilot, "escape")
        assert "40 of 40 lines, level all" in screen(pilot)

    watch(session, running())


def test_l_turns_through_the_levels() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "5")
        told = []
        for _ in range(5):
            told.append(screen(pilot).splitlines()[3].split(" of ")[0].strip())
            await press(pilot, "l")
        assert told == ["40", "16", "40", "16", "8"]
        assert "40 of 40 lines, level all" in screen(pilot)

    watch(session, running())


def test_the_log_follows_the_newest_line_until_somebody_scrolls_up() -> None:
    script = running()

    def more(number: int) -> LogEntry:
        return LogEntry(time=START + 100, level="event", text=f"line {number}", number=number)

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "5")
        script.log(more(40))
        await settle(pilot)
        assert log_lines(pilot)[-1].endswith("line 40")
        await press(pilot, "pageup")
        script.log(more(41))
        await settle(pilot)
        assert "line 41" not in screen(pilot)
        assert "paused (f" in screen(pilot)
        await press(pilot, "f")
        assert log_lines(pilot)[-1].endswith("line 41")

    watch(session, script)


@pytest.mark.parametrize("scroll", ["page_up", "scroll_up", "scroll_home"])
def test_lines_that_arrive_while_the_log_is_scrolled_do_not_take_it_back(scroll: str) -> None:
    script = running()

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "5")
        pane = pilot.app.query_one(LogLines)
        for number in range(40, 43):
            script.log(LogEntry(time=START, level="event", text="another", number=number))
            if number == 41:
                getattr(pane, f"action_{scroll}")()
        await settle(pilot)
        assert "paused (f" in screen(pilot)
        assert not pane.is_vertical_scroll_end

    watch(session, script)


def test_a_log_that_is_numbered_anew_goes_on_and_one_that_is_told_twice_does_not() -> None:
    script = running()

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "5")
        script.log(*LOG[-2:])
        await settle(pilot)
        assert "40 of 40 lines" in screen(pilot)
        script.log(LOG[0])
        await settle(pilot)
        assert "41 of 41 lines" in screen(pilot)

    watch(session, script)


# ---------------------------------------------------------------- settings


def test_a_setting_is_changed_through_the_daemon_and_read_again() -> None:
    script = running()

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "6", "down", "enter")
        assert "How far other programs go first." in screen(pilot)
        await press(pilot, "backspace", "backspace", "1", "9", "enter")

    watch(session, script)
    assert script.asked == [
        ("config_show", {}),
        ("config_set", {"name": "nice", "text": "19"}),
        ("config_show", {}),
    ]


def test_a_setting_that_is_left_as_it_was_is_not_sent() -> None:
    script = running()
    after(script, "6", "enter", "enter", "enter", "escape")
    assert [method for method, _ in script.asked] == ["config_show"]


def test_a_value_that_is_refused_is_told_why() -> None:
    script = running()
    script.answers["config_set"] = ConfigurationError("cpu_percent must be at most 100")

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "6", "enter", "9", "0", "0", "enter")
        assert "cpu_percent must be at most 100" in screen(pilot)
        # The window stays open, with what was typed.
        script.answers["config_set"] = {"value": 90}
        await press(pilot, "backspace", "enter")
        assert "cpu_percent is now 90" in screen(pilot)

    watch(session, script)
    asked = [arguments["text"] for method, arguments in script.asked if method == "config_set"]
    assert asked == ["900", "90"]


def test_every_setting_that_a_daemon_tells_is_shown_under_its_group_with_what_it_means(
    tmp_path: Path,
) -> None:
    script = running()
    told = shown(tmp_path / "preferences.toml", ())
    script.answers["config_show"] = told
    names = list(told["preferences"])

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "6")
        shown = screen(pilot)
        for name in names:
            assert name in shown
        for group in GROUPS:
            assert group in shown
        assert "Compute while this machine runs on battery power. Allowed: true, false." in shown
        await press(pilot, "end")
        assert "Percentage of the time that it computes. Allowed: from 5 to 100." in screen(pilot)

    watch(session, script, columns=120, rows=80)


def test_settings_of_another_form_are_told_in_a_sentence() -> None:
    script = running()
    script.answers["config_show"] = {"something": "else"}
    assert "in a form that this program does not know" in after(script, "6")


# ---------------------------------------------------------------- keys, mouse, palette, themes


def test_tab_turns_through_the_panes_and_a_click_chooses_one() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "tab")
        assert "Microbatches through this machine" in screen(pilot)
        await press(pilot, "shift+tab", "shift+tab")
        assert "cpu_percent" in screen(pilot)
        await pilot.click("#tabs", offset=(28, 0))
        await settle(pilot)
        assert "Credit a day" in screen(pilot)

    watch(session, running())


def test_the_wheel_scrolls_what_does_not_fit() -> None:
    assert "credit 12.5" not in after(running(), columns=60, rows=20)
    assert "credit 12.5" in after(running(), "end", columns=60, rows=20)


def test_the_command_palette_finds_commands_by_their_words() -> None:
    assert "Teams" in after(running(), "colon", *"leaderb", "enter")


@pytest.mark.parametrize("theme", ThemeName)
def test_every_theme_draws_the_same_text(theme: ThemeName) -> None:
    async def session(pilot: Pilot[None]) -> None:
        before = screen(pilot)
        assert isinstance(pilot.app, ClientApp)
        pilot.app.paint(theme)
        await settle(pilot)
        assert screen(pilot) == before
        assert bool(colours(pilot)) == (theme is not ThemeName.NONE)

    watch(session, running())


def test_what_is_chosen_stands_out_without_any_colour() -> None:
    async def session(pilot: Pilot[None]) -> None:
        strip = pilot.app.screen._compositor.render_strips()[2]
        reversed_text = [s.text for s in strip if s.style is not None and s.style.reverse]
        assert reversed_text == [" 1 Overview "]

    watch(session, running(), look=ASCII)


def test_the_help_lists_the_keys() -> None:
    assert "hand the stage over, stop" in after(running(), "question_mark")
    assert "1 Overview" in after(running(), "question_mark", "escape")
