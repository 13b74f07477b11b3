"""token, allow, ban and unban as an organiser types them, whether a coordinator runs or not."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest
import trio

from kits.coordinator.commands import Started, complains, said
from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli.main import run
from swarm_coordinator.durability.run_files import load_identity, read_admission_book
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.types import PeerId
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity

ANNA = Identity.from_seed(b"a" * 32).peer_id


def seen(folder: RunFolder, *peers: PeerId) -> None:
    """These have taken part."""
    store = SqliteStore.open(folder.database)

    async def main() -> None:
        for peer in peers:
            await store.write(PeerSeen(peer))

    trio.run(main)
    store.close()


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["token", "make", "RUN"], "No such command"),
        (["token", "create"], "Missing argument"),
        (["token", "create", "/nonexistent"], "does not exist"),
        (["token", "create", "RUN", "--uses", "0"], "is not in the range"),
        (["token", "create", "RUN", "--uses", "many"], "is not a valid integer"),
        (["token", "create", "RUN", "--expires", "soon"], "'soon' is not a duration"),
        (["token", "create", "RUN", "--expires", "7"], "like 90s, 30m, 12h, 7d or 2w"),
        (["token", "create", "RUN", "--expires", "0d"], "is not a duration"),
        (["token", "create", "RUN", "--expires", "-3d"], "is not a duration"),
        (["token", "create", "RUN", "--expires", "9" * 400 + "d"], "is not a duration"),
        (["token", "create", "RUN", "--expires", "٣d"], "is not a duration"),
        (["token", "create", "RUN", "--note", "x" * 201], "--note has at most 200 characters"),
        (["token", "revoke", "RUN"], "Missing argument"),
        (["token", "revoke", "RUN", "first"], "is not a valid integer"),
        (["token", "revoke", "RUN", "1"], "there is no token 1"),
        (["token", "revoke", "RUN", "9" * 30], "there is no token 9999"),
        (["allow", "add", "RUN", "anna"], "'anna' is neither a peer ID"),
        (["allow", "add", "RUN", ""], "is neither a peer ID"),
        (["allow", "add", "RUN", "OWN"], "is this run's own coordinator"),
        (["allow", "remove", "RUN", "ANNA"], "is not on the list"),
        (["ban", "RUN"], "Missing argument"),
        (["ban", "RUN", "ANNA", "--reason", "x" * 201], "--reason has at most 200 characters"),
        (["ban", "RUN", "ANN"], "is neither a peer ID"),
        (["ban", "RUN", "12D3KooWxyz0OIl"], "is neither a peer ID"),
        (["ban", "RUN", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"], "is neither a peer ID"),
        (["ban", "RUN", "OWN"], "is this run's own coordinator"),
        (["unban", "RUN", "ANNA"], "is not banned"),
    ],
)
def test_wrong_words_are_one_sentence_each(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    own = load_identity(folder).peer_id
    names = {"RUN": str(folder.path), "ANNA": ANNA, "OWN": own, "ANN": ANNA[:-1]}
    code, sentence = complains(capsys, *(names.get(word, word) for word in words))
    assert (code, reason in sentence) == (2, True), sentence


@pytest.mark.parametrize("words", [[], ["token"], ["allow"]])
def test_who_names_no_command_sees_which_there_are(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(words) == 2
    shown = capsys.readouterr().err
    assert "Commands:" in shown
    assert "error" not in shown


@pytest.mark.parametrize(
    ("damage", "words", "code", "reason"),
    [
        (lambda f: f.database.write_bytes(b"x" * 9000), ["token", "list"], 7, "is damaged"),
        (lambda f: f.database.write_bytes(b"x" * 9000), ["ban", ANNA], 7, "is damaged"),
        (lambda f: f.database.touch(), ["token", "list"], 7, "has not been started"),
        (lambda f: f.organiser_key.unlink(), ["token", "create"], 7, "lost its organiser.key"),
        (
            lambda f: f.settings.write_text("[admission]\nmode = 'closed'"),
            ["ban", ANNA], 3, "'closed'",
        ),
        (
            lambda f: f.settings.write_text(
                f.settings.read_text().replace("announce = []", 'announce = ["here"]')
            ),
            ["token", "create"], 3, "[network] announce",
        ),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_one_sentence(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], damage, words, code, reason
) -> None:
    damage(folder)
    at = 2 if words[0] in ("token", "allow") else 1
    seen_code, sentence = complains(capsys, *words[:at], folder.path, *words[at:])
    assert (seen_code, reason in sentence) == (code, True), sentence


# ---------------------------------------------------------------- tokens


def test_a_token_is_made_listed_and_revoked_without_a_coordinator(
    token_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--uses", "1", "--expires", "7d", "--note", "for Anna"]
    out = said(capsys, "token", "create", token_run.path, *words)
    first, invite_line = out.splitlines()
    assert re.fullmatch(
        r"token 1: admits one peer, until 20\d\d-\d\d-\d\d \d\d:\d\d; this invite carries it and "
        r"is not shown again:", first
    )  # fmt: skip
    invite = Invite.decode(invite_line)
    assert invite.token is not None
    assert invite.addresses == (f"/ip4/127.0.0.1/tcp/{token_run.remembered_port()}",)

    made = json.loads(said(capsys, "token", "create", token_run.path, "--json"))
    assert (made["token"], made["uses"], made["expires_at"]) == (2, None, None)
    assert Invite.decode(made["invite"]).token == made["secret"] != invite.token

    listed = said(capsys, "token", "list", token_run.path)
    assert re.search(r"1 +valid +1 of 1 +0 +20.* for Anna", listed)
    assert re.search(r"2 +valid +any number +0 +20.* never", listed)
    assert said(capsys, "token", "revoke", token_run.path, 1) == "token 1 is revoked\n"
    assert said(capsys, "token", "revoke", token_run.path, 1) == "token 1 is revoked already\n"
    documents = json.loads(said(capsys, "token", "list", token_run.path, "--json"))
    assert [(d["token"], d["state"], d["uses_left"], d["note"]) for d in documents] == [
        (1, "revoked", 1, "for Anna"), (2, "valid", None, ""),
    ]  # fmt: skip
    assert 7 * 86_400 - 60 < documents[0]["expires_at"] - time.time() <= 7 * 86_400
    kept = b"".join(f.read_bytes() for f in token_run.path.iterdir() if f.is_file())
    for secret in (invite.token, made["secret"]):
        assert secret.encode() not in kept


def test_no_token_yet_says_how_to_make_one(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "token create" in said(capsys, "token", "list", folder.path)
    assert json.loads(said(capsys, "token", "list", folder.path, "--json")) == []
    assert "allow add" in said(capsys, "allow", "list", folder.path)
    assert json.loads(said(capsys, "allow", "list", folder.path, "--json")) == []


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["token", "create", "RUN"], 'mode is "open", so no token is required'),
        (["allow", "add", "RUN", ANNA], 'mode is "open", so the list is not used'),
        (["ban", "RUN", ANNA], "its owner can come back with a new identity"),
    ],
)
def test_what_does_not_do_what_one_may_think_says_so(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], words: list[str], note: str
) -> None:
    assert run([str(folder.path) if word == "RUN" else word for word in words]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("note: ")
    assert note in captured.err
    assert "note" not in captured.out


def test_a_note_cannot_steer_the_organisers_terminal(
    token_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "token", "create", token_run.path, "--note", "x\x1b[2Jy")
    assert "\x1b" not in said(capsys, "token", "list", token_run.path)


def test_the_standing_invite_stays_the_same_until_its_token_is_revoked(
    token_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    first = said(capsys, "invite", token_run.path)
    assert said(capsys, "invite", token_run.path) == first
    assert Invite.decode(first.strip()).token == token_run.admission_token()
    # Written down with the next start, or with the next decision.
    assert read_admission_book(token_run).tokens == {}


def test_an_organiser_who_makes_tokens_of_his_own_has_no_standing_invite(
    token_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "token", "create", token_run.path, "--uses", "1")
    code, sentence = complains(capsys, "invite", token_run.path)
    assert code == 2
    assert "swarm-coordinator token create" in sentence


# ---------------------------------------------------------------- list and bans


def test_the_list_is_kept_without_a_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a run", admission__mode="allow-list")
    bert = Identity.generate().peer_id
    for peer in (ANNA, bert):
        assert f"{peer} is on the list" in said(capsys, "allow", "add", folder.path, peer)
    assert f"{ANNA} is on the list already" in said(capsys, "allow", "add", folder.path, ANNA)
    assert said(capsys, "allow", "list", folder.path).split() == [ANNA, bert]
    # The end of an ID is enough for one that is known.
    assert f"{bert} is off the list" in said(capsys, "allow", "remove", folder.path, bert[-8:])
    [row] = json.loads(said(capsys, "allow", "list", folder.path, "--json"))
    assert row["peer"] == ANNA


def test_a_peer_is_banned_and_unbanned_by_the_end_of_its_id_as_status_shows_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    seen(folder, ANNA, Identity.generate().peer_id)
    out = said(capsys, "ban", folder.path, f"…{ANNA[-8:]}", "--reason", "it cheats")
    assert out == (
        f"banned {ANNA}; no coordinator is running, so it takes effect at the next start\n"
    )
    assert f"{ANNA} is banned already" in said(
        capsys, "ban", folder.path, ANNA, "--reason", "it cheats"
    )
    assert read_admission_book(folder).bans[ANNA].reason == "it cheats"
    assert f"{ANNA} is not banned any more" in said(capsys, "unban", folder.path, ANNA[-6:])
    assert read_admission_book(folder).bans == {}


def test_the_end_of_several_ids_names_them_all(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_coordinator.cli.admission.SHORTEST_SUFFIX", 1)
    crowd = [Identity.generate().peer_id for _ in range(60)]
    ends: dict[str, list[PeerId]] = {}
    for peer in crowd:
        ends.setdefault(peer[-1], []).append(peer)
    end, alike = max(ends.items(), key=lambda item: len(item[1]))
    assert len(alike) > 1
    seen(folder, *crowd)
    code, sentence = complains(capsys, "ban", folder.path, end)
    assert code == 2
    assert all(peer in sentence for peer in alike)
    assert read_admission_book(folder).bans == {}


def test_the_status_of_a_run_that_is_down_knows_of_later_decisions(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Started(folder) as started:
        started.invite()
    said(capsys, "ban", folder.path, ANNA, "--reason", "it cheats")
    out = said(capsys, "status", folder.path)
    assert "not running" in out
    assert "admission: open, 0 member(s), 1 banned" in out
    assert f"banned {ANNA}: it cheats" in out
    document = json.loads(said(capsys, "status", folder.path, "--json"))
    assert [ban["peer"] for ban in document["admission"]["bans"]] == [ANNA]


@pytest.mark.process
def test_all_of_it_works_beside_a_running_coordinator(
    token_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Started(token_run) as started:
        started.invite()
        standing = said(capsys, "invite", token_run.path).strip()
        assert standing in "".join(started.lines)
        out = said(capsys, "token", "create", token_run.path, "--uses", "1")
        assert Invite.decode(out.split()[-1]).addresses == Invite.decode(standing).addresses
        assert re.search(r"\b2 +valid +1 of 1", said(capsys, "token", "list", token_run.path))
        assert said(capsys, "ban", token_run.path, ANNA) == (
            f"banned {ANNA}; 0 volunteers were notified\n"
        )
        assert said(capsys, "ban", token_run.path, ANNA) == f"{ANNA} is banned already\n"
        assert "admission: token, 0 member(s), 2 valid token(s), 1 banned" in wait_for_status(
            capsys, token_run, "1 banned"
        )
        code, sentence = complains(capsys, "token", "revoke", token_run.path, 9)
        assert (code, "there is no token 9" in sentence) == (2, True)
        assert said(capsys, "token", "revoke", token_run.path, 1) == "token 1 is revoked\n"
        code, sentence = complains(capsys, "invite", token_run.path)
        assert (code, "token create" in sentence) == (2, True)
    assert not token_run.socket.exists()
    with Started(token_run) as started:
        started.until("make invites with `swarm-coordinator token create")
    book = read_admission_book(token_run)
    assert book.bans.keys() == {ANNA}


def wait_for_status(capsys: pytest.CaptureFixture[str], folder: RunFolder, words: str) -> str:
    """status.json is written once a second."""
    ends = time.monotonic() + 10.0
    while words not in (out := said(capsys, "status", folder.path)):
        assert time.monotonic() < ends, out
        time.sleep(0.1)
    return out


def accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


@pytest.mark.process
def test_a_coordinator_that_was_killed_leaves_nothing_that_a_command_trips_over(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Started(folder) as started:
        while not folder.socket.exists():
            time.sleep(0.02)
        started.process.kill()
        started.process.wait()
        # A process that it had just started has the socket, too, until it runs its own program.
        while accepts(folder.socket):
            time.sleep(0.02)
        assert "no coordinator is running" in said(capsys, "ban", folder.path, ANNA)
    with Started(folder) as started:
        started.invite()
        assert said(capsys, "unban", folder.path, ANNA).startswith(f"{ANNA} is not banned any more")
