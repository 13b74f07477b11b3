"""`swarm-coordinator invite --qr`: what a camera reads off the screen is the invite."""

from __future__ import annotations

from pathlib import Path

import pytest
import segno

from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli.main import run
from swarm_shared.identity.invite import Invite


def test_the_code_on_the_screen_is_that_of_the_invite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["invite", str(folder.path)]) == 0
    alone = capsys.readouterr().out
    assert run(["invite", str(folder.path), "--qr"]) == 0
    first, *drawn = capsys.readouterr().out.splitlines()
    assert first == alone.strip()
    assert max(len(line) for line in drawn) <= 80
    assert {character for line in drawn for character in line} == set("█▀▄ ")
    content = first.upper()
    assert Invite.decode(content) == Invite.decode(first)
    # Two rows of cells in a line of text; dark cells are left blank.
    cells = [
        [character in " ▄" if half == "upper" else character in " ▀" for character in line]
        for line in drawn
        for half in ("upper", "lower")
    ]
    border = 4
    code = [row[border:-border] for row in cells[border:]]
    wanted = [[bool(cell) for cell in row] for row in segno.make(content, micro=False).matrix]
    assert code[: len(wanted)] == wanted
    assert not any(any(row) for row in cells[:border]), "no light margin above it"
