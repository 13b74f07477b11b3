"""Which documents are trained on, held out or left out.

Owns leaving out duplicates and empty documents, and the split into training and held-out text. The
corpus is read once to plan and once per use; the plan keeps about 150 bytes per document, and where
near duplicates are left out about 1,000.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from swarm_coordinator.run_creation.corpus import TextCorpus, TextDocument
from swarm_coordinator.run_creation.near_duplicates import (
    NearDuplicates,
    add_shingles,
    no_signature,
)
from swarm_coordinator.run_dir.shard_index import DataReport
from swarm_shared.base.errors import DataError
from swarm_shared.data.shards import Split

_DROPPED, _TRAIN, _HELDOUT, _TAIL = range(4)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The split: documents for training, held-out documents, and what is left out."""

    assignments: bytes
    """One byte for each piece of a document, in the corpus's order."""
    tail_bytes: int
    """Held-out bytes at the end of the one piece with assignment _TAIL."""
    train_bytes: int
    heldout_bytes: int
    report: DataReport


class _Reading:
    """What is known of the documents that were read so far."""

    def __init__(self, similarity: float) -> None:
        self.assignments = bytearray()
        self.sizes, self.keys = array("Q"), array("Q")
        self.documents = self.duplicates = self.near_duplicates = self.empty = self.too_long = 0
        self._seen: set[bytes] = set()
        self._kept = NearDuplicates(similarity) if similarity < 1 else None
        self._begin()

    def _begin(self) -> None:
        self._first = len(self.assignments)
        self._digest = hashlib.blake2b(digest_size=16)
        self._signature = no_signature()
        self._is_blank, self._is_too_long = True, False

    def add(self, piece: TextDocument) -> None:
        if not piece.continues:
            self.end_document()
        content = piece.text.encode("utf-8")
        self._digest.update(content)
        if self._kept is not None:
            add_shingles(self._signature, content)
        self._is_blank = self._is_blank and not content.strip()
        self._is_too_long = piece.too_long
        self.assignments.append(_TRAIN)
        self.sizes.append(len(content))
        self.keys.append(_key(piece.name))

    def end_document(self) -> None:
        """Count the document whose pieces were added, and leave all of them out if need be."""
        pieces = range(self._first, len(self.assignments))
        if not pieces:
            return
        digest = self._digest.digest()
        if self._is_too_long:
            self.too_long += 1
        elif self._is_blank:
            self.empty += 1
        elif digest in self._seen:
            self.duplicates += 1
        elif self._kept is not None and self._kept.repeats(self._signature):
            self.near_duplicates += 1
        else:
            self._seen.add(digest)
            self.documents += 1
            pieces = range(0)
        for ordinal in pieces:
            self.assignments[ordinal] = _DROPPED
            self.sizes[ordinal] = 0
        self._begin()


def plan_split(
    corpus: TextCorpus, heldout_share: float, least_bytes: int, similarity: float = 1.0
) -> SplitPlan:
    """Hold out `heldout_share` of the text in whole documents, or pieces of long ones, selected by
    a hash of their names.

    Where no selection of them comes near the share and leaves `least_bytes` on both sides, the end
    of the longest one is held out instead. Below 1, `similarity` is that from which on a document
    repeats an earlier one and is left out.
    """
    read = _Reading(similarity)
    for document in corpus.documents():
        read.add(document)
    read.end_document()
    assignments, sizes = read.assignments, read.sizes
    total_bytes = sum(sizes)
    if total_bytes == 0:
        raise DataError(f"{corpus.description} holds no text; add some")
    heldout = _choose_whole(assignments, sizes, read.keys, heldout_share, least_bytes)
    tail_bytes = 0
    for ordinal in heldout:
        assignments[ordinal] = _HELDOUT
    if not heldout:
        longest = max(range(len(sizes)), key=lambda ordinal: sizes[ordinal])
        assignments[longest] = _TAIL
        tail_bytes = max(round(heldout_share * sizes[longest]), least_bytes)
    heldout_bytes = tail_bytes + sum(sizes[ordinal] for ordinal in heldout)
    report = DataReport(
        documents=read.documents, text_bytes=total_bytes, duplicates=read.duplicates,
        near_duplicates=read.near_duplicates, empty=read.empty, too_long=read.too_long,
    )  # fmt: skip
    train_bytes = max(0, total_bytes - heldout_bytes)
    return SplitPlan(bytes(assignments), tail_bytes, train_bytes, heldout_bytes, report)


def _choose_whole(
    assignments: bytearray, sizes: array[int], keys: array[int], share: float, least_bytes: int
) -> list[int]:
    """Select ordinals by their keys until the share is reached; [] if that is impossible."""
    order = np.argsort(np.frombuffer(keys, dtype=np.uint64), kind="stable").tolist()
    total = sum(sizes)
    target = max(share * total, least_bytes)
    for largest in (2 * target, max(2 * target, total / 4)):
        chosen, held = [], 0
        for ordinal in order:
            if assignments[ordinal] == _TRAIN and held + sizes[ordinal] <= largest:
                chosen.append(ordinal)
                held += sizes[ordinal]
                if held >= target:
                    break
        if held >= target / 2 and held >= least_bytes and total - held >= max(held, least_bytes):
            return chosen
    return []


def split_documents(corpus: TextCorpus, plan: SplitPlan, split: Split) -> Iterator[TextDocument]:
    """Yield the documents of one split, in the corpus's order."""
    wanted = _TRAIN if split == "train" else _HELDOUT
    ordinal, last = -1, -1
    for ordinal, document in enumerate(corpus.documents()):
        if ordinal >= len(plan.assignments):
            break
        assignment = plan.assignments[ordinal]
        # A piece whose predecessor is on the other side continues nothing here.
        follows = document.continues and last == ordinal - 1
        if assignment == _TAIL:
            yield replace(_part(document, plan.tail_bytes, split), continues=follows)
        elif assignment == wanted:
            last = ordinal
            yield replace(document, continues=follows)
    if ordinal + 1 != len(plan.assignments):
        raise DataError(
            f"{corpus.description} changed while it was read; do not modify it and start again"
        )


def sampled(documents: Iterator[TextDocument], share: float) -> Iterator[TextDocument]:
    """Yield about `share` of the documents, always the same ones."""
    for document in documents:
        if share >= 1 or _key("sample " + document.name) < share * 2**64:
            yield document


def _part(document: TextDocument, tail_bytes: int, split: Split) -> TextDocument:
    content = document.text.encode("utf-8")
    cut = max(0, len(content) - tail_bytes)
    # After a line if one ends nearby, and never inside a character.
    cut = content.rfind(b"\n", max(0, cut - tail_bytes // 4), cut) + 1 or cut
    while 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1
    part = content[:cut] if split == "train" else content[cut:]
    return TextDocument(f"{document.name}/{split}", part.decode("utf-8"))


def _key(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
