"""Tables of README.md and docs/ that belong to no benchmark's own package."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages.markdown import headed_table, when_and_where


def throughput_markdown(document: Mapping[str, Any]) -> str:
    """Median throughput of each contender, and the conditions of the measurement."""
    model, ratios = document["model"], document["ratios"]
    head = (
        f"Median of {document['repetitions']} interleaved repetitions, {when_and_where(document)}, "
        f"torch {document['machine']['packages']['torch']}, everything on one machine over "
        f"loopback. Preset `{document['preset']}`: width {model['hidden_size']}, "
        f"{model['layers']} layers, vocabulary {model['vocabulary_size']}, "
        f"{document['microbatches_per_step']} microbatches of "
        f"{document['sequences_per_microbatch']} x {model['sequence_length']} tokens, float32."
    )
    rows = [
        (
            one["name"],
            f"{one['compute_processes']} x {one['threads_per_process']}",
            f"{one['tokens_per_second_median']:,.0f}",
            ratio(ratios.get(f"{name} / torch")),
            ratio(ratios.get(f"{name} / 1f1b-{one['compute_processes']}")),
        )
        for name, one in document["contenders"].items()
    ]
    columns = (
        "", "compute processes x threads", "tokens/s", "over one torch process",
        "over torch 1F1B with as many processes",
    )  # fmt: skip
    return headed_table(
        head,
        columns,
        "lrrrr",
        rows,
        "`make bench` repeats the measurement; `benchmarks/results/` holds every repetition.",
    )


def net_markdown(document: Mapping[str, Any]) -> str:
    """Links behind NAT: throughput, CPU cost, and the time to join."""
    joined, punch = document["first_receipt_seconds"], document["punch_seconds"]
    head = (
        f"{when_and_where(document)} shared by senders, relay and receivers; machines and routers "
        "are network namespaces, so the wire itself costs nothing. Medians."
    )
    parts = ("senders", "relay", "receivers")
    rows = [
        (
            name,
            f"{link['megabytes_per_second']:.0f}",
            *(f"{link[f'{part}_cpu_seconds_per_gb']:.1f}" for part in parts),
        )
        for name, link in document["links"].items()
    ]
    columns = (
        "path x concurrent links", "total MB/s", "CPU s/GB: senders", "relay", "receivers"
    )  # fmt: skip
    joins = ", ".join(
        f"{one['median']:.0f} s behind {nat} routers"
        for nat, one in joined.items()
        if nat != "preset"
    )
    return headed_table(
        head,
        columns,
        "lrrrr",
        rows,
        f"Hole punching takes {punch['median'] * 1000:.0f} ms (slowest of {len(punch['all'])}: "
        f"{max(punch['all']) * 1000:.0f} ms). Time from `swarm-client join` to the first accepted "
        f"receipt (preset `{joined['preset']}`, two volunteers that join at the same time): "
        f"{joins}.",
    )


def faults_markdown(document: Mapping[str, Any]) -> str:
    """Cost of killed, frozen and leaving peers, and of a killed coordinator."""
    killed, work = document["killed_every"], document["work_while_killing"]
    head = (
        f"{when_and_where(document)}: a real run of {document['stages']} stages with "
        f"{document['peers_per_stage']} peers each, throttled so that they share the cores. "
        "Median (maximum)."
    )
    rows = [
        (
            f"one of 8 peers killed every {killed['every_seconds']:g} s: throughput over the "
            "survivors' capacity",
            f"{killed['share']:.2f}",
            "0.90",
        ),
        ("share of gradients computed twice", f"{work['duplicated_share']:.2%}", ""),
        ("share of gradients lost with their peers", f"{work['cleared_share']:.2%}", ""),
    ]
    faults = {"kill": ("killed", "5 s"), "freeze": ("frozen", "5 s"), "leave": ("leaving", "1 s")}
    for name, (kind, aim) in faults.items():
        seconds = {
            what: _seconds([one[f"{what}_seconds"] for one in document["single_faults"][name]])
            for what in ("noticed", "recovery")
        }
        rows += [
            (f"time to detect a {kind} peer", seconds["noticed"], aim),
            ("time to the survivors' full rate", seconds["recovery"], "15 s"),
        ]
    restarts = document["coordinator_restart"]
    rows += [
        (
            "time until a killed coordinator, restarted at once, serves again",
            _seconds([one["serving_seconds"] for one in restarts]),
            "",
        ),
        ("time to the full rate", _seconds([one["recovery_seconds"] for one in restarts]), ""),
    ]
    return headed_table(
        head,
        ("", "", "aim"),
        "lrr",
        rows,
        "`make bench-faults` repeats the measurement.",
    )


def coordinator_markdown(document: Mapping[str, Any]) -> str:
    """Latency of messages from thousands of volunteers at one coordinator."""
    memory, sockets = document["memory"], document.get("sockets")
    measured = [(f"{memory['volunteers']:,} in memory", memory, memory)]
    if sockets is not None:
        measured.append((f"{sockets['volunteers']:,} over sockets", sockets, sockets["heartbeats"]))
    rows = [
        (
            name,
            f"{60 * waited['words'] / one['seconds']:,.0f}",
            f"{waited['p50_ms']:.0f} ms",
            f"{waited['p99_ms']:.0f} ms",
            f"{one['core_used']:.2f}",
        )
        for name, one, waited in measured
    ]
    return headed_table(
        f"{document['date']}, {document['stages']} stages. Time from sending a message until the "
        "coordinator has acted on it (`make bench-coordinator`):",
        ("volunteers", "messages per minute", "median", "99th percentile", "cores used"),
        "lrrrr",
        rows,
    )


def prediction_markdown(document: Mapping[str, Any]) -> str:
    """Simulated and measured seconds of a step."""
    rows = [
        (
            case["case"],
            f"{case['measured_seconds']:.2f} s",
            f"{case['predicted_seconds']:.2f} s",
            f"{100 * case['error']:+.1f} %",
        )
        for case in document["cases"]
    ]
    return headed_table(
        f"{document['date']}: the median of {document['steps']} steps, with paced workers.",
        ("", "measured", "predicted", "error"),
        "lrrr",
        rows,
    )


def growth_markdown(document: Mapping[str, Any]) -> str:
    """Cost of a simulation and of one placement decision, by number of machines."""
    hour = document["hour"]
    decisions = {one["machines"]: one["seconds_median"] for one in document["decisions"]}
    rows = [
        (
            f"{one['machines']:,}",
            f"{one['cpu_seconds']:.0f} s",
            f"{decisions[one['machines']]:.3f} s" if one["machines"] in decisions else "",
        )
        for one in document["growth"]
    ]
    return headed_table(
        f"{document['date']}: simulating one hour of {hour['machines']:,} machines in "
        f"{document['stages']} stages takes {hour['cpu_seconds']:.0f} CPU seconds.",
        ("machines", "ten simulated minutes take", "one placement decision"),
        "rrr",
        rows,
    )


def views_markdown(document: Mapping[str, Any]) -> str:
    """Start-up time and cost of the terminal views."""
    views = document["views"]
    starts = len(next(iter(views.values()))["starts"])
    rows = []
    for name, one in views.items():
        frame, whole, cpu = (
            [start[f"{key}_seconds"] for start in one["starts"]]
            for key in ("frame", "whole", "cpu")
        )
        rows.append((
            f"`{name}`",
            f"{statistics.median(frame):.2f} s ({max(frame):.2f})",
            f"{statistics.median(whole):.2f} s ({max(whole):.2f})",
            f"{statistics.median(cpu):.2f} s",
            f"{one['cpu_share']:.1%}",
            f"{one['memory_bytes'] / 2**20:.0f} MiB",
        ))  # fmt: skip
    columns = (
        "", "first frame", "first frame with data", "CPU time until then",
        "CPU share of a core while open", "memory",
    )  # fmt: skip
    return headed_table(
        f"{when_and_where(document)}, textual {document['machine']['packages']['textual']}, "
        f"{document['columns']} by {document['rows']}, beside a real run with two volunteers that "
        f"left the CPU mostly idle. Median (maximum) of {starts} starts.",
        columns,
        "lrrrrr",
        rows,
        "`make bench-views` repeats the measurement.",
    )


def yielding_markdown(document: Mapping[str, Any]) -> str:
    """Time until a volunteer pauses after its user returns."""
    keys = document["keys"]
    rows = []
    for name, what in (
        ("reason_seconds", "the status shows the pause and its reason"),
        ("work_seconds", "the last work for the run"),
    ):
        seconds = [float(key[name]) for key in keys]
        rows.append((what, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", "2.00"))
    return headed_table(
        f"{when_and_where(document)}: a key is pressed {len(keys)} times in a terminal of a "
        "machine that computes; a microbatch takes "
        f"{document['seconds_per_microbatch']:.2f} s there.",
        ("seconds after the key press", "median", "maximum", "aim"),
        "lrrr",
        rows,
        f"Watching for user activity takes {document['looking_share_of_a_core']:.2%} of a core. "
        "`make bench-yielding` repeats the measurement.",
    )


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "more than a minute"
    return f"{statistics.median(known):.1f} s ({max(known):.1f})"
