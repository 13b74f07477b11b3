"""status.json: what the coordinator says about itself, whole at any moment, once a second.

Owns the file's form and the words of `swarm-coordinator status`. Reading it needs no running
coordinator; whether one is running is told by the run folder's lock.
"""

from __future__ import annotations

import heapq
import json
import math
import operator
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio.lowlevel
import anyio.to_thread

from swarm_coordinator.core.rules.status_view import peer_rows, status_but_peers
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.status.pacing import batched, with_duty_cycle
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import StorageError
from swarm_shared.base.text import printable
from swarm_shared.base.types import PeerId
from swarm_shared.base.units import duration_text, latency_text, rate_text, size_text
from swarm_shared.protocol import LinkBytes, LinkPath

STATUS_FORMAT = 1
MAX_LINKS = 500
"""The largest ones; all of them are in the database."""
ROWS_PER_TURN = 100
"""Of a table, between two turns of everybody else: less than a millisecond of work."""
REPORTERS_PER_TURN = 25
"""The same of paths, of which some ten are known of each reporter in a large run."""
DECISIONS_SHOWN = 3
"""The newest; the others are in the run's log."""
PATHS_SHOWN = 4
MIN_SHOWN_BYTES_PER_SECOND = 500
"""Rate of a link below which it is not shown; keep-alive traffic stays below."""
"""Of one peer, to people; programs get all of them."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What the shell knows beside the core's state."""

    now: float
    """On the core's clock."""
    links: Mapping[PeerId, tuple[LinkBytes, ...]]
    paths: Mapping[PeerId, tuple[LinkPath, ...]]
    """The newest word of everybody who is attached, and the coordinator's own."""
    admission: Mapping[str, Any]
    sessions: int
    sessions_ended: Mapping[str, int]
    http: Mapping[str, Any]
    """Of the pages' process; empty where there is none."""


class StatusFile:
    """Writes the file; a failure is reported once and never ends the run."""

    def __init__(
        self, path: Path, state: RunState, addresses: tuple[str, ...], wall_clock: Clock
    ) -> None:
        self._path = path
        self._state = state
        self._addresses = addresses
        self._wall_clock = wall_clock
        self.failures = 0

    async def write(self, seen: ServerStatus, *, running: bool = True) -> float:
        """The seconds of computing that it took, here and in a thread."""
        document = {
            "format": STATUS_FORMAT,
            "running": running,
            "pid": os.getpid(),
            "time": self._wall_clock(),
            "addresses": self._addresses,
            "coordinator": self._state.coordinator.peer,
            **status_but_peers(self._state, seen.now),
            "admission": seen.admission,
            "sessions": seen.sessions,
            "sessions_ended": seen.sessions_ended,
            "http": seen.http,
        }
        document["peers"], took = await self._peer_rows(seen.now)
        try:
            took += await anyio.to_thread.run_sync(partial(_write, self._path, document, seen))
        except StorageError:
            # A full disk must not stop a run that can still train; the file just gets old.
            self.failures += 1
        return took

    async def _peer_rows(self, now: float) -> tuple[list[dict[str, object]], float]:
        """A few at a time, as they are then; one that has gone meanwhile as it was. And the
        seconds that it took."""
        peers, rows, took = list(self._state.peers.values()), [], 0.0
        for begin in range(0, len(peers), ROWS_PER_TURN):
            began = time.thread_time()
            rows += peer_rows(self._state, peers[begin : begin + ROWS_PER_TURN], now)
            took += time.thread_time() - began
            await anyio.lowlevel.checkpoint()
        return rows, took


def _write(path: Path, document: dict[str, Any], seen: ServerStatus) -> float:
    """In a thread: a large run's status takes longer than its volunteers' words should wait. The
    seconds of computing that it took."""
    began = time.thread_time()
    tables = {"paths": path_table(seen.paths), "links": link_table(seen.links)}
    write_atomically(path, encode_document({**document, **tables}).encode())
    return time.thread_time() - began


def encode_document(document: Mapping[str, Any]) -> str:
    """As JSON, whose text is the same as if it were made in one go. A thread that is inside C code
    lets no other one run: long lists are made there a few rows at a time, with rests."""
    return "{" + ", ".join(f"{json.dumps(k)}: {_value(v)}" for k, v in document.items()) + "}"


def _value(value: Any) -> str:
    if isinstance(value, list) and len(value) > ROWS_PER_TURN:
        parts = (value[at : at + ROWS_PER_TURN] for at in range(0, len(value), ROWS_PER_TURN))
        return "[" + ", ".join(_value(part)[1:-1] for part in with_duty_cycle(parts)) + "]"
    try:
        # Without an indent json runs in C.
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(without_nan(value))


def link_table(links: Mapping[PeerId, tuple[LinkBytes, ...]]) -> list[dict[str, Any]]:
    found = (
        (link.sent + link.received, reporter, link)
        for reporters in with_duty_cycle(batched(links.items(), ROWS_PER_TURN))
        for reporter, reported in reporters
        for link in reported
    )
    largest = heapq.nlargest(MAX_LINKS, found, key=operator.itemgetter(0))
    return [{"reporter": reporter, **link.model_dump()} for _, reporter, link in largest]


def path_table(paths: Mapping[PeerId, tuple[LinkPath, ...]]) -> list[dict[str, Any]]:
    return [
        {"reporter": reporter, **path.model_dump(mode="json")}
        for reporters in with_duty_cycle(batched(paths.items(), REPORTERS_PER_TURN))
        for reporter, reported in reporters
        for path in reported
    ]


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return value


def read_status(path: Path) -> dict[str, Any] | None:
    """The last status written; None when the run has never been started."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}); delete it, it is made anew"
        ) from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} holds something else than a status; delete it")
    return document


def status_lines(document: Mapping[str, Any], running: bool, now: float) -> list[str]:
    """The status for a person."""
    age_seconds = max(0.0, now - float(document["time"]))
    if running:
        state = f"running, {document['phase']}"
    else:
        state = f"not running (last seen {duration_text(age_seconds)} ago)"
        state += ", finished" if document["phase"] == "finished" else ""
    lines = [f"{document['run']}: {state}"]
    if running and document.get("waiting_for"):
        lines.append(f"  waiting for: {document['waiting_for']}")
    loss = document.get("loss")
    step = f"  step {document['version']} of {document['steps']} applied"
    lines.append(step + (f", loss {loss:.4f}" if loss is not None else ""))
    if running and document.get("tokens_per_second"):
        lines.append(f"  {document['tokens_per_second']:,.0f} tokens/s in the last step")
    if document.get("heldout_loss") is not None:
        lines.append(f"  held-out loss {document['heldout_loss']:.4f}")
    checkpoint = document.get("checkpoint_version")
    lines.append(f"  checkpoint: {'none yet' if checkpoint is None else f'step {checkpoint}'}")
    if "admission" in document:
        lines += admission_lines(document["admission"])
    if running:
        for row in document.get("stages", []):
            rate = row.get("microbatches_per_second")
            made = f", {rate:.2f} microbatches/s" if rate else ""
            lines.append(f"  stage {row['stage']}: {row['peers']} peer(s){made}")
            lines[-1] += _stage_timing(row["stage"], document)
        lines += figure_lines(document)
        lines += rebalancing_lines(document.get("rebalancing"))
        for peer in document.get("peers", []):
            lines += _peer_lines(peer, document)
    return [printable(line) for line in lines]


def admission_lines(admission: Mapping[str, Any]) -> list[str]:
    bans = admission["bans"]
    parts = [f"{admission['members']} member(s)"]
    if admission["mode"] == "token":
        parts.append(f"{admission['valid_tokens']} valid token(s)")
    parts.append(f"{len(bans)} banned")
    lines = [f"  admission: {admission['mode']}, {', '.join(parts)}"]
    for ban in bans:
        lines.append(f"    banned {ban['peer']}" + (f": {ban['reason']}" if ban["reason"] else ""))
    return lines


def figure_lines(document: Mapping[str, Any]) -> list[str]:
    """How much of the stages' time is idle, and what did not count."""
    figures = document.get("figures", {})
    lines = []
    if figures.get("bubble_share") is not None:
        lines.append(f"  bubble: the stages are idle for {figures['bubble_share']:.0%} of the time")
    rejected = [f"{count} {why}" for why, count in figures.get("rejected", {}).items() if count]
    if rejected:
        lines.append(f"  rejected since the start: {', '.join(rejected)}")
    return lines


def _stage_timing(stage: int, document: Mapping[str, Any]) -> str:
    told = document.get("figures", {}).get("stages", [])
    row = told[stage] if stage < len(told) else {}
    text = ""
    if row.get("p50_seconds") is not None:
        text += f", a microbatch takes {row['p50_seconds']:.3g} s (p95 {row['p95_seconds']:.3g} s)"
    if row.get("idle_share") is not None:
        text += f", idle {row['idle_share']:.0%}"
    return text


def rebalancing_lines(told: Mapping[str, Any] | None) -> list[str]:
    """Each decision in a sentence: why this peer, what it gains, what it costs; and why no more."""
    if told is None or told["rule"] == "none":
        return []
    lines = [
        f"  rebalancing: {told['made']} move(s) made, {told['on_the_way']} on the way, "
        f"{told['dropped']} given up, {size_text(told['bytes_moved'])} of state for them"
    ]
    for decision in told["decisions"][-DECISIONS_SHOWN:]:
        lines.append(f"    {duration_text(decision['seconds_ago'])} ago: {decision['text']}")
    if told["reason"]:
        lines.append(f"    nobody moves now: {told['reason']}")
    return lines


def _peer_lines(peer: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    stage = "no stage" if peer["stage"] is None else f"stage {peer['stage']}"
    phase = "paused" if peer.get("paused") else peer["phase"]
    lines = [
        f"    {_name_of(peer['peer'], document)}: {stage}, {phase}, "
        f"{peer['microbatches_per_second']:.2f} microbatches/s, {peer['device']}"
    ]
    paths = [p for p in document.get("paths", []) if p["reporter"] == peer["peer"]]
    paths.sort(key=lambda path: (-path["bytes_per_second"], path["remote"]))
    if paths:
        shown = [_path_text(path, document) for path in paths[:PATHS_SHOWN]]
        more = len(paths) - len(shown)
        lines.append(f"      links: {'; '.join(shown)}{f'; {more} more' if more else ''}")
    return lines


def _path_text(path: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Like "bert relayed via …kR3xTq9a, 84 ms, 1.2 MB/s"."""
    kind = path["kind"]
    if path.get("relay") is not None:
        kind += f" via {_name_of(path['relay'], document)}"
    text = f"{_name_of(path['remote'], document)} {kind}, {latency_text(path['rtt_seconds'])}"
    rate = path["bytes_per_second"]
    return f"{text}, {rate_text(rate)}" if rate >= MIN_SHOWN_BYTES_PER_SECOND else text


def _name_of(peer: str, document: Mapping[str, Any]) -> str:
    """The end of its ID, by which `ban` knows it, and the name that it gives itself."""
    if peer == document.get("coordinator"):
        return "the coordinator"
    names = {p["peer"]: p.get("name") for p in document.get("peers", [])}
    name, short = names.get(peer), f"…{peer[-8:]}"
    return f"{name} ({short})" if name else short
