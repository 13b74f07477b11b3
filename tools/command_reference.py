"""Write docs/commands.md from the click commands of both programs.

    make docs        (or: python tools/command_reference.py)

A test compares the page in the repository with `page()`.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from swarm_client.cli.main import swarm_client
from swarm_coordinator.cli.main import cli as swarm_coordinator
from swarm_shared.base.command_line import visible_commands

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"

PROGRAMS: dict[str, click.Group] = {
    "swarm-client": swarm_client,
    "swarm-coordinator": swarm_coordinator,
}

EXIT_CODES = {
    0: "success",
    1: "a failure without a code of its own; the message says what failed",
    2: "the command line is wrong",
    3: "a setting has an unknown name or an impossible value",
    4: "the invite is damaged",
    5: "training data is missing, empty, damaged or not text",
    6: "no offered memory is large enough",
    7: "the disk is full, a folder is not writable, or a file is damaged",
    8: "a port is in use, or the other side cannot be reached",
    9: "the run refuses this peer",
    10: "the two sides speak different versions",
    11: "the other side violated the protocol",
    12: "another coordinator serves this run",
    13: "no daemon runs in this home, or it does not answer",
    14: "this machine has failed its self-test",
    130: "interrupted (Ctrl-C)",
}
"""Meaning of every exit code of both programs; `swarm_shared.base.errors` assigns them."""

_HEAD = """\
# Commands

<!-- Made by `python tools/command_reference.py` (`make docs`). -->

All commands of `swarm-client` (volunteers) and `swarm-coordinator` (organisers), as their `--help`
shows them. `-h` and `--help` work for every command, `--version` for both programs.

- `--json` prints a JSON document; those of `swarm-client` have a `version` field, and fields are
  only added within a version.
- `--home DIR` (or the environment variable `SWARM_CLIENT_HOME`) selects the home of a volunteer.
  Commands reach the daemon over a socket in it; [control-api.md](control-api.md) describes its API.
- `RUN_DIR` is the folder of a run. `token`, `allow`, `ban` and `unban` work whether its coordinator
  runs or not.
- [preferences.md](preferences.md) lists the preferences of `swarm-client config`,
  [top.md](top.md) describes both `top` commands.
"""


def page() -> str:
    """The whole page as Markdown."""
    lines = [_HEAD]
    for program, group in PROGRAMS.items():
        lines += [f"## {program}", "", _help(group), ""]
        commands = list(visible_commands(program, group))
        lines += ["| command | purpose |", "|---|---|"]
        lines += [f"| [`{name}`](#{_anchor(name)}) | {_summary(one)} |" for name, one in commands]
        lines.append("")
        for name, command in commands:
            lines += _section(name, command)
    lines += ["## Exit codes", "", "The same for both programs. An error prints one sentence: what"]
    lines += ["was found, and what to do.", "", "| code | meaning |", "|---:|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join(lines) + "\n"


def _section(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f"### {name}", "", "```", usage, "```", "", _help(command), ""]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        for option in options:
            spelling, text = _option(context, option)
            lines.append(f"| `{_cell(spelling)}` | {_cell(text)} |")
        lines.append("")
    return lines


def _option(context: click.Context, option: click.Option) -> tuple[str, str]:
    """The left and right column of click's own help for this option."""
    record = option.get_help_record(context)
    assert record is not None, "hidden options are left out"
    spelling, text = record
    return spelling, " ".join(text.split())


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").strip()


def _summary(command: click.Command) -> str:
    """The first paragraph of the help, on one line."""
    return _cell(" ".join(_help(command).split("\n\n")[0].split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
