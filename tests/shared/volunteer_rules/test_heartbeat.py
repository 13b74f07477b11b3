"""Heartbeats: only what has changed, a bounded share of it, and eventually everything."""

from __future__ import annotations

from dataclasses import replace

from swarm_shared.base.types import PeerId
from swarm_shared.protocol import Heartbeat, LinkBytes, LinkPath, PathKind, encode
from swarm_shared.volunteer_rules.heartbeat import (
    LINK_REPORTS_PER_SECOND,
    MAX_REPORTED_AT_ONCE,
    HeartbeatDelta,
    HeartbeatSnapshot,
    alike,
)

SMALL_RUN, LARGE_RUN = 4, 10_000


def link(remote: str, sent: int) -> LinkBytes:
    return LinkBytes(remote=PeerId(remote), protocol="/a/1", sent=sent, received=0)


def path(remote: str, kind: PathKind = PathKind.DIRECT, rtt: float = 0.05) -> LinkPath:
    return LinkPath(remote=PeerId(remote), kind=kind, rtt_seconds=rtt, bytes_per_second=1e5)


def present(
    links: tuple[LinkBytes, ...] = (), paths: tuple[LinkPath, ...] = ()
) -> HeartbeatSnapshot:
    return HeartbeatSnapshot(
        microbatches_per_second=1.25, queued=0, up_bytes_per_second=2e6, links=links, paths=paths,
        paused=False, computed=0, busy_seconds=0.0,
    )  # fmt: skip


def test_the_first_heartbeat_of_a_session_has_everything() -> None:
    now = present((link("b", 1), link("c", 2)), (path("b"), path("c")))
    said = HeartbeatDelta(1.0).heartbeat(now, SMALL_RUN)
    assert (said.microbatches_per_second, said.up_bytes_per_second) == (1.25, 2e6)
    assert (said.changed_links, said.changed_paths) == (now.links, now.paths)


def test_a_heartbeat_in_which_nothing_has_changed_has_a_few_dozen_bytes() -> None:
    telling = HeartbeatDelta(1.0)
    now = present((link("b", 1),), (path("b"),))
    telling.heartbeat(now, SMALL_RUN)
    assert encode(telling.heartbeat(now, SMALL_RUN)) == b'{"kind":"heartbeat","busy_seconds":0.0}'


def test_only_what_has_changed_is_reported_again_and_what_has_gone_is_reported_once() -> None:
    telling = HeartbeatDelta(1.0)
    links, paths = (link("b", 1), link("c", 2)), (path("b"), path("c"))
    telling.heartbeat(present(links, paths), SMALL_RUN)
    now = present((links[0], link("c", 9)), (path("b", PathKind.PUNCHED),))
    said = telling.heartbeat(now, SMALL_RUN)
    assert (said.changed_links, said.changed_paths) == ((link("c", 9),), now.paths)
    assert said.lost_paths == ("c",)
    assert telling.heartbeat(now, SMALL_RUN).lost_paths == ()
    back = telling.heartbeat(present(now.links, (*now.paths, paths[1])), SMALL_RUN)
    assert back.changed_paths == (paths[1],), "a way that comes back is a new one"


def test_a_rate_and_an_uplink_are_reported_when_they_are_other_than_before() -> None:
    telling, now = HeartbeatDelta(1.0), present()
    telling.heartbeat(now, SMALL_RUN)
    free = replace(now, up_bytes_per_second=0.0, microbatches_per_second=1.2501)
    said = telling.heartbeat(free, SMALL_RUN)
    assert said.up_bytes_per_second == 0.0, "that the line is free again is news"
    assert said.microbatches_per_second is None, "nobody could tell the difference"
    assert '"up_bytes_per_second":0.0' in encode(said).decode()
    parsed = Heartbeat.model_validate_json(encode(said))
    assert parsed == said


def test_a_path_is_reported_again_when_a_person_would_learn_something() -> None:
    told = path("b")
    assert alike(told, path("b", rtt=0.0535))
    assert not alike(told, path("b", rtt=0.06))
    assert not alike(told, path("b", PathKind.RELAYED))
    assert alike(path("b", rtt=0.0001), path("b", rtt=0.001)), "over a short way it is never alike"


def test_in_a_large_run_each_reports_little_and_in_turn_everything() -> None:
    heartbeat_seconds = 2.2
    telling = HeartbeatDelta(heartbeat_seconds)
    remotes = [f"peer-{number}" for number in range(20)]
    said: list[str] = []
    beats = 200
    for beat in range(beats):
        links = tuple(link(remote, beat + 1) for remote in remotes)
        ways = tuple(path(remote, rtt=0.01 * (1 + beat % 7)) for remote in remotes)
        heartbeat = telling.heartbeat(present(links, ways), LARGE_RUN)
        assert len(heartbeat.changed_links) <= 1
        assert len(heartbeat.changed_paths) <= 1
        said += [one.remote for one in heartbeat.changed_links]
    assert len(said) <= 1 + beats * heartbeat_seconds * LINK_REPORTS_PER_SECOND / LARGE_RUN
    assert said[:20] == remotes, "those that were never told come first"
    assert said[20:40] == remotes, "and then those that were told longest ago"


def test_a_class_of_arithmetic_is_reported_once_a_session_and_when_it_has_changed() -> None:
    telling, none = HeartbeatDelta(1.0), present()
    classes = [None, "5e0f1a2b", "5e0f1a2b", None, "5e0f1a2b", "00000000"]
    said = [
        telling.heartbeat(replace(none, arithmetic=one), SMALL_RUN).arithmetic for one in classes
    ]
    assert said == [None, "5e0f1a2b", None, None, None, "00000000"]
    again = HeartbeatDelta(1.0).heartbeat(replace(none, arithmetic="00000000"), SMALL_RUN)
    assert again.arithmetic == "00000000", "a new session begins with nothing"
    without = len(encode(again.model_copy(update={"arithmetic": None})))
    assert len(encode(again)) - without == 24


def test_a_changed_route_is_reported_before_how_fast_the_others_are() -> None:
    telling = HeartbeatDelta(2.2)
    before = tuple(path(f"peer-{number}") for number in range(5))
    for _ in range(40):
        telling.heartbeat(present(paths=before), LARGE_RUN)
    after = (*(path(one.remote, rtt=0.2) for one in before[:4]), path("peer-4", PathKind.PUNCHED))
    said = [telling.heartbeat(present(paths=after), LARGE_RUN) for _ in range(40)]
    told = [one for heartbeat in said for one in heartbeat.changed_paths]
    assert told[0] == after[4]
    assert set(told) == set(after)


def test_one_heartbeat_is_never_large() -> None:
    links = tuple(link(f"peer-{number}", 1) for number in range(3 * MAX_REPORTED_AT_ONCE))
    telling, said = HeartbeatDelta(1.0), []
    for _ in range(4):
        said.append(len(telling.heartbeat(present(links), 1).changed_links))
    assert said == [MAX_REPORTED_AT_ONCE, MAX_REPORTED_AT_ONCE, MAX_REPORTED_AT_ONCE, 0]
