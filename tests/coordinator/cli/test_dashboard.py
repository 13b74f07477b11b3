"""`start --http` and `dashboard`, as an organiser types them."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.certificate import write_certificate
from kits.coordinator.commands import Started, edit
from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli.main import run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.status_file import read_status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("cli") / "a run")


def link(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> str:
    """As soon as the coordinator's status names the address: a second after it said it."""
    while True:
        code = run(["dashboard", str(folder.path)])
        said = capsys.readouterr()
        if code == 0:
            return said.out.strip()
        assert code == 8, said.err


@pytest.mark.process
def test_the_link_opens_the_organisers_page(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Started(folder) as started:
        url = started.until("dashboard at").split("dashboard at ")[1].split()[0]
        found = link(folder, capsys)
        assert found == f"{url}#token={folder.dashboard_token()}"
        request = urllib.request.Request(
            f"{url}api/v1/organiser/bans",
            headers={"Authorization": f"Bearer {found.split('token=')[1]}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["mode"] == "open"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}api/v1/organiser/bans", timeout=60)
    logs = "".join(path.read_text() for path in folder.log.iterdir())
    assert folder.dashboard_token() not in logs


def test_without_a_coordinator_it_says_how_to_start_one(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dashboard", str(folder.path)]) == 8
    assert "swarm-coordinator start" in capsys.readouterr().err


def test_a_run_may_have_no_pages(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Started(folder, "--http", "") as started:
        started.until("swarm1")
        assert run(["dashboard", str(folder.path)]) == 8
        assert "no dashboard" in capsys.readouterr().err
        status = read_status(folder.status)
        assert status is not None
        assert status.http.url is None


@pytest.mark.parametrize("words", ["8080", "here:there"])
def test_an_address_that_is_none_is_refused_before_anything_starts(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert run(["start", str(folder.path), "--http", words]) == 3
    assert "HOST:PORT" in capsys.readouterr().err


@pytest.fixture
def with_tls(folder: RunFolder) -> Iterator[Path]:
    """The certificate of a run that has one, beside its run.toml."""
    text = edit(
        folder,
        ('certificate = ""', 'certificate = "server.pem"'),
        ('\nkey = ""', '\nkey = "server.key"'),
    )
    yield write_certificate(folder.path, "localhost")[0]
    folder.settings.write_text(text)


@pytest.mark.process
def test_with_a_certificate_the_link_is_https(
    folder: RunFolder, with_tls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Started(folder) as started:
        url = started.until("dashboard at").split("dashboard at ")[1].split()[0]
        assert url.startswith("https://127.0.0.1:")
        assert link(folder, capsys).startswith(url)
        context = ssl.create_default_context(cafile=str(with_tls))
        named = url.replace("127.0.0.1", "localhost")
        with urllib.request.urlopen(named, timeout=60, context=context) as answer:
            assert answer.status == 200


def test_a_certificate_that_cannot_be_used_is_named_before_anything_starts(
    folder: RunFolder, with_tls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = folder.status.stat().st_mtime_ns if folder.status.exists() else None
    key = with_tls.with_suffix(".key")

    def refusal() -> str:
        assert run(["start", str(folder.path)]) == 3
        [sentence] = capsys.readouterr().err.splitlines()
        assert str(with_tls) in sentence
        assert str(key) in sentence
        return sentence

    key.unlink()
    assert "No such file" in refusal()
    key.write_text("no key")
    assert "PEM" in refusal()
    write_certificate(folder.path, "localhost", password="secret")
    assert "without a password" in refusal()
    write_certificate(folder.path, "localhost")
    other = key.read_bytes()
    write_certificate(folder.path, "localhost")
    key.write_bytes(other)
    assert "belong together" in refusal()
    assert status == (folder.status.stat().st_mtime_ns if folder.status.exists() else None)


def test_a_wrong_address_in_run_toml_is_named(
    tmp_path: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    text = edit(folder, ('listen = "127.0.0.1:0"', 'listen = "nowhere"'))
    try:
        assert run(["start", str(folder.path)]) == 3
        assert "[http] listen" in capsys.readouterr().err
    finally:
        folder.settings.write_text(text)
