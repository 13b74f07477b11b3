"""The five figures that README.md quotes, made from result files of the benchmarks.

`benchmarks.pages` writes them; `tests/test_readme_figures.py` checks that each depends on its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MARK = "headline figures"
SOURCES = ("agreement", "faults", "throughput-small", "wan", "coordinator")
"""Stems of the result files, in the order of `headline_markdown`'s parameters."""

Document = Mapping[str, Any]


def headline_markdown(
    agreement: Document,
    faults: Document,
    throughput: Document,
    wan: Document,
    coordinator: Document,
) -> str:
    rows = (
        ("Losses compared with one process", _exactness(agreement)),
        ("Peers killed or frozen", _faults(faults)),
        ("Throughput over one torch process, on loopback", _loopback(throughput)),
        ("Tokens/s on emulated home links", _home_links(wan)),
        ("Load of one coordinator", _coordinator(coordinator)),
    )
    return "\n".join(
        ["| | measured |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    )


def _exactness(document: Document) -> str:
    exact = [one for one in document["codecs"].values() if one["average"] == "exact"]
    equal = sum(one["farthest"] == 0.0 for one in exact)
    return (
        f"equal to the bit in all {document['steps']} steps, in {equal} of {len(exact)} runs with "
        f"exact sums ({document['stages']} stages x {document['peers_per_stage']} peers, with and "
        "without codecs)"
    )


def _faults(document: Document) -> str:
    killed, single = document["killed_every"], document["single_faults"]
    peers = document["stages"] * document["peers_per_stage"]

    def longest(seconds: list[float]) -> str:
        return f"{max(seconds):.1f} s ({len(seconds)})"

    noticed = {kind: [one["noticed_seconds"] for one in single[kind]] for kind in single}
    recovered = {kind: [one["recovery_seconds"] for one in single[kind]] for kind in single}
    return (
        f"{100 * killed['share']:.0f} % of the survivors' rate while one of {peers} is killed "
        f"every {killed['every_seconds']:g} s; longest time (number of faults) until a killed "
        f"peer is noticed {longest(noticed['kill'])} and the full rate is back "
        f"{longest(recovered['kill'] + killed['recovery_seconds'])}, for a frozen peer "
        f"{longest(noticed['freeze'])} and {longest(recovered['freeze'])}"
    )


def _loopback(document: Document) -> str:
    parts = [
        f"{document['ratios'][f'{name} / torch']:.2f} ({one['name'].removeprefix('swarm, ')})"
        for name, one in document["contenders"].items()
        if name.startswith("swarm")
    ]
    cores = document["machine"]["cpu_count"]
    return f"{', '.join(parts)}; {cores} cores, the aim is 0.90"


def _home_links(document: Document) -> str:
    def gain(pairs: Iterable[tuple[str, str]]) -> str:
        pairs = tuple(pairs)
        ratios = [
            _rate(mix, over) / _rate(mix, base)
            for mix in document["mixes"].values()
            for over, base in pairs
            if {over, base} <= mix["contenders"].keys()
        ]
        return f"{100 * (min(ratios) - 1):.0f} to {100 * (max(ratios) - 1):.0f} % more"

    return (
        f"{gain([('swarm-int8', 'swarm')])} with int8 than with float32, "
        f"{gain([('swarm-late', 'swarm'), ('swarm-late-int8', 'swarm-int8')])} with staleness 1 "
        f"than without, {gain([('swarm-late-int8', 'swarm')])} with both; "
        f"{len(document['mixes'])} mixes of links"
    )


def _rate(mix: Document, contender: str) -> float:
    return float(mix["contenders"][contender]["tokens_per_second_median"])


def _coordinator(document: Document) -> str:
    memory = document["memory"]
    due = memory["heartbeats_since_due"]["p99_ms"]
    leases = memory["of_each_kind"]["LeaseResolved"]["p99_ms"]
    return (
        f"{memory['volunteers']:,} simulated volunteers in memory, one run of "
        f"{memory['seconds']:.0f} s: {memory['core_used']:.2f} of a core; 99 % of the messages are "
        f"processed within {memory['p99_ms']:.0f} ms, of the lease results within {leases:.0f} ms, "
        f"of the heartbeats within {due:.0f} ms of when they were due"
    )
