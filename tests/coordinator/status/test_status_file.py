"""The status document: its text and its encoding."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from kits.swarm_world.event_bench import Bench
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.status import status_file
from swarm_coordinator.status.document import PathRow, PeerRow, StatusDocument
from swarm_coordinator.status.status_file import (
    ROWS_PER_TURN,
    encode_document,
    read_status,
    write_status,
)
from swarm_coordinator.status.text import PATHS_SHOWN, status_lines
from swarm_shared.base.errors import StorageError

ANNA, BERT, CARL, OWN = (f"12D3KooW{name * 11}" for name in ("anna", "bert", "carl", "self"))


def path(remote: str, **changes: object) -> dict[str, Any]:
    return {
        "reporter": ANNA, "remote": remote, "kind": "direct", "relay": None, "rtt_seconds": 0.001,
        "bytes_per_second": 0.0, **changes,
    }  # fmt: skip


def document(*paths: dict[str, Any], **changes: object) -> StatusDocument:
    peers = [
        {
            "peer": peer, "name": name, "stage": 0, "phase": "ready", "device": "CPU",
            "microbatches_per_second": 1.0,
        }
        for peer, name in ((ANNA, "anna"), (BERT, None))
    ]  # fmt: skip
    return StatusDocument.model_validate({
        "run": "a run", "phase": "collecting", "version": 1, "steps": 2, "coordinator": OWN,
        "peers": peers, "paths": list(paths), "admission": {"members": 2}, **changes,
    })  # fmt: skip


def test_an_evaluation_is_two_lines_and_its_text_one_of_them() -> None:
    evaluation = {"version": 50, "heldout_loss": 2.5, "tokens": 64, "sample": "def f():\n  x" * 99}
    lines = shown(evaluation=evaluation)
    assert "  held-out loss 2.5000 after step 50" in lines
    [text] = [line for line in lines if "the model writes: def f(): x" in line]
    assert len(text) < 230
    nothing = {"version": 50, "heldout_loss": None, "tokens": 64, "sample": ""}
    assert "  held-out loss – after step 50" in shown(evaluation=nothing)
    ended = shown(evaluation=evaluation, heldout_loss=2.25)
    assert [line for line in ended if "held-out" in line] == ["  held-out loss 2.2500"]


def shown(*paths: dict[str, Any], **changes: object) -> list[str]:
    return status_lines(document(*paths, running=True, **changes), 0.0)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (path(OWN), "the coordinator direct, 1 ms"),
        (
            path(BERT, kind="punched", rtt_seconds=0.0341, bytes_per_second=12.34e6),
            "…bertbert punched, 34.1 ms, 12.3 MB/s",
        ),
        (
            path(CARL, kind="relayed", relay=OWN, rtt_seconds=0.2, bytes_per_second=45_600.0),
            "…carlcarl relayed via the coordinator, 200 ms, 45.6 kB/s",
        ),
        (
            path(CARL, kind="relayed", relay=BERT, rtt_seconds=0.00061, bytes_per_second=100.0),
            "…carlcarl relayed via …bertbert, 0.61 ms",
        ),
    ],
)
def test_a_path_is_its_kind_its_round_trip_and_its_rate(one: dict[str, Any], text: str) -> None:
    assert f"      links: {text}" in shown(one)


def test_the_busiest_paths_of_a_peer_are_shown_and_the_others_counted() -> None:
    paths = [path(f"{n}" * 8, bytes_per_second=n * 1e6) for n in range(1, PATHS_SHOWN + 3)]
    [line] = [line for line in shown(*paths) if "links:" in line]
    assert line.index("…66666666 direct, 1 ms, 6 MB/s") < line.index("…55555555")
    assert line.endswith("; 2 more")
    assert "…11111111" not in line


def test_a_peer_is_named_with_the_end_of_its_id_by_which_it_can_be_banned() -> None:
    lines = shown()
    assert any(line.startswith("    anna (…annaanna): stage 0, ready") for line in lines)
    assert any(line.startswith("    …bertbert: stage 0, ready") for line in lines)
    assert not any("links:" in line for line in lines)


def test_unlike_classes_of_arithmetic_in_a_stage_are_a_line() -> None:
    def lines(*classes: tuple[int | None, str]) -> list[str]:
        peers = [
            {"peer": f"{n}" * 8, "stage": stage, "phase": "ready", "device": "CPU",
             "arithmetic": name}
            for n, (stage, name) in enumerate(classes)
        ]  # fmt: skip
        return shown(peers=peers, stages=[{"stage": 0, "peers": 1}, {"stage": 1, "peers": 4}])

    one, other, third, fourth = (f"{n}" * 8 for n in "abcd")
    alike = lines((0, one), (1, other), (1, other), (1, ""), (None, third))
    assert not [line for line in alike if "classes" in line]
    [first] = [line for line in alike if "…00000000" in line]
    assert first.endswith(f", CPU, class {one}")
    [without] = [line for line in alike if "…33333333" in line]
    assert without.endswith(", CPU")
    unlike = lines((0, one), (1, one), (1, other), (1, other), (1, ""))
    row = unlike.index(next(line for line in unlike if line.startswith("  stage 1: 4 peer(s)")))
    assert unlike[row + 1] == (
        f"    2 classes of arithmetic among 3 peers of stage 1: {other} (2), {one} (1)"
    )
    [many] = [
        line for line in lines((0, one), (0, other), (0, third), (0, fourth)) if "classes" in line
    ]
    assert many.endswith(f"{third} (1) and 1 more")


def test_admission_is_its_mode_its_members_and_its_bans() -> None:
    assert "  admission: open, 2 member(s), 0 banned" in shown()
    bans = [
        {"peer": CARL, "reason": "cheats\x1b[2J", "banned_at": 0.0},
        {"peer": BERT, "reason": "", "banned_at": 0.0},
    ]
    admission = {"mode": "token", "members": 7, "valid_tokens": 2, "bans": bans}
    lines = shown(admission=admission)
    assert "  admission: token, 7 member(s), 2 valid token(s), 2 banned" in lines
    assert f"    banned {CARL}: cheats\N{REPLACEMENT CHARACTER}[2J" in lines
    assert f"    banned {BERT}" in lines


def rebalancing(**changes: object) -> dict[str, Any]:
    return {
        "rule": "throughput", "period_seconds": 60.0, "decided": 3, "made": 2, "dropped": 1,
        "bytes_moved": 4_000_000, "on_the_way": 1, "reason": "", "decisions": [], **changes,
    }  # fmt: skip


def test_each_decision_to_move_a_peer_is_a_sentence() -> None:
    decisions = [{"seconds_ago": 90.0, "peer": ANNA, "text": "anna moves, and why"}]
    lines = shown(rebalancing=rebalancing(decisions=decisions))
    assert (
        "  rebalancing: 2 move(s) made, 1 in progress, 1 given up, 4 MB of state transferred"
        in lines
    )
    assert "    90 s ago: anna moves, and why" in lines


def test_why_no_peer_moves_is_explained() -> None:
    lines = shown(rebalancing=rebalancing(reason="it is not worth the downloads"))
    assert "    no peer moves now: it is not worth the downloads" in lines


def test_without_rebalancing_no_moves_are_shown() -> None:
    assert not [line for line in shown(rebalancing=rebalancing(rule="none")) if "move" in line]


def test_long_tables_are_encoded_in_parts_as_they_would_be_whole() -> None:
    rows = tuple(
        PeerRow(peer=f"peer {n}", name='\N{SNOWMAN} "a"', microbatches_per_second=n / 3)
        for n in range(3 * ROWS_PER_TURN + 7)
    )
    paths = (PathRow(ANNA, BERT, "direct", None, math.nan, math.inf),) * (2 * ROWS_PER_TURN)
    whole = document(loss=math.nan).model_copy(update={"peers": rows, "paths": paths})
    encoded = json.loads(encode_document(whole))
    assert encoded == json.loads(whole.model_dump_json())
    assert encoded["loss"] is None
    assert encoded["paths"][0]["rtt_seconds"] is None
    assert json.loads(encode_document(document())) == document().model_dump(mode="json")


async def test_the_time_of_everything_that_is_shown_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer pauses by it: a hundred thousand owners take a tenth of a second to be counted."""
    made = status_file.document_without_peers

    def slow(run: RunState, now: float) -> StatusDocument:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return made(run, now)

    monkeypatch.setattr(status_file, "document_without_peers", slow)
    assert await write_status(tmp_path / "status.json", Bench().run, 0.0, {}, {}) >= 0.2


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    path.write_bytes(encode_document(document()))
    assert read_status(path) == document()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a status of this version"),
        ('{"run": 5}', "is not a status of this version"),
    ],
)
def test_a_damaged_status_is_refused_in_a_sentence(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "status.json"
    path.write_text(content)
    with pytest.raises(StorageError, match=rf"status\.json {words}"):
        read_status(path)
