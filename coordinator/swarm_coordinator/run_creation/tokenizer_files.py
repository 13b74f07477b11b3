"""The organiser's own tokenizer: a `tokenizer.json`, or a vocabulary with one token a line.

A vocabulary is UTF-8 text in which the id of a token is the number of its line, the first being 0;
the lines `\\n` and `\\t` are newline and tab. It becomes a `tokenizer.json` that takes the longest
token at each place of the text. There are no bytes to fall back to: an unknown character is refused
by its name and place, or becomes `<unk>` where the vocabulary has that line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from swarm_shared.base.errors import DataError
from swarm_shared.data.tokenizer import END_OF_TEXT_TOKENS, JsonTokenizer, read_tokenizer_file

UNKNOWN_WORD = "<unk>"
MAX_TOKEN_CHARACTERS = 100
"""Characters of one token of a vocabulary; the pattern of the tokens is nested as deep."""

_ESCAPES = {"\\n": "\n", "\\t": "\t"}


def organisers_tokenizer(path: Path) -> JsonTokenizer:
    """Read a `.json` as a tokenizer.json and everything else as a vocabulary."""
    content = read_tokenizer_file(path)
    if path.suffix != ".json":
        content = _of_vocabulary(_vocabulary(path, content))
    return JsonTokenizer(content, str(path))


def _vocabulary(path: Path, content: bytes) -> list[str]:
    try:
        lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the vocabulary {path} is not UTF-8 (byte {error.start}); write one token a line, or "
            "name a tokenizer.json"
        ) from error
    tokens: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        token = line.removesuffix("\r")
        token = _ESCAPES.get(token, token)
        problem = None
        if not token:
            problem = "is empty"
        elif len(token) > MAX_TOKEN_CHARACTERS:
            problem = f"is longer than {MAX_TOKEN_CHARACTERS} characters"
        elif token in tokens:
            problem = f"repeats {line!r} of line {tokens[token]}"
        if problem:
            raise DataError(
                f"line {number} of the vocabulary {path} {problem}; the id of a token is the "
                "number of its line, so each needs one of its own"
            )
        tokens[token] = number
    return list(tokens)


def _of_vocabulary(tokens: list[str]) -> bytes:
    """Return the tokenizer.json of a vocabulary."""
    special = [token for token in tokens if token in (UNKNOWN_WORD, *END_OF_TEXT_TOKENS)]
    ids = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN_WORD))
    known = _longest_of(set(tokens).difference(special))
    pattern = Regex(f"(?:{known})|[\\s\\S]" if known else "[\\s\\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    content: str = backend.to_str(pretty=True)
    return content.encode("utf-8")


def _longest_of(tokens: Iterable[str]) -> str:
    """Return a pattern of the longest token with which a text begins: a tree by first characters,
    so that its time does not grow with the number of tokens."""
    rests: dict[str, set[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], set()).add(token[1:])
    branches = []
    for first, rest in sorted(rests.items()):
        longer = _longest_of(rest - {""})
        optional = "?" if "" in rest else ""
        branches.append(re.escape(first) + (f"(?:{longer}){optional}" if longer else ""))
    return "|".join(branches)
