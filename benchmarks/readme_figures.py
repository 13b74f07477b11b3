"""Puts measured tables into pages of docs/, each between its two marks.

.venv/bin/python -m benchmarks.readme_figures benchmarks/results/throughput-small.json
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.bottlenecks import bottlenecks_markdown
from benchmarks.codec_figures import (
    agreement_markdown,
    averages_markdown,
    codecs_markdown,
    quality_markdown,
)
from benchmarks.copies.page import copies_markdown
from benchmarks.lateness import lateness_markdown
from benchmarks.rebalancing import table
from benchmarks.wan.averaging import all_reduce_markdown
from benchmarks.wan.page import ratios_markdown, times
from benchmarks.wan.timeline.page import timeline_markdown
from benchmarks.wire_bytes.page import wire_bytes_markdown

ROOT = Path(__file__).parents[1]


@click.command()
@click.argument("results", nargs=-1, type=click.Path(path_type=Path, exists=True))
def main(results: tuple[Path, ...]) -> None:
    """Rewrite the figures that RESULTS are about, files that benchmarks wrote."""
    for result in results:
        document = json.loads(result.read_text())
        places = [(page, mark, make) for name, page, mark, make in PLACES if name == result.stem]
        for page, mark, markdown in places or [("docs/benchmarks.md", "figures", figures_markdown)]:
            put(ROOT / page, mark, markdown(document))


def put(page: Path, mark: str, block: str) -> None:
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    changed, count = re.subn(
        f"{begin}.*{end}", lambda _: f"{begin}\n{block}\n{end}", page.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise click.ClickException(f"{page} has no marks {begin} and {end}")
    page.write_text(changed)


def figures_markdown(document: Mapping[str, Any]) -> str:
    """A table with the medians, and under what circumstances they were measured."""
    machine, model = document["machine"], document["model"]
    ratios: Mapping[str, float] = document["ratios"]
    lines = [
        f"Median of {document['repetitions']} interleaved repetitions, "
        f"{document['measured_at'][:10]}: {machine['cpu_count']} cores "
        f"({machine['processor']}), torch {machine['packages']['torch']}, everything on one "
        f"machine over loopback. Preset `{document['preset']}`: width {model['hidden_size']}, "
        f"{model['layers']} layers, vocabulary {model['vocabulary_size']}, "
        f"{document['microbatches_per_step']} microbatches of "
        f"{document['sequences_per_microbatch']} x {model['sequence_length']} tokens, float32.",
        "",
        "| | compute processes x threads | tokens/s | over one torch process | "
        "over torch 1F1B with as many processes |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in document["contenders"].items():
        processes = one["compute_processes"]
        lines.append(
            f"| {one['name']} | {processes} x {one['threads_per_process']} "
            f"| {one['tokens_per_second_median']:,.0f} "
            f"| {_ratio(ratios.get(f'{name} / torch'))} "
            f"| {_ratio(ratios.get(f'{name} / 1f1b-{processes}'))} |"
        )
    lines += [
        "",
        "`make bench` measures again; every single repetition is in `benchmarks/results/`.",
    ]
    return "\n".join(lines)


def net_markdown(document: Mapping[str, Any]) -> str:
    """Links behind NAT: rates, what they cost, and how long joining takes."""
    machine, joined = document["machine"], document["first_receipt_seconds"]
    lines = [
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}) "
        "that senders, relay and receivers share; machines and routers are network namespaces, "
        "so the wire costs nothing. Medians.",
        "",
        "| links x at once | MB/s together | CPU s/GB: senders | relay | receivers |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, link in document["links"].items():
        cpu = (link[f"{part}_cpu_seconds_per_gb"] for part in ("senders", "relay", "receivers"))
        cells = " | ".join(f"{seconds:.1f}" for seconds in cpu)
        lines.append(f"| {name} | {link['megabytes_per_second']:.0f} | {cells} |")
    joins = ", ".join(
        f"{one['median']:.0f} s behind {nat} routers"
        for nat, one in joined.items()
        if nat != "preset"
    )
    punch = document["punch_seconds"]
    lines += [
        "",
        f"A hole is punched in {punch['median'] * 1000:.0f} ms "
        f"(slowest of {len(punch['all'])}: {max(punch['all']) * 1000:.0f} ms). From "
        f"`swarm-client join` to the first accepted receipt (preset `{joined['preset']}`, two "
        f"volunteers that join at once): {joins}.",
    ]
    return "\n".join(lines)


def faults_markdown(document: Mapping[str, Any]) -> str:
    """What killed, frozen and leaving peers and a killed coordinator cost."""
    machine, killed = document["machine"], document["killed_every"]
    work, single = document["work_while_killing"], document["single_faults"]
    lines = [
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}): a "
        f"real run of {document['stages']} stages with {document['peers_per_stage']} peers each, "
        "slowed down so that they share the cores. Median (longest).",
        "",
        "| | | aim |",
        "|---|---:|---:|",
        f"| one of 8 killed every {killed['every_seconds']:g} s: throughput over the survivors' "
        f"| {killed['share']:.2f} | 0.90 |",
        f"| of all gradients: computed twice | {work['duplicated_share']:.2%} | |",
        f"| of all gradients: lost with their peers | {work['cleared_share']:.2%} | |",
    ]
    noticed = {"kill": ("killed", "5 s"), "freeze": ("frozen", "5 s"), "leave": ("leaving", "1 s")}
    for name, (word, aim) in noticed.items():
        cells = (
            _seconds([one[f"{what}_seconds"] for one in single[name]])
            for what in ("noticed", "recovery")
        )
        noticed_text, recovered_text = cells
        lines.append(f"| a {word} peer is noticed after | {noticed_text} | {aim} |")
        lines.append(f"| and the survivors' full rate is back after | {recovered_text} | 15 s |")
    restarts = _seconds([one["recovery_seconds"] for one in document["coordinator_restart"]])
    serving = _seconds([one["serving_seconds"] for one in document["coordinator_restart"]])
    lines += [
        f"| a killed coordinator that is started at once serves after | {serving} | |",
        f"| and the full rate is back after | {restarts} | |",
        "",
        "`make bench-faults` measures again.",
    ]
    return "\n".join(lines)


def coordinator_markdown(document: Mapping[str, Any]) -> str:
    """Words of thousands of volunteers at one coordinator."""
    memory, sockets = document["memory"], document.get("sockets")
    rows = [(f"{memory['volunteers']:,} in memory", memory, memory)]
    if sockets is not None:
        rows.append((f"{sockets['volunteers']:,} over sockets", sockets, sockets["heartbeats"]))
    lines = [
        f"{document['date']}, {document['stages']} stages. How long a word waits until the "
        "coordinator has acted on it (`make bench-coordinator`):",
        "",
        "| volunteers | words in a minute | median | 99 of 100 | of a core |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one, waited in rows:
        lines.append(
            f"| {name} | {60 * waited['words'] / one['seconds']:,.0f} | {waited['p50_ms']:.0f} ms "
            f"| {waited['p99_ms']:.0f} ms | {one['core_used']:.2f} |"
        )
    return "\n".join(lines)


def rebalancing_markdown(document: Mapping[str, Any]) -> str:
    """Rules of moving peers, over recordings and generated churn."""
    head = (
        f"{document['date']}, {document['seeds']} seeds of {document['hours']:g} h each. Share of "
        "the best placement's throughput in percent (moves an hour, gigabytes an hour):"
    )
    return "\n".join([head, "", *table(document["rows"])])


def prediction_markdown(document: Mapping[str, Any]) -> str:
    """Simulated and real seconds of a step."""
    lines = [
        f"{document['date']}: the median step of {document['steps']}, with workers that are paced.",
        "",
        "| | real | predicted | error |",
        "|---|---:|---:|---:|",
    ]
    for case in document["cases"]:
        lines.append(
            f"| {case['case']} | {case['measured_seconds']:.2f} s "
            f"| {case['predicted_seconds']:.2f} s | {100 * case['error']:+.1f} % |"
        )
    return "\n".join(lines)


def growth_markdown(document: Mapping[str, Any]) -> str:
    """What the simulator and a decision cost."""
    hour = document["hour"]
    lines = [
        f"{document['date']}: an hour of {hour['machines']:,} machines in {document['stages']} "
        f"stages takes {hour['cpu_seconds']:.0f} processor seconds.",
        "",
        "| machines | ten minutes take | one placement decision |",
        "|---:|---:|---:|",
    ]
    decisions = {one["machines"]: one["seconds_median"] for one in document["decisions"]}
    for one in document["growth"]:
        decision = decisions.get(one["machines"])
        cell = "" if decision is None else f"{decision:.3f} s"
        lines.append(f"| {one['machines']:,} | {one['cpu_seconds']:.0f} s | {cell} |")
    return "\n".join(lines)


def wan_markdown(document: Mapping[str, Any]) -> str:
    """Training over emulated lines: a table per mix of machines."""
    machine, model = document["machine"], document["model"]
    measured = document["steps"] - document["warmup_steps"] - document["cooldown_steps"]
    lines = [
        f"{machine['cpu_count']} cores ({machine['processor']}); medians of runs of {measured} "
        f"measured steps. {document['stages']} stages, width {model['hidden_size']}, "
        f"{model['layers']} layers, {document['microbatches_per_step']} microbatches a step, "
        "float32; an ordinary machine computes a stage's microbatch in "
        f"{document['microbatch_seconds']:g} s.",
    ]
    for mix in document["mixes"].values():
        counts = [len(one["tokens_per_second_all"]) for one in mix["contenders"].values()]
        runs = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
        when = ", ".join(
            f"{one['measured_at'][:10]} {one['measured_at'][11:16]} (load {one['load_before']:.1f} "
            "before)"
            for one in times(mix)
        )
        lines += [
            "",
            f"**{mix['name']}**, {when}, {runs} run{'s' if max(counts) > 1 else ''} each: "
            f"{_fleet(mix)}.",
            "",
            *_wan_table(document, mix),
        ]
    return "\n".join(lines)


def _fleet(mix: Mapping[str, Any]) -> str:
    counts = Counter(one["link"] for one in mix["machines"])
    text = ", ".join(f"{count} with {link}" for link, count in counts.items())
    found = "; ".join(
        f"{one['machine']}: {one['up_mbit']:.1f} up ({one['asked']['up_mbit']:g}), "
        f"{one['down_mbit']:.1f} down ({one['asked']['down_mbit']:g}) Mbit/s, RTT "
        f"{one['rtt_ms']:.1f} ms ({one['asked']['rtt_ms']:g})"
        for one in mix["checks"]
    )
    return f"{text}. Lines as measured (as asked): {found}" if found else text


def _wan_table(document: Mapping[str, Any], mix: Mapping[str, Any]) -> list[str]:
    ours = mix["contenders"].get("swarm")
    lines = [
        "| | tokens/s (spread) | of the bound | of the computing | bytes over the least | "
        "swarm over it | busy cores |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in mix["contenders"].items():
        rate, rates = one["tokens_per_second_median"], one["tokens_per_second_all"]
        over = one["bytes_over_minimum"]
        cells = (
            document["contenders"][name],
            f"{rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            f"{one['of_bound']:.2f}",
            f"{one['compute_share']:.2f}",
            _ratio(over),
            _ratio(None if ours is None else ours["tokens_per_second_median"] / rate),
            f"{one['busy_cores_median']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| *the bound* | {mix['bound_tokens_per_second']:,.0f} | 1 | | 1 | | |")
    return lines


def _seconds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "more than a minute"
    return f"{statistics.median(known):.1f} s ({max(known):.1f})"


def views_markdown(document: Mapping[str, Any]) -> str:
    """How soon the terminal views are there, and what they take while they are open."""
    machine, views = document["machine"], document["views"]
    starts = len(next(iter(views.values()))["starts"])
    lines = [
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}), "
        f"textual {machine['packages']['textual']}, {document['columns']} by {document['rows']}, "
        "beside a real run with two volunteers that left the processor mostly free. Median "
        f"(slowest) of {starts} starts.",
        "",
        "| | first frame | with what there is to say | processor until then "
        "| processor while open, of a core | memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, one in views.items():
        frame, whole, cpu = (
            [start[f"{key}_seconds"] for start in one["starts"]]
            for key in ("frame", "whole", "cpu")
        )
        lines.append(
            f"| `{name}` | {statistics.median(frame):.2f} s ({max(frame):.2f}) "
            f"| {statistics.median(whole):.2f} s ({max(whole):.2f}) "
            f"| {statistics.median(cpu):.2f} s | {one['cpu_share']:.1%} "
            f"| {one['memory_bytes'] / 2**20:.0f} MiB |"
        )
    lines += ["", "`make bench-views` measures again."]
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def yielding_markdown(document: Mapping[str, Any]) -> str:
    """How soon somebody who comes back has the machine again."""
    machine, keys = document["machine"], document["keys"]
    lines = [
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}): a "
        f"key in a terminal of a machine that computes, {len(keys)} times; a microbatch takes "
        f"{document['seconds_per_microbatch']:.2f} s there.",
        "",
        "| seconds after the key | median | longest | aim |",
        "|---|---:|---:|---:|",
    ]
    for name, what in (
        ("reason_seconds", "the status says paused, and why"),
        ("work_seconds", "the last work for the run"),
    ):
        seconds = [float(key[name]) for key in keys]
        lines.append(f"| {what} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | 2.00 |")
    share = document["looking_share_of_a_core"]
    lines += [
        "",
        f"Looking for somebody takes {share:.2%} of a core. `make bench-yielding` measures again.",
    ]
    return "\n".join(lines)


PLACES: Sequence[tuple[str, str, str, Callable[[Mapping[str, Any]], str]]] = (
    ("net", "docs/benchmarks.md", "net figures", net_markdown),
    ("faults", "docs/benchmarks.md", "fault figures", faults_markdown),
    ("coordinator", "docs/benchmarks.md", "coordinator figures", coordinator_markdown),
    ("rebalancing", "docs/simulator.md", "rebalancing figures", rebalancing_markdown),
    ("prediction", "docs/simulator.md", "prediction figures", prediction_markdown),
    ("views", "docs/top.md", "view figures", views_markdown),
    ("copies", "docs/tensor-path.md", "copies figures", copies_markdown),
    ("wire-bytes", "docs/benchmarks.md", "wire figures", wire_bytes_markdown),
    ("wan", "docs/benchmarks.md", "wan ratios", ratios_markdown),
    ("wan", "docs/benchmarks.md", "wan figures", wan_markdown),
    ("wan-timeline", "docs/benchmarks.md", "timeline figures", timeline_markdown),
    ("all-reduce", "docs/benchmarks.md", "all-reduce figures", all_reduce_markdown),
    ("codecs", "docs/benchmarks.md", "codec figures", codecs_markdown),
    ("codecs", "docs/benchmarks.md", "average figures", averages_markdown),
    ("agreement", "docs/benchmarks.md", "agreement figures", agreement_markdown),
    ("quality", "docs/benchmarks.md", "quality figures", quality_markdown),
    ("lateness", "docs/benchmarks.md", "lateness figures", lateness_markdown),
    ("bottlenecks", "docs/benchmarks.md", "bottleneck figures", bottlenecks_markdown),
    ("simulator", "docs/simulator.md", "growth figures", growth_markdown),
    ("yielding", "docs/preferences.md", "yielding figures", yielding_markdown),
)
"""A file's name, the page, its marks, and what makes the block between them."""


if __name__ == "__main__":
    main()
