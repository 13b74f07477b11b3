from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.envelope import Envelope, make_unsigned, unmarshal_envelope

from swarm_shared.base.errors import FrameError, SignatureError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import (
    JSON_PAYLOAD_TYPE,
    MAX_ENVELOPE_BYTES,
    open_envelope,
    open_message,
    seal,
    sign_message,
)

DOMAIN = "swarmtrain-test-1"
SEED = b"k" * 32
IDENTITY = Identity.from_seed(SEED)


class Note(FrozenModel):
    text: str
    count: int
    values: tuple[float, ...] = ()


@given(st.binary(max_size=20), st.binary(max_size=1000))
def test_our_envelopes_are_those_of_libp2p_and_open(payload_type: bytes, payload: bytes) -> None:
    key = create_new_key_pair(SEED)
    signature = key.private_key.sign(make_unsigned(DOMAIN, payload_type, payload))
    sealed = Envelope(key.public_key, payload_type, payload, signature).marshal_envelope()
    assert sealed == seal(IDENTITY, DOMAIN, payload_type, payload)
    opened = open_envelope(sealed, DOMAIN, IDENTITY.peer_id)
    assert (opened.signer, opened.payload_type, opened.payload) == (
        IDENTITY.peer_id, payload_type, payload,
    )  # fmt: skip


@given(st.binary(max_size=100), st.data())
def test_an_envelope_with_any_changed_byte_is_refused(payload: bytes, data: st.DataObject) -> None:
    envelope = bytearray(seal(IDENTITY, DOMAIN, b"type", payload))
    position = data.draw(st.integers(0, len(envelope) - 1))
    envelope[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises((SignatureError, FrameError)):
        open_envelope(bytes(envelope), DOMAIN)


@given(st.binary(max_size=100), st.data())
def test_an_envelope_with_bytes_added_or_taken_is_refused(
    payload: bytes, data: st.DataObject
) -> None:
    envelope = seal(IDENTITY, DOMAIN, b"type", payload)
    start = data.draw(st.integers(0, len(envelope)))
    end = data.draw(st.integers(start, len(envelope)))
    changed = envelope[:start] + data.draw(st.binary(max_size=8)) + envelope[end:]
    if changed == envelope:
        return
    with pytest.raises((SignatureError, FrameError)):
        open_envelope(changed, DOMAIN)


def test_unknown_fields_are_refused_although_the_signature_would_hold() -> None:
    envelope = seal(IDENTITY, DOMAIN, b"type", b"payload")
    unmarshal_envelope(envelope + b"\x32\x01x").validate(DOMAIN)  # a lenient parser takes it
    with pytest.raises(FrameError):
        open_envelope(envelope + b"\x32\x01x", DOMAIN)


def test_a_signature_of_another_domain_is_refused() -> None:
    envelope = seal(IDENTITY, DOMAIN, b"type", b"payload")
    with pytest.raises(SignatureError):
        open_envelope(envelope, "swarmtrain-test-2")


def test_a_message_by_somebody_else_is_refused() -> None:
    envelope = seal(Identity.generate(), DOMAIN, b"type", b"payload")
    with pytest.raises(SignatureError, match=IDENTITY.peer_id):
        open_envelope(envelope, DOMAIN, expected_signer=IDENTITY.peer_id)


def test_an_envelope_longer_than_allowed_is_refused() -> None:
    envelope = seal(IDENTITY, DOMAIN, b"type", bytes(MAX_ENVELOPE_BYTES))
    with pytest.raises(FrameError, match="longer"):
        open_envelope(envelope, DOMAIN)
    assert open_envelope(envelope, DOMAIN, max_bytes=2 * MAX_ENVELOPE_BYTES)


@given(st.text(max_size=50), st.integers(), st.lists(st.floats(allow_nan=False, width=64)))
def test_a_signed_message_comes_back_equal(text: str, count: int, values: list[float]) -> None:
    finite = tuple(value for value in values if abs(value) < 1e300)
    note = Note(text=text.encode("utf-8", "ignore").decode(), count=count, values=finite)
    message, signer = open_message(
        sign_message(IDENTITY, note, DOMAIN), Note, DOMAIN, IDENTITY.peer_id
    )
    assert message == note
    assert signer == IDENTITY.peer_id


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b'{"text": "a"}',
        b'{"text": "a", "count": "1"}',
        b'{"text": "a", "count": 1, "more": 1}',
        b'{"text": "\xff", "count": 1}',
        b"[" * 10_000,
    ],
)
def test_a_signed_message_of_the_wrong_form_is_refused(payload: bytes) -> None:
    envelope = seal(IDENTITY, DOMAIN, JSON_PAYLOAD_TYPE, payload)
    with pytest.raises(FrameError, match="Note"):
        open_message(envelope, Note, DOMAIN)


def test_a_message_of_another_payload_type_is_refused() -> None:
    envelope = seal(IDENTITY, DOMAIN, b"/other", b'{"text": "a", "count": 1}')
    with pytest.raises(FrameError, match="payload type"):
        open_message(envelope, Note, DOMAIN)


def test_the_complaint_about_a_message_does_not_repeat_the_message() -> None:
    secret = "s" * 5000
    envelope = seal(IDENTITY, DOMAIN, JSON_PAYLOAD_TYPE, b'{"text": 1, "%s": 2}' % secret.encode())
    with pytest.raises(FrameError) as caught:
        open_message(envelope, Note, DOMAIN)
    assert len(str(caught.value)) < 600
