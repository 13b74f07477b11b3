"""What programs load: nothing heavy that they do not need to answer at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.loaded_modules import loaded

COMMAND = """
import sys
from swarm_client.cli.main import main
sys.argv = ["swarm-client", *{words}]
try:
    main()
except SystemExit:
    pass
"""
VIEW = (
    "import swarm_client.cli.main, swarm_client.tui.command, swarm_client.tui.app\n"
    "import swarm_client.tui.socket_source"
)
"""It has to be on the screen in less than a second; what reads documents comes after that."""

TO_ASK = ["torch", "libp2p", "hivemind", "trio", "numpy", "textual", "psutil", "matplotlib"]
"""What a command that only asks the daemon can do without."""

TO_SHOW = ["pydantic", "trio", "libp2p", "cryptography", "torch", "numpy", "psutil"]


@pytest.mark.parametrize("words", [["status"], ["pause"], ["logs", "-f"], ["credit"], ["runs"], []])
def test_commands_that_only_ask_import_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    home = ["--home", str(tmp_path / "h")] if words else []
    assert loaded(COMMAND.format(words=[*words, *home]), TO_ASK) == []


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (VIEW, TO_SHOW),
        (
            "import swarm_client.cli.main, swarm_client.daemon.daemon",
            ["torch", "hivemind", "textual"],
        ),
        ("import swarm_client.doctor.checkup", ["torch", "hivemind"]),
    ],
    ids=["the view before its first frame", "the daemon", "the doctor"],
)
def test_what_is_not_needed_at_the_start_is_not_loaded_by(code: str, heavy: list[str]) -> None:
    assert loaded(code, heavy) == []
