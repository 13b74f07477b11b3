"""How an installation is upgraded follows from the files that its installer left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kits.other_user import give_to_another_user
from swarm_client.service.installation import DEB_PREFIX, Upgrade, find_upgrade


def origin_of(folder: Path, **info: object) -> str:
    return json.dumps({"url": folder.as_uri(), "dir_info": info})


def found(prefix: Path, origin: str | None = None, organiser: bool = False) -> Upgrade:
    return find_upgrade(prefix, origin, {"HOME": "/home/ann"}, organiser=organiser)


@pytest.mark.parametrize(
    ("left", "command"),
    [
        ("uv-receipt.toml", ("uv", "tool", "upgrade", "swarmtrain")),
        ("pipx_metadata.json", ("pipx", "upgrade", "swarmtrain")),
    ],
)
def test_a_tool_that_left_its_receipt_upgrades(
    tmp_path: Path, left: str, command: tuple[str, ...]
) -> None:
    (tmp_path / left).touch()
    upgrade = found(tmp_path)
    assert (upgrade.command, upgrade.restarts) == (command, False)


def test_an_environment_that_no_tool_made_is_upgraded_by_hand_and_from_no_index(
    tmp_path: Path,
) -> None:
    upgrade = found(tmp_path)
    assert upgrade.command == ()
    assert str(tmp_path) in upgrade.installed_by


def test_a_checkout_that_is_used_in_place_is_pulled_even_in_uvs_environment(tmp_path: Path) -> None:
    (tmp_path / "uv-receipt.toml").touch()
    checkout = tmp_path / "a folder"
    upgrade = found(tmp_path, origin_of(checkout, editable=True))
    assert upgrade.command == ()
    assert upgrade.by_hand == f"run `git pull` and `make setup` in {checkout}"


def test_the_package_is_upgraded_by_apt() -> None:
    upgrade = found(DEB_PREFIX)
    assert upgrade.command == ()
    assert "sudo apt-get install ./" in upgrade.by_hand


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    script = tmp_path / "a checkout" / "installers" / "linux" / "install.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    return tmp_path / "a checkout"


def test_the_scripts_own_environment_is_made_again_by_the_script(checkout: Path) -> None:
    script = str(checkout / "installers" / "linux" / "install.sh")
    usual = Path("/home/ann/.local/share/swarmtrain-program")
    upgrade = found(usual, origin_of(checkout))
    assert upgrade.command == ("sh", script)
    assert upgrade.restarts, "the script stops and starts a client itself"
    elsewhere = found(Path("/opt/x/share/swarmtrain-program"), origin_of(checkout), organiser=True)
    assert elsewhere.command == ("sh", script, "--prefix", "/opt/x", "--coordinator")


def test_a_script_that_installed_a_wheel_is_run_by_the_user(tmp_path: Path) -> None:
    usual = Path("/home/ann/.local/share/swarmtrain-program")
    wheel = json.dumps({"url": "https://example.org/swarmtrain.whl", "archive_info": {}})
    for origin in (None, wheel, origin_of(tmp_path / "gone")):
        upgrade = found(usual, origin)
        assert upgrade.command == ()
        assert "--from" in upgrade.by_hand


def test_a_checkout_that_another_user_has_made_in_a_folder_open_to_all_is_not_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Path("/home/ann/.local/share/swarmtrain-program")
    checkout.parent.chmod(0o1777)
    assert found(usual, origin_of(checkout)).command != ()
    give_to_another_user(checkout, monkeypatch)
    assert found(usual, origin_of(checkout)).command == ()
