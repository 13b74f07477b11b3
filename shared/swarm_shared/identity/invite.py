"""The invite: one line of text that a volunteer pastes to join a run.

    swarm1 + base32 (lower case, a-z and 2-7) of: format u8, flags u8, coordinator key,
             [organiser key], run id, [token], addresses, checksum

Owns the text form and its check. An invite is not signed: the person who pastes it trusts the
person who sent it, and everything it points to is verified against the keys in it. The checksum
detects accidents (a character lost in copying) before any use of the network.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from typing import Final

from pydantic import Field, ValidationError, field_validator

from swarm_shared.base.errors import InviteError, SignatureError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.types import RUN_ID_PATTERN, Address, PeerId, RunId, Token
from swarm_shared.identity.keys import PUBLIC_KEY_BYTES, peer_id_of, public_key_of

PREFIX: Final = "swarm1"
_FAMILY: Final = "swarm"
_FORMAT: Final = 1
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
# 48 bits: a damaged invite passes once in 3e14 times.
_CHECKSUM_BYTES: Final = 6
_CHECKSUM_DOMAIN: Final = b"swarmtrain-invite-1"
# Format, flags, one key, a length, an address count and the checksum.
_SHORTEST_CHARACTERS: Final = (2 + PUBLIC_KEY_BYTES + 2 + _CHECKSUM_BYTES) * 8 // 5
_MAX_CHARACTERS: Final = 8192
_MAX_FIELD_BYTES: Final = 255

_FLAG_OTHER_ORGANISER: Final = 1
_FLAG_TOKEN: Final = 2

# How an address is packed; the common ones in a few bytes, all others as their text.
_ADDRESS_TEXT: Final = 0
_ADDRESS_IP4_TCP: Final = 4
_ADDRESS_IP6_TCP: Final = 6
_IP_TCP = re.compile(r"/ip([46])/([0-9a-f.:]+)/tcp/([0-9]{1,5})")

_COPY_AGAIN: Final = "Copy the whole line again, from 'swarm1' to its end."
# Quotes, brackets and invisible characters that chat programs and terminals put around text.
_WRAPPING: Final = "\"'`<>()[]{}.,;:\u200b\u200c\u200d\u2060\ufeff\u201c\u201d\u2018\u2019"


class Invite(FrozenModel):
    """The coordinator's key and addresses, the run, and the organiser whose signature counts."""

    coordinator: PeerId
    addresses: tuple[Address, ...] = Field(min_length=1, max_length=_MAX_FIELD_BYTES)
    """Multiaddrs of the coordinator, without the `/p2p/…` part that names it."""
    run_id: RunId
    organiser: PeerId
    token: Token | None = None

    @field_validator("coordinator", "organiser")
    @classmethod
    def _is_an_ed25519_peer_id(cls, peer_id: PeerId) -> PeerId:
        try:
            public_key_of(peer_id)
        except SignatureError as error:
            raise ValueError(str(error)) from error
        return peer_id

    @field_validator("run_id")
    @classmethod
    def _is_the_id_of_a_run(cls, run: RunId) -> RunId:
        if not re.fullmatch(RUN_ID_PATTERN, run):
            raise ValueError(f"{run[:80]!r} is not the ID of a run")
        return run

    @field_validator("addresses")
    @classmethod
    def _are_multiaddrs(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if not address.startswith("/") or not address.isascii() or not address.isprintable():
                raise ValueError(f"{address!r} is not a multiaddr such as /ip4/192.0.2.1/tcp/4001")
            if len(address) > _MAX_FIELD_BYTES:
                raise ValueError(f"an address of {len(address)} characters is too long")
        return tuple(_without_final_p2p(address) for address in addresses)

    @field_validator("token")
    @classmethod
    def _token_fits(cls, token: str | None) -> str | None:
        if token is not None and not 1 <= len(token.encode()) <= _MAX_FIELD_BYTES:
            raise ValueError(f"a token has 1 to {_MAX_FIELD_BYTES} bytes")
        return token

    def encode(self) -> str:
        """Return the one line that is handed out."""
        flags = 0
        parts = [public_key_of(self.coordinator)]
        if self.organiser != self.coordinator:
            flags |= _FLAG_OTHER_ORGANISER
            parts.append(public_key_of(self.organiser))
        parts.append(_with_length(bytes.fromhex(self.run_id)))
        if self.token is not None:
            flags |= _FLAG_TOKEN
            parts.append(_with_length(self.token.encode()))
        parts.append(bytes([len(self.addresses)]))
        parts += [_pack_address(address) for address in self.addresses]
        body = b"".join([bytes([_FORMAT, flags]), *parts])
        return PREFIX + _to_base32(body + _checksum(body))

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Parse an invite as pasted; white space, line breaks and surrounding quotes are removed.

        InviteError explains what is wrong with it.
        """
        characters = _clean(text)
        if len(characters) < _SHORTEST_CHARACTERS:
            raise InviteError(
                f"This invite is too short ({len(PREFIX) + len(characters)} characters): its end "
                f"is missing. {_COPY_AGAIN}"
            )
        data = _from_base32(characters)
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if checksum != _checksum(body):
            raise InviteError(_describe_damage(characters, data))
        if body[0] != _FORMAT:
            raise InviteError(
                f"This invite has format {body[0]}, made by a newer version of swarmtrain; "
                f"update swarmtrain on this machine with `swarm-client update`."
            )
        return _parse(body)


def _parse(body: bytes) -> Invite:
    reader = _Reader(body[2:])
    flags = body[1]
    coordinator = peer_id_of(reader.take(PUBLIC_KEY_BYTES))
    organiser = coordinator
    if flags & _FLAG_OTHER_ORGANISER:
        organiser = peer_id_of(reader.take(PUBLIC_KEY_BYTES))
    run_id = RunId(reader.take_with_length().hex())
    token = reader.take_text() if flags & _FLAG_TOKEN else None
    addresses = tuple(_unpack_address(reader) for _ in range(reader.take(1)[0]))
    if reader.rest or flags > (_FLAG_OTHER_ORGANISER | _FLAG_TOKEN):
        raise InviteError(f"This invite holds more than an invite should. {_COPY_AGAIN}")
    try:
        return Invite(
            coordinator=coordinator,
            addresses=addresses,
            run_id=run_id,
            organiser=organiser,
            token=token,
        )
    except ValidationError as error:
        raise InviteError(
            f"This invite was made wrongly ({first_error(error)}); ask the organiser for a new one."
        ) from error


class _Reader:
    """Takes bytes off the front. The checksum was right, so running out is the fault of the
    encoder."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, count: int) -> bytes:
        if count > len(self.rest):
            raise InviteError(
                "This invite was made wrongly (it ends too early); ask the organiser for a new one."
            )
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def take_with_length(self) -> bytes:
        return self.take(self.take(1)[0])

    def take_text(self) -> str:
        try:
            return self.take_with_length().decode()
        except UnicodeDecodeError as error:
            raise InviteError(
                "This invite was made wrongly (text that is not UTF-8); ask the organiser for a "
                "new one."
            ) from error


def _pack_address(address: str) -> bytes:
    match = _IP_TCP.fullmatch(address)
    if match is not None:
        version, host, port_text = match.groups()
        port = int(port_text)
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            ip = None
        # Only the usual spelling is packed, so that unpacking gives the same text back.
        if ip is not None and str(ip.version) == version and port < 65_536:
            packed = bytes([ip.version]) + ip.packed + port.to_bytes(2, "big")
            if f"/ip{ip.version}/{ip}/tcp/{port}" == address:
                return packed
    return bytes([_ADDRESS_TEXT]) + _with_length(address.encode())


def _unpack_address(reader: _Reader) -> str:
    kind = reader.take(1)[0]
    if kind == _ADDRESS_TEXT:
        return reader.take_text()
    if kind not in (_ADDRESS_IP4_TCP, _ADDRESS_IP6_TCP):
        raise InviteError(
            f"This invite has an address of an unknown kind ({kind}); update swarmtrain on this "
            f"machine."
        )
    ip = ipaddress.ip_address(reader.take(4 if kind == _ADDRESS_IP4_TCP else 16))
    port = int.from_bytes(reader.take(2), "big")
    return f"/ip{kind}/{ip}/tcp/{port}"


def _without_final_p2p(address: str) -> str:
    """Remove the final peer ID; a relayed address (…/p2p-circuit) keeps the relay's ID."""
    head, separator, tail = address.rpartition("/p2p/")
    return head if separator and "/" not in tail and head else address


def _with_length(content: bytes) -> bytes:
    assert len(content) <= _MAX_FIELD_BYTES, "validated by Invite"
    return bytes([len(content)]) + content


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(_CHECKSUM_DOMAIN + body).digest()[:_CHECKSUM_BYTES]


def _clean(text: str) -> str:
    """Return the characters after the prefix, in lower case."""
    if len(text) > _MAX_CHARACTERS:
        raise InviteError(
            f"This text of {len(text)} characters is too long for an invite. {_COPY_AGAIN}"
        )
    line = "".join(text.split()).strip(_WRAPPING).lower()
    if not line:
        raise InviteError(f"There is no invite here. {_COPY_AGAIN}")
    if line.startswith(PREFIX):
        return line[len(PREFIX) :]
    family, digit = line[: len(_FAMILY)], line[len(_FAMILY) : len(_FAMILY) + 1]
    if family == _FAMILY and digit.isdigit():
        raise InviteError(
            f"This invite begins with '{family}{digit}', but this version of swarmtrain knows "
            f"'{PREFIX}': update swarmtrain, or copy the invite again if it was mistyped."
        )
    raise InviteError(
        f"This is not an invite: it begins with {line[:12]!r}, and an invite begins with "
        f"'{PREFIX}'. {_COPY_AGAIN}"
    )


def _to_base32(data: bytes) -> str:
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def _from_base32(characters: str) -> bytes:
    for index, character in enumerate(characters):
        if character not in _ALPHABET:
            raise InviteError(
                f"This invite is damaged: its {_ordinal(len(PREFIX) + index + 1)} character "
                f"{character!r} cannot occur in an invite. {_COPY_AGAIN}"
            )
    padding = "=" * (-len(characters) % 8)
    try:
        data = base64.b32decode((characters + padding).upper())
    except ValueError as error:
        raise InviteError(
            f"This invite is damaged: a character is missing or one too many. {_COPY_AGAIN}"
        ) from error
    if _to_base32(data) != characters:
        # The last character's unused bits are set: no encoder writes that.
        raise InviteError(f"This invite is damaged at its end. {_COPY_AGAIN}")
    return data


def _describe_damage(characters: str, data: bytes) -> str:
    """Name the wrong character when changing one character makes the checksum right.

    It is not corrected silently: some thousand guesses against 48 bits are good enough to point at
    a character, and not to connect to the result.
    """
    number, size = int.from_bytes(data, "big"), len(data)
    for index, original in enumerate(characters):
        # Where the character's five bits are; the last one's may reach beyond the end.
        shift = 8 * size - 5 * (index + 1)
        for difference in range(1, 32):
            mask = difference << shift if shift >= 0 else difference >> -shift
            changed = (number ^ mask).to_bytes(size, "big")
            if mask and changed[-_CHECKSUM_BYTES:] == _checksum(changed[:-_CHECKSUM_BYTES]):
                place = _ordinal(len(PREFIX) + index + 1)
                return (
                    f"This invite is damaged: its {place} character {original!r} is wrong. "
                    f"{_COPY_AGAIN}"
                )
    return f"This invite is damaged: its checksum does not fit. {_COPY_AGAIN}"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
