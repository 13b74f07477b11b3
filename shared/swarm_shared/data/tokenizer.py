"""Text to token ids and back: plain bytes, or what a `tokenizer.json` describes.

Owns both tokenizers, training byte-level BPE, and which token separates documents. Does not own
files of tokens (`swarm_shared.data.shards`), the organiser's own files of tokenizers
(`swarm_coordinator.run_creation.tokenizer_files`) or the origin of texts. Byte-level BPE is GPT-2's
scheme (Radford et al. 2019; Sennrich et al. 2016, arXiv 1508.07909), as the `tokenizers` package
trains it; the same texts always give the same tokenizer, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import ConfigurationError, DataError
from swarm_shared.run.manifest import TokenizerKind

TokenIds = npt.NDArray[np.uint32]

END_OF_TEXT_TOKEN = "<|endoftext|>"
END_OF_TEXT_TOKENS = (
    END_OF_TEXT_TOKEN, "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>", "[EOS]",
    "[SEP]",
)  # fmt: skip
"""Special tokens that end a document: of GPT-2 and Qwen, Llama 3, Gemma and ESM, Llama 2 and
Mistral, DeepSeek, BERT. The first one that a tokenizer has separates the documents."""

SMALLEST_BPE_VOCABULARY = 257
"""256 bytes and the separator of documents."""


class BytesTokenizer:
    """The UTF-8 bytes of the text; nothing to train and nothing to store."""

    vocabulary_size = 256
    """Exclusive upper bound of the ids that `encode` returns."""
    end_of_text = 0
    """Id between two documents: NUL, which no text document contains."""

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
        content: bytes = known[known != self.end_of_text].astype(np.uint8).tobytes()
        return content.decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer of the `tokenizers` package; `content` is its file, `tokenizer.json`.

    Truncation, padding and templates of the file do not apply: training text is encoded whole, and
    only the separator is added. A tokenizer without one of END_OF_TEXT_TOKENS gets the first as one
    more id. Special tokens that a document spells out in letters are text.
    """

    def __init__(self, content: bytes, where: str) -> None:
        """DataError if `content`, which lies at `where`, is no tokenizer."""
        with _library_errors(
            f"{where} is not a tokenizer",
            "use a tokenizer.json as the tokenizers package writes it",
        ):
            backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        special = {token.content for token in backend.get_added_tokens_decoder().values()
                   if token.special}  # fmt: skip
        separator = next((token for token in END_OF_TEXT_TOKENS if token in special), None)
        if separator is None:
            separator = END_OF_TEXT_TOKEN
            backend.add_special_tokens([separator])
            content = backend.to_str(pretty=True).encode("utf-8")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        vocabulary = backend.get_vocab(with_added_tokens=True)
        ids = list(vocabulary.values())
        self.content = content
        self.end_of_text_token = separator
        self.end_of_text: int = vocabulary[separator]
        # Not the number of tokens: ids may have gaps.
        self.vocabulary_size = max(ids) + 1
        self._backend = backend
        if ids.count(self.end_of_text) > 1:
            raise DataError(
                f"{where} has no token that ends a document, and its ids have gaps; add one of "
                f"{', '.join(END_OF_TEXT_TOKENS)} to its added_tokens"
            )

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode every text. DataError if one has what the tokenizer has no token for."""
        with _library_errors("the tokenizer cannot encode it", "use another one, or another text"):
            try:
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            except Exception as error:
                unknown = next(filter(None, map(self._first_unknown, texts)), None)
                if unknown is None:
                    raise
                raise DataError(unknown) from error
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        known = _known_ids(ids, self.vocabulary_size)
        with _library_errors("the tokenizer cannot decode what it encodes", "use another one"):
            return str(self._backend.decode(known.tolist(), skip_special_tokens=True))

    def save(self, path: Path) -> str:
        """Write `tokenizer.json` and return its SHA-256, as the manifest names it."""
        write_atomically(path, self.content)
        return hashlib.sha256(self.content).hexdigest()

    def _first_unknown(self, text: str) -> str | None:
        if self._backend.pre_tokenizer is None:
            return None
        for piece, (start, _) in self._backend.pre_tokenizer.pre_tokenize_str(text):
            if self._backend.token_to_id(piece) is None:
                code = f" (U+{ord(piece):04X})" if len(piece) == 1 else ""
                return (
                    f"character {start + 1} is {piece!r}{code}, for which the tokenizer has no "
                    "token; add it to the vocabulary, or <unk> for everything unknown"
                )
        return None


@contextmanager
def _library_errors(seen: str, advice: str) -> Iterator[None]:
    """Convert what the `tokenizers` package raises to a DataError."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        # A failed assertion in the package, as of a damaged file, is no Exception, and no module
        # exports its class.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{seen} ({error}); {advice}") from error


Tokenizer = BytesTokenizer | JsonTokenizer
"""A deterministic tokenizer. Bytes and trained BPE are lossless: `decode(encode(text)) == text`."""


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> JsonTokenizer:
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
        special_tokens=[END_OF_TEXT_TOKEN],
        # The alphabet comes as a set; sorted, the ids are the same in every process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return JsonTokenizer(backend.to_str(pretty=True).encode("utf-8"), "the trained tokenizer")


def load_tokenizer(kind: TokenizerKind, path: Path, sha256: str | None = None) -> Tokenizer:
    """Load the tokenizer that a manifest names; `path` is not read for bytes, otherwise checked."""
    if kind == "bytes":
        return BytesTokenizer()
    content = read_tokenizer_file(path)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{path} is not the tokenizer that the manifest names (its hash differs); "
            "restore it from a copy"
        )
    return JsonTokenizer(content, str(path))


def read_tokenizer_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path} ({error.strerror}); check its path, or restore it "
            "from a copy"
        ) from error


def _known_ids(ids: Sequence[int] | npt.NDArray[Any], size: int) -> npt.NDArray[np.int64]:
    """Drop ids of no token: a model's vocabulary may be larger than its tokenizer's."""
    values = np.asarray(ids, dtype=np.int64).reshape(-1)
    return values[(values >= 0) & (values < size)]
