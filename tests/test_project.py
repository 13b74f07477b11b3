"""Rules of the project itself (docs/contributing.md): layout, sizes, documents, shell scripts."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from swarm_shared.base import errors
from tools import command_reference, lock

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("client", "coordinator", "shared")
COMMANDS = ROOT / "docs" / "commands.md"
PROGRAMS = [
    path
    for folder in ("benchmarks", "client", "coordinator", "installers", "shared")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MOST_LINES_OF_A_FILE = 700
"""A file may have as many where it holds one idea; a longer one is cut by idea, not by length."""

MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_THE_README = 200
MOST_MODULES_OF_A_FOLDER = 16
"""Without `__init__`; a room that can be taken in at a glance."""

PERSON_WORDS = re.compile(r"\b(?:nobody|somebody|anybody|everybody|whoever|whom)\b", re.I)
MOST_PERSON_WORDS = {"client": 0, "coordinator": 0, "shared": 0, "docs": 0}
"""Bound per package's docstrings; `docs` is README.md and docs/*.md. A peer is "it"."""

OF_A_DEVICE = re.compile(
    r"""\btorch\.(?:cuda|mps|xpu|accelerator|version\.\w+|get_device_module)\b|["'](?:cuda|mps|xpu)\b"""
)
"""What asks torch about a kind of device, or names one."""


def test_no_file_is_longer_than_a_reader_takes_in() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in PROGRAMS}
    assert len(lengths) > 200
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_longer_than_a_reader_takes_in() -> None:
    too_long = {}
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    too_long[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    assert too_long == {}


def test_no_folder_has_more_modules_than_a_reader_takes_in() -> None:
    modules = Counter(
        str(path.parent.relative_to(ROOT)) for path in PROGRAMS if path.name != "__init__.py"
    )
    assert modules["benchmarks"] > 0
    too_many = {name: n for name, n in modules.items() if n > MOST_MODULES_OF_A_FOLDER}
    assert too_many == {}


def test_devices_are_asked_for_behind_one_door() -> None:
    found = {
        str(path.relative_to(ROOT)): matches
        for path in PROGRAMS
        if path.relative_to(ROOT).parts[0] in PACKAGES
        if (matches := OF_A_DEVICE.findall(path.read_text()))
    }
    door = "client/swarm_client/stage/worker/accelerator.py"
    assert "torch.accelerator" in found.pop(door), "the pattern finds nothing any more"
    assert '"cuda' in found.pop("client/swarm_client/machine/device_names.py")
    # What the reference, too, asks of torch, which is no client.
    assert '"cuda' in found.pop("shared/swarm_shared/model/repeatable_kernels.py")
    assert found == {}


def test_the_readme_stays_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= MOST_LINES_OF_THE_README


def test_docstrings_and_pages_name_no_more_persons_than_counted() -> None:
    texts = {package: _docstrings(package) for package in PACKAGES}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts["docs"] = [page.read_text() for page in pages]
    found = {
        name: sum(len(PERSON_WORDS.findall(text)) for text in parts)
        for name, parts in texts.items()
    }
    assert {name: n for name, n in found.items() if n > MOST_PERSON_WORDS[name]} == {}


def _docstrings(package: str) -> list[str]:
    """All string statements of a package: of modules, classes, functions and constants."""
    return [
        node.value.value
        for path in PROGRAMS
        if path.is_relative_to(ROOT / package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [t for t in targets if ":" not in t and not (document.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_anchor_of_a_link_is_a_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in _anchors(document.parent / target if target else document)
    ]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_named_in_the_documents_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`((?:tests|docs|tools)/[\w/.-]+\.\w+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`swarm_((?:client|coordinator|shared)\.[\w.]+)`", text))
    assert len(names) > 50
    missing = []
    for name in sorted(names):
        package, _, rest = name.partition(".")
        path = ROOT / package / f"swarm_{package}" / rest.replace(".", "/")
        if not path.is_dir() and not path.with_suffix(".py").exists():
            missing.append(f"swarm_{name}")
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tables_of_rooms_are_the_import_contracts(package: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [
        contract["layers"]
        for contract in contracts["contracts"]
        if contract.get("containers") == [f"swarm_{package}"]
    ]
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split(f"**swarm_{package}**\n")[1].strip().split("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()[2:]]
    assert [re.findall(r"`(\w+)`", row) for row in rows] == [layer.split(" | ") for layer in layers]


def test_the_page_of_commands_is_what_the_commands_make() -> None:
    assert COMMANDS.read_text() == command_reference.page(), "run `make docs`"


def test_the_page_of_commands_lists_every_exit_code() -> None:
    text = COMMANDS.read_text()
    table = text[text.index("## Exit codes") :]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    raised = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.SwarmError)
    }
    assert raised <= listed
    assert {0, 130} <= listed


def test_every_command_option_and_group_has_a_help_text() -> None:
    text = COMMANDS.read_text()
    assert re.findall(r"^\|[^|]+\|\s*\|$", text, re.M) == []
    assert re.findall(r"```\n\n\n", text) == []


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert [page for page in pages if f"({page})" not in index] == []
    numbers = [page[:4] for page in pages]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize(
    ("system", "machine", "has_wheel"),
    [
        ("linux", "x86_64", True), ("linux", "aarch64", True), ("darwin", "arm64", True),
        ("darwin", "x86_64", False), ("win32", "AMD64", False), ("linux", "armv7l", False),
    ],
)  # fmt: skip
def test_hivemind_is_installed_where_a_wheel_has_its_daemon(
    system: str, machine: str, has_wheel: bool
) -> None:
    """The wheels of 1.1.12 with a p2pd in them, looked into on 26 November 2026."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = (one for one in project["dependencies"] if one.startswith("hivemind"))
    marker = Requirement(required).marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": system, "platform_machine": machine}) is has_wheel


def test_the_lock_has_one_version_of_every_declared_package_that_is_installed() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    locked = {lock.normalised(one.name): one for one in pins}
    assert len(locked) == len(pins)
    assert all(re.fullmatch(r"==[\w.]+", str(one.specifier)) for one in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [Requirement(one) for one in project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        declared += map(Requirement, extra)
    for one in declared:
        name = lock.normalised(one.name)
        needed = one.marker is None or one.marker.evaluate({"extra": ""})
        if needed and name not in lock.NOT_LISTED:
            assert one.specifier.contains(str(locked[name].specifier)[2:], prereleases=True)


def test_the_shell_scripts_parse() -> None:
    for script in (ROOT / "tools").glob("*.sh"):
        subprocess.run(["sh", "-n", script], check=True)
    for script in sorted((ROOT / ".ci").iterdir()):
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK) or script.suffix == ".bash"


# ---------------------------------------------------------------- tools/setup.sh

FAKE_PYTHON = """#!/bin/sh
# Stands in for an interpreter: makes an "environment" of itself and writes down what pip is asked.
case "$*" in
*"-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"-m pip "*) echo "$*" >> pip-calls ;;
*ensurepip*) exit {venv_missing} ;;
*"--version"*) echo "Python 3.11.0" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name, with what the script needs and an interpreter to find."""
    folder = tmp_path / "a checkout"
    (folder / "tools").mkdir(parents=True)
    for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    write_python(folder, venv_missing=False)
    return folder


def write_python(folder: Path, *, venv_missing: bool) -> None:
    path = folder / "fake python"
    path.write_text(FAKE_PYTHON.replace("{venv_missing}", str(int(venv_missing))))
    path.chmod(0o755)


def set_up(folder: Path, extras: str = "user") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "tools/setup.sh", extras],
        cwd=folder, env={**os.environ, "PYTHON": str(folder / "fake python")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def pip_calls(folder: Path) -> int:
    path = folder / "pip-calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_setup_installs_once_and_asks_pip_for_nothing_when_nothing_has_changed(
    checkout: Path,
) -> None:
    assert set_up(checkout).returncode == 0
    first = pip_calls(checkout)
    assert first > 0
    assert "--constraint constraints.txt" in (checkout / "pip-calls").read_text()
    again = set_up(checkout)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert pip_calls(checkout) == first


def test_setup_installs_again_after_a_change_of_dependencies_or_a_move(checkout: Path) -> None:
    set_up(checkout)
    calls = pip_calls(checkout)
    with (checkout / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    set_up(checkout)
    assert pip_calls(checkout) > calls
    calls = pip_calls(checkout)
    moved = checkout.rename(checkout.with_name("moved checkout"))
    assert set_up(moved).returncode == 0
    assert pip_calls(moved) > calls


def test_a_developers_environment_serves_the_demo_too(checkout: Path) -> None:
    set_up(checkout, "dev")
    calls = pip_calls(checkout)
    assert ".[coordinator,dev]" in (checkout / "pip-calls").read_text()
    set_up(checkout, "user")
    assert pip_calls(checkout) == calls


def test_setup_says_what_to_install_when_venv_is_missing(checkout: Path) -> None:
    write_python(checkout, venv_missing=True)
    done = set_up(checkout)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_says_so_when_there_is_no_suitable_python(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname", "cksum", "cat", "rm"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [str(tools / "sh"), "tools/setup.sh"], cwd=checkout, env={"PATH": str(tools)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no Python 3.11 or newer was found" in done.stderr
