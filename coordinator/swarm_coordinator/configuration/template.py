"""Writes a run.toml that explains itself.

Owns the comments of the file and TOML's spelling of values. Every setting is there, so that a
person needs no manual; sizes of the model that follow from the preset are shown as comments.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import MutableMapping
from pathlib import Path

import tomlkit

from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.run.manifest import CodecsConfig
from swarm_shared.run.model_config import PRESETS, preset

_HEAD = f"""\
# A run of swarmtrain, as its organiser describes it.
#
# The manifest that volunteers receive was made from this file and signed by
# `swarm-coordinator init`. What is marked (fixed) is part of it: changed later, it needs
# the manifest to be made anew, and `swarm-coordinator start` says so. The rest is read at
# every start.
#
# Presets: {", ".join(PRESETS)}.
"""

_SECTIONS: dict[str, str] = {
    "run": "Who the run is.",
    "model": "The model: a preset, and what you want different. (fixed)",
    "stages": "Into how many parts the model is cut; each volunteer holds one. (fixed)",
    "data": "Training text. (fixed)",
    "training": "How long, and how much at a time. (fixed)",
    "optimizer": "AdamW with linear warm-up, cosine decay and global-norm clipping. (fixed)",
    "network": "Where volunteers reach the coordinator.",
    "checkpoint": "Saved states, from which a run continues after everything is gone.",
    "limits": "Bounds that every peer keeps to, so that nobody decides over its memory. (fixed)",
    "codecs": "How tensors are written between stages, for slow lines. What a codec loses is part "
    "of what the run computes. (fixed)",
    "admission": "Who may join.",
    "coordinator": "Where it keeps what it must not forget.",
    "rebalancing": "Moving volunteers to the stage that holds the others up, while training goes "
    "on.",
    "http": "The dashboard, its API and metrics, in a process of their own.",
}

_SETTINGS: dict[str, str] = {
    "run.name": "Shown to volunteers. (fixed)",
    "run.seed": "Decides the initial parameters and the order of the data. (fixed)",
    "model.preset": "",
    "model.vocabulary_size": "Token ids; a bpe tokenizer is trained to this size.",
    "model.hidden_size": "Width of the model, a multiple of 2 * heads.",
    "model.intermediate_size": "Width of the feed-forward layers.",
    "model.layers": "",
    "model.heads": "Attention heads.",
    "model.key_value_heads": "Heads that keys and values have; a divisor of heads.",
    "model.sequence_length": "Tokens the model sees at once.",
    "model.rope_theta": "Base of the rotary positions.",
    "model.norm_epsilon": "",
    "model.tie_embeddings": "Whether input embedding and output head share their weights.",
    "model.bottleneck_size": "Width of what crosses a border between stages, or 0 for all of "
    "hidden_size. With it the model is no Llama any more, and is not exported as one.",
    "stages.count": "Stages without a layer are possible at the ends only.",
    "data.source": 'Path of a text file, a folder of text files, a .jsonl with a field "text", '
    'a folder of ready shards, or "python-stdlib".',
    "data.tokenizer": '"bytes", or "bpe": byte pairs learned from the training text.',
    "data.heldout_share": "Part of the text that is kept aside to measure progress on.",
    "data.shards_url": "Web folder that also has the files of data/, so that volunteers need not "
    'get them from the coordinator; "" for none.',
    "training.steps": "Optimizer steps of the whole run.",
    "training.microbatches_per_step": "Averaged into one step; the unit of work volunteers share.",
    "training.sequences_per_microbatch": "",
    "training.dtype": '"float32", or "bfloat16" for computing in half the memory.',
    "training.evaluation_microbatches": "Held-out microbatches measured after the last step.",
    "training.staleness": "1: gradients are one version late, and the pipeline never runs empty "
    "between steps.",
    "optimizer.learning_rate": "At its highest, after the warm-up.",
    "optimizer.minimum_learning_rate_ratio": "The last step's rate over the highest.",
    "optimizer.warmup_steps": "Steps over which the rate rises from zero.",
    "optimizer.beta1": "",
    "optimizer.beta2": "",
    "optimizer.epsilon": "",
    "optimizer.weight_decay": "On matrices only.",
    "optimizer.clip_norm": "Bound on the gradient norm of the whole model.",
    "network.listen_host": 'Address to listen at; "0.0.0.0" is every IPv4 one.',
    "network.listen_port": "0 picks a free port at the first start and keeps it.",
    "network.announce": "More addresses under which volunteers reach you, for example "
    '["/dns4/train.example.org/tcp/4711"] behind a router.',
    "network.relay": "Carry traffic of volunteers that cannot reach each other otherwise.",
    "checkpoint.every_steps": "(fixed)",
    "checkpoint.keep": "Older checkpoints than so many are deleted.",
    "limits.heartbeat_seconds": "How often a peer says that it lives.",
    "limits.dead_after_seconds": "Silence after which a peer counts as dead.",
    "limits.receipt_interval_seconds": "How long finished work may wait to be reported.",
    "limits.edge_credits": "Microbatches one sender may have outstanding at one receiver.",
    "limits.stage_queue": "Microbatches one peer holds at once, over all senders.",
    "limits.join_hold_seconds": "How long a step waits for a newcomer that is downloading.",
    "limits.round_stall_seconds": "An all-reduce without progress for so long has failed.",
    "limits.lease_seconds": "Time a trainer has for a microbatch.",
    "limits.starting_peers_per_stage": (
        "Training begins once every stage has so many peers; after a restart one each is enough "
        "when ten seconds have passed."
    ),
    "codecs.activation": '"none", "float16", "bfloat16", "int8" (a quarter of the bytes) or "int4" '
    '(an eighth); docs/benchmarks.md has what each costs in loss: "int8" nothing that could be '
    'measured. Or "auto", here and for the '
    "gradient: at the next start, until a step is applied, the pair takes its place that is "
    "fastest by what follows.",
    "codecs.gradient": 'The same, and "topk": the sixteenth of a gradient that is largest.',
    "codecs.average": '"exact", "none", "float16" or "int8", for the sums of gradients among the '
    'peers of a stage. "exact" rounds each microbatch\'s gradient once, far below what the '
    "optimizer notices, and adds without rounding: the run is its reference to the bit, whoever "
    'computes what, on machines that compute alike. "none" adds float32, up to rounding. What a '
    "lossy one loses depends on how many average: replicas stay equal to the bit, but the run is "
    "near its reference only, by about the codec's error.",
    "codecs.largest_loss_gap": 'What "auto" may cost in held-out loss, relative; the default is '
    "the noise from seed to seed, as measured.",
    "codecs.up_mbit_per_second": 'The line that "auto" assumes volunteers to have upwards.',
    "coordinator.store": '"sqlite", in this folder; or "postgresql://user@host/database", a '
    "database of the run's own on a server, with which coordinators stand in for each other.",
    "coordinator.lease_seconds": "With PostgreSQL: a coordinator that is silent for so long has "
    "lost the run to one that stands by.",
    "admission.mode": '"open": whoever has the invite. "token": whoever has an invite with a valid '
    'token (`swarm-coordinator token`). "allow-list": peers that are on the list '
    "(`swarm-coordinator allow`).",
    "rebalancing.rule": '"throughput": whoever moves must gain more than the move costs. "none": '
    "volunteers keep the stage that they joined with.",
    "rebalancing.period_seconds": "A stage takes part in at most one move in so long.",
    "rebalancing.minimum_replicas": "A stage is never left with fewer volunteers than so many.",
    "http.listen": 'HOST:PORT. "127.0.0.1:0" is for this machine only, at a free port that is '
    'kept; "0.0.0.0:8080" for everybody (no peer\'s address is shown to them); "" for none.',
}


def render_run_toml(settings: RunSettings) -> str:
    """The text of a run.toml that says exactly `settings`."""
    lines = [_HEAD]
    for section, about in _SECTIONS.items():
        content: FrozenModel = getattr(settings, section)
        lines += [_comment(about), f"[{section}]"]
        for field in type(content).model_fields:
            lines += _setting(settings, section, field, getattr(content, field))
        lines.append("")
    return "\n".join(lines)


def write_codecs(path: Path, codecs: CodecsConfig) -> None:
    """Say in a run.toml, whose owner has edited it, which codecs were chosen; no other word."""
    # A file that was saved with a byte order mark keeps it.
    text = path.read_bytes().decode("utf-8")
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    document = tomlkit.parse(text.removeprefix(mark))
    section = document["codecs"]
    assert isinstance(section, MutableMapping), "it was read as a section before"
    section["activation"], section["gradient"] = codecs.activation, codecs.gradient
    write_atomically(path, (mark + tomlkit.dumps(document)).encode("utf-8"))


def _setting(settings: RunSettings, section: str, field: str, value: object) -> list[str]:
    about = _SETTINGS.get(f"{section}.{field}", "")
    lines = [_comment(about)] if about else []
    if value is None:
        # Only a size of the model can be unset: it follows from the preset.
        value = getattr(preset(settings.model.preset).model, field)
        return [*lines, f"# {field} = {toml_value(value)}"]
    return [*lines, f"{field} = {toml_value(value)}"]


def _comment(text: str) -> str:
    # Names of commands have hyphens and must stay whole.
    return textwrap.fill(
        text, 88, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def toml_value(value: object) -> str:
    """TOML's spelling of a value of run.toml."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, tuple), f"no TOML for {value!r}"
    return "[" + ", ".join(toml_value(item) for item in value) + "]"
