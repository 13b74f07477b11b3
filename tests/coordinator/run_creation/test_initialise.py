from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from kits.coordinator.commands import edit
from swarm_coordinator.configuration.run_settings import RunSettings, default_settings
from swarm_coordinator.durability.run_files import (
    changed_settings,
    load_identity,
    load_manifest,
    load_settings,
)
from swarm_coordinator.run_creation import initialise as module
from swarm_coordinator.run_creation.initialise import initialise_run, refresh_manifest
from swarm_coordinator.run_creation.shards import Progress
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.shard_index import DataReport, read_shard_index
from swarm_shared.base.errors import ConfigurationError, DataError, StorageError, UsageError
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.shards import verify_shard
from swarm_shared.data.tokenizer import BytesTokenizer, load_tokenizer
from swarm_shared.run.manifest import Manifest

# A model whose profile takes no time; four layers so that it can be cut.
SMALL = {
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.heads": 2,
    "model.key_value_heads": 2,
    "model.sequence_length": 16,
    "training.sequences_per_microbatch": 2,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "some text"
    folder.mkdir()
    for n in range(60):
        # No sixteen bytes of two documents are equal.
        words = [hashlib.sha256(f"{n} {line}".encode()).hexdigest() for line in range(3)]
        (folder / f"{n}.txt").write_text("".join(f"word ü {word}\n" for word in words))
    return folder


def initialised(run: Path, text: Path, **overrides: object) -> tuple[RunFolder, Manifest]:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    manifest = initialise_run(run, "tiny", str(text), 2, SMALL | dotted)
    return RunFolder.open(run), manifest


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_run_has_everything_that_start_needs(tmp_path: Path, text: Path):
    lines: list[str] = []
    manifest = initialise_run(tmp_path / "my run", "tiny", str(text), 3, SMALL, lines.append)
    folder = RunFolder.open(tmp_path / "my run")
    assert load_manifest(folder) == manifest
    assert manifest.name == "my run"
    assert manifest.organiser == load_identity(folder).peer_id
    assert manifest.stage_count == 3
    assert all(stage.work_flops > 0 and stage.memory.device_bytes > 0 for stage in manifest.stages)
    assert changed_settings(folder, load_settings(folder), manifest) == []
    for info in manifest.data.shards:
        verify_shard(folder.data / info.name, info, manifest.data.token_bytes, 256)
    assert len(lines) >= 4
    assert names_in(tmp_path) == {"my run", "some text"}
    assert (folder.organiser_key.stat().st_mode & 0o777) == 0o600


def test_a_bottleneck_size_puts_one_at_each_border(tmp_path: Path, text: Path):
    plain_borders = {"codecs__activation": "none", "codecs__gradient": "none"}
    folder, narrow = initialised(
        tmp_path / "narrow", text, model__bottleneck_size=4, **plain_borders
    )
    _, plain = initialised(tmp_path / "plain", text, **plain_borders)
    border = narrow.stages[1].first_layer
    assert narrow.model.bottlenecks == (border,)
    assert plain.model.bottlenecks == ()
    assert 4 * narrow.activation_bytes == plain.activation_bytes
    assert changed_settings(folder, load_settings(folder), narrow) == []
    weights = 16 * 4
    for one, other, norm in zip(narrow.stages, plain.stages, (16, 0), strict=True):
        assert one.memory.device_bytes - other.memory.device_bytes == 12 * (weights + norm)
        assert one.memory.host_bytes - other.memory.host_bytes == 28 * (weights + norm)
        work = 6 * narrow.tokens_per_microbatch * (weights + norm)
        assert one.work_flops - other.work_flops == work


def test_the_shards_hold_the_text_and_no_sequence_is_on_both_sides(tmp_path: Path, text: Path):
    folder, manifest = initialised(tmp_path / "run", text)
    samples = ShardSamples(folder.data, manifest)
    documents: dict[str, set[bytes]] = {}
    for split in ("train", "heldout"):
        shards = manifest.data.split(split)
        content = b"".join((folder.data / info.name).read_bytes() for info in shards)
        assert content[0] == BytesTokenizer.end_of_text
        documents[split] = set(content.split(bytes([BytesTokenizer.end_of_text]))[1:])
    originals = {file.read_bytes() for file in text.iterdir()}
    assert documents["train"] | documents["heldout"] == originals
    assert not documents["train"] & documents["heldout"]

    def sequences(count: int, heldout: bool) -> set[bytes]:
        found = set()
        for index in range(count):
            if heldout:
                inputs_BT, _ = samples.heldout(index)
            else:
                step, place = divmod(index, manifest.training.microbatches_per_step)
                inputs_BT, _ = samples.training(step + 1, place)
            found |= {row.tobytes() for row in inputs_BT}
        return found

    held = sequences(20, heldout=True)
    trained = sequences(300, heldout=False)
    assert len(held) > 10
    assert len(trained) > 200
    assert not held & trained


def test_the_same_text_makes_the_same_data_and_another_organiser(tmp_path: Path, text: Path):
    for overrides in ({}, {"data__tokenizer": "bpe", "model__vocabulary_size": 300}):
        kind = overrides.get("data__tokenizer", "bytes")
        _, one = initialised(tmp_path / f"one {kind}", text, **overrides)
        _, two = initialised(tmp_path / f"two {kind}", text, **overrides)
        assert one.data == two.data
        assert one.organiser != two.organiser


def test_bpe_trains_its_tokenizer_and_writes_ids_below_the_vocabulary(tmp_path: Path, text: Path):
    folder, manifest = initialised(
        tmp_path / "run", text, data__tokenizer="bpe", model__vocabulary_size=300
    )
    tokenizer = load_tokenizer("bpe", folder.tokenizer, manifest.data.tokenizer_sha256)
    assert tokenizer.vocabulary_size == 300
    assert manifest.data.token_bytes == 2
    inputs_BT, _ = ShardSamples(folder.data, manifest).heldout(0)
    assert tokenizer.decode(inputs_BT[0]).startswith("word ü ")
    assert manifest.data.unigram_entropy_nats < np.log(300)


def test_a_model_may_have_more_ids_than_a_small_text_yields(tmp_path: Path, text: Path):
    folder, manifest = initialised(
        tmp_path / "run", text, data__tokenizer="bpe", model__vocabulary_size=70_000
    )
    assert manifest.data.token_bytes == 4
    assert read_shard_index(folder.data).vocabulary_size < 70_000


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_shards_of_one_run_are_data_for_another(tmp_path: Path, text: Path, kind: str):
    first, one = initialised(
        tmp_path / "one", text, data__tokenizer=kind, model__vocabulary_size=300
    )
    _, two = initialised(tmp_path / "two", first.path, model__vocabulary_size=400)
    assert two.data == one.data
    # Another time from the data folder itself, named by the default preset's other tokenizer.
    _, three = initialised(tmp_path / "three", first.data, model__vocabulary_size=300)
    assert three.data == one.data
    with pytest.raises(ConfigurationError, match="raise it to"):
        initialised(tmp_path / "four", first.path, model__vocabulary_size=200)
    other = "bpe" if kind == "bytes" else "bytes"
    with pytest.raises(ConfigurationError, match=f"made with .*{kind!r}"):
        initialised(
            tmp_path / "five", first.path, model__vocabulary_size=300, data__tokenizer=other
        )


def test_ready_shards_that_are_damaged_are_refused_and_leave_no_run(tmp_path: Path, text: Path):
    first, manifest = initialised(tmp_path / "one", text)
    shard = first.data / manifest.data.shards[0].name
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        initialised(tmp_path / "two", first.path)
    shard.unlink()
    with pytest.raises(DataError, match="cannot read the data shard"):
        initialised(tmp_path / "two", first.path)
    assert names_in(tmp_path) == {"one", "some text"}


def test_text_too_short_for_one_sequence_on_each_side_is_refused(tmp_path: Path):
    file = tmp_path / "short.txt"
    for words in ("tiny", "just too short for two sequences"):
        file.write_text(words)
        with pytest.raises(DataError, match=r"too short|holds no sequence"):
            initialised(tmp_path / "run", file)
    file.write_text("long enough: 17 bytes go aside and 17 are left here")
    folder, _ = initialised(tmp_path / "run", file)
    assert folder.data.is_dir()


def test_impossible_settings_are_refused_before_anything_is_made(tmp_path: Path, text: Path):
    with pytest.raises(ConfigurationError, match="stages"):
        initialised(tmp_path / "run", text, stages__count=9)
    with pytest.raises(ConfigurationError, match="at least 257"):
        initialised(tmp_path / "run", text, data__tokenizer="bpe")
    assert names_in(tmp_path) == {"some text"}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, text: Path):
    with pytest.raises(UsageError, match="is not empty"):
        initialised(text, text)
    assert len(names_in(text)) == 60


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), StorageError("the disk is full")])
def test_an_interrupted_init_leaves_nothing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
):
    def interrupted(*_: object) -> bytes:
        raise failure

    monkeypatch.setattr(module, "sign_manifest", interrupted)
    with pytest.raises(type(failure)):
        initialised(tmp_path / "run", text)
    assert names_in(tmp_path) == {"some text"}


_KILLED = """
import sys
from pathlib import Path
from swarm_coordinator.run_creation.initialise import initialise_run

def progress(line):
    if line.startswith("data: "):
        print("half", flush=True)
        sys.stdin.read()

initialise_run(Path(sys.argv[1]), "tiny", sys.argv[2], progress=progress)
"""


def test_a_killed_init_leaves_no_run_and_the_next_one_tidies_up(tmp_path: Path, text: Path):
    (text / "more.txt").write_text("more text for the preset's long sequences\n" * 200)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path / "run"), str(text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "half\n"
            # One that is still at work is not tidied away.
            initialised(tmp_path / "run", text)
            assert len(names_in(tmp_path)) == 3
            (tmp_path / "run").rename(tmp_path / "kept")
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    assert len(names_in(tmp_path)) == 3
    assert not (tmp_path / "run").exists()
    initialised(tmp_path / "run", text)
    assert names_in(tmp_path) == {"run", "kept", "some text"}


def test_an_edited_run_toml_is_noticed_and_can_be_signed_anew(tmp_path: Path, text: Path):
    folder, before = initialised(tmp_path / "run", text)
    edit(folder, ("steps = 60\n", "steps = 77\n"), ("count = 2\n", "count = 4\n"))
    differences = changed_settings(folder, load_settings(folder), load_manifest(folder))
    assert [line.split(" is ")[0] for line in differences] == ["[stages] count", "[training] steps"]
    after = refresh_manifest(folder)
    assert load_manifest(folder) == after
    assert (after.training.steps, after.stage_count) == (77, 4)
    assert (after.data, after.organiser) == (before.data, before.organiser)
    assert changed_settings(folder, load_settings(folder), after) == []


def test_an_edit_that_needs_other_data_is_noticed_and_refused(tmp_path: Path, text: Path):
    folder, before = initialised(tmp_path / "run", text)
    edit(
        folder,
        (f'source = "{text}"', 'source = "python-stdlib"'),
        ("heldout_share = 0.05", "heldout_share = 0.1"),
        ('tokenizer = "bytes"', 'tokenizer = "bpe"'),
    )
    differences = changed_settings(folder, load_settings(folder), before)
    assert len(differences) == 3
    with pytest.raises(ConfigurationError, match=r"does not fit its run\.toml .*\[data\] source"):
        refresh_manifest(folder)
    assert load_manifest(folder) == before


def test_a_manifest_that_was_tampered_with_is_refused(tmp_path: Path, text: Path):
    folder, _ = initialised(tmp_path / "run", text)
    envelope = folder.manifest.read_bytes()
    folder.manifest.write_bytes(envelope.replace(b'"steps":60', b'"steps":61'))
    with pytest.raises(StorageError, match=r"manifest\.json is damaged"):
        load_manifest(folder)
    folder.organiser_key.unlink()
    with pytest.raises(StorageError, match=r"lost its organiser\.key"):
        load_manifest(folder)


def test_a_relative_path_is_written_down_so_that_it_is_found_from_everywhere(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    initialise_run(Path("run"), "tiny", "some text", 2, SMALL)
    assert load_settings(RunFolder.open(tmp_path / "run")).data.source == str(text)


def test_the_manifest_names_the_mirrors_of_its_shards(tmp_path: Path, text: Path):
    urls = "https://example.org/run/data/ https://example.net/copy s3://corpus/data"
    _, manifest = initialised(tmp_path / "run", text, data__shards_url=urls)
    assert manifest.data.mirrors == (
        "https://example.org/run/data",
        "https://example.net/copy",
        "https://corpus.s3.amazonaws.com/data",
    )


def test_the_standard_library_is_the_tiny_presets_text(tmp_path: Path):
    lines: list[str] = []
    progress: Progress = lines.append
    manifest = initialise_run(tmp_path / "run", "tiny", progress=progress)
    settings = default_settings("tiny", {"run.name": "run"})
    assert load_settings(RunFolder.open(tmp_path / "run")) == settings
    train, heldout = (
        sum(shard.tokens for shard in manifest.data.split(split)) for split in ("train", "heldout")
    )
    assert train > 5_000_000
    assert 0.04 < heldout / (train + heldout) < 0.06
    assert 2.5 < manifest.data.unigram_entropy_nats < 4


def test_the_report_is_printed_and_kept(tmp_path: Path, text: Path):
    (text / "again.txt").write_bytes((text / "7.txt").read_bytes())
    (text / "empty.txt").write_text("\n")
    lines: list[str] = []
    manifest = initialise_run(tmp_path / "one", "tiny", str(text), 2, SMALL, lines.append)
    size = sum(file.stat().st_size for file in text.iterdir() if file.name[0].isdigit())
    train, heldout = (
        sum(shard.tokens for shard in manifest.data.split(split)) for split in ("train", "heldout")
    )
    assert train + heldout == size + 60
    said = [
        f"data: 60 document(s), {size / 1000:.3g} kB: {train:,} tokens to train on, "
        f"{heldout:,} held out",
        "left out: 1 exact and 0 near duplicate(s), 1 empty, 0 longer than 256 MiB",
    ]
    assert [line for line in lines if line in said] == said
    kept = read_shard_index(RunFolder(tmp_path / "one").data).report
    assert kept == DataReport(documents=60, text_bytes=size, duplicates=1, empty=1, too_long=0)
    _, _ = initialised(tmp_path / "two", tmp_path / "one")
    assert read_shard_index(RunFolder(tmp_path / "two").data).report == kept


@pytest.fixture
def proteins(tmp_path: Path) -> Path:
    """A parquet file of sequences, in another column than text."""
    path = tmp_path / "proteins.parquet"
    sequences = [
        "".join("ACDEFGHIKLMNPQRSTVWY"[byte % 20] for byte in hashlib.sha512(bytes([n])).digest())
        for n in range(60)
    ]
    table = pyarrow.table({"id": list(range(60)), "sequence": sequences})
    parquet.write_table(table, path)
    return path


@pytest.fixture
def amino_acids(tmp_path: Path) -> Path:
    path = tmp_path / "amino acids.txt"
    path.write_text("\n".join(["<eos>", *"ACDEFGHIKLMNPQRSTVWY"]) + "\n")
    return path


def test_the_organisers_tokenizer_gives_the_model_its_vocabulary(
    tmp_path: Path, proteins: Path, amino_acids: Path
):
    chosen = {"data__tokenizer": str(amino_acids), "data__column": "sequence"}
    folder, manifest = initialised(tmp_path / "run", proteins, **chosen)
    assert manifest.model.vocabulary_size == 21
    assert (manifest.data.tokenizer, manifest.data.token_bytes) == ("file", 1)
    tokenizer = load_tokenizer("file", folder.tokenizer, manifest.data.tokenizer_sha256)
    content = b"".join(
        (folder.data / info.name).read_bytes() for info in manifest.data.split("train")
    )
    sequences = set(parquet.read_table(proteins)["sequence"].to_pylist())
    found = {tokenizer.decode(list(part)) for part in content.split(b"\0")[1:]}
    assert len(found) > 40
    assert found <= sequences
    assert changed_settings(folder, load_settings(folder), manifest) == []
    # The shards are data for another run, whose tokenizer is named by theirs.
    amino_acids.unlink()
    _, again = initialised(tmp_path / "again", folder.path)
    assert again.data == manifest.data


def test_data_made_with_another_column_or_tokenizer_is_noticed(
    tmp_path: Path, proteins: Path, amino_acids: Path
):
    chosen = {"data__tokenizer": str(amino_acids), "data__column": "sequence"}
    folder, manifest = initialised(tmp_path / "run", proteins, **chosen)
    edit(
        folder,
        ('column = "sequence"', 'column = "id"'),
        (f'tokenizer = "{amino_acids}"', 'tokenizer = "bytes"'),
    )
    differences = changed_settings(folder, load_settings(folder), manifest)
    assert [line.split(" is ")[0] for line in differences] == ["[data] column", "[data] tokenizer"]
    with pytest.raises(ConfigurationError, match="does not fit its run"):
        refresh_manifest(folder)


def test_a_tokenizer_whose_ids_exceed_the_vocabulary_is_refused_before_the_text_is_read(
    tmp_path: Path, proteins: Path, amino_acids: Path
):
    lines: list[str] = []
    chosen = {"data.tokenizer": str(amino_acids), "model.vocabulary_size": 20}
    with pytest.raises(ConfigurationError, match=r"has 21 ids, but .* is 20; raise it to 21"):
        initialise_run(
            tmp_path / "run", "tiny", str(proteins), 2, SMALL | chosen, progress=lines.append
        )
    assert not [line for line in lines if line.startswith("reading")]
    assert names_in(tmp_path) == {"proteins.parquet", "amino acids.txt"}


ANY_PRESET = {"data.tokenizer": "bytes", "data.heldout_share": 0.5}


@pytest.mark.parametrize(
    ("preset", "stages", "sizes", "queue"),
    [
        ("tiny", None, (16, 8), 32), ("small", None, (16, 4), 32), ("125m", None, (128, 2), 32),
        ("1b", None, (256, 1), 39), ("7b", None, (512, 1), 60), ("small", 4, (32, 2), 32),
    ],
)  # fmt: skip
def test_a_presets_sequences_are_divided_into_fine_microbatches(
    tmp_path: Path, text: Path, preset: str, stages: int | None, sizes: tuple[int, int], queue: int
):
    lines: list[str] = []
    manifest = initialise_run(tmp_path / "run", preset, str(text), stages, ANY_PRESET, lines.append)
    training, limits = manifest.training, manifest.limits
    assert (training.microbatches_per_step, training.sequences_per_microbatch) == sizes
    assert (limits.stage_queue, limits.edge_credits) == (queue, queue)
    chosen = [line for line in lines if line.startswith("microbatches: ")]
    assert len(chosen) == 1
    assert chosen[0].startswith(f"microbatches: {sizes[0]} a step, of {sizes[1]} sequence(s)")
    assert chosen[0].endswith(f"holds up to {queue}")
    assert changed_settings(RunFolder(tmp_path / "run"), _settings(tmp_path), manifest) == []


def _settings(place: Path) -> RunSettings:
    return load_settings(RunFolder(place / "run"))


@pytest.mark.parametrize(
    ("overrides", "sizes", "limits"),
    [
        ({"training.sequences_per_microbatch": 3}, (64, 3), (32, 32)),
        ({"training.microbatches_per_step": 7}, (7, 4), (32, 32)),
        ({"limits.stage_queue": 5}, (128, 2), (5, 32)),
        ({"limits.edge_credits": 9}, (128, 2), (32, 9)),
    ],
)
def test_what_is_given_is_kept(
    tmp_path: Path, text: Path, overrides: dict[str, object], sizes: tuple[int, int],
    limits: tuple[int, int],
):  # fmt: skip
    lines: list[str] = []
    manifest = initialise_run(
        tmp_path / "run", "125m", str(text), overrides=ANY_PRESET | overrides, progress=lines.append
    )
    training = manifest.training
    assert (training.microbatches_per_step, training.sequences_per_microbatch) == sizes
    assert (manifest.limits.stage_queue, manifest.limits.edge_credits) == limits
    chosen = [line for line in lines if line.startswith("microbatches: ")]
    assert len(chosen) == (0 if next(iter(overrides)).startswith("training") else 1)
