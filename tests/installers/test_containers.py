"""The image and the compose file: what can be checked of them without a container engine, and a
run of the whole where there is one."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from kits.installers.command_lines import PROGRAMS, parse
from swarm_coordinator.dashboard.app import build_app
from swarm_coordinator.dashboard.snapshot_loop import SnapshotLoop
from swarm_shared import SOFTWARE_VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "installers" / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("coordinator", "volunteer")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = (ROOT / "docs" / "installing.md").read_text()


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", DOCKERFILE)
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(name)]


def test_every_base_image_is_pinned_to_a_whole_version() -> None:
    images = [one.split()[0] for one in instructions("FROM ")]
    images += [service["image"] for service in SERVICES.values() if service["image"] not in images]
    assert len(images) == 7
    assert [one for one in images if not re.search(r":v?\d+\.\d+(\.\d+)?(-|$)", one)] == []
    assert len({one for one in images if one.startswith("python:")}) == 1
    for name in OURS:
        assert SERVICES[name]["image"] == f"swarmtrain:{SOFTWARE_VERSION}"


def test_the_image_has_a_python_and_a_uv_that_the_project_takes() -> None:
    (version,) = {tuple(map(int, v)) for v in re.findall(r"FROM python:(\d+)\.(\d+)", DOCKERFILE)}
    assert (3, 11) <= version <= (3, 13), "what install.sh takes"
    (pinned,) = (d for d in PROJECT["project"]["optional-dependencies"]["dev"] if "uv==" in d)
    assert pinned in DOCKERFILE
    assert "fastecdsa>=4,<5" in DOCKERFILE
    assert "fastecdsa>=4,<5" in (ROOT / "installers" / "linux" / "install.sh").read_text()


def test_what_the_image_copies_exists_is_let_through_and_is_all_that_the_wheel_needs() -> None:
    copied = [
        source
        for line in instructions("COPY ")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    rules = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in rules
    assert [one for one in copied if f"!{one}" not in rules] == []
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"]
    needed += [Path(package).parts[0] for package in wheel]
    assert [one for one in needed if not any(fnmatch.fnmatch(one, c) for c in copied)] == []
    extras = re.search(r"swarmtrain\[([a-z,]+)\] @ file:///source", DOCKERFILE)
    assert extras is not None
    assert set(extras[1].split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_programs_run_as_an_ordinary_user_that_owns_the_folders_of_the_volumes() -> None:
    assert instructions("USER ") == ["10001:10001"]
    assert "--uid 10001" in DOCKERFILE
    (volumes,) = instructions("VOLUME ")
    for folder in yaml.safe_load(volumes):
        assert re.search(rf"install -d .*-o swarmtrain .*{folder}", re.sub(r"\\\n", "", DOCKERFILE))
        assert any(f":{folder}" in v for name in OURS for v in SERVICES[name]["volumes"])
    for name in OURS:
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert "privileged" not in SERVICES[name]


def test_the_programs_are_started_as_they_are_so_that_a_signal_reaches_them() -> None:
    # A shell in between would keep SIGTERM from them; `init` passes it on.
    assert instructions("STOPSIGNAL ") == ["SIGTERM"]
    assert "ENTRYPOINT" not in DOCKERFILE
    (default,) = instructions("CMD ")
    for words in (yaml.safe_load(default), *(SERVICES[name]["command"] for name in OURS)):
        parse(words)
    for name in OURS:
        assert SERVICES[name]["init"] is True
        assert SERVICES[name]["stop_grace_period"] in ("2m", "10m"), "above TimeoutStopSec=60"


def test_every_command_of_the_page_is_one_of_the_programs() -> None:
    section = PAGE.split("## Containers")[1].split("\n## ")[0]
    found = 0
    for line in section.splitlines():
        words = shlex.split(line, comments=True) if line.startswith("docker compose ") else []
        at = next((n for n, word in enumerate(words) if word in PROGRAMS), None)
        if at is not None:
            assert words[at - 1] in SERVICES
            parse(words[at:])
            found += 1
    assert found >= 3


def test_every_service_has_a_volume_that_exists_and_every_file_it_mounts_is_there() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).resolve().is_file(), source
            else:
                assert source in COMPOSE["volumes"]
        assert set(service["networks"]) <= COMPOSE["networks"].keys()


def test_only_the_swarms_port_is_open_to_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == ["4711:4711"]
    assert SERVICES["postgres"]["networks"] == ["database"]
    assert COMPOSE["networks"]["database"] == {"internal": True}


def test_prometheus_reads_what_the_coordinator_serves_and_the_rules_that_exist() -> None:
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    start = parse(SERVICES["coordinator"]["command"]).params
    host, port = start["http"].rsplit(":", 1)
    assert host == "0.0.0.0", "at a loopback address other names are refused"
    assert job["static_configs"] == [{"targets": [f"coordinator:{port}"]}]
    app = build_app(cast(SnapshotLoop, None), "token", lambda snapshot: b"")
    assert job["metrics_path"] in {getattr(route, "path", "") for route in app.routes}
    mounted = {v.split(":")[1] for v in SERVICES["prometheus"]["volumes"] if ":" in v}
    for name in settings["rule_files"]:
        assert f"/etc/prometheus/{name}" in mounted
    health = SERVICES["coordinator"]["healthcheck"]["test"][-1]
    assert f"127.0.0.1:{port}/healthz" in health


def test_grafana_shows_the_board_of_the_documents_from_prometheus() -> None:
    volumes = dict(v.split(":")[:2] for v in SERVICES["grafana"]["volumes"])
    board = "../../docs/monitoring/grafana-dashboard.json"
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "boards.yml").read_text())["providers"]
    assert volumes[board].startswith(provider["options"]["path"] + "/")
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"] is True


def answers(engine: str) -> bool:
    """Whether the engine is installed and can be reached: a client alone builds nothing."""
    return (
        shutil.which(engine) is not None
        and not subprocess.run([engine, "info"], capture_output=True, check=False).returncode
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_both_programs_run_in_it() -> None:
    engine = next(filter(answers, ("docker", "podman")), None)
    if engine is None:
        pytest.skip("there is no container engine here (docker or podman)")
    tag = "swarmtrain-test:build"
    subprocess.run(
        [engine, "build", "--file", FOLDER / "Dockerfile", "--tag", tag, ROOT], check=True
    )
    for words in (["swarm-client", "version"], ["swarm-coordinator", "--version"], ["id", "-u"]):
        done = subprocess.run(
            [engine, "run", "--rm", tag, *words], check=True, capture_output=True, text=True
        )
        assert done.stdout.strip() in (
            SOFTWARE_VERSION, f"swarm-coordinator {SOFTWARE_VERSION}", "10001"
        )  # fmt: skip
