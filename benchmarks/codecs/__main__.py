"""Time, size and error of the codecs between stages and in averaging: `make bench-codecs`.

Each codec in turn encodes one hidden state of a model with a billion parameters (preset `1b`) into
memory and decodes it, as do hivemind's quantisations where hivemind is installed (their
size includes their protobuf, as sent). It uses one thread, because a volunteer's other cores
compute. The medians give the link rate below which a codec pays against the next larger one: the
saved transfer time exceeds the codec's own time.

The error is that of normal noise with a few outlier channels, as hidden states have (Dettmers et
al. 2022, arXiv 2208.07339). `benchmarks/loss/quality.py` measures the cost of errors in loss,
`benchmarks/codecs/averages.py` the codecs of the all-reduce.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.codecs.averages import (
    RoundTrip,
    gradients,
    hivemind_averages,
    hivemind_round_trip,
    our_averages,
    round_trip,
)
from benchmarks.outcome import conclude, out_option, result_head
from benchmarks.pages.markdown import headed_table
from swarm_shared.codecs.choice import MEGABIT_BYTES, Cost
from swarm_shared.codecs.tensors import decode, encode
from swarm_shared.run.codec_sizes import GRADIENT_CODECS, CodecName, encoded_bytes
from swarm_shared.run.model_config import preset

PACKAGES = ("torch", "numpy", "hivemind")
PRESET = "1b"
REPETITIONS = 15
OUTLIER_CHANNELS = 6
OUTLIER_SIZE = 20.0


@click.command()
@click.option("--repetitions", type=click.IntRange(1), default=REPETITIONS, show_default=True)
@out_option("codecs.json")
def main(repetitions: int, out: Path) -> None:
    """Measure time, size and error of every codec, and the link rate below which each pays."""
    # This must come first: hivemind's server forks.
    hivemind = hivemind_module()
    document = measure(repetitions, hivemind)
    conclude(out, document, lambda it: f"{codecs_markdown(it)}\n\n{averages_markdown(it)}")


def measure(repetitions: int, hivemind: Any | None) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    vector = gradients()
    try:
        tensor_BTD = hidden_state()
        turns: dict[str, RoundTrip] = {
            name: our_codec(name, tensor_BTD) for name in GRADIENT_CODECS
        }
        of_averages = our_averages(vector)
        if hivemind is not None:
            for name in ("FLOAT16", "UNIFORM_8BIT", "QUANTILE_8BIT"):
                turns[f"hivemind {name}"] = hivemind_round_trip(hivemind, name, [tensor_BTD])
            of_averages |= hivemind_averages(hivemind, vector)
        codecs = taken(turns, tensor_BTD, repetitions)
        averages = taken(of_averages, vector, repetitions)
    finally:
        torch.set_num_threads(before)
    ours: dict[str, Cost] = {name: cost_of(codecs[name]) for name in GRADIENT_CODECS}
    return {
        **result_head(PACKAGES),
        "load_before": load,
        "preset": PRESET,
        "shape": list(tensor_BTD.shape),
        "repetitions": repetitions,
        "codecs": codecs,
        "pays_below_bytes_per_second": pays_below(ours),
        "average_elements": vector.numel(),
        "averages": averages,
    }


def taken(turns: dict[str, RoundTrip], tensor: Tensor, repetitions: int) -> dict[str, Any]:
    """Measure the codecs in turn: bytes, seconds, and the error of the decoded tensor."""
    seen: dict[str, list[tuple[int, float, float]]] = {name: [] for name in turns}
    errors: dict[str, float] = {}
    for _ in range(repetitions + 1):
        for name, turn in turns.items():
            nbytes, encoding, decoding, back = turn()
            seen[name].append((nbytes, encoding, decoding))
            errors[name] = float((back - tensor).norm() / tensor.norm())
    return {
        # The first round warms up caches.
        name: {
            "bytes": times[0][0],
            "encode_seconds_median": statistics.median(one[1] for one in times[1:]),
            "decode_seconds_median": statistics.median(one[2] for one in times[1:]),
            "encode_seconds_all": [one[1] for one in times[1:]],
            "decode_seconds_all": [one[2] for one in times[1:]],
            "relative_error": errors[name],
        }
        for name, times in seen.items()
    }


def pays_below(costs: dict[str, Cost]) -> dict[str, float | None]:
    """Return for each codec the link rate at which it takes as long as the next larger one.

    Above that rate the larger codec is faster. None: faster at any rate; 0: at no rate. The largest
    codec has no larger one and is omitted.
    """
    by_size = sorted(costs, key=lambda name: costs[name].nbytes, reverse=True)
    rates: dict[str, float | None] = {}
    for larger, smaller in pairwise(by_size):
        saved = costs[larger].nbytes - costs[smaller].nbytes
        extra = costs[smaller].seconds - costs[larger].seconds
        rates[smaller] = None if extra <= 0 else saved / extra
    return rates


def cost_of(codec: dict[str, Any]) -> Cost:
    seconds = codec["encode_seconds_median"] + codec["decode_seconds_median"]
    return Cost(codec["bytes"], seconds)


def hidden_state() -> Tensor:
    chosen = preset(PRESET)
    model = chosen.model
    generator = torch.Generator().manual_seed(1)
    shape = (chosen.sequences_per_microbatch, model.sequence_length, model.hidden_size)
    tensor_BTD = torch.randn(shape, generator=generator)
    tensor_BTD[..., :: model.hidden_size // OUTLIER_CHANNELS] *= OUTLIER_SIZE
    return tensor_BTD


def our_codec(name: CodecName, tensor_BTD: Tensor) -> RoundTrip:
    slot = memoryview(bytearray(encoded_bytes(name, tensor_BTD.numel(), "float32")))
    return round_trip(
        lambda: encode(name, tensor_BTD, slot),
        lambda nbytes: decode(name, slot[:nbytes], tensor_BTD.shape, "float32"),
        lambda nbytes, back: (nbytes, back),
    )


def hivemind_module() -> Any | None:
    """Return the module of hivemind's parts; None where it is not installed."""
    try:
        from benchmarks.wan.contenders import hivemind_parts
    except ImportError:
        return None
    return hivemind_parts


def rate_text(bytes_per_second: float | None) -> str:
    return "any" if bytes_per_second is None else f"{bytes_per_second / MEGABIT_BYTES:,.0f} Mbit/s"


def rows_of(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return table rows: codec, compression, milliseconds, error, and the rate of `pays_below`."""
    rates = document["pays_below_bytes_per_second"]
    return [
        (*row, rate_text(rates[row[0]]) if row[0] in rates else "")
        for row in average_rows_of(document["codecs"])
    ]


def average_rows_of(codecs: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows without the rate, which does not apply to codecs of averages."""
    whole = codecs["none"]["bytes"]
    return [
        (
            name,
            f"{whole / one['bytes']:.2f}",
            f"{1000 * one['encode_seconds_median']:.1f}",
            f"{1000 * one['decode_seconds_median']:.1f}",
            f"{one['relative_error']:.2%}",
        )
        for name, one in codecs.items()
    ]


HEAD: Sequence[str] = (
    "codec", "compression", "encode, ms", "decode, ms", "error", "pays below"
)  # fmt: skip


def codecs_markdown(document: Mapping[str, Any]) -> str:
    """Time, size and error of each codec, the project's and hivemind's."""
    machine = document["machine"]
    shape = " x ".join(f"{size:,}" for size in document["shape"])
    head = (
        f"{document['measured_at'][:10]}, one thread of {machine['processor']}, load "
        f"{document['load_before']:.1f} before, torch {machine['packages']['torch']}; medians of "
        f"{document['repetitions']}. A hidden state of preset `{document['preset']}` ({shape}, "
        "float32)."
    )
    return headed_table(head, HEAD, "lrrrrr", rows_of(document))


def averages_markdown(document: Mapping[str, Any]) -> str:
    """Time, size and error of each codec of the all-reduce."""
    head = (
        f"The same run; {document['average_elements']:,} elements in pieces of 1 MiB, one thread."
    )
    rows = average_rows_of(document["averages"])
    return headed_table(head, HEAD[:-1], "lrrrr", rows)


if __name__ == "__main__":
    main()
