"""A ledger: what was written is right, and whatever is changed in it afterwards is found."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits import lost_audit
from kits.manifests import manifest_of, stage_ranges
from kits.peer_names import named
from swarm_shared.base.errors import ProtocolError, SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId, StageIndex, Step
from swarm_shared.credit.credit import work_shares
from swarm_shared.credit.ledger import (
    VerifiedLedger,
    _Chain,
    _LedgerSums,
    verify_ledger,
    write_ledger,
)
from swarm_shared.credit.ledger_lines import (
    Head,
    Seal,
    SealLine,
    StepLine,
    TotalLine,
    VerdictLine,
    ledger_lines,
)
from swarm_shared.identity.credentials import sign_owner_binding
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of, sign_manifest
from swarm_shared.identity.signing import encode_envelope, sign_message
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import preset
from swarm_shared.trust.evidence import SumVerdict, Verdict

ORGANISER, STRANGER = Identity.generate(), Identity.generate()
ANNA, BERT = named("Anna"), named("Bert")
AS_OF = 2e6
MICROBATCHES = 4


def ledger_manifest(organiser: Identity, work_flops: float = 1e9, **changes: Any) -> Manifest:
    """Of two stages, the second of which does most of the work."""
    model = preset("tiny").model
    works = zip(stage_ranges(1, model.layers), (work_flops, 3e9), strict=True)
    stages = tuple(one.model_copy(update={"work_flops": flops}) for one, flops in works)
    training = {"steps": 9, "microbatches_per_step": MICROBATCHES, "seed": 1}
    return manifest_of(
        organiser=organiser.peer_id, model=model, stages=stages, training=training, **changes
    )


MANIFEST = ledger_manifest(ORGANISER, name="a run")
ENVELOPE = sign_manifest(ORGANISER, MANIFEST)
RUN = run_id_of(MANIFEST)


def step(number: int, annas: int = 1) -> StepLine:
    shares = ((ANNA, 0, annas), (BERT, 0, MICROBATCHES - annas), (BERT, 1, MICROBATCHES))
    return StepLine(step=number, applied_at=1e6 + number, shares=shares)


def ledger(*steps: StepLine, as_of: float = AS_OF) -> list[bytes]:
    return list(write_ledger(ORGANISER, ENVELOPE, steps, {ANNA: ("anna", "the As")}, as_of))


def refused(lines: list[bytes], organiser: PeerId | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        verify_ledger(lines, organiser)
    return str(caught.value)


WHOLE = ledger(step(1), step(2, annas=3), step(3))


def test_a_ledger_is_right_as_it_was_written() -> None:
    found = verify_ledger(WHOLE, ORGANISER.peer_id)
    assert isinstance(found, VerifiedLedger)
    assert (found.run, found.steps, found.name) == (run_id_of(MANIFEST), 3, "a run")
    assert verify_ledger(WHOLE) == found
    bert, anna = found.totals
    tokens = MANIFEST.tokens_per_microbatch
    assert (anna.name, bert.name, anna.team) == ("anna", None, "the As")
    assert (anna.microbatches, anna.tokens) == (5, 5 * tokens)
    first, second = work_shares([1e9, 3e9])
    assert anna.credit == pytest.approx(5 * tokens * first)
    assert bert.credit == pytest.approx(7 * tokens * first + 12 * tokens * second)
    assert anna.credit + bert.credit == pytest.approx(3 * MANIFEST.tokens_per_step)
    assert 0 < anna.credit_per_day < anna.credit


def test_a_run_without_steps_has_a_ledger_too() -> None:
    assert verify_ledger(ledger()).totals == ()


def test_lines_in_another_order_are_noticed() -> None:
    for number in range(1, len(WHOLE)):
        lines = list(WHOLE)
        lines[number - 1], lines[number] = lines[number], lines[number - 1]
        assert refused(lines).startswith(f"line {number}: ")


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=100), max_size=5))
def test_nonsense_is_refused_in_a_sentence(lines: list[bytes]) -> None:
    refused(lines)


def test_a_ledger_of_another_organiser_is_not_this_runs() -> None:
    assert refused(WHOLE, STRANGER.peer_id).startswith("line 1: ")


# ---------------------------------------------------------------- organisers that lie


def forged(*steps: StepLine, **changes: object) -> list[bytes]:
    """Chained and signed as it should be, but the first total says something else."""
    sums = _LedgerSums(MANIFEST)
    head = Head(run=RUN, as_of=AS_OF, manifest=encode_envelope(ENVELOPE))
    for one in steps:
        sums.add_step(one)
    totals = [sums.total(peer, (None, None), AS_OF) for peer in sorted(sums.peers)]
    totals[0] = TotalLine.model_validate({**totals[0].model_dump(), **changes})
    return sealed(head, *steps, *totals)


def sealed(*lines: FrozenModel) -> list[bytes]:
    chain = _Chain()
    written = [chain.put(line) for line in lines]
    seal = Seal(run=RUN, lines=chain.lines, digest=chain.digest)
    envelope = encode_envelope(sign_message(ORGANISER, seal, Seal.domain))
    return [*written, chain.put(SealLine(envelope=envelope))]


def test_the_forger_makes_right_ledgers_when_nothing_is_forged() -> None:
    assert verify_ledger(forged(step(1))).steps == 1


@pytest.mark.parametrize("name", ["microbatches", "tokens", "credit", "credit_per_day"])
def test_a_sum_that_does_not_follow_from_the_steps_is_named(name: str) -> None:
    said = refused(forged(step(1), **{name: 12345}))
    assert said.startswith("line 3: ")
    assert name in said
    assert "12345" in said


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (((ANNA, 0, 4), (BERT, 1, 3)), "counts 3 microbatches in stage 1"),
        (((ANNA, 0, 5), (BERT, 1, 4)), "counts 5 microbatches in stage 0"),
        (((ANNA, 0, 4),), "counts 0 microbatches in stage 1"),
    ],
    ids=["one-lost", "one-twice", "a-stage-missing"],
)
def test_a_step_that_does_not_count_everything_once_is_named(
    shares: tuple[tuple[str, int, int], ...], why: str
) -> None:
    bad = StepLine(step=1, applied_at=1e6, shares=shares)
    said = refused(forged(bad))
    assert said.startswith("line 2: ")
    assert why in said


def test_a_step_that_is_left_out_is_named() -> None:
    assert "step 2 is next" in refused(forged(step(1), step(3)))


# ---------------------------------------------------------------- people

VERA, FIRST, SECOND, LAZY = (Identity.from_seed(name * 32) for name in (b"v", b"1", b"2", b"3"))


def bound(owner: Identity, device: Identity) -> str:
    return encode_envelope(sign_owner_binding(owner, device.peer_id))


def steps_of(*peers: PeerId) -> list[StepLine]:
    """Each counts one microbatch in the first stage; the first one does the second stage alone."""
    shares = (*((peer, 0, 1) for peer in peers), (peers[0], 1, MICROBATCHES))
    return [StepLine(step=number, applied_at=1e6 + number, shares=shares) for number in (1, 2)]


FOUR = (ANNA, VERA.peer_id, FIRST.peer_id, SECOND.peer_id)
BINDINGS = {FIRST.peer_id: bound(VERA, FIRST), SECOND.peer_id: bound(VERA, SECOND)}
NAMES: dict[PeerId, tuple[str | None, str | None]] = {FIRST.peer_id: ("first", "the Vs")}


def owned(bindings: dict[PeerId, str], steps: list[StepLine]) -> list[bytes]:
    bound = {device: (VERA.peer_id, text) for device, text in bindings.items()}
    return list(write_ledger(ORGANISER, ENVELOPE, steps, NAMES, AS_OF, bound))


def test_people_are_the_sums_of_the_devices_that_they_signed_for() -> None:
    found = verify_ledger(owned(BINDINGS, steps_of(*FOUR)))
    anna, vera = found.people
    assert (anna.owner, anna.devices) == (ANNA, (ANNA,))
    devices = {VERA.peer_id, FIRST.peer_id, SECOND.peer_id}
    assert (vera.owner, set(vera.devices), vera.microbatches) == (VERA.peer_id, devices, 6)
    parts = [total for total in found.totals if total.peer in devices]
    assert vera.credit == pytest.approx(sum(part.credit for part in parts))
    assert vera.credit_per_day(AS_OF) == pytest.approx(sum(part.credit_per_day for part in parts))
    assert vera.tokens == sum(part.tokens for part in parts)
    # Her own key takes part and gives no name, so she has none, whatever a device says.
    assert (vera.name, vera.team) == (None, None)


def test_an_owner_that_never_counted_has_the_row_of_its_devices() -> None:
    peers = (ANNA, BERT, FIRST.peer_id, SECOND.peer_id)
    found = verify_ledger(owned(BINDINGS, steps_of(*peers)))
    [vera] = [one for one in found.people if one.owner == VERA.peer_id]
    assert (vera.name, vera.team, vera.microbatches) == ("first", "the Vs", 4)


def test_a_ledger_without_owners_has_a_row_for_each_peer() -> None:
    assert len(verify_ledger(owned({}, steps_of(*FOUR))).people) == len(FOUR)
    for line in WHOLE:
        assert b"owner" not in line
    found = verify_ledger(WHOLE)
    assert [(one.owner, one.credit) for one in found.people] == [
        (total.peer, total.credit) for total in found.totals
    ]


@pytest.mark.parametrize(
    ("bindings", "why"),
    [
        ({ANNA: bound(VERA, FIRST)}, "shows the owner binding of"),
        ({FIRST.peer_id: bound(VERA, SECOND)}, "shows the owner binding of"),
        ({LAZY.peer_id: bound(VERA, LAZY)}, "has an owner and counts in no step"),
        ({FIRST.peer_id: "AAAA"}, "signed message"),
        ({FIRST.peer_id: "?"}, "not base64"),
        ({VERA.peer_id: bound(VERA, VERA)}, "bound to itself"),
        (
            {FIRST.peer_id: bound(VERA, FIRST), VERA.peer_id: bound(SECOND, VERA)},
            "is the owner of other devices and has an owner; an owner must have none",
        ),
    ],
    ids=["stolen", "anothers", "idle", "no-envelope", "no-base64", "itself", "a-chain"],
)
def test_a_binding_that_does_not_hold_is_named_though_the_organiser_sealed_it(
    bindings: dict[PeerId, str], why: str
) -> None:
    said = refused(owned(bindings, steps_of(*FOUR)))
    assert said.startswith("line ")
    assert why in said


# ---------------------------------------------------------------- verdicts

LIAR, OWNER = lost_audit.AUDITED.peer_id, lost_audit.OWNER.peer_id
VERDICT = lost_audit.verdict(RUN, void_after=Step(4))


def with_a_verdict(*verdicts: Verdict | SumVerdict) -> list[bytes]:
    """Ten steps in which the liar, its owner's other device and Anna have counted."""
    shares = ((LIAR, 0, 2), (FIRST.peer_id, 0, 1), (ANNA, 0, 1), (ANNA, 1, MICROBATCHES))
    steps = [StepLine(step=n, applied_at=1e6 + n, shares=shares) for n in range(1, 11)]
    bindings = {
        device.peer_id: (OWNER, lost_audit.binding(lost_audit.OWNER, device))
        for device in (lost_audit.AUDITED, FIRST)
    }
    return list(write_ledger(ORGANISER, ENVELOPE, steps, {}, AS_OF, bindings, verdicts))


JUDGED = with_a_verdict(VERDICT)
VERDICT_LINE = 4
"""Behind the head and two owners."""


def test_a_verdict_voids_the_credit_of_all_devices_of_the_owner_since_its_last_passed_audit() -> (
    None
):
    found = verify_ledger(JUDGED, ORGANISER.peer_id)
    counted = {total.peer: total.microbatches for total in found.totals}
    # Steps 5 to 9 are void, of ten.
    assert counted == {LIAR: 5 * 2, FIRST.peer_id: 5, ANNA: 10 * (1 + MICROBATCHES)}
    [(verdict, judgement)] = found.verdicts
    assert verdict == VERDICT
    assert judgement.losers == ((LIAR, OWNER),)


def test_a_lie_about_an_average_voids_credit_as_a_lost_audit_does() -> None:
    signed = lost_audit.sums(lost_audit.AUDITED, RUN)
    lie = SumVerdict(
        step=Step(9), stage=StageIndex(0), peer=LIAR, owner=OWNER, void_after=Step(4),
        statements=(signed,),
    )  # fmt: skip
    found = verify_ledger(with_a_verdict(lie), ORGANISER.peer_id)
    assert found.sum_verdicts == (lie,)
    judged = verify_ledger(JUDGED, ORGANISER.peer_id)
    assert found.totals == judged.totals
    others = lie.model_copy(update={"step": Step(8)})
    assert "of another step" in refused(with_a_verdict(others))


LEDGERS = {"of peers": WHOLE, "of owners": owned(BINDINGS, steps_of(*FOUR)), "judged": JUDGED}
any_ledger = pytest.mark.parametrize("lines", LEDGERS.values(), ids=LEDGERS)


@any_ledger
@given(position=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_whatever_byte_is_changed_its_line_is_named(
    lines: list[bytes], position: float, change: int
) -> None:
    content = bytearray(b"".join(lines))
    place = int(position * len(content))
    content[place] ^= change
    said = refused(bytes(content).splitlines(keepends=True))
    number = bytes(content[:place]).count(b"\n") + 1
    assert said.startswith(f"line {number}: ")


@any_ledger
def test_a_line_that_is_missing_is_noticed_at_its_place(lines: list[bytes]) -> None:
    for number in range(len(lines)):
        rest = lines[:number] + lines[number + 1 :]
        assert refused(rest).startswith(f"line {number + 1}: ")


@settings(max_examples=200)
@given(data=st.data())
def test_an_organiser_that_changes_the_evidence_and_seals_it_is_found_at_the_verdict(
    data: st.DataObject,
) -> None:
    """All digests and the seal are right: what fails is the verdict itself."""
    places = ("receipt", "binding", "statement 0", "statement 1")
    place = data.draw(st.sampled_from(places))
    evidence = VERDICT.evidence
    texts = [evidence.receipt, evidence.binding, *(one.statement for one in evidence.statements)]
    content = bytearray(base64.b64decode(texts[places.index(place)]))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    text = encode_envelope(content)
    if place in ("receipt", "binding"):
        changed = evidence.model_copy(update={place: text})
    else:
        statements = list(evidence.statements)
        number = int(place[-1])
        statements[number] = statements[number].model_copy(update={"statement": text})
        changed = evidence.model_copy(update={"statements": tuple(statements)})
    said = refused(with_a_verdict(VERDICT.model_copy(update={"evidence": changed})))
    assert said.startswith(f"line {VERDICT_LINE}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 8}, {"microbatch": 2}, {"stage": 0}, {"peer": ANNA}, {"owner": ANNA},
        {"void_after": 10},
    ],
)  # fmt: skip
def test_an_organiser_that_changes_the_verdict_and_seals_it_is_found(
    changes: dict[str, object],
) -> None:
    said = refused(with_a_verdict(VERDICT.model_copy(update=changes)))
    assert said.startswith(f"line {VERDICT_LINE}: ")


def test_an_organiser_that_ignores_a_verdict_in_a_total_is_found() -> None:
    """The verdict is there, and the totals are those of a ledger without it."""
    contents = [json.loads(line) for line in with_a_verdict()[:-1]]
    for content in contents:
        del content["digest"]
    lines = [ledger_lines.validate_json(json.dumps(content)) for content in contents]
    lines.insert(VERDICT_LINE - 1, VerdictLine(verdict=VERDICT))
    # The totals are sorted, and the first one is of a device of the owner.
    said = refused(sealed(*lines))
    assert "the steps come to" in said or "no credit in any step" in said


# ---------------------------------------------------------------- seals


def test_a_seal_of_somebody_else_or_of_another_ledger_is_refused() -> None:
    other = ledger(step(1), step(2), step(3))
    said = refused([*WHOLE[:-1], other[-1]])
    assert said.startswith(f"line {len(WHOLE)}: ")
    chained = json.loads(WHOLE[-1])
    envelope = sign_manifest(STRANGER, ledger_manifest(STRANGER))
    chained["envelope"] = encode_envelope(envelope)
    with pytest.raises(SwarmError):
        verify_ledger([*WHOLE[:-1], json.dumps(chained).encode()])
