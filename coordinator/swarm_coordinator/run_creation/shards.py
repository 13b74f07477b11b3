"""The data folder of a run: tokenizer, shards and their index.

Owns the order of the work and the files it writes (`data/*.tokens`, `data/shards.json`,
`tokenizer.json`). `run_creation.corpus` reads and splits the text; the shard format and the
tokenizers are `swarm_shared.data`. Text is streamed: memory holds one batch of documents.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import numpy as np

from swarm_coordinator.configuration.mirror_addresses import web_address
from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.run_creation.corpus import (
    ReadyShards,
    SplitPlan,
    TextCorpus,
    TextDocument,
    plan_split,
    sampled,
    split_documents,
)
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.shard_index import SHARD_INDEX, ShardIndex
from swarm_shared.base.atomic_file import atomic_file, write_atomically
from swarm_shared.base.errors import ConfigurationError, DataError
from swarm_shared.base.text import size_text
from swarm_shared.data.sampler import split_slots
from swarm_shared.data.shards import (
    Split,
    TokenBytes,
    Tokens,
    token_bytes_for,
    tree_path,
    unigram_entropy_nats,
    verify_shard,
    write_shards,
)
from swarm_shared.data.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from swarm_shared.run.manifest import DataConfig, ShardInfo
from swarm_shared.run.model_config import ModelConfig

Progress = Callable[[str], None]

BPE_TRAINING_BYTES = 64 * 1024 * 1024
"""Bytes of text from which a tokenizer is trained; more hardly changes the merges, and takes
minutes and a gigabyte of memory."""

_BATCH_CHARACTERS = 2 * 1024 * 1024
_PROGRESS_CHARACTERS = 50_000_000
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
    model = settings.model.config
    if isinstance(corpus, ReadyShards):
        data, vocabulary_size = _copy_ready_shards(folder, settings, corpus, progress)
    else:
        data, vocabulary_size = _tokenise(folder, settings, corpus, progress)
    for split in ("train", "heldout"):
        split_slots(data, split, model.sequence_length)
    index = ShardIndex(
        source=settings.data.source,
        heldout_share=settings.data.heldout_share,
        vocabulary_size=vocabulary_size,
        data=data,
    )
    content = index.model_dump_json(indent=1).encode("utf-8")
    write_atomically(folder.data / SHARD_INDEX, content)
    return data


def _tokenise(
    folder: RunFolder, settings: RunSettings, corpus: TextCorpus, progress: Progress
) -> tuple[DataConfig, int]:
    model = settings.model.config
    progress(f"reading {corpus.description}")
    plan = _planned_split(settings, corpus, model)
    progress(
        f"{size_text(plan.train_bytes)} to train on, {size_text(plan.heldout_bytes)} held out, "
        f"{plan.duplicates} empty or repeated documents left out"
    )
    tokenizer, tokenizer_sha256 = _make_tokenizer(folder, settings, corpus, plan, progress)
    token_bytes = token_bytes_for(model.vocabulary_size)
    shards: list[ShardInfo] = []
    for split in _SPLITS:
        documents = split_documents(corpus, plan, split)
        written = write_shards(
            folder.data, split, _tokens(tokenizer, documents, progress), token_bytes
        )
        progress(
            f"{sum(shard.tokens for shard in written):,} {split} tokens in {len(written)} file(s)"
        )
        shards += written
    data = _data_config(folder, settings, token_bytes, shards, tokenizer_sha256)
    return data, tokenizer.vocabulary_size


_SPLITS: tuple[Split, ...] = ("train", "heldout")


def _planned_split(settings: RunSettings, corpus: TextCorpus, model: ModelConfig) -> SplitPlan:
    longest = 1 if settings.data.tokenizer == "bytes" else _MAX_TOKEN_BYTES
    least_bytes = (model.sequence_length + 1) * longest
    plan = plan_split(corpus, settings.data.heldout_share, least_bytes)
    if plan.train_bytes == 0 or plan.heldout_bytes == 0:
        raise DataError(
            f"the text in {corpus.description} is too short: a sequence has "
            f"{model.sequence_length} tokens, and training and held-out text need one each; add "
            "text, or lower [model] sequence_length"
        )
    return plan


def _make_tokenizer(
    folder: RunFolder,
    settings: RunSettings,
    corpus: TextCorpus,
    plan: SplitPlan,
    progress: Progress,
) -> tuple[Tokenizer, str | None]:
    vocabulary_size = settings.model.config.vocabulary_size
    if settings.data.tokenizer == "bytes":
        _check_vocabulary(BytesTokenizer.vocabulary_size, vocabulary_size)
        return BytesTokenizer(), None
    progress(f"training a tokenizer of {vocabulary_size} ids")
    share = BPE_TRAINING_BYTES / plan.train_bytes
    documents = sampled(split_documents(corpus, plan, "train"), share)
    tokenizer = train_bpe((document.text for document in documents), vocabulary_size)
    return tokenizer, tokenizer.save(folder.tokenizer)


def _tokens(
    tokenizer: Tokenizer, documents: Iterator[TextDocument], progress: Progress
) -> Iterator[Tokens]:
    """Yield the ids of every document, each preceded by the mark between documents."""
    mark = np.array([END_OF_TEXT], dtype=np.uint32)
    characters, reported = 0, 0
    for batch in _batches(documents):
        encoded = tokenizer.encode_batch([document.text for document in batch])
        pieces: list[Tokens] = []
        for document, ids in zip(batch, encoded, strict=True):
            pieces += [ids] if document.continues else [mark, ids]
        yield np.concatenate(pieces)
        characters += sum(len(document.text) for document in batch)
        if characters - reported >= _PROGRESS_CHARACTERS:
            reported = characters
            progress(f"tokenised {characters / 1e6:.0f} million characters")


def _batches(documents: Iterator[TextDocument]) -> Iterator[list[TextDocument]]:
    batch: list[TextDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _copy_ready_shards(
    folder: RunFolder, settings: RunSettings, ready: ReadyShards, progress: Progress
) -> tuple[DataConfig, int]:
    """Copy existing shards and verify every byte of the copies."""
    source, model = ready.index.data, settings.model.config
    if settings.data.tokenizer != source.tokenizer:
        raise ConfigurationError(
            f"the shards in {ready.folder} were made with the {source.tokenizer} tokenizer, but "
            f"[data] tokenizer is {settings.data.tokenizer!r}; change the setting"
        )
    _check_vocabulary(ready.index.vocabulary_size, model.vocabulary_size)
    progress(f"copying {len(source.shards)} shards from {ready.folder}")
    for info in source.shards:
        copied = folder.data / info.name
        _copy(ready, info, folder)
        tree = verify_shard(copied, info, source.token_bytes, model.vocabulary_size)
        write_atomically(tree_path(copied), tree)
    if source.tokenizer == "bpe":
        # A run folder has the tokenizer beside its data folder.
        homes = (ready.folder, ready.folder.parent)
        path = next(
            (home / "tokenizer.json" for home in homes if (home / "tokenizer.json").exists()),
            ready.folder / "tokenizer.json",
        )
        tokenizer = load_tokenizer("bpe", path, source.tokenizer_sha256)
        assert isinstance(tokenizer, BpeTokenizer)
        write_atomically(folder.tokenizer, path.read_bytes())
    shards = list(source.shards)
    data = _data_config(folder, settings, source.token_bytes, shards, source.tokenizer_sha256)
    return data, ready.index.vocabulary_size


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
        tokenizer=settings.data.tokenizer,
        tokenizer_sha256=tokenizer_sha256,
        unigram_entropy_nats=0.0,
    )
    vocabulary_size = settings.model.config.vocabulary_size
    entropy_nats = unigram_entropy_nats(folder.data, data, "heldout", vocabulary_size)
    return data.model_copy(update={"unigram_entropy_nats": entropy_nats})
