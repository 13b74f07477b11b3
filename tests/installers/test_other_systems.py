"""What can be said of the macOS and Windows scripts on another system.

macOS's are carried out with a `uname` that answers as a Mac's does; PowerShell's are read: there is
no PowerShell here, so the rules of PSScriptAnalyzer that matter most are checked by their text.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAC = ROOT / "installers" / "macos"
WINDOWS = sorted((ROOT / "installers" / "windows").glob("*.ps1"))

APPROVED_VERBS = {
    "Add", "Assert", "Clear", "ConvertFrom", "ConvertTo", "Copy", "Enable", "Disable", "Find",
    "Get", "Install", "Invoke", "Join", "Move", "New", "Out", "Read", "Register", "Remove",
    "Resolve", "Select", "Set", "Split", "Start", "Stop", "Test", "Uninstall", "Unregister",
    "Update", "Wait", "Where", "ForEach", "Write",
}  # fmt: skip
CHANGING_VERBS = {"Install", "New", "Register", "Remove", "Set", "Uninstall", "Unregister"}
ALIASES = {
    "cat", "cd", "cp", "curl", "dir", "echo", "foreach", "gc", "gci", "gcm", "gi", "iex", "irm",
    "iwr", "kill", "ls", "mkdir", "mv", "pwd", "rm", "sc", "select", "sleep", "sort", "wget",
    "where", "write",
}  # fmt: skip


def mac(tmp_path: Path, *words: str, processor: str = "arm64") -> subprocess.CompletedProcess[str]:
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    uname = tools / "uname"
    uname.write_text(f"#!/bin/sh\ncase $1 in -m) echo {processor} ;; *) echo Darwin ;; esac\n")
    uname.chmod(0o755)
    environment = {
        "HOME": str(tmp_path / "home"), "PATH": f"{tools}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }  # fmt: skip
    return subprocess.run(
        ["sh", MAC / "install.sh", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_a_mac_that_torch_has_no_packages_for_is_told_so(tmp_path: Path) -> None:
    done = mac(tmp_path, "--dry-run", processor="x86_64")
    assert done.returncode == 1
    assert "Apple's own processor is needed" in done.stderr


def test_installing_on_a_mac_hands_its_words_on_and_names_the_agent(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    done = mac(tmp_path, "--service", "--prefix", f"{tmp_path}/a b", "--dry-run")
    assert done.returncode == 0, done
    assert f"would link {tmp_path}/a b/bin/swarm-client" in done.stdout
    assert f"would run {tmp_path}/a b/bin/swarm-client service install" in done.stdout
    assert list((tmp_path / "home").iterdir()) == []


def test_a_purge_on_a_mac_leaves_nothing_of_ours_and_everything_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = home / ".local" / "share" / "swarmtrain-program" / "bin"
    ours = [
        "Library/Application Support/swarmtrain/identity.key", "Library/Caches/swarmtrain/x",
        "Library/Logs/swarmtrain/x", "Library/LaunchAgents/org.swarmtrain.client.plist",
        ".local/share/swarmtrain-program/bin/x",
    ]  # fmt: skip
    theirs = ["Library/Application Support/other/x", "Library/LaunchAgents/other.plist"]
    for name in ours + theirs:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    (home / ".local" / "bin").mkdir()
    (home / ".local" / "bin" / "swarm-client").symlink_to(environment / "swarm-client")
    (home / ".local" / "bin" / "swarm-coordinator").symlink_to("/usr/bin/true")
    assert mac(tmp_path, "--uninstall", "--purge", "--dry-run").returncode == 0
    assert all((home / name).exists() for name in ours)
    assert mac(tmp_path, "--uninstall").returncode == 0
    assert (home / ours[0]).exists()
    assert mac(tmp_path, "--uninstall", "--purge").returncode == 0
    left = sorted(
        str(p.relative_to(home)) for p in home.rglob("*") if p.is_symlink() or p.is_file()
    )
    assert left == sorted([*theirs, ".local/bin/swarm-coordinator"])


# ---------------------------------------------------------------- Windows


def without_comments_and_strings(text: str) -> str:
    """The code alone; what a string in double quotes computes stays out as well."""
    text = re.sub(r"<#.*?#>", "", text, flags=re.DOTALL)
    pattern = r"""'(?:[^']|'')*'|"(?:[^"`]|`.)*"|#[^\n]*"""
    return re.sub(pattern, lambda m: '""' if m[0][0] in "'\"" else "", text)


@pytest.mark.parametrize("script", WINDOWS, ids=lambda path: path.name)
def test_brackets_of_a_powershell_script_are_balanced(script: Path) -> None:
    pairs = {")": "(", "]": "[", "}": "{"}
    open_ones: list[str] = []
    for letter in without_comments_and_strings(script.read_text()):
        if letter in pairs.values():
            open_ones.append(letter)
        elif letter in pairs:
            assert open_ones.pop() == pairs[letter]
    assert open_ones == []


@pytest.mark.parametrize("script", WINDOWS, ids=lambda path: path.name)
def test_a_powershell_script_keeps_the_rules_that_matter_most(script: Path) -> None:
    text = script.read_text()
    assert text.isascii()  # without a byte order mark, Windows PowerShell reads nothing else right
    assert max(len(line) for line in text.splitlines()) <= 110
    assert not re.search(r"[ \t]$", text, flags=re.MULTILINE)
    code = without_comments_and_strings(text)
    head = code[: code.index("function ")]
    assert "[CmdletBinding(SupportsShouldProcess = $true)]" in head
    assert "Set-StrictMode" in head
    assert "$ErrorActionPreference = " in head
    for banned in ("Invoke-Expression", "Write-Host", "RunAs", "-ExecutionPolicy"):
        assert banned not in code
    for verb, _ in re.findall(r"\b([A-Z][A-Za-z]+)-([A-Z][A-Za-z]+)\b", code):
        assert verb in APPROVED_VERBS, verb
    words = re.findall(r"(?:^|[|;{(&])\s*([A-Za-z]+)(?=[\s;|)}])", code, flags=re.MULTILINE)
    assert not {word.lower() for word in words} & ALIASES
    # Null stands on the left: on the right it filters a list.
    assert not re.search(r"-(?:eq|ne) \$null", code)


@pytest.mark.parametrize("script", WINDOWS, ids=lambda path: path.name)
def test_every_function_that_changes_something_can_be_asked_what_it_would_do(script: Path) -> None:
    code = without_comments_and_strings(script.read_text())
    functions = re.split(r"^function ", code, flags=re.MULTILINE)[1:]
    names = [body.split()[0] for body in functions]
    assert names
    for name, body in zip(names, functions, strict=True):
        verb = name.split("-")[0]
        if verb in CHANGING_VERBS:
            assert "SupportsShouldProcess" in body, name
    # All of it in functions, and one call on the last line.
    lines = [line for line in code.splitlines() if line.strip()]
    assert lines[-1].split()[0] == names[0]
    for changing in (
        "Register-ScheduledTask",
        "Unregister-ScheduledTask",
        "& wsl.exe --distribution $name --exec sh",
    ):
        for body in functions:
            if changing in body:
                assert "ShouldProcess(" in body[: body.index(changing)]
