"""`swarm-coordinator init`, and `refresh`, by which `start` follows an edited run.toml.

Owns their output. A run is made by `run_creation.initialise`.
"""

from __future__ import annotations

from pathlib import Path

import click

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.configuration.command_line import parse_codec, parse_override
from swarm_coordinator.configuration.run_settings import DEFAULT_PRESET
from swarm_coordinator.durability.run_files import read_progress
from swarm_coordinator.model_hub.models import HubModel
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.host.user_folders import expanded
from swarm_shared.run.model_config import PRESETS


@click.command("init")
@RUN_DIR
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help=f"Preset of model and training sizes; by default {DEFAULT_PRESET}, or the nearest to the "
    "model of --from.",
)
@click.option(
    "--from",
    "given_model",
    metavar="FOLDER|ORG/NAME",
    help="Continue from a model (Llama, Mistral, Qwen2, Qwen3): a folder in Hugging Face's format, "
    "or a model on its hub, also as ORG/NAME@REVISION.",
)
@click.option(
    "--data",
    default="python-stdlib",
    show_default=True,
    help="Training data: a file or folder of text, .jsonl, .parquet or .arrow, also compressed "
    "(.gz, .zst); a folder of ready shards; a data set of the Hugging Face hub, "
    "hf://datasets/ORG/NAME[@REVISION][/FOLDER_OR_GLOB]; or python-stdlib.",
)
@click.option(
    "--stages",
    type=int,
    help="Number of pipeline stages; by default the preset's, or the best one for --fleet.",
)
@click.option(
    "--fleet",
    metavar="FILE|home|N",
    help="Cut the model for the machines that are expected: a file as for `simulate`, the built-in "
    "home machines, or a number of them.",
)
@click.option("--steps", type=int, help="Optimizer steps of the run; by default the preset's.")
@click.option("--seed", type=int, help="Seed of initialisation and data order.")
@click.option(
    "--tokenizer",
    metavar="bytes|bpe|FILE",
    help="Tokenizer: bytes, bpe trained on the data, a tokenizer.json, or a vocabulary with one "
    "token a line; by default the preset's.",
)
@click.option(
    "--codec",
    metavar="auto|NAME|NAME/NAME",
    help="Codecs between stages: none, int8, … for both directions, int8/int4 for activations and "
    "gradients, or auto: the fastest pair here whose measured loss is within the limit.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.NAME=VALUE",
    help="Any other setting of run.toml; may be repeated.",
)
def init_command(
    run_dir: Path,
    preset: str | None,
    given_model: str | None,
    data: str,
    stages: int | None,
    fleet: str | None,
    steps: int | None,
    seed: int | None,
    tokenizer: str | None,
    codec: str | None,
    changes: tuple[str, ...],
) -> None:
    """Create a run: settings, data, key and signed manifest in RUN_DIR.

    A step's sequences are divided into microbatches as small as their overhead allows, unless
    `--set training.sequences_per_microbatch=N` or `training.microbatches_per_step` is given.

    `--fleet` prints for 2 to 16 stages what share of the machines can hold one and how many tokens
    a second they would train.
    """
    overrides = dict(parse_override(change) for change in changes)
    for name, value in (
        ("training.steps", steps),
        ("run.seed", seed),
        ("data.tokenizer", tokenizer),
    ):
        if value is not None:
            overrides[name] = value
    if codec is not None:
        overrides |= parse_codec(codec)
    from swarm_coordinator.run_creation.initialise import initialise_run

    model = None if given_model is None else _folder_or_hub_model(given_model)
    initialise_run(run_dir, preset, data, stages, overrides, click.echo, fleet, model)
    click.echo(f"edit {run_dir / 'run.toml'} if you like, then:")
    click.echo(f"  swarm-coordinator start {quoted(run_dir)}")


def _folder_or_hub_model(given: str) -> Path | HubModel:
    """A folder that exists comes before a model of the same name on the hub."""
    folder = Path(given)
    return folder if expanded(folder).exists() else HubModel.parse(given) or folder


@click.command("refresh", hidden=True)
@RUN_DIR
def refresh_command(run_dir: Path) -> None:
    """Sign the manifest again after an edit of run.toml; `start` runs this automatically."""
    from swarm_coordinator.run_creation.initialise import refresh_manifest

    folder = RunFolder.open(run_dir)
    folder.refuse_backup()
    restored = read_progress(folder)
    if restored is not None and restored.version > 0:
        raise ConfigurationError(f"the run has applied {restored.version} steps already")
    refresh_manifest(folder, click.echo)
