"""The data folder of a run: tokenizer, shards and their index.

Owns the order of the work and the files it writes (`data/*.tokens`, `data/shards.json`,
`tokenizer.json`), and the report of what was read. `run_creation.corpus` reads the text, `split`
chooses the documents, `tokenise` encodes them; the shard format and the tokenizers are
`swarm_shared.data`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from swarm_coordinator.configuration.mirror_addresses import web_address
from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.run_creation.corpus import MAX_RECORD_BYTES, ReadyShards, TextCorpus
from swarm_coordinator.run_creation.split import SplitPlan, plan_split, sampled, split_documents
from swarm_coordinator.run_creation.tokenise import metered, token_stream
from swarm_coordinator.run_creation.tokenizer_files import organisers_tokenizer
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.shard_index import SHARD_INDEX, DataReport, ShardIndex
from swarm_shared.base.atomic_file import atomic_file, write_atomically
from swarm_shared.base.errors import ConfigurationError, DataError
from swarm_shared.base.text import memory_text, size_text
from swarm_shared.data.sampler import split_slots
from swarm_shared.data.shards import (
    Split,
    TokenBytes,
    token_bytes_for,
    tree_path,
    unigram_entropy_nats,
    verify_shard,
    write_shards,
)
from swarm_shared.data.tokenizer import (
    BytesTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from swarm_shared.run.manifest import DataConfig, ShardInfo
from swarm_shared.run.model_config import ModelConfig

Progress = Callable[[str], None]

_SPLITS: tuple[Split, Split] = ("train", "heldout")

BPE_TRAINING_BYTES = 64 * 1024 * 1024
"""Bytes of text from which a tokenizer is trained; more hardly changes the merges, and takes
minutes and a gigabyte of memory."""

_MAX_TOKEN_BYTES = 8
"""Upper estimate of a token's bytes, for an early refusal; the tokens themselves are checked
later."""


def prepare_data(
    folder: RunFolder,
    settings: RunSettings,
    corpus: TextCorpus | ReadyShards,
    progress: Progress,
) -> DataConfig:
    """Fill the run's data folder from text or from existing shards; return its description."""
    if isinstance(corpus, ReadyShards):
        data = _copy_ready_shards(folder, settings, corpus, progress)
        vocabulary_size, report = corpus.index.vocabulary_size, corpus.index.report
    else:
        data, vocabulary_size, report = _tokenise(folder, settings, corpus, progress)
    for split in _SPLITS:
        split_slots(data, split, settings.model_shape.sequence_length)
    index = ShardIndex(
        source=settings.data.source,
        column=settings.data.column,
        tokenizer=settings.data.tokenizer,
        heldout_share=settings.data.heldout_share,
        similarity=settings.data.similarity,
        vocabulary_size=vocabulary_size,
        data=data,
        report=report,
    )
    content = index.model_dump_json(indent=1).encode("utf-8")
    write_atomically(folder.data / SHARD_INDEX, content)
    for line in _report_lines(report, data):
        progress(line)
    return data


def _report_lines(report: DataReport, data: DataConfig) -> list[str]:
    """Say what became of the text that was read."""
    train, heldout = (sum(shard.tokens for shard in data.split(split)) for split in _SPLITS)
    return [
        f"data: {report.documents:,} document(s), {size_text(report.text_bytes)}: {train:,} tokens "
        f"to train on, {heldout:,} held out",
        f"left out: {report.duplicates:,} exact and {report.near_duplicates:,} near duplicate(s), "
        f"{report.empty:,} empty, {report.too_long:,} longer than {memory_text(MAX_RECORD_BYTES)}",
    ]


def _tokenise(
    folder: RunFolder,
    settings: RunSettings,
    corpus: TextCorpus,
    progress: Progress,
) -> tuple[DataConfig, int, DataReport]:
    model = settings.model_shape
    tokenizer = _given_tokenizer(settings)
    if tokenizer:
        _check_vocabulary(tokenizer.vocabulary_size, model.vocabulary_size)
    progress(f"reading {corpus.description}")
    plan = _planned_split(settings, corpus, model, progress)
    tokenizer = tokenizer or _trained_tokenizer(settings, corpus, plan, progress)
    tokenizer_sha256 = (
        tokenizer.save(folder.tokenizer) if isinstance(tokenizer, JsonTokenizer) else None
    )
    token_bytes = token_bytes_for(model.vocabulary_size)
    shards: list[ShardInfo] = []
    for split, split_bytes in zip(_SPLITS, (plan.train_bytes, plan.heldout_bytes), strict=True):
        documents = metered(
            split_documents(corpus, plan, split), progress, "tokenised", split_bytes
        )
        tokens = token_stream(tokenizer, documents)
        shards += write_shards(folder.data, split, tokens, token_bytes)
    data = _data_config(folder, settings, token_bytes, shards, tokenizer_sha256)
    return data, tokenizer.vocabulary_size, plan.report


def _planned_split(
    settings: RunSettings, corpus: TextCorpus, model: ModelConfig, progress: Progress
) -> SplitPlan:
    longest = 1 if settings.data.tokenizer == "bytes" else _MAX_TOKEN_BYTES
    least_bytes = (model.sequence_length + 1) * longest
    read = replace(corpus, documents=lambda: metered(corpus.documents(), progress, "read"))
    wanted = settings.data
    plan = plan_split(read, wanted.heldout_share, least_bytes, wanted.similarity)
    if plan.train_bytes == 0 or plan.heldout_bytes == 0:
        raise DataError(
            f"the text in {corpus.description} is too short: a sequence has "
            f"{model.sequence_length} tokens, and training and held-out text need one each; add "
            "text, or lower [model] sequence_length"
        )
    return plan


def _given_tokenizer(settings: RunSettings) -> Tokenizer | None:
    """Return the tokenizer that needs no training text; None for bpe."""
    match settings.data.tokenizer_kind:
        case "bytes":
            return BytesTokenizer()
        case "bpe":
            return None
        case "file":
            return organisers_tokenizer(Path(settings.data.tokenizer))


def _trained_tokenizer(
    settings: RunSettings, corpus: TextCorpus, plan: SplitPlan, progress: Progress
) -> Tokenizer:
    vocabulary_size = settings.model_shape.vocabulary_size
    progress(f"training a tokenizer of {vocabulary_size} ids")
    share = BPE_TRAINING_BYTES / plan.train_bytes
    documents = sampled(split_documents(corpus, plan, "train"), share)
    return train_bpe((document.text for document in documents), vocabulary_size)


def _copy_ready_shards(
    folder: RunFolder, settings: RunSettings, ready: ReadyShards, progress: Progress
) -> DataConfig:
    """Copy existing shards and verify every byte of the copies."""
    source, model = ready.index.data, settings.model_shape
    if settings.data.tokenizer != ready.index.tokenizer:
        raise ConfigurationError(
            f"the shards in {ready.folder} were made with [data] tokenizer = "
            f"{ready.index.tokenizer!r}, but "
            f"it is {settings.data.tokenizer!r} here; change the setting"
        )
    _check_vocabulary(ready.index.vocabulary_size, model.vocabulary_size)
    progress(f"copying {len(source.shards)} shards from {ready.folder}")
    for info in source.shards:
        copied = folder.data / info.name
        _copy(ready, info, folder)
        tree = verify_shard(copied, info, source.token_bytes, model.vocabulary_size)
        write_atomically(tree_path(copied), tree)
    if source.tokenizer != "bytes":
        # A run folder has the tokenizer beside its data folder.
        homes = (ready.folder, ready.folder.parent)
        path = next(
            (home / "tokenizer.json" for home in homes if (home / "tokenizer.json").exists()),
            ready.folder / "tokenizer.json",
        )
        tokenizer = load_tokenizer(source.tokenizer, path, source.tokenizer_sha256)
        assert isinstance(tokenizer, JsonTokenizer)
        tokenizer.save(folder.tokenizer)
    shards = list(source.shards)
    return _data_config(folder, settings, source.token_bytes, shards, source.tokenizer_sha256)


def _copy(ready: ReadyShards, info: ShardInfo, folder: RunFolder) -> None:
    path = ready.folder / info.name
    try:
        source = path.open("rb")
    except OSError as error:
        raise DataError(
            f"cannot read the data shard {path} ({error.strerror}); restore it from a copy"
        ) from error
    with source, atomic_file(folder.data / info.name) as target:
        shutil.copyfileobj(source, target)


def _check_vocabulary(needed: int, offered: int) -> None:
    if needed > offered:
        raise ConfigurationError(
            f"the tokenizer has {needed} ids, but [model] vocabulary_size is {offered}; raise it "
            f"to {needed} or more"
        )


def _data_config(
    folder: RunFolder,
    settings: RunSettings,
    token_bytes: TokenBytes,
    shards: list[ShardInfo],
    tokenizer_sha256: str | None,
) -> DataConfig:
    data = DataConfig(
        token_bytes=token_bytes,
        shards=tuple(shards),
        mirrors=tuple(map(web_address, settings.data.shards_url.split())),
        tokenizer=settings.data.tokenizer_kind,
        tokenizer_sha256=tokenizer_sha256,
        unigram_entropy_nats=0.0,
    )
    vocabulary_size = settings.model_shape.vocabulary_size
    entropy_nats = unigram_entropy_nats(folder.data, data, "heldout", vocabulary_size)
    return data.model_copy(update={"unigram_entropy_nats": entropy_nats})
