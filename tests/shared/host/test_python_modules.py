"""Modules of the program as processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swarm_shared.host.python_modules import module_command

ROOT = Path(__file__).parents[3]


def test_a_module_is_not_taken_from_the_folder_in_which_it_is_started(tmp_path: Path) -> None:
    for name in ("swarm_shared", "platformdirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of another user')\n")
    command = module_command("swarm_shared.host.user_folders")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_program_starts_its_modules_in_no_other_way() -> None:
    sources = [
        path for part in ("client", "coordinator", "shared") for path in (ROOT / part).rglob("*.py")
    ]
    assert sources
    assert [path for path in sources if 'sys.executable, "-m"' in path.read_text()] == []
