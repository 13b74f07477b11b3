"""Signed messages in libp2p's signed-envelope format (libp2p RFC 0002).

    Envelope { public_key = 1, payload_type = 2, payload = 3, signature = 5 }

The signature covers the domain, the payload type and the payload, each preceded by its length
as a varint; so a signature given in one domain is worth nothing in another. Owns the envelope
and its check. What is signed is in credentials and manifest.

The protobuf is read and written by hand, because it must be strict: exactly one spelling of an
envelope is accepted, the one `seal` writes. A lenient parser would let a third party change
bytes of a signed message (unknown fields, long varints) without breaking its signature.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from swarm_shared.base.errors import FrameError, SignatureError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import (
    PUBLIC_KEY_BYTES,
    PUBLIC_KEY_PREFIX,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    verify,
)

MAX_ENVELOPE_BYTES = 64 * 1024
"""Default bound of an envelope; credentials and receipts have some hundred bytes."""

MAX_CREDENTIAL_BYTES = 4096
"""Default bound of a `SignedMessage`; most of them have less than 900 bytes."""

MAX_OVERHEAD_BYTES = 256
"""Most bytes of a `SignedMessage`'s envelope beside its JSON: key, signature and lengths have 127;
the rest is for numbers that another release may write with more digits."""

JSON_PAYLOAD_TYPE = b"/swarmtrain/json/1"

# Field number << 3 | wire type 2 (length-delimited).
_PUBLIC_KEY_TAG = b"\x0a"
_PAYLOAD_TYPE_TAG = b"\x12"
_PAYLOAD_TAG = b"\x1a"
_SIGNATURE_TAG = b"\x2a"
# Five bytes of seven bits hold every length below 2^35.
_MAX_VARINT_BYTES = 5

ModelT = TypeVar("ModelT", bound=FrozenModel)


class Envelope(NamedTuple):
    """A decoded envelope; it is `signer`'s only if `verify` accepts its signature."""

    signer: PeerId
    payload_type: bytes
    payload: bytes
    signature: bytes

    def verify(self, domain: str) -> None:
        """SignatureError unless `signer` has signed the envelope in this domain."""
        signed = _signed_bytes(domain, self.payload_type, self.payload)
        verify(self.signer, signed, self.signature)


def seal(identity: Identity, domain: str, payload_type: bytes, payload: bytes) -> bytes:
    """Return an envelope with `payload`, signed by `identity` for `domain`."""
    signature = identity.sign(_signed_bytes(domain, payload_type, payload))
    return _encode(identity.public_key_bytes, payload_type, payload, signature)


def open_envelope(
    envelope: bytes,
    domain: str,
    expected_signer: PeerId | None = None,
    max_bytes: int = MAX_ENVELOPE_BYTES,
) -> Envelope:
    """Check an envelope and return it decoded.

    FrameError: it is too long or not an envelope. SignatureError: the signature is not valid in
    this domain, or the signer is not `expected_signer`.
    """
    opened = _decode(envelope, max_bytes)
    if expected_signer is not None and opened.signer != expected_signer:
        raise SignatureError(
            f"a message that {expected_signer} must sign is signed by {opened.signer}"
        )
    opened.verify(domain)
    return opened


def encode_envelope(envelope: bytes) -> str:
    """Encode an envelope in base64, as messages carry it."""
    return base64.b64encode(envelope).decode("ascii")


def decode_envelope(text: str, what: str = "a signed message") -> bytes:
    """Decode an envelope from base64; FrameError, which names it as `what`, for other text.

    Only the spelling of `encode_envelope` is accepted: the last character may have bits that belong
    to no byte. Evidence could be changed there, or signed in a way that no verifier accepts.
    """
    try:
        envelope = base64.b64decode(text, validate=True)
    except ValueError as error:
        # binascii.Error is one; text that is not ASCII raises the plain ValueError.
        raise FrameError(f"{what} is not base64") from error
    if encode_envelope(envelope) != text:
        raise FrameError(f"{what} is not spelt as base64 is")
    return envelope


def sign_message(identity: Identity, message: FrozenModel, domain: str) -> bytes:
    """Return an envelope with the message's JSON."""
    return seal(identity, domain, JSON_PAYLOAD_TYPE, message.model_dump_json().encode())


def open_message(
    envelope: bytes,
    type: type[ModelT],
    domain: str,
    expected_signer: PeerId | None = None,
    max_bytes: int = MAX_ENVELOPE_BYTES,
) -> tuple[ModelT, PeerId]:
    """Return the checked message and its signer. Errors as in `open_envelope`."""
    opened = open_envelope(envelope, domain, expected_signer, max_bytes)
    return _parsed(type, opened), opened.signer


class SignedMessage(FrozenModel):
    """A message that counts only in an envelope signed in its own domain."""

    domain: ClassVar[str]
    signed_by: ClassVar[str | None] = None
    """The field that names the signer; None where the opener must know the signer."""
    called: ClassVar[str] = "a message"
    """What it is called in the error about a foreign signature."""
    max_bytes: ClassVar[int] = MAX_CREDENTIAL_BYTES

    def sign(self, identity: Identity) -> bytes:
        """Return the envelope."""
        if self.signed_by is not None:
            named = getattr(self, self.signed_by)
            assert named == identity.peer_id, f"{named} signs {self.called} itself"
        return sign_message(identity, self, self.domain)

    @classmethod
    def open(cls, envelope: bytes, signer: PeerId | None = None) -> Self:
        """Return the message, signed by `signer` and by the peer that it names. FrameError or
        SignatureError otherwise.

        FrameError also for JSON with white space: envelopes are kept as evidence and sent to all
        members, and a few hundred bytes could be thousands.
        """
        assert signer is not None or cls.signed_by is not None, "anyone could have signed it"
        message, signed_by = open_message(envelope, cls, cls.domain, signer, cls.max_bytes)
        return cls._checked(message, envelope, signed_by)

    @classmethod
    def open_wanted(cls, envelope: bytes, is_wanted: Callable[[Self], bool]) -> Self | None:
        """As `open`; but None for a message that is not wanted by what it claims to be. Its
        signature, which costs more than all else, is not checked then."""
        opened = _decode(envelope, cls.max_bytes)
        message = _parsed(cls, opened)
        if not is_wanted(message):
            return None
        opened.verify(cls.domain)
        return cls._checked(message, envelope, opened.signer)

    @classmethod
    def _checked(cls, message: Self, envelope: bytes, signed_by: PeerId) -> Self:
        if len(envelope) > len(message.model_dump_json().encode()) + MAX_OVERHEAD_BYTES:
            raise FrameError(f"{signed_by} signed {cls.called} with white space in it")
        if cls.signed_by is not None and signed_by != (named := getattr(message, cls.signed_by)):
            raise SignatureError(f"{signed_by} signed {cls.called} in the name of {named}")
        return message


def _parsed(type: type[ModelT], opened: Envelope) -> ModelT:
    if opened.payload_type != JSON_PAYLOAD_TYPE:
        raise FrameError(f"a signed message has the unknown payload type {opened.payload_type!r}")
    try:
        return type.model_validate_json(opened.payload, strict=True)
    except ValidationError as error:
        raise FrameError(
            f"{opened.signer} signed something that is not a {type.__name__}: {first_error(error)}"
        ) from error


def _signed_bytes(domain: str, payload_type: bytes, payload: bytes) -> bytes:
    return b"".join(_with_length(part) for part in (domain.encode(), payload_type, payload))


def _encode(public_key: bytes, payload_type: bytes, payload: bytes, signature: bytes) -> bytes:
    parts = [_PUBLIC_KEY_TAG, _with_length(PUBLIC_KEY_PREFIX + public_key)]
    # Protobuf leaves empty fields out.
    if payload_type:
        parts += [_PAYLOAD_TYPE_TAG, _with_length(payload_type)]
    if payload:
        parts += [_PAYLOAD_TAG, _with_length(payload)]
    parts += [_SIGNATURE_TAG, _with_length(signature)]
    return b"".join(parts)


def _decode(envelope: bytes, max_bytes: int) -> Envelope:
    if len(envelope) > max_bytes:
        raise FrameError(
            f"a signed message of {len(envelope)} bytes is longer than the {max_bytes} allowed"
        )
    envelope = bytes(envelope)
    fields: dict[bytes, bytes] = {}
    position = 0
    while position < len(envelope):
        tag = envelope[position : position + 1]
        length, start = _read_varint(envelope, position + 1)
        position = start + length
        if position > len(envelope):
            raise FrameError("a signed message is cut short")
        fields[tag] = envelope[start:position]
    public_key = fields.get(_PUBLIC_KEY_TAG, b"")
    if not public_key.startswith(PUBLIC_KEY_PREFIX):
        raise FrameError("a signed message carries no Ed25519 public key")
    public_key = public_key[len(PUBLIC_KEY_PREFIX) :]
    signature = fields.get(_SIGNATURE_TAG, b"")
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        raise FrameError("a signed message has a key or signature of the wrong length")
    payload_type, payload = fields.get(_PAYLOAD_TYPE_TAG, b""), fields.get(_PAYLOAD_TAG, b"")
    if _encode(public_key, payload_type, payload, signature) != envelope:
        raise FrameError("a signed message is not spelt as envelopes are")
    return Envelope(peer_id_of(public_key), payload_type, payload, signature)


def _with_length(content: bytes) -> bytes:
    length, encoded = len(content), bytearray()
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + content


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            break
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise FrameError("a signed message has a damaged length")
