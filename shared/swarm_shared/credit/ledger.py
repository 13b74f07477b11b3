"""The public ledger of a run: each peer's counted work in every applied step, signed by the
organiser.

Owns the file's form, writing and checking it. Lines of JSON in the canonical form of RFC 8785, each
with a digest that covers the line before; the last one is the organiser's signature over the last
digest, so that it covers every line. A line's `digest` is the SHA-256, in hex, of the digest of the
line before as text (the first line's: 64 zeros), a line break, and the line without its `digest`.

    head     the run, and its signed manifest (stages' work, tokens of a microbatch, organiser)
    owner    that one peer is another key's device, signed by that key
    verdict  one lost audit with its evidence, and of which steps the loser's credit is void
    sum_verdict  the same for one lie about an average
    step     one applied step: (peer, stage, microbatches) of every peer counted in it
    total    one peer's sums, with the name it chose, recomputable from the steps
    seal     number of lines, last digest, the organiser's envelope

Owners have no lines of their own: an owner's total is the sum over all peers bound to its key,
added up by the reader.

The ledger proves that

- the totals follow from the steps and the verdicts;
- each verdict of an audit follows from what the audited peer and its auditors have signed;
- every step counts every microbatch exactly once in every stage;
- an owner has signed for each of its devices;
- the organiser has signed exactly these lines: a ledger that was kept exposes a later one with a
  different past.

It does not prove

- which peer counted a microbatch: volunteers sign a receipt for each, which the coordinator checks
  and does not keep, as half a kilobyte for every microbatch and stage is gigabytes in a run of ten
  thousand steps. A volunteer can compare its own count with the ledger's;
- how many owners could vote on an audit, and since when the credit of an owner that lost is void;
- that a lie about an average follows from the signed statements: only their signatures are checked;
- that a device agreed to its owner: the coordinator saw that on the device's connection.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from swarm_shared.base.errors import ProtocolError, SignatureError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.credit.contributions import ContributionSums, OwnerSums
from swarm_shared.credit.credit import work_shares
from swarm_shared.credit.ledger_lines import (
    Head,
    Line,
    OwnerLine,
    Seal,
    SealLine,
    StepLine,
    SumVerdictLine,
    TotalLine,
    VerdictLine,
    ledger_lines,
)
from swarm_shared.identity.canonical_json import canonical_json
from swarm_shared.identity.credentials import open_owner_binding
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import (
    MANIFEST_DOMAIN,
    MAX_MANIFEST_BYTES,
    open_manifest,
    run_id_of,
)
from swarm_shared.identity.signing import (
    decode_envelope,
    encode_envelope,
    open_envelope,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.trust.evidence import (
    Judgement,
    SumVerdict,
    Verdict,
    check_sum_verdict,
    check_verdict,
)

MAX_LINE_BYTES = 16 * 2**20
"""Longest line; a step of ten thousand peers has a megabyte."""
TOLERANCE = 1e-9
"""Relative tolerance of decayed averages: machines round powers differently in the last digits."""

NameAndTeam = tuple[str | None, str | None]
"""A peer's name and its team."""


class _LedgerSums(ContributionSums):
    """The totals that follow from the steps and verdicts: the same code writes and checks them."""

    def __init__(self, manifest: Manifest) -> None:
        self._tokens = manifest.tokens_per_microbatch
        self._void: dict[PeerId, list[tuple[int, int]]] = {}
        """First and last step without credit, by the peers and owners that have lost an audit."""
        super().__init__(work_shares([stage.work_flops for stage in manifest.stages]))

    def add_verdict(self, verdict: Verdict | SumVerdict) -> None:
        """Void the loser's credit in the steps that are added after this."""
        for key in {verdict.peer, verdict.owner}:
            self._void.setdefault(key, []).append((verdict.void_after + 1, verdict.step))

    def add_step(self, line: StepLine) -> None:
        for peer, stage, microbatches in line.shares:
            if self._is_void(peer, line.step):
                continue
            tokens = microbatches * self._tokens
            self.add(PeerId(peer), stage, microbatches, tokens, applied_at=line.applied_at)

    def _is_void(self, peer: PeerId, step: int) -> bool:
        keys = (peer, self.owners.get(peer, peer))
        return any(first <= step <= last for key in keys for first, last in self._void.get(key, ()))

    def total(self, peer: PeerId, named: NameAndTeam, as_of: float) -> TotalLine:
        sums = self.peers[peer]
        return TotalLine(
            peer=peer,
            name=named[0],
            team=named[1],
            microbatches=sums.microbatches,
            tokens=sum(sums.tokens.values()),
            credit=self._credit(sums),
            credit_per_day=sums.recent.per_day(as_of),
        )


# ---------------------------------------------------------------- writing


def write_ledger(
    organiser: Identity,
    envelope: bytes,
    steps: Iterable[StepLine],
    names: Mapping[PeerId, NameAndTeam],
    as_of: float,
    bindings: Mapping[PeerId, tuple[PeerId, str]] | None = None,
    verdicts: Iterable[Verdict | SumVerdict] = (),
) -> Iterator[bytes]:
    """Yield the lines of a ledger, each with its line break. `envelope` is the signed manifest.

    `bindings` are the owners of devices that have counted, each with the binding in base64, without
    chains. A verdict must follow from its evidence.
    """
    manifest = open_manifest(envelope, organiser.peer_id)
    run = run_id_of(manifest)
    chain = _Chain()
    yield chain.put(
        Head(
            run=run, as_of=as_of,
            manifest=encode_envelope(envelope),
        )
    )  # fmt: skip
    sums = _LedgerSums(manifest)
    for peer, (owner, binding) in sorted((bindings or {}).items()):
        sums.owners[peer] = owner
        yield chain.put(OwnerLine(peer=peer, binding=binding))
    for verdict in verdicts:
        sums.add_verdict(verdict)
        of_sums = isinstance(verdict, SumVerdict)
        line = SumVerdictLine(verdict=verdict) if of_sums else VerdictLine(verdict=verdict)
        yield chain.put(line)
    for step in steps:
        sums.add_step(step)
        yield chain.put(step)
    for peer in sorted(sums.peers):
        yield chain.put(sums.total(peer, names.get(peer, (None, None)), as_of))
    sealed = Seal(run=run, lines=chain.lines, digest=chain.digest).sign(organiser)
    yield chain.put(SealLine(envelope=encode_envelope(sealed)))


class _Chain:
    """Writes each line with the digest of itself and of the line before."""

    def __init__(self) -> None:
        self.digest = "0" * 64
        self.lines = 0

    def put(self, line: FrozenModel) -> bytes:
        content = line.model_dump(mode="json")
        self.digest = _digest(self.digest, content)
        self.lines += 1
        return canonical_json({**content, "digest": self.digest}) + b"\n"


def _digest(before: str, content: Mapping[str, Any]) -> str:
    return hashlib.sha256(before.encode() + b"\n" + canonical_json(content)).hexdigest()


# ---------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class VerifiedLedger:
    """A ledger whose every number was found right."""

    run: RunId
    name: str
    organiser: PeerId
    as_of: float
    steps: int
    totals: tuple[TotalLine, ...]
    """Totals by peer, highest credit first."""
    people: tuple[OwnerSums, ...]
    """Totals by owner, highest credit first."""
    verdicts: tuple[tuple[Verdict, Judgement], ...] = ()
    """Lost audits, and what their evidence shows."""
    sum_verdicts: tuple[SumVerdict, ...] = ()
    """Lies about an average, whose statements are signed."""


def verify_ledger(lines: Iterable[bytes], organiser: PeerId | None = None) -> VerifiedLedger:
    """Recompute everything. ProtocolError names the first wrong line and the reason.

    Without an `organiser` the one that the ledger names is used: the result is then only as
    trustworthy as the source of the file.
    """
    check = _Check(organiser)
    number = 0
    for number, content in enumerate(lines, start=1):
        try:
            check.take(content)
        except ProtocolError as error:
            raise type(error)(f"line {number}: {error}") from error
    if not check.sealed:
        raise ProtocolError(
            f"line {number + 1}: the organiser's seal is missing; the ledger is cut short"
        )
    return check.result()


_ORDER = (Head, OwnerLine, VerdictLine | SumVerdictLine, StepLine, TotalLine, SealLine)
"""The kinds of lines in the only order allowed; there is one head and one seal."""


class _Check:
    """Takes the lines one by one."""

    def __init__(self, organiser: PeerId | None) -> None:
        self._organiser = organiser
        self._chain = _Chain()
        self._head: Head | None = None
        self._place = 0
        self._steps = 0
        self._binding_owners: set[PeerId] = set()
        """The owners of all devices that are bound to one."""
        self._verdicts: list[tuple[Verdict, Judgement]] = []
        self._sum_verdicts: list[SumVerdict] = []
        self._counted: set[PeerId] = set()
        """Peers that count in a step, void or not."""
        self._totals: dict[str, TotalLine] = {}
        self.sealed = False

    def take(self, content: bytes) -> None:
        before = self._chain.digest
        line = self._parse(content)
        place = next(at for at, kinds in enumerate(_ORDER) if isinstance(line, kinds))
        if (place == 0) != (self._head is None) or place < self._place or self.sealed:
            raise ProtocolError(f"a line of the kind {line.line!r} is not in its place")
        self._place = place
        match line:
            case Head():
                self._take_head(line)
            case OwnerLine():
                self._take_owner(line)
            case VerdictLine() | SumVerdictLine():
                self._take_verdict(line)
            case StepLine():
                self._take_step(line)
            case TotalLine():
                self._take_total(line)
            case SealLine():
                self._take_seal(line, before)

    def _parse(self, content: bytes) -> Line:
        if len(content) > MAX_LINE_BYTES:
            raise ProtocolError(f"it is longer than {MAX_LINE_BYTES} bytes")
        try:
            fields = json.loads(content)
            if not isinstance(fields, dict):
                raise ValueError("it is no object")
            stated_digest = fields.pop("digest", None)
            line = ledger_lines.validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            raise ProtocolError(first_error(error)) from error
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"it is no line of a ledger: {error}") from error
        if self._chain.put(line) != content or stated_digest != self._chain.digest:
            raise ProtocolError(
                "its digest does not follow from it and from the line before: one of the two was "
                "changed"
            )
        return line

    def _take_head(self, line: Head) -> None:
        envelope = decode_envelope(line.manifest, "its manifest")
        organiser = self._organiser or _named_organiser(envelope)
        self._manifest = open_manifest(envelope, organiser)
        if run_id_of(self._manifest) != line.run:
            raise ProtocolError("its manifest is of another run than it names")
        self._head, self._signer = line, organiser
        self._sums = _LedgerSums(self._manifest)

    def _take_step(self, line: StepLine) -> None:
        if line.step != self._steps + 1:
            raise ProtocolError(f"it is step {line.step}, and step {self._steps + 1} is next")
        counted: Counter[int] = Counter()
        for _, stage, microbatches in line.shares:
            counted[stage] += microbatches
        every = self._manifest.training.microbatches_per_step
        for stage in range(self._manifest.stage_count):
            if counted[stage] != every:
                raise ProtocolError(
                    f"step {line.step} counts {counted[stage]} microbatches in stage {stage}, and "
                    f"a step has {every}"
                )
        if len(counted) != self._manifest.stage_count:
            raise ProtocolError(f"step {line.step} counts in stages that the run does not have")
        self._steps = line.step
        self._counted.update(peer for peer, _, _ in line.shares)
        self._sums.add_step(line)

    def _take_owner(self, line: OwnerLine) -> None:
        owners = self._sums.owners
        if owners and line.peer <= next(reversed(owners)):
            raise ProtocolError(f"{line.peer} is not in its place, or there twice")
        envelope = decode_envelope(line.binding, f"the owner binding of {line.peer}")
        device = PeerId(line.peer)
        owner = open_owner_binding(envelope, device).owner
        owners[device] = owner
        self._binding_owners.add(owner)
        chained = next((one for one in (owner, device) if self._is_chained(one)), None)
        if chained is not None:
            raise ProtocolError(
                f"{chained} is the owner of other devices and has an owner; an owner must have none"
            )

    def _is_chained(self, peer: PeerId) -> bool:
        return peer in self._sums.owners and peer in self._binding_owners

    def _take_verdict(self, line: VerdictLine | SumVerdictLine) -> None:
        assert self._head is not None
        run, verdict = self._head.run, line.verdict
        if isinstance(verdict, SumVerdict):
            check_sum_verdict(run, verdict)
            self._sum_verdicts.append(verdict)
        else:
            self._verdicts.append((verdict, check_verdict(run, verdict)))
        self._sums.add_verdict(verdict)

    def _take_total(self, line: TotalLine) -> None:
        assert self._head is not None
        self._check_owners_count()
        if line.peer not in self._sums.peers:
            raise ProtocolError(f"{line.peer} has a total and no credit in any step")
        if self._totals and line.peer <= next(reversed(self._totals)):
            raise ProtocolError(f"{line.peer} is not in its place, or there twice")
        named = (line.name, line.team)
        right = self._sums.total(PeerId(line.peer), named, self._head.as_of)
        for name in ("microbatches", "tokens", "credit", "credit_per_day"):
            stated, recomputed = getattr(line, name), getattr(right, name)
            if not math.isclose(stated, recomputed, rel_tol=TOLERANCE, abs_tol=1e-12):
                raise ProtocolError(
                    f"the {name} of {line.peer} is {stated}, and the steps come to {recomputed}"
                )
        self._totals[line.peer] = line

    def _check_owners_count(self) -> None:
        idle = self._sums.owners.keys() - self._counted
        if idle:
            raise ProtocolError(f"{min(idle)} has an owner and counts in no step")

    def _take_seal(self, line: SealLine, digest: str) -> None:
        self._check_owners_count()
        missing = set(self._sums.peers) - set(self._totals)
        if missing:
            raise ProtocolError(f"the total of {min(missing)} is missing")
        seal = Seal.open(decode_envelope(line.envelope, "the seal"), self._signer)
        assert self._head is not None
        if seal != Seal(run=self._head.run, lines=self._chain.lines - 1, digest=digest):
            raise SignatureError("the organiser's seal is of another ledger")
        self.sealed = True

    def result(self) -> VerifiedLedger:
        assert self._head is not None
        totals = sorted(self._totals.values(), key=lambda total: (-total.credit, total.peer))
        return VerifiedLedger(
            self._head.run, self._manifest.name, self._signer, self._head.as_of, self._steps,
            tuple(totals), self._people(), tuple(self._verdicts), tuple(self._sum_verdicts),
        )  # fmt: skip

    def _people(self) -> tuple[OwnerSums, ...]:
        for peer, total in self._totals.items():
            device = PeerId(peer)
            self._sums.describe(device, total.name, total.team, self._sums.owners.get(device))
        return tuple(self._sums.ranked())


def _named_organiser(envelope: bytes) -> PeerId:
    """Return the signer of the manifest's envelope; its signature is checked against that next."""
    return open_envelope(envelope, MANIFEST_DOMAIN, max_bytes=MAX_MANIFEST_BYTES).signer
