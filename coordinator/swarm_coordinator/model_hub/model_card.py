"""The card of an exported model: README.md with the front matter that model hubs read.

It says what the run's manifest and database say, and nothing that a volunteer has written: peers
are counted and not named. The run's own name is escaped.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from swarm_shared.base.text import printable
from swarm_shared.base.types import RunId
from swarm_shared.run.manifest import Manifest

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|<>~&$:@/])")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run has reached with the exported checkpoint."""

    run_id: RunId
    manifest_sha256: str
    """Of the run folder's manifest.json, which the organiser has signed."""
    steps: int
    """Optimizer steps in the exported parameters."""
    training_loss: float | None
    """Of the last of these steps, in nats a token; None if it is not known."""
    heldout_loss: float | None
    """None if these parameters were not evaluated."""
    volunteers: int | None
    """Devices whose work counted in these steps; None if it is not known."""


def model_card(
    manifest: Manifest, figures: RunFigures, dtype: str, place: str, *, as_adapters: bool = False
) -> str:
    """Return README.md. `dtype` is that of the exported parameters, and `place` what loads them: a
    name on the hub, or a folder. `as_adapters`: the export has adapters alone."""
    name = escaped(manifest.name)
    return "\n".join(
        (
            *_front_matter(manifest, "peft" if as_adapters else "transformers"),
            f"# {name}",
            "",
            _summary(manifest, figures, as_adapters=as_adapters),
            "",
            "| | |",
            "|---|---|",
            *(f"| {label} | {value} |" for label, value in _rows(manifest, figures, dtype)),
            "",
            *(_loading_adapters(manifest, place) if as_adapters else _loading(dtype, place)),
            *_VERIFYING,
        )
    )


def escaped(text: str) -> str:
    """Return text that Markdown and HTML show as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", printable(text))


def _front_matter(manifest: Manifest, library: str) -> list[str]:
    """Return YAML; strings are quoted as JSON, which is YAML as well."""
    lines = [
        "---",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags: [swarmtrain, distributed-training, volunteer-computing]",
    ]
    if manifest.base_model:
        lines.append(f"base_model: {json.dumps(manifest.base_model)}")
    return [*lines, "---", ""]


def _summary(manifest: Manifest, figures: RunFigures, *, as_adapters: bool) -> str:
    of_volunteers = ""
    if figures.volunteers is not None:
        devices = "1 device" if figures.volunteers == 1 else f"{figures.volunteers:,} devices"
        of_volunteers = f" across {devices} of volunteers"
    base = escaped(manifest.base_model) or "another model"
    if as_adapters:
        return f"Low-rank adapters of {base}, trained by swarmtrain{of_volunteers}."
    origin = f", continued from {base}" if manifest.initial or manifest.base_model else ""
    return f"A language model trained by swarmtrain{of_volunteers}{origin}."


def _rows(manifest: Manifest, figures: RunFigures, dtype: str) -> list[tuple[str, str]]:
    model, training, codecs = manifest.model, manifest.training, manifest.codecs
    tokens = figures.steps * manifest.tokens_per_step
    train, heldout = (
        sum(shard.tokens for shard in manifest.data.split(split)) for split in ("train", "heldout")
    )
    rows = [
        ("run", f"`{figures.run_id}`"),
        ("manifest, SHA-256", f"`{figures.manifest_sha256}`"),
        ("steps", f"{figures.steps:,} of {training.steps:,}"),
        ("tokens trained", f"{tokens:,}"),
    ]
    for label, loss in (
        ("training loss of the last step", figures.training_loss),
        ("held-out loss", figures.heldout_loss),
    ):
        if loss is not None and math.isfinite(loss):
            rows.append((label, f"{loss:.4f} nats a token"))
    if figures.volunteers is not None:
        rows.append(("devices that contributed", f"{figures.volunteers:,}"))
    rows += [
        (
            "data",
            f"{train:,} tokens to train on and {heldout:,} held out, tokenizer "
            f"{manifest.data.tokenizer}",
        ),
        (
            "model",
            f"{model.layers} layers, width {model.hidden_size}, {model.sequence_length:,} tokens "
            "of context",
        ),
        *_adapter_rows(manifest),
        ("stages of the pipeline", str(manifest.stage_count)),
        (
            "codecs",
            f"activations {codecs.activation}, gradients {codecs.gradient}, averages "
            f"{codecs.average}",
        ),
        ("staleness", str(training.staleness)),
        ("computed in", training.dtype),
        ("parameters stored in", dtype),
    ]
    return rows


def _adapter_rows(manifest: Manifest) -> list[tuple[str, str]]:
    adapters = manifest.model.adapters
    if not manifest.model.has_adapters:
        return []
    targets = ", ".join(f"`{target}`" for target in adapters.targets)
    return [("adapters", f"rank {adapters.rank}, alpha {adapters.alpha:g}, of {targets}")]


def _loading_adapters(manifest: Manifest, place: str) -> list[str]:
    return [
        "## Use",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{manifest.base_model or "BASE"}")',
        f'model = PeftModel.from_pretrained(base, "{place}")',
        "```",
        "",
    ]


def _loading(dtype: str, place: str) -> list[str]:
    return [
        "## Use",
        "",
        "```python",
        "from transformers import pipeline",
        "",
        f'generate = pipeline("text-generation", model="{place}", dtype="{dtype}")',
        'print(generate("Once upon a time", max_new_tokens=50)[0]["generated_text"])',
        "```",
        "",
    ]


_VERIFYING = (
    "## Verification",
    "",
    "The organiser has signed a manifest of everything that decides what the run computes: sizes, "
    "seed, data, optimizer. The run's id follows from it.",
    "",
    "- `swarm-coordinator verify RUN_DIR` checks the run's folder: manifest, data, history and "
    "checkpoints.",
    "- `swarm-client verify-ledger FILE` recomputes who contributed what from the ledger that "
    "`swarm-coordinator ledger export` writes.",
    "- `swarm-coordinator reference RUN_DIR` trains the same manifest in one process and compares "
    "the losses.",
    "",
)
