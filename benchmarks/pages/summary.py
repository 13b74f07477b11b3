"""The summary table of docs/benchmarks.md, from the result files of all benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.pages.markdown import markdown_table

PREEMPTIONS = (
    "p3", "g4dn", "a100x1-east1b", "v100x1-east1c", "skypilot us-east-2b", "full-64-node",
)  # fmt: skip
"""Scenarios of `benchmarks.simulator.rebalancing` that replay recorded preemptions of rented
machines."""

Document = Mapping[str, Any]


def summary_markdown(
    throughput: Document, wan: Document, all_reduce: Document, faults: Document,
    coordinator: Document, rebalancing: Document, prediction: Document, agreement: Document,
    quality: Document, wire: Document, copies: Document, yielding: Document,
) -> str:  # fmt: skip
    """One row per measured quantity: aim, figure, and the section with the details."""
    over, small = throughput["ratios"], quality["pairs"]["int8 / int8"]
    boundaries = [one["over_least"] for one in wire["boundaries"]]
    copied = sum(hop["memory"] for hop in copies["hops"].values()) / copies["payload_bytes"]
    errors = [100 * abs(case["error"]) for case in prediction["cases"]]
    exact = [one["farthest"] for one in agreement["codecs"].values() if one["average"] == "exact"]
    yields = [key["work_seconds"] for key in yielding["keys"]]
    rows = [
        ("loopback, four compute processes: over one torch process", "0.90",
         _span([over["swarm-2x2 / torch"], over["swarm-4x1 / torch"]]), _LOOPBACK),
        ("the same over torch 1F1B; with two processes", "1.0",
         f"{_span([over['swarm-2x2 / 1f1b-4'], over['swarm-4x1 / 1f1b-4']])}; "
         f"{over['swarm-2x1 / 1f1b-2']:.2f}", _LOOPBACK),
        *_wan_rows(wan),
        ("all-reduce: bound over measured time", "0.70",
         _span(row["of_bound"] for row in all_reduce["rows"] if row["sums"] != "equally much"),
         "[Averaging](#averaging)"),
        *_fault_rows(faults),
        (f"{coordinator['memory']['volunteers']:,} volunteers at one coordinator: message latency, "
         "99th percentile", "50 ms", f"{coordinator['memory']['p99_ms']:.0f} ms",
         "[Coordinator](#a-coordinator-of-many-volunteers)"),
        ("replayed preemptions: throughput over the best placement's", "99 %",
         _percent([row["share_of_best"] for row in rebalancing["rows"]
                   if row["scenario"] in PREEMPTIONS and row["rule"] == "throughput"
                   and row["period_seconds"] == 60]), "[simulator](simulator.md)"),
        ("step time predicted by the simulator: error", "",
         f"{min(errors):.1f} to {max(errors):.1f} %", "[simulator](simulator.md)"),
        ("exact sums: relative difference of a step's loss from one process", "1e-4",
         f"{max(exact):.0e}" if max(exact) else "0",
         "[Agreement](#agreement-with-one-process)"),
        ("int8 between stages: gap of the held-out loss (noise over the seeds)", "",
         f"{small['gap_mean']:+.4f} ({quality['noise']:.4f})",
         "[Codecs](#codecs-between-stages)"),
        ("bytes on the wire over activations and gradients", "", _span(boundaries, 4),
         "[Bytes](#bytes-on-the-wire)"),
        ("copies in memory per byte of an activation", "", f"{copied:.2f}",
         "[tensor path](tensor-path.md)"),
        ("time until a volunteer yields to its returning user", "2 s",
         f"{max(yields):.1f} s at most", "[preferences](preferences.md)"),
    ]  # fmt: skip
    return "\n".join(markdown_table(("measured", "aim", "figure", "details"), "lrll", rows))


_LOOPBACK = "[Loopback](#one-machine-over-loopback)"
_WAN = "[Home links](#training-over-home-links)"
_WAN_AIMS = dict.fromkeys(("heterogeneous-32", "heterogeneous-32-slow"), "0.75; int8 0.90")


def _wan_rows(wan: Document) -> list[tuple[str, str, str, str]]:
    mixes = wan["mixes"]

    def over_trainer(mix: str, aim: str, title: str) -> tuple[str, str, str, str]:
        rates = {
            name: one["tokens_per_second_median"] for name, one in mixes[mix]["contenders"].items()
        }
        prompt, late = (
            rates[name] / rates["expert-fp16"] for name in ("swarm", "swarm-late")
        )  # fmt: skip
        return (title, aim, f"{prompt:.2f}; with staleness {late:.2f}", _WAN)

    def of_bound(contender: str, names: Iterable[str]) -> list[float]:
        return [mixes[name]["contenders"][contender]["of_bound"] for name in names]

    usual = [name for name, mix in mixes.items() if "training" not in mix]
    uniform = [name for name in usual if name != "heterogeneous"]
    mixed = [*of_bound("swarm", ["heterogeneous"]), *of_bound("swarm-late", ["heterogeneous"])]
    return [
        over_trainer("cable", "3", "20 Mbit/s, 80 ms (cable): over a trainer in the middle, fp16"),
        over_trainer("fibre", "1.7", "100 Mbit/s (fibre): the same"),
        ("uniform fleets: throughput over the bound of float32", "0.85",
         f"{_span(of_bound('swarm', uniform))}; with staleness "
         f"{_span(of_bound('swarm-late', uniform))}", _WAN),
        ("heterogeneous fleet: the same", "0.85",
         f"{mixed[0]:.2f}; with staleness {mixed[1]:.2f}, and int8 "
         f"{of_bound('swarm-late-int8', ['heterogeneous'])[0]:.2f}", _WAN),
        *((f"mix {name}: the same", _WAN_AIMS.get(name, ""),
           f"{of_bound('swarm', [name])[0]:.2f}; int8 {of_bound('swarm-int8', [name])[0]:.2f}",
           _WAN) for name in mixes if name not in usual),
    ]  # fmt: skip


def _fault_rows(faults: Document) -> list[tuple[str, str, str, str]]:
    dead = [*faults["single_faults"]["kill"], *faults["single_faults"]["freeze"]]
    noticed = [one["noticed_seconds"] for one in dead]
    recovered = [one["recovery_seconds"] for one in dead]
    link = "[Faults](#faults)"
    return [
        ("one of 8 peers killed every 30 s: throughput over the survivors' capacity", "0.90",
         f"{faults['killed_every']['share']:.2f}", link),
        ("time to detect a dead peer", "5 s", f"{min(noticed):.1f} to {max(noticed):.1f} s", link),
        ("time to the survivors' full rate", "15 s", f"{max(recovered):.1f} s at most", link),
    ]  # fmt: skip


def _span(values: Iterable[float], digits: int = 2) -> str:
    known = list(values)
    least, largest = f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"
    return least if least == largest else f"{least} to {largest}"


def _percent(values: Iterable[float]) -> str:
    known = [100 * value for value in values]
    return f"{min(known):.1f} to {max(known):.1f} %"
