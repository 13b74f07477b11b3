"""The shell of both command lines: one sentence and an exit code for every error."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from swarm_shared.base.command_line import LazyGroup, print_event, run_command_line
from swarm_shared.base.errors import NetworkError, StorageError


def shell(error: BaseException | None = None) -> click.Group:
    @click.group()
    def group() -> None: ...

    @group.command("work")
    def work() -> None:
        if error is not None:
            raise error
        click.echo("done")

    return group


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (StorageError("the disk is full"), StorageError.exit_code, "the disk is full"),
        (
            BaseExceptionGroup("tasks", [NetworkError("no route"), NetworkError("no port")]),
            NetworkError.exit_code,
            "no route",
        ),
        (KeyboardInterrupt(), 130, ""),
        (BaseExceptionGroup("tasks", [KeyboardInterrupt()]), 130, ""),
        (click.BadParameter("seven is needed"), 2, "seven is needed"),
        (click.ClickException("this file is locked"), 2, "this file is locked"),
    ],
)
def test_an_error_is_one_sentence_and_its_exit_code(
    error: BaseException, code: int, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(shell(error), "program", ["work"]) == code
    written = capfd.readouterr().err
    assert sentence in written
    assert written.count("program: error:") == bool(sentence)


def test_the_choices_of_a_missing_option_are_one_readable_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    @click.group()
    def group() -> None: ...

    @group.command("log")
    @click.option("--to", type=click.Choice(["jsonl", "wandb"]), required=True)
    def log(to: str) -> None: ...

    assert run_command_line(group, "program", ["log"]) == 2
    assert capfd.readouterr().err == (
        "program: error: Missing option '--to'. Choose from: jsonl, wandb (see `program log "
        "--help`)\n"
    )


def test_what_a_remote_says_neither_steers_the_terminal_nor_begins_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = "no\x1b]0;title\x07\x1b[2J\r\nprogram: error: \N{RIGHT-TO-LEFT OVERRIDE}fine"
    run_command_line(shell(NetworkError(said)), "program", ["work"])
    print_event(said)
    written = capfd.readouterr()
    for text in (written.out, written.err):
        assert text.endswith("\n")
        assert text[:-1].isprintable()


def test_a_reader_that_has_ended_is_no_error_and_is_written_to_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run_command_line(shell(BrokenPipeError()), "program", ["work"]) == 0
        out.write("the rest")
    assert (tmp_path / "out").read_text() == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("the bug"), ExceptionGroup("tasks", [ZeroDivisionError("the bug")])]
)
def test_the_traceback_of_an_unexpected_error_is_kept(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "home" / "log" / "program-error.log"

    def folders() -> list[Path]:
        return [tmp_path / "file" / "log", log.parent]

    (tmp_path / "file").write_text("not a folder")
    for times in (1, 2):
        assert run_command_line(shell(error), "program", ["work"], folders) == 1
        assert str(log) in capsys.readouterr().err
        assert log.read_text().count("ZeroDivisionError: the bug") == times


def test_of_a_long_unexpected_error_the_beginning_is_printed_and_the_whole_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("of a page:\n" + "x" * 400)
    assert run_command_line(shell(error), "program", ["work"], lambda: [tmp_path]) == 1
    beginning = f"of a page: {'x' * 288}…"
    assert len(beginning) == 300
    assert f"ValueError: {beginning}; details" in capsys.readouterr().err
    assert "x" * 400 in (tmp_path / "program-error.log").read_text()


def test_a_module_is_imported_when_its_command_is_used() -> None:
    group = LazyGroup("group", modules={"there": "math:pi", "lost": "no_such_module:command"})
    context = click.Context(group)
    assert group.list_commands(context) == ["there", "lost"]
    assert group.get_command(context, "other") is None
    with pytest.raises(ModuleNotFoundError):
        group.get_command(context, "lost")
