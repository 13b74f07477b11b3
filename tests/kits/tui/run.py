"""A made-up run, for tests of `swarm-coordinator top`."""

from __future__ import annotations

from typing import Any

from kits.tui import START
from swarm_coordinator.status.document import RunDocument

ANNA, BERT, CARL, OWN = (f"12D3KooW{name * 2}" for name in ("anna", "bert", "carl", "self"))


def peer(peer_id: str, stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "peer": peer_id, "name": None, "stage": stage, "phase": "ready", "device": "CPU, 2 cores",
        "arithmetic": "5e0f1a2b",
        "microbatches_per_second": 1.5, "reachability": "public", "silent_seconds": 0.2, **changes,
    }  # fmt: skip


def run(number: int = 0, **changes: Any) -> RunDocument:
    """The coordinator's word `number` seconds after the start."""
    told: dict[str, Any] = {
        "format": 1, "run": "my-run", "phase": "collecting", "time": START + number,
        "running": True, "pid": 1, "coordinator": OWN, "waiting_for": "", "generation": 1,
        "version": 40, "steps": 100, "step": 41, "cells_done": 12, "cells_total": 32,
        "loss": 3.25, "tokens_per_second": 2915.0, "heldout_loss": None, "checkpoint_version": 30,
        "uptime_seconds": 4000.0,
        "health": {"state": "healthy", "sentence": "Every stage has reachable peers."},
        "work": {"counted": 1280, "duplicated": 3, "cleared": 7},
        "stages": [
            {"stage": 0, "peers": 2, "microbatches_per_second": 3.0},
            {"stage": 1, "peers": 1, "microbatches_per_second": 1.5},
        ],
        "figures": {
            "bubble_share": 0.182,
            "stages": [
                {"idle_share": 0.064, "p50_seconds": 0.61, "p95_seconds": 0.92},
                {"idle_share": 0.3, "p50_seconds": 0.0874, "p95_seconds": 1.25},
            ],
            "rejected": {"not finite": 3, "other parameters": 1, "receipt: impossible": 0},
        },
        "rebalancing": {
            "rule": "throughput", "made": 2, "on_the_way": 1, "dropped": 0,
            "bytes_moved": 123_000_000,
            "decisions": [
                {"seconds_ago": 65.0, "peer": BERT,
                 "text": "…bertbert goes from stage 1 to stage 0: 12 % more for 3 s"}
            ],
            "reason": "no move would pay",
        },
        "peers": [
            peer(ANNA, 0, name="anna", offers_relay=True),
            peer(BERT, 0, flagged_times=2, flagged_reason="gradients were not finite"),
            peer(CARL, 1, name="carl \x1b[2J", silent_seconds=5.0),
        ],
        "paths": [
            {"reporter": ANNA, "remote": OWN, "kind": "direct", "rtt_seconds": 0.00061,
             "bytes_per_second": 1_250_000.0},
            {"reporter": BERT, "remote": OWN, "kind": "relayed", "relay": ANNA,
             "rtt_seconds": 0.0812, "bytes_per_second": 45_600.0},
        ],
        "admission": {
            "mode": "token", "members": 3, "valid_tokens": 1,
            "bans": [{"peer": "12D3KooWdoradora", "reason": "cheats", "banned_at": START - 60}],
        },
        "trust": {
            "audit_share": 0.02, "passed": 214, "under_way": 1, "established": 1,
            "on_probation": 1, "lost": 1, "probation_cells": 50,
            "owners": [
                {"owner": BERT, "passed": 0, "lost": 1, "made": 4, "established": False},
                {"owner": ANNA, "passed": 180, "lost": 0, "made": 31, "established": True},
            ],
            "verdicts": [
                {"step": 39, "microbatch": 3, "stage": 0, "peer": BERT, "owner": BERT,
                 "reason": "what it signed \x1b[2J is not what the microbatch gives"},
            ],
        },
        "sessions": 3,
        "sessions_ended": {"silent": 2, "goodbye": 1},
        "history": [
            {"step": step, "loss": 5.0 - 0.04 * step, "tokens": 16_384,
             "seconds": 6.0 - 0.01 * step, "written_at": START - 400 + step}
            for step in range(1, 41)
        ],
        "notes": [
            {"text": "anna (…annaanna) was admitted (CPU, 2 cores)", "written_at": START - 300},
            {"text": "dora \x1b[2J (stage 1) is gone: silent", "written_at": START - 60},
        ],
        "contributors": [
            {"peer": CARL, "name": "carl", "devices": 2, "stages": [1],
             "microbatches": 64, "tokens": 600_000},
            {"peer": ANNA, "name": "anna", "stages": [0, 1], "microbatches": 9, "tokens": 300_000},
            {"peer": BERT, "name": None, "stages": [0], "microbatches": 32, "tokens": 300_000},
        ],
    }  # fmt: skip
    return RunDocument.model_validate({**told, **changes})
