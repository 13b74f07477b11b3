"""Creation of a run: the work of `swarm-coordinator init`.

Owns the order of the work (settings, stage boundaries, data, the organiser's key, the signed
manifest), and that an interrupted init leaves no incomplete run: the run is built in a temporary
folder that is renamed at the end. Imports torch to profile the model's layers, so the running
coordinator must not import this module; it reads runs through `durability.run_files`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from swarm_coordinator.configuration.run_settings import (
    DEFAULT_PRESET,
    PYTHON_STDLIB,
    RunSettings,
    default_settings,
)
from swarm_coordinator.configuration.template import render_run_toml, write_codecs
from swarm_coordinator.durability.run_files import (
    data_differences,
    load_identity,
    load_manifest,
    load_settings,
)
from swarm_coordinator.model_hub.data_sets import HubDataset
from swarm_coordinator.model_hub.models import HubModel, download_model
from swarm_coordinator.offline.hf_export import bytes_tokenizer_file
from swarm_coordinator.run_creation.corpus import (
    DEFAULT_COLUMN,
    Corpus,
    ReadyShards,
    read_corpus,
)
from swarm_coordinator.run_creation.fleet_cut import (
    ExpectedFleet,
    fleet_rows,
    recommended,
    table_lines,
)
from swarm_coordinator.run_creation.given_model import (
    GivenModel,
    read_config,
    read_given_model,
    write_initial_states,
)
from swarm_coordinator.run_creation.hub_corpus import hub_corpus, pinned
from swarm_coordinator.run_creation.microbatch_size import choice_text, choose_queue
from swarm_coordinator.run_creation.shards import Progress, prepare_data
from swarm_coordinator.run_creation.stage_plan import (
    StagePlan,
    in_stages,
    plan_of,
    with_microbatches_chosen,
)
from swarm_coordinator.run_creation.tokenizer_files import organisers_tokenizer
from swarm_coordinator.run_dir.folder import RunFolder, disk_errors, refuse_existing
from swarm_coordinator.simulator.fleet import fleet_from
from swarm_shared.base.atomic_file import make_folder, sync_folder, write_atomically
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.text import size_text
from swarm_shared.codecs.choice import MEGABIT_BYTES
from swarm_shared.data.sampler import split_slots
from swarm_shared.data.tokenizer import read_tokenizer_file
from swarm_shared.host.user_folders import expanded
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import sign_manifest
from swarm_shared.run.codec_sizes import encoded_bytes
from swarm_shared.run.manifest import DataConfig, Manifest, StageRange, with_bottlenecks
from swarm_shared.run.model_config import PRESETS
from swarm_shared.scheduling.placement.memory_need import check_stage_memory

_MICROBATCH_SIZES = ("training.microbatches_per_step", "training.sequences_per_microbatch")
"""Settings of which one given number keeps the program from choosing both."""

TRAINED_RATE_SHARE = 0.1
"""Learning rate of a run that continues from a trained model, over the preset's."""

_SEQUENCE_LENGTH = "model.sequence_length"


def initialise_run(
    run_dir: Path,
    preset: str | None,
    data: str = PYTHON_STDLIB,
    stages: int | None = None,
    overrides: Mapping[str, object] | None = None,
    progress: Progress = lambda line: None,
    fleet: str | None = None,
    given_model: Path | HubModel | None = None,
) -> Manifest:
    """Make the folder of a new run from a preset; `overrides` maps names of settings to values.

    `data` is what `read_corpus` takes, or the address of a data set on the Hugging Face hub.
    `fleet` names the machines that are expected, as `simulate --fleet` does. `given_model` is the
    model from which the run continues, a folder or on the Hugging Face hub; without a preset, the
    nearest one gives the training sizes.
    """
    chosen, model = dict(overrides or {}), None
    source = _source(str(chosen.pop("data.source", data)), progress)
    if given_model is not None:
        model = _given_model(given_model, chosen, progress)
        preset = preset or model.nearest_preset
        chosen = _with_model(model, chosen, preset, _corpus(source), progress)
    preset = preset or DEFAULT_PRESET
    chosen = _with_tokenizer_file(chosen)
    if "data.tokenizer" not in chosen:
        corpus = _corpus(source)
        if isinstance(corpus, ReadyShards):
            chosen["data.tokenizer"] = corpus.index.tokenizer
    if stages is not None:
        chosen.setdefault("stages.count", stages)
    named = {"run.name": _name_for(run_dir), "data.source": source}
    settings = default_settings(preset, named | chosen)
    return _initialise(run_dir, settings, chosen.keys(), progress, fleet, model)


def _source(data: str, progress: Progress) -> str:
    """Return the source as run.toml keeps it: with the commit of a data set, or a whole path."""
    dataset = HubDataset.parse(data)
    if dataset is not None:
        return str(pinned(dataset, progress))
    return data if data == PYTHON_STDLIB else str(expanded(Path(data)))


def _corpus(
    source: str, column: str = DEFAULT_COLUMN, progress: Progress = lambda line: None
) -> Corpus:
    """Return the data that run.toml's source names; `progress` reports downloads."""
    dataset = HubDataset.parse(source)
    if dataset is not None:
        return hub_corpus(dataset, column, progress)
    return read_corpus(source, column)


def _given_model(
    given: Path | HubModel, chosen: Mapping[str, object], progress: Progress
) -> GivenModel:
    sizes = [name for name in chosen if name.startswith("model.") and name != _SEQUENCE_LENGTH]
    if sizes:
        raise ConfigurationError(
            f"{', '.join(sizes)} cannot be chosen with --from: the model's own sizes are used"
        )
    chosen_length = chosen.get(_SEQUENCE_LENGTH)
    length = chosen_length if isinstance(chosen_length, int) else None
    if isinstance(given, Path):
        return read_given_model(expanded(given), length)
    folder = download_model(given, progress, partial(read_config, sequence_length=length))
    return replace(read_given_model(folder, length), hub_name=given.name)


def _with_model(
    model: GivenModel, chosen: dict[str, object], preset: str, corpus: Corpus, progress: Progress
) -> dict[str, object]:
    """Add the model's sizes, its tokenizer, and a rate that suits a trained model. Adapters are not
    trained yet."""
    sizes = model.config.model_dump(exclude={"bottleneck_size", "bottlenecks", "adapters"})
    defaults: dict[str, object] = {f"model.{name}": size for name, size in sizes.items()}
    if not isinstance(corpus, ReadyShards):
        if model.tokenizer is None and "data.tokenizer" not in chosen:
            raise ConfigurationError(
                "the model's folder has no tokenizer.json; name one with --tokenizer"
            )
        defaults["data.tokenizer"] = _tokenizer_of(model)
    if "optimizer.learning_rate" not in chosen and not chosen.get("adapters.rank"):
        rate = PRESETS[preset].learning_rate * TRAINED_RATE_SHARE
        defaults["optimizer.learning_rate"] = rate
        progress(
            f"learning rate {rate:g}, a tenth of the preset's, as the model is trained already; "
            "--set optimizer.learning_rate=RATE chooses another"
        )
    return defaults | chosen


def _tokenizer_of(model: GivenModel) -> str:
    """Return the setting of the model's tokenizer. An exported run on bytes goes on with bytes: as
    a file, its tokenizer has no token that ends a document."""
    path = model.tokenizer
    is_bytes = path is not None and read_tokenizer_file(path) == bytes_tokenizer_file()
    return "bytes" if is_bytes else str(path)


def _with_tokenizer_file(chosen: dict[str, object]) -> dict[str, object]:
    """Name the organiser's tokenizer by its whole path; the model's vocabulary has its size unless
    another is given."""
    tokenizer = chosen.get("data.tokenizer")
    if not isinstance(tokenizer, str) or tokenizer in ("", "bytes", "bpe"):
        return chosen
    path = expanded(Path(tokenizer))
    size = organisers_tokenizer(path).vocabulary_size
    return {"model.vocabulary_size": size, **chosen, "data.tokenizer": str(path)}


def _initialise(
    run_dir: Path,
    settings: RunSettings,
    given: Set[str],
    progress: Progress,
    fleet: str | None,
    model: GivenModel | None,
) -> Manifest:
    """Make the folder of a new run; `given` are the names of settings that keep their values."""
    refuse_existing(run_dir)
    _check_adapters(settings, model is not None)
    corpus = _corpus(settings.data.source, settings.data.column, progress)
    if fleet is not None:
        settings, plan = _cut_for_fleet(settings, fleet, given, progress)
    else:
        if given.isdisjoint(_MICROBATCH_SIZES):
            settings = with_microbatches_chosen(settings)
        plan = plan_of(settings)
    with _staging_folder(run_dir.absolute()) as folder:
        settings = _with_codecs_selected(settings, progress)
        if given.isdisjoint(_MICROBATCH_SIZES):
            settings, why = _with_queues_chosen(settings, plan, given)
            progress(why)
        data = prepare_data(folder, settings, corpus, progress)
        identity = Identity.load_or_create(folder.organiser_key)
        manifest = _manifest(settings, identity, plan.stages, data)
        if model is not None:
            initial = write_initial_states(model, manifest, folder)
            manifest = manifest.model_copy(
                update={"initial": initial, "base_model": model.hub_name}
            )
            size = size_text(sum(state.bytes for state in initial))
            progress(f"the run continues from {model.hub_name or model.folder}, {size} in float32")
        write_atomically(folder.manifest, sign_manifest(identity, manifest))
        write_atomically(folder.settings, render_run_toml(settings).encode("utf-8"))
    progress(f"made {run_dir}: {manifest.stage_count} stage(s), {manifest.training.steps} steps")
    return manifest


def refresh_manifest(folder: RunFolder, progress: Progress = lambda line: None) -> Manifest:
    """Sign the manifest anew after run.toml was edited, keeping the data, and the cut unless the
    model or the number of stages was changed.

    `auto` codecs are selected and written to run.toml. The caller ensures that the run has not
    applied a step. ConfigurationError if the edit needs other data.
    """
    settings, old = load_settings(folder), load_manifest(folder)
    needs_data = data_differences(folder, settings)
    model = settings.model_shape
    if model.vocabulary_size != old.model.vocabulary_size:
        needs_data.append(f"[model] vocabulary_size was {old.model.vocabulary_size}")
    if needs_data:
        raise ConfigurationError(
            f"the data of {folder.path} does not fit its run.toml ({'; '.join(needs_data)}); "
            "change it back, or make a new run with `swarm-coordinator init`"
        )
    for split in ("train", "heldout"):
        split_slots(old.data, split, model.sequence_length)
    identity = load_identity(folder)
    _check_adapters(settings, bool(old.initial))
    uncut = old.model.model_copy(update={"bottlenecks": ()})
    same = model.base == uncut.base and settings.stages.count == old.stage_count
    if old.initial and not same:
        raise ConfigurationError(
            f"the run continues from a model that was cut for {old.stage_count} stage(s) at "
            "`init`, so that neither the model nor the number of stages can change; change it "
            "back, or make a new run with `swarm-coordinator init --from`"
        )
    stages = plan_of(settings, old.stages if same else None).stages
    if settings.codecs.needs_selection:
        settings = _with_codecs_selected(settings, progress)
        write_codecs(folder.settings, settings.codecs.config)
    manifest = _manifest(settings, identity, stages, old.data)
    manifest = manifest.model_copy(update={"initial": old.initial, "base_model": old.base_model})
    write_atomically(folder.manifest, sign_manifest(identity, manifest))
    return manifest


def _check_adapters(settings: RunSettings, has_base: bool) -> None:
    if settings.adapters.rank and not has_base:
        raise ConfigurationError(
            "[adapters] are trained on a given model; name it with `init --from`, or set rank to 0"
        )


def _with_codecs_selected(settings: RunSettings, progress: Progress) -> RunSettings:
    if not settings.codecs.needs_selection:
        return settings
    # Imported here because it imports torch.
    from swarm_coordinator.run_creation.codec_selection import select_codecs

    chosen, why = select_codecs(settings)
    progress(why)
    return chosen


def _cut_for_fleet(
    settings: RunSettings, fleet: str, given: Set[str], progress: Progress
) -> tuple[RunSettings, StagePlan]:
    """Return the settings and stages with the best cut for the expected machines; a given number of
    stages is kept."""
    expected = ExpectedFleet(fleet_from(fleet, random.Random(f"{settings.run.seed} fleet")))
    in_two = in_stages(settings, 2)
    # One stage has no boundary; the other rows have.
    codecs = _with_codecs_selected(in_two, lambda line: None).codecs
    is_given = "stages.count" in given
    # The preset's number may be too large for the model.
    first = (settings if is_given else in_two).model_copy(update={"codecs": codecs})
    rows = fleet_rows(first, expected, given.isdisjoint(_MICROBATCH_SIZES))
    if is_given:
        used = next(row for row in rows if row.stage_count == settings.stages.count)
        why = "as given"
    else:
        used = recommended(rows, expected)
        why = "the highest rate; --stages N chooses another number"
    for line in table_lines(rows, expected, used):
        progress(line)
    left_out = expected.size - used.holders
    unused = f"; {left_out} of the machines can hold none" if left_out else ""
    progress(f"stages: {used.stage_count}, {why}{unused}")
    return used.settings.model_copy(update={"codecs": settings.codecs}), used.plan


def _with_queues_chosen(
    settings: RunSettings, plan: StagePlan, given: Set[str]
) -> tuple[RunSettings, str]:
    """Set the bounds of queues that were not given; return the reason of all sizes in one line."""
    training, model, codecs = settings.training, settings.model_shape, settings.codecs
    sequences = training.sequences_per_microbatch
    tokens = sequences * model.sequence_length
    elements = tokens * (model.bottleneck_size or model.hidden_size)
    up_bytes_per_second = codecs.up_mbit_per_second * MEGABIT_BYTES
    activation, gradient = (
        encoded_bytes(codec, elements, training.dtype) / up_bytes_per_second
        for codec in (codecs.config.activation, codecs.config.gradient)
    )
    queue = choose_queue(
        [work.task_seconds(sequences) for work in plan.works],
        activation,
        gradient,
        training.microbatches_per_step,
    )
    chosen = {n: queue for n in ("stage_queue", "edge_credits") if f"limits.{n}" not in given}
    limits = settings.limits.model_copy(update=chosen)
    why = choice_text(
        plan.works, sequences, training.microbatches_per_step, tokens, limits.stage_queue
    )
    return settings.model_copy(update={"limits": limits}), why


def _manifest(
    settings: RunSettings, identity: Identity, stages: tuple[StageRange, ...], data: DataConfig
) -> Manifest:
    manifest = Manifest(
        name=settings.run.name,
        organiser=identity.peer_id,
        model=with_bottlenecks(settings.model_shape, stages),
        stages=stages,
        data=data,
        training=settings.training_config,
        optimizer=settings.optimizer,
        limits=settings.limits,
        codecs=settings.codecs.config,
        checkpoint_steps=settings.checkpoint.every_steps,
    )
    # As volunteers do: they leave a run whose stages are larger than its manifest claims.
    check_stage_memory(manifest)
    return manifest


@contextlib.contextmanager
def _staging_folder(run_dir: Path) -> Iterator[RunFolder]:
    """Yield a locked folder next to `run_dir`, renamed to it when the block succeeds."""
    prefix = f".{run_dir.name[:64]}.initialising-"
    with disk_errors(run_dir):
        make_folder(run_dir.parent)
        _remove_abandoned(run_dir.parent, prefix)
        temporary = Path(tempfile.mkdtemp(dir=run_dir.parent, prefix=prefix))
    try:
        folder = RunFolder.create(temporary)
        with folder.lock():
            yield folder
            sync_folder(temporary)
            refuse_existing(run_dir)
            with disk_errors(run_dir):
                temporary.replace(run_dir)
            sync_folder(run_dir.parent)
    finally:
        # Does nothing after the rename.
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete folders of killed inits; a running init holds the lock of its folder."""
    for left in parent.glob(f"{prefix}*"):
        folder = RunFolder(left)
        if folder.lock_file.exists() and not folder.in_use():
            shutil.rmtree(left, ignore_errors=True)


def _name_for(run_dir: Path) -> str:
    name = run_dir.absolute().name.encode("utf-8", "replace").decode("utf-8")
    return name[:100] or "my-run"
