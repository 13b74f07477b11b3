"""Text to token ids and back: plain bytes, or byte-level BPE.

Owns both tokenizers and the meaning of id 0, the separator of documents. Does not own files of
tokens (`swarm_shared.data.shards`) or the origin of texts. Byte-level BPE is GPT-2's scheme
(Radford et al. 2019; Sennrich et al. 2016, arXiv 1508.07909), as the `tokenizers` package trains
it; the same texts always give the same tokenizer, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import ConfigurationError, DataError

TokenIds = npt.NDArray[np.uint32]

END_OF_TEXT = 0
"""The id between two documents. As a byte it is NUL, which no text document contains."""

END_OF_TEXT_WORD = "<|endoftext|>"
SMALLEST_BPE_VOCABULARY = 257
"""256 bytes and the separator of documents."""


class BytesTokenizer:
    """The UTF-8 bytes of the text; nothing to train and nothing to store."""

    vocabulary_size = 256
    """Exclusive upper bound of the ids that `encode` returns."""

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text`, without a separator at its end."""
        if "\0" in text:
            raise DataError("text with a NUL character cannot be tokenised; remove the character")
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode every text; faster than one call each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of `ids`; separators of documents and ids of no token are left out."""
        known = _known_ids(ids, self.vocabulary_size)
        return known.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class BpeTokenizer:
    """Byte-level BPE; its file is the `tokenizer.json` that Hugging Face's packages read."""

    def __init__(self, backend: Any) -> None:
        # A document that spells the separator out in letters must not end there.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocabulary_size = int(backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        known = _known_ids(ids, self.vocabulary_size)
        return str(self._backend.decode(known.tolist(), skip_special_tokens=True))

    def to_bytes(self) -> bytes:
        """Return the content of `tokenizer.json`."""
        text: str = self._backend.to_str(pretty=True)
        return text.encode("utf-8")

    def save(self, path: Path) -> str:
        """Write `tokenizer.json` and return its SHA-256, as the manifest names it."""
        content = self.to_bytes()
        write_atomically(path, content)
        return hashlib.sha256(content).hexdigest()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> BpeTokenizer:
        try:
            backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:
            raise DataError(
                f"{where} is not a tokenizer ({error}); copy it again or make the run anew"
            ) from error
        if backend.id_to_token(END_OF_TEXT) != END_OF_TEXT_WORD:
            raise DataError(
                f"{where} is a tokenizer of another kind: its id {END_OF_TEXT} is not "
                f"{END_OF_TEXT_WORD}; use one made by `swarm-coordinator init`"
            )
        return cls(backend)

    @classmethod
    def load(cls, path: Path) -> BpeTokenizer:
        return cls.from_bytes(_read(path), str(path))


Tokenizer = BytesTokenizer | BpeTokenizer
"""A deterministic and lossless tokenizer: `decode(encode(text)) == text`."""


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> BpeTokenizer:
    """Train a tokenizer of at most `vocabulary_size` ids; a small text yields fewer."""
    if vocabulary_size < SMALLEST_BPE_VOCABULARY:
        raise ConfigurationError(
            f"a bpe tokenizer needs a vocabulary of at least {SMALLEST_BPE_VOCABULARY}, "
            f"not {vocabulary_size}; raise [model] vocabulary_size or use the bytes tokenizer"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT_WORD],
        # The alphabet comes as a set; sorted, the ids are the same in every process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return BpeTokenizer(backend)


def load_tokenizer(
    kind: Literal["bytes", "bpe"], path: Path, sha256: str | None = None
) -> Tokenizer:
    """Load the tokenizer that a manifest names; `path` is read for bpe only, and checked."""
    if kind == "bytes":
        return BytesTokenizer()
    content = _read(path)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{path} is not the tokenizer that the manifest names (its hash differs); "
            "restore it from a copy"
        )
    return BpeTokenizer.from_bytes(content, str(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path} ({error.strerror}); restore it from a copy"
        ) from error


def _known_ids(ids: Sequence[int] | npt.NDArray[Any], size: int) -> npt.NDArray[np.int64]:
    """Drop ids of no token: a model's vocabulary may be larger than its tokenizer's."""
    values = np.asarray(ids, dtype=np.int64).reshape(-1)
    return values[(values > END_OF_TEXT) & (values < size)]
