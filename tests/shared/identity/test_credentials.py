from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm_shared.base.errors import AdmissionError, FrameError, ProtocolError, SignatureError
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import Generation, MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.credentials import (
    CLOCK_SKEW_SECONDS,
    CarrierBinding,
    MembershipCertificate,
    OwnerBinding,
    Receipt,
    check_certificate,
    open_carrier_binding,
    open_owner_binding,
    sign_owner_binding,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import JSON_PAYLOAD_TYPE, seal, sign_message

ORGANISER = Identity.from_seed(b"o" * 32)
PEER = Identity.from_seed(b"p" * 32)
STRANGER = Identity.from_seed(b"x" * 32)
RUN = RunId("ab" * 32)
NOW = 1_900_000_000.0

CERTIFICATE = MembershipCertificate(
    peer=PEER.peer_id,
    run=RUN,
    generation=Generation(3),
    not_before=NOW - 10,
    expires=NOW + 3600,
    role="volunteer",
)
RECEIPT = Receipt(
    transcript=Transcript(input="0" * 32, output="1" * 32, gradient="2" * 32),
    run=RUN,
    generation=Generation(3),
    step=Step(7),
    microbatch=MicrobatchIndex(2),
    stage=StageIndex(1),
    peer=PEER.peer_id,
    samples=4,
    tokens=1024,
    loss_sum=2345.6789012345678,
)
BINDING = CarrierBinding(
    peer=PEER.peer_id,
    carrier_peer_id="QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    expires=NOW + 60,
)


def check(envelope: bytes, now: float = NOW, remote: Identity = PEER) -> MembershipCertificate:
    return check_certificate(envelope, RUN, ORGANISER.peer_id, now, remote.peer_id)


def test_what_is_signed_has_no_more_bytes_than_it_needs() -> None:
    """The binding of a p2pd goes to all members: white space could make it ten times as long."""
    padded = BINDING.model_dump_json() + " " * 1000
    envelope = seal(PEER, CarrierBinding.domain, JSON_PAYLOAD_TYPE, padded.encode())
    with pytest.raises(FrameError, match="white space"):
        open_carrier_binding(envelope, PEER.peer_id, NOW)


def test_a_certificate_lets_its_peer_in() -> None:
    assert check(CERTIFICATE.sign(ORGANISER)) == CERTIFICATE


@pytest.mark.parametrize(
    ("envelope", "now", "remote", "reason"),
    [
        (CERTIFICATE.sign(ORGANISER), NOW, STRANGER, "shows the certificate of"),
        (CERTIFICATE.sign(PEER), NOW, PEER, "no certificate of this run"),
        (
            CERTIFICATE.model_copy(update={"run": RunId("cd" * 32)}).sign(ORGANISER), NOW, PEER,
            "a member of run cdcdcdcdcdcd",
        ),
        (
            CERTIFICATE.sign(ORGANISER), CERTIFICATE.expires + CLOCK_SKEW_SECONDS + 1, PEER,
            "expired 121 s ago",
        ),
        (
            CERTIFICATE.sign(ORGANISER), CERTIFICATE.not_before - CLOCK_SKEW_SECONDS - 1, PEER,
            "valid only in 121 s",
        ),
        (sign_message(ORGANISER, CERTIFICATE, Receipt.domain), NOW, PEER, None),
        (sign_message(ORGANISER, RECEIPT, MembershipCertificate.domain), NOW, PEER, None),
        (b"", NOW, PEER, None),
        (b"garbage", NOW, PEER, None),
        (bytes(10_000), NOW, PEER, None),
    ],
    ids=[
        "it is another peer's", "the peer signed it itself", "it is of another run", "it is over",
        "it is not valid yet", "it was signed as a receipt", "it is a signed receipt",
        "it is empty", "it is garbage", "it is too long",
    ],
)  # fmt: skip
def test_a_certificate_is_refused_if(
    envelope: bytes, now: float, remote: Identity, reason: str | None
) -> None:
    with pytest.raises(AdmissionError, match=reason):
        check(envelope, now, remote)


@pytest.mark.parametrize(
    "now",
    [
        CERTIFICATE.expires + CLOCK_SKEW_SECONDS - 1,
        CERTIFICATE.not_before - CLOCK_SKEW_SECONDS + 1,
    ],
)
def test_a_little_difference_between_clocks_is_tolerated(now: float) -> None:
    assert check(CERTIFICATE.sign(ORGANISER), now) == CERTIFICATE


def test_times_that_are_no_numbers_are_refused() -> None:
    for value in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValidationError):
            MembershipCertificate.model_validate(CERTIFICATE.model_dump() | {"expires": value})


def test_a_receipt_comes_back_equal_to_the_last_bit() -> None:
    assert Receipt.open(RECEIPT.sign(PEER)) == RECEIPT
    without_loss = RECEIPT.model_copy(update={"loss_sum": None})
    assert Receipt.open(without_loss.sign(PEER)) == without_loss


def test_a_receipt_in_the_name_of_another_peer_is_refused() -> None:
    forged = sign_message(STRANGER, RECEIPT, Receipt.domain)
    with pytest.raises(SignatureError, match=f"{STRANGER.peer_id} signed a receipt in the name"):
        Receipt.open(forged)


def test_a_certificate_is_no_receipt() -> None:
    with pytest.raises(SignatureError):
        Receipt.open(CERTIFICATE.sign(PEER))


@pytest.mark.parametrize(
    "change",
    [{"step": 0}, {"microbatch": -1}, {"samples": -1}, {"loss_sum": float("nan")}, {"extra": 1}],
)
def test_an_impossible_receipt_cannot_be_made(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Receipt.model_validate(RECEIPT.model_dump() | change)


def test_a_receipt_longer_than_receipts_are_is_refused() -> None:
    long = RECEIPT.model_copy(update={"run": RunId("ab" * 5000)})
    with pytest.raises(FrameError, match="longer"):
        Receipt.open(sign_message(PEER, long, Receipt.domain))


def test_a_carrier_binding_holds_until_it_expires() -> None:
    envelope = BINDING.sign(PEER)
    assert open_carrier_binding(envelope, PEER.peer_id, NOW) == BINDING
    with pytest.raises(SignatureError, match="expired"):
        open_carrier_binding(envelope, PEER.peer_id, BINDING.expires + CLOCK_SKEW_SECONDS + 1)
    with pytest.raises(SignatureError):
        open_carrier_binding(envelope, STRANGER.peer_id, NOW)


def test_a_carrier_binding_names_a_peer_id() -> None:
    wrong = CarrierBinding(peer=PEER.peer_id, carrier_peer_id="not base58: 0OIl", expires=NOW)
    with pytest.raises(FrameError, match="carrier_peer_id"):
        open_carrier_binding(wrong.sign(PEER), PEER.peer_id, NOW)


def test_a_certificate_of_an_older_generation_than_asked_for_is_refused() -> None:
    envelope = CERTIFICATE.sign(ORGANISER)

    def check_from(oldest: int) -> MembershipCertificate:
        return check_certificate(
            envelope, RUN, ORGANISER.peer_id, NOW, PEER.peer_id, Generation(oldest)
        )

    assert check_from(3) == check_from(0) == CERTIFICATE
    with pytest.raises(AdmissionError, match="start 3, and those before 4 hold no longer"):
        check_from(4)


# ---------------------------------------------------------------- owners

DEVICE = Identity.from_seed(b"d" * 32)
BOUND = sign_owner_binding(PEER, DEVICE.peer_id)


def test_an_owner_binding_names_who_signed_it_and_the_device_that_shows_it() -> None:
    binding = open_owner_binding(BOUND, DEVICE.peer_id)
    assert (binding.owner, binding.device) == (PEER.peer_id, DEVICE.peer_id)
    assert sign_owner_binding(PEER, DEVICE.peer_id) == BOUND, "there is nothing to keep"


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_an_owner_binding_holds_for_no_other_device(device: bytes, other: bytes) -> None:
    assume(device != other)
    one, another = Identity.from_seed(device), Identity.from_seed(other)
    assume(PEER.peer_id not in (one.peer_id, another.peer_id))
    envelope = sign_owner_binding(PEER, one.peer_id)
    assert open_owner_binding(envelope, one.peer_id).owner == PEER.peer_id
    with pytest.raises(SignatureError, match="shows the owner binding of"):
        open_owner_binding(envelope, another.peer_id)


@given(st.integers(0, len(BOUND) - 1), st.integers(1, 255))
def test_whatever_byte_of_an_owner_binding_is_changed_it_does_not_hold(
    position: int, change: int
) -> None:
    content = bytearray(BOUND)
    content[position] ^= change
    with pytest.raises(ProtocolError):
        open_owner_binding(bytes(content), DEVICE.peer_id)


def test_nobody_signs_in_the_name_of_another_owner() -> None:
    forged = OwnerBinding(owner=PEER.peer_id, device=DEVICE.peer_id)
    with pytest.raises(SignatureError, match="in the name of"):
        open_owner_binding(sign_message(STRANGER, forged, OwnerBinding.domain), DEVICE.peer_id)


def test_what_an_owner_signed_for_another_purpose_is_no_owner_binding() -> None:
    for domain in (MembershipCertificate.domain, Receipt.domain, CarrierBinding.domain):
        binding = OwnerBinding(owner=PEER.peer_id, device=DEVICE.peer_id)
        with pytest.raises(SignatureError):
            open_owner_binding(sign_message(PEER, binding, domain), DEVICE.peer_id)
    with pytest.raises(SignatureError, match="bound to itself"):
        open_owner_binding(sign_owner_binding(PEER, PEER.peer_id), PEER.peer_id)
