"""A ledger's chain is followed by a program that knows RFC 8785 and SHA-256 and nothing of ours.

`follow` stands for a verifier in another language: it reads every number as a double, as JSON
readers elsewhere do, and writes it by the rules of ECMA-262 (Number::toString).
"""

from __future__ import annotations

import hashlib
import json

import pytest

from kits import lost_audit
from kits.peer_names import named
from shared.credit.test_ledger import ledger_manifest
from swarm_shared.base.types import Step
from swarm_shared.credit.ledger import verify_ledger, write_ledger
from swarm_shared.credit.ledger_lines import StepLine
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of, sign_manifest


def number_text(value: float) -> str:
    """ECMA-262, Number::toString: `digits` and `point` as there k digits and n."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole + fraction) and len(digits) - len(fraction) + int(exponent or 0)
    digits = digits.rstrip("0")
    sign = "-" if value < 0 else ""
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{rest}e{point - 1:+d}"


def string_text(value: str) -> str:
    """RFC 8785, 3.2.2.2: as it is, but for controls, quotes and backslashes."""
    short = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"'}
    short["\\"] = "\\\\"
    return '"' + "".join(short.get(c, c if c >= " " else f"\\u{ord(c):04x}") for c in value) + '"'


def canonical(value: object) -> str:
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return string_text(value)
        case float():
            return number_text(value)
        case list():
            return f"[{','.join(map(canonical, value))}]"
        case dict():
            keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
            return f"{{{','.join(f'{string_text(k)}:{canonical(value[k])}' for k in keys)}}}"
    raise AssertionError(f"JSON has no {value!r}")


def follow(ledger: bytes) -> int:
    """Follow the chain; return its lines. AssertionError at the first line that does not."""
    before, count = "0" * 64, 0
    for line in ledger.split(b"\n")[:-1]:
        content = json.loads(line, parse_int=float)
        assert canonical(content).encode() == line, f"line {count + 1} is not canonical"
        told = content.pop("digest")
        hashed = hashlib.sha256(f"{before}\n{canonical(content)}".encode()).hexdigest()
        assert told == hashed, f"the digest of line {count + 1} is of something else"
        before, count = told, count + 1
    return count


# ---------------------------------------------------------------- a ledger with every kind of value

ORGANISER = Identity.from_seed(b"o" * 32)
ANNA, BERT = named("Anna"), named("Bert")


def ledger(work_flops: float, as_of: float) -> bytes:
    manifest = ledger_manifest(ORGANISER, work_flops, name="ein Lauf, größer")
    steps = [
        StepLine(
            step=number, applied_at=as_of - 100 + number / 7,
            shares=(
                (ANNA, 0, 1), (lost_audit.AUDITED.peer_id, 0, 1), (BERT, 0, 2), (BERT, 1, 4)
            ),
        )
        for number in range(1, 10)
    ]  # fmt: skip
    owner = lost_audit.OWNER
    bindings = {
        lost_audit.AUDITED.peer_id: (
            owner.peer_id, lost_audit.binding(owner, lost_audit.AUDITED),
        )
    }  # fmt: skip
    names = {ANNA: ('Änna \U0001f600 "q" \\ \u2028', None), BERT: ("b", "tab\tand \x7f\x01")}
    verdict = lost_audit.verdict(run_id_of(manifest), void_after=Step(4))
    envelope = sign_manifest(ORGANISER, manifest)
    return b"".join(write_ledger(ORGANISER, envelope, steps, names, as_of, bindings, [verdict]))


@pytest.mark.parametrize(
    ("work_flops", "as_of"), [(1e9, 1.7e9 + 1 / 3), (1e-2, 1e15), (1e24, 1000.0)]
)
def test_a_program_that_knows_only_the_rfc_follows_the_whole_chain(
    work_flops: float, as_of: float
) -> None:
    written = ledger(work_flops, as_of)
    lines = written.splitlines(keepends=True)
    verify_ledger(lines)
    kinds = {json.loads(line)["line"] for line in lines}
    assert kinds == {"head", "owner", "verdict", "step", "total", "seal"}
    assert follow(written) == len(lines)


def test_a_changed_digit_breaks_the_chain_there() -> None:
    written = ledger(1e9, 1.7e9)
    with pytest.raises(AssertionError, match="line 5"):
        follow(written.replace(b'"step":2}', b'"step":3}', 1))
