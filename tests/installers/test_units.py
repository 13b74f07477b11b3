"""The shipped units and agent: what they promise, and what systemd itself says of them."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kits.installers.command_lines import parse
from swarm_client.service import launchd, systemd
from swarm_client.service.steps import MakeFolder, Remove, RunCommand, WriteFile
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.errors import ConfigurationError, UsageError

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "client" / "swarm_client" / "service"
UNITS = ("swarm-client.service", "swarm-client-system.service")

EXPOSURE_CEILINGS = {True: 25, False: 75}
"""Tenths of what `systemd-analyze security` gives, for the system unit and the user's, which has no
view of the file system of its own. Measured with systemd 252: 2.4 and 7.3."""

BREAKING = {
    "MemoryDenyWriteExecute": "torch compiles while it runs",
    "PrivateDevices": "hides the GPU",
    "PrivateTmp": "hides X11's socket",
}


COORDINATOR = ROOT / "installers" / "linux" / "swarm-coordinator@.service"
COORDINATOR_CEILING = 15
"""Tenths; measured with systemd 252: 1.4."""


def settings(name: str, section: str = "Service") -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(SHIPPED / name)
    return parser[section]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_of_the_kind_that_the_daemon_serves(name: str) -> None:
    wanted = {
        "Type": "notify", "KillMode": "mixed", "TimeoutStopSec": "60", "Nice": "10",
        "IOSchedulingClass": "idle", "Restart": "on-failure", "NoNewPrivileges": "yes",
    }  # fmt: skip
    found = settings(name)
    assert {key: found.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_leaves_the_machine_memory_and_tasks_and_outlives_a_worker_that_is_ended(
    name: str,
) -> None:
    found = settings(name)
    assert found["MemoryMax"].endswith("%")
    assert 50 <= int(found["MemoryMax"].removesuffix("%")) <= 95
    # More than two pools of threads on the largest machines, far fewer than a fork bomb.
    assert 1024 <= int(found["TasksMax"]) <= 8192
    # Otherwise systemd stops the daemon together with a worker that used too much memory.
    assert found["OOMPolicy"] == "continue"


def test_what_the_system_unit_can_write_is_its_own_folder_and_temporary_ones() -> None:
    found = settings("swarm-client-system.service")
    assert (found["ProtectSystem"], found["ProtectHome"]) == ("strict", "yes")
    assert found["ReadWritePaths"] == "/tmp /var/tmp"
    assert found["StateDirectory"] == "swarmtrain"


def test_the_user_unit_hides_no_part_of_its_users_home() -> None:
    assert "ProtectHome" not in settings("swarm-client.service")


@pytest.mark.parametrize("name", UNITS)
def test_what_would_break_torch_or_hide_the_gpu_is_left_out(name: str) -> None:
    found = settings(name)
    assert not BREAKING.keys() & set(found)
    # Each of these makes a list of devices, and what is not on it is closed.
    assert not {"ProtectClock", "DevicePolicy", "DeviceAllow"} & set(found)


@pytest.mark.parametrize("system", [True, False], ids=["system", "user"])
def test_systemd_understands_every_line_and_finds_little_to_expose(
    system: bool, tmp_path: Path
) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here: sh tools/install_installer_tools.sh")
    # The program's path is one that a unit has to spell with care.
    folder = tmp_path / 'it\'s 50% "mine" for $5'
    folder.mkdir()
    script = folder / "swarm-client"
    script.symlink_to(sys.executable)
    unit = tmp_path / "swarm-client.service"
    unit.write_text(systemd.unit_text((str(script), "daemon"), system=system))
    whose = () if system else ("--user",)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    verified = subprocess.run(
        [program, "verify", *whose, "--man=no", unit],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    # It also looks at units that this machine has, and may have remarks on those.
    about_ours = [line for line in verified.stderr.splitlines() if "swarm" in line]
    assert about_ours == []
    assert verified.returncode == 0, verified.stderr
    judged = subprocess.run(
        [program, "security", *whose, "--offline=true", "--no-pager",
         f"--threshold={EXPOSURE_CEILINGS[system]}", unit],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout + judged.stderr


# ---------------------------------------------------------------- the coordinator


def test_the_coordinators_unit_starts_one_run_by_a_command_that_the_program_takes() -> None:
    found = settings(str(COORDINATOR))
    path, *words = found["ExecStart"].split()
    assert path == "/usr/bin/swarm-coordinator"
    parsed = parse(["swarm-coordinator", *words]).params
    assert parsed["run_dir"] == Path("/var/lib") / found["StateDirectory"] / "%i"
    wanted = settings(str(COORDINATOR), "Unit")["AssertPathExists"]
    assert Path(wanted) == parsed["run_dir"] / RunFolder(Path()).settings
    assert found["User"] == found["StateDirectory"]


def test_the_coordinators_unit_waits_for_its_checkpoint_and_gives_up_what_stays_wrong() -> None:
    found = settings(str(COORDINATOR))
    assert found["KillMode"] == "mixed"
    assert int(found["TimeoutStopSec"]) >= 600
    never = {int(code) for code in found["RestartPreventExitStatus"].split()}
    assert never == {UsageError.exit_code, ConfigurationError.exit_code}


def test_systemd_understands_the_coordinators_unit_and_finds_less_to_expose(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here: sh tools/install_installer_tools.sh")
    text = COORDINATOR.read_text().replace("/usr/bin/swarm-coordinator", sys.executable)
    unit = tmp_path / "swarm-coordinator@my-run.service"
    unit.write_text(text)
    verified = subprocess.run(
        [program, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert [line for line in verified.stderr.splitlines() if "swarm" in line] == []
    assert verified.returncode == 0, verified.stderr
    judged = subprocess.run(
        [program, "security", "--offline=true", "--no-pager",
         f"--threshold={COORDINATOR_CEILING}", unit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_the_package_brings_the_coordinators_unit_and_the_user_that_it_runs_as() -> None:
    linux = COORDINATOR.parent
    assert f'cp "$here/{COORDINATOR.name}"' in (linux / "build_deb.sh").read_text()
    assert f"ORGANISER={settings(str(COORDINATOR))['User']}" in (linux / "deb/postinst").read_text()
    assert "stop 'swarm-coordinator@*.service'" in (linux / "deb/prerm").read_text()


# ---------------------------------------------------------------- both


def test_a_unit_names_the_program_that_installed_it_and_keeps_everything_else() -> None:
    text = systemd.unit_text(("/a b/swarm-client", "daemon", "--home", "/100%"), system=False)
    shipped = (SHIPPED / "swarm-client.service").read_text()
    changed = [
        (old, new)
        for old, new in zip(shipped.splitlines(), text.splitlines(), strict=True)
        if old != new
    ]
    begins = 'ExecStart="/a b/swarm-client" "daemon" "--home" "/100%%"'
    assert changed == [('ExecStart="%h/.local/bin/swarm-client" daemon', begins)]


def test_the_installers_folder_leads_to_the_units_and_the_agent() -> None:
    for name in UNITS:
        assert (ROOT / "installers" / "linux" / name).resolve() == SHIPPED / name
    agent = f"{launchd.LABEL}.plist"
    assert (ROOT / "installers" / "macos" / agent).resolve() == SHIPPED / agent


def test_the_agent_is_a_property_list_that_starts_the_daemon_at_login() -> None:
    text = launchd.agent_text(("/x & y/swarm-client", "daemon"), Path("/h/log/service.log"))
    agent = plistlib.loads(text.encode())
    assert agent["Label"] == launchd.LABEL
    assert agent["ProgramArguments"] == ["/x & y/swarm-client", "daemon"]
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["StandardErrorPath"] == "/h/log/service.log"
    assert agent["Umask"] == 0o077
    assert agent["ExitTimeOut"] > 60


def test_an_agent_goes_before_its_file_does() -> None:
    path = launchd.agent_path(Path("/Users/ann"))
    assert path == Path("/Users/ann/Library/LaunchAgents/org.swarmtrain.client.plist")
    stop, remove = launchd.uninstall(path, 501)
    assert isinstance(stop, RunCommand)
    assert tuple(stop.command) == ("launchctl", "bootout", "gui/501/org.swarmtrain.client")
    assert remove == Remove(path)
    home = Path("/Users/ann/home")
    folder, _, write, start = launchd.install(path, "text", [home], 501)
    assert folder == MakeFolder(home)
    assert write == WriteFile(path, "text")
    assert isinstance(start, RunCommand)
    assert tuple(start.command) == ("launchctl", "bootstrap", "gui/501", str(path))
