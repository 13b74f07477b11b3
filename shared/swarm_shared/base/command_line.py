"""The shell around a click program: lazily imported commands, and errors as one sentence.

Owns what `swarm-client` and `swarm-coordinator` have in common: importing a command's module only
when it is used, lines of events, the translation of exceptions to one sentence and an exit code,
the file that keeps the traceback of an unexpected error, and completion scripts. The commands
belong to the two programs.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from swarm_shared.base.error_groups import expected_error, leaves
from swarm_shared.base.text import excerpt, printable_line

UNEXPECTED_EXIT_CODE = 1
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C; by the shell's convention 128 + SIGINT."""

COMPLETED_SHELLS = ("bash", "zsh", "fish")


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is used or listed."""

    def __init__(self, *arguments: Any, modules: Mapping[str, str], **settings: Any) -> None:
        """`modules` maps names of commands, in the order of the help, to `module:attribute`."""
        super().__init__(*arguments, **settings)
        self._modules = modules

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self._modules:
            return None
        module, _, attribute = self._modules[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def visible_commands(prefix: str, group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that help shows, with their full names: each group before its own."""
    context = click.Context(group, info_name=prefix)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        full = f"{prefix} {name}"
        yield full, command
        if isinstance(command, click.Group):
            yield from visible_commands(full, command)


def completion_script(root: click.Command, program: str, shell: str) -> str:
    """Return the script that completes `program` in one of COMPLETED_SHELLS."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    # Without running the shell for its version: this only prints.
    script = kind(root, {}, program, variable)
    return str(script.source_template % script.source_vars())


def print_event(text: str) -> None:
    """Print one event on one line, with the time of day.

    Often into a file or a pipe: a full disk, a closed terminal, or a reader that has ended, is no
    reason to stop.
    """
    now = datetime.datetime.now().strftime("%H:%M:%S")
    try:
        click.echo(f"{now}  {printable_line(text)}")
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):
            _discard_output()


def _discard_output() -> None:
    """Let what is printed vanish: nothing reads it any more, and Python would report that when the
    program ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command_line(
    group: click.Group,
    program: str,
    arguments: Sequence[str],
    log_folders: Callable[[], Sequence[Path]] = tuple,
) -> int:
    """Execute one command line and return its exit code.

    Every error is printed as at most one sentence. The traceback of an unexpected one is kept in
    the first writable one of `log_folders`.
    """
    try:
        result = group.main(list(arguments), prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE_EXIT_CODE
    except click.ClickException as error:
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see `{error.ctx.command_path} --help`)"
        # click lists the choices of a missing option on lines of their own, each with a tab.
        message = error.format_message().replace("\n\t", " ")
        return _print_error(program, f"{message}{hint}", USAGE_EXIT_CODE)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        _discard_output()  # as of `history | head`
        return 0
    except BaseExceptionGroup as error:
        return _fail(program, error, log_folders)
    except Exception as error:  # noqa: BLE001 (the outermost supervisor keeps the traceback)
        return _fail(program, error, log_folders)


def _fail(program: str, error: BaseException, log_folders: Callable[[], Sequence[Path]]) -> int:
    known = expected_error(error)
    if known is not None:
        return _print_error(program, str(known), known.exit_code)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
        return INTERRUPTED_EXIT_CODE
    kind = type(error).__name__
    return _print_error(
        program,
        f"unexpected error: {kind}: {excerpt(str(error), 300)}; details are in "
        f"{_keep_traceback(program, error, log_folders())}, please report them",
        UNEXPECTED_EXIT_CODE,
    )


def _print_error(program: str, sentence: str, exit_code: int) -> int:
    # It may quote what a remote has said, as the reason of a refusal.
    print(f"{program}: error: {printable_line(sentence)}", file=sys.stderr)
    return exit_code


def _keep_traceback(
    program: str, error: BaseException, folders: Sequence[Path]
) -> Path | Literal["the lines above"]:
    """Append the traceback to `PROGRAM-error.log`; print it where no folder is writable."""
    for folder in folders:
        path = folder / f"{program}-error.log"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(traceback.format_exception(error)))
            return path
    traceback.print_exception(error)
    return "the lines above"
