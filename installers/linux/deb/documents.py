"""Write the manual pages and the completion files of both programs below a folder, as Debian lays
them out. Run by the Python of the environment that is packaged:

    python documents.py TREE

A page is made from the click commands, as docs/commands.md is; it has no date, so that the same
program gives the same bytes.
"""

from __future__ import annotations

import gzip
import inspect
import re
import sys
from pathlib import Path

import click

from swarm_client.cli.main import swarm_client
from swarm_coordinator.cli.main import cli as swarm_coordinator
from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.command_line import completion_script, visible_commands

PROGRAMS: dict[str, tuple[click.Group, str]] = {
    "swarm-client": (swarm_client, "lend this computer to the training of a large model"),
    "swarm-coordinator": (swarm_coordinator, "train a language model on volunteers' computers"),
}
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/{}",
    "zsh": "usr/share/zsh/vendor-completions/_{}",
    "fish": "usr/share/fish/vendor_completions.d/{}.fish",
}


def manual_page(program: str) -> str:
    """The page of one program in the macros of man(7), with all of its commands."""
    group, purpose = PROGRAMS[program]
    other = next(name for name in PROGRAMS if name != program)
    lines = [f'.TH {_text(program.upper())} 1 "" "swarmtrain {SOFTWARE_VERSION}" "User Commands"']
    lines += [".SH NAME", f"{_text(program)} \\- {_text(purpose)}"]
    lines += [".SH SYNOPSIS", f".B {_text(program)}", "[OPTIONS] COMMAND [ARGS]..."]
    lines += [".SH DESCRIPTION", *_paragraphs(group.help), ".SH COMMANDS"]
    for name, command in visible_commands(program, group):
        lines += _section(name, command)
    lines += [".SH SEE ALSO", f".BR {_text(other)} (1)"]
    return "\n".join(lines) + "\n"


def _section(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f'.SS "{_text(usage)}"', *_paragraphs(command.help)]
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            spelling, meaning = record
            lines += [".TP", f'.B "{_text(spelling)}"', _text(" ".join(meaning.split()))]
    return lines


def _paragraphs(text: str | None) -> list[str]:
    parts = inspect.cleandoc(text or "").split("\n\n")
    joined = [_text(" ".join(part.split())) for part in parts if part.strip()]
    return [line for part in joined for line in (".PP", part)]


def _text(text: str) -> str:
    """Escape for roff: backslashes, hyphens that are typed, quotes in arguments, control lines."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq").replace("`", "\\(ga")
    text = re.sub(r"[^\x00-\x7f]", lambda one: f"\\[u{ord(one[0]):04X}]", text)
    return "\\&" + text if text[:1] in (".", "'") else text


def write(tree: Path) -> None:
    for program, (group, _) in PROGRAMS.items():
        page = tree / f"usr/share/man/man1/{program}.1.gz"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_bytes(gzip.compress(manual_page(program).encode("ascii"), 9, mtime=0))
        for shell, place in COMPLETIONS.items():
            script = tree / place.format(program)
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(completion_script(group, program, shell).strip("\n") + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
