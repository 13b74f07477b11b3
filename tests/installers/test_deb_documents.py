"""The manual pages and completion files of the Debian package, made from the click commands."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from swarm_shared.base.command_line import visible_commands
from tools import command_reference

LINUX = Path(__file__).parents[2] / "installers" / "linux"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documents", LINUX / "deb" / "documents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    load().write(folder)
    return folder


@pytest.mark.parametrize("program", command_reference.PROGRAMS)
def test_a_page_has_every_command_of_the_program_and_every_option(tree: Path, program: str) -> None:
    packed = (tree / f"usr/share/man/man1/{program}.1.gz").read_bytes()
    # lintian: the best compression, and neither a name nor a time inside.
    assert packed[:9] == b"\x1f\x8b\x08\0\0\0\0\0\x02"
    page = gzip.decompress(packed).decode("ascii").replace("\\-", "-")
    group = command_reference.PROGRAMS[program]
    commands = list(visible_commands(program, group))
    assert len(commands) > 15
    for name, command in commands:
        assert f'.SS "{name}' in page
        for option in command.params:
            for spelling in option.opts:
                assert not spelling.startswith("--") or spelling in page
    assert f".SH NAME\n{program} - " in page


@pytest.mark.parametrize("program", command_reference.PROGRAMS)
def test_a_page_is_formatted_without_a_complaint(tree: Path, program: str) -> None:
    program_path = shutil.which("groff")
    if program_path is None:
        pytest.skip("no groff here: sh tools/install_installer_tools.sh")
    packed = (tree / f"usr/share/man/man1/{program}.1.gz").read_bytes()
    done = subprocess.run(
        [program_path, "-man", "-ww", "-Tutf8"], input=gzip.decompress(packed),
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stderr == b""
    assert program.encode() in done.stdout


def test_the_completion_files_are_where_the_shells_look_and_complete_that_program(
    tree: Path,
) -> None:
    for program in command_reference.PROGRAMS:
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        for path in (
            f"usr/share/bash-completion/completions/{program}",
            f"usr/share/zsh/vendor-completions/_{program}",
            f"usr/share/fish/vendor_completions.d/{program}.fish",
        ):
            script = (tree / path).read_text()
            assert variable in script
            assert program in script
        zsh = (tree / f"usr/share/zsh/vendor-completions/_{program}").read_text()
        assert zsh.startswith(f"#compdef {program}\n"), "else zsh does not load it"
