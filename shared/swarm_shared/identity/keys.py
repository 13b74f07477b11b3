"""A peer's identity: an Ed25519 key, the peer ID that follows from it, and its file.

Owns the key file and the mapping between keys and peer IDs. Not here: signed envelopes
(`swarm_shared.identity.signing`) and connections (`swarm_shared.network`). Free of libp2p; the
format of peer IDs is libp2p's (specs/peer-ids): the identity multihash of the protobuf-encoded
public key, in base58btc, so an Ed25519 peer ID carries its own public key and needs no look-up.
"""

from __future__ import annotations

import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from swarm_shared.base.atomic_file import make_folder, sync_folder
from swarm_shared.base.errors import ConfigurationError, SignatureError, StorageError
from swarm_shared.base.types import PeerId

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

# Protobuf of libp2p's PublicKey{Type=Ed25519, Data=32 bytes}: the two field tags and lengths.
PUBLIC_KEY_PREFIX = b"\x08\x01\x12\x20"
# Identity multihash (code 0) of the 36 bytes above and the key.
_MULTIHASH_PREFIX = b"\x00\x24"
_PEER_ID_BYTES = len(_MULTIHASH_PREFIX) + len(PUBLIC_KEY_PREFIX) + PUBLIC_KEY_BYTES
PEER_ID_CACHE_SIZE = 16_384
"""Cached conversions. The receipts of a large run's members come again and again, and base58 costs
a fifth of a signature."""
# 38 bytes are 52 base58 characters; longer text is refused before it is decoded, because
# base58 decoding takes time quadratic in the length.
_MAX_PEER_ID_CHARACTERS = 60
# A PKCS #8 PEM of an Ed25519 key has 119 bytes.
_MAX_KEY_FILE_BYTES = 4096


class Identity:
    """A private Ed25519 key. Its text form shows the peer ID, never the key."""

    __slots__ = ("_private_key", "_public_key_bytes", "peer_id")

    peer_id: PeerId

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self._public_key_bytes = private_key.public_key().public_bytes(
            Encoding.Raw, PublicFormat.Raw
        )
        self.peer_id = peer_id_of(self._public_key_bytes)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Return the key that follows from a 32-byte seed: for tests and for handing a key on."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file at `path`; create it (mode 0600) when there is none.

        Raises ConfigurationError when the file is damaged, readable by other users or out of reach,
        StorageError when it cannot be created.
        """
        try:
            return cls.load(path)
        except FileNotFoundError:
            pass
        identity = cls.generate()
        try:
            make_folder(path.parent, 0o700)
            _write_exclusively(path, identity._to_pem())
        except FileExistsError:
            # Another process created one at the same moment: its key is kept.
            return cls.load(path)
        except OSError as error:
            raise StorageError(
                f"The key file {path} cannot be written ({error.strerror or error}); make room on "
                "the disk, make its folder writable, or choose another one."
            ) from error
        return identity

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read an existing key file. FileNotFoundError passes through."""
        pem = _read_private_file(path)
        damaged = ConfigurationError(
            f"The key file {path} is damaged. Restore it from a backup, or give it up and start "
            f"with a new identity: mv '{path}' '{path}.damaged'"
        )
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise damaged from error
        if not isinstance(key, Ed25519PrivateKey):
            raise damaged
        return cls(key)

    @property
    def public_key_bytes(self) -> bytes:
        return self._public_key_bytes

    @property
    def private_seed(self) -> bytes:
        """The 32 secret bytes; used by the libp2p host and the key file only."""
        return self._private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    def sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)

    def _to_pem(self) -> bytes:
        return self._private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@lru_cache(maxsize=PEER_ID_CACHE_SIZE)
def peer_id_of(public_key_bytes: bytes) -> PeerId:
    """Return the peer ID of a raw 32-byte Ed25519 public key."""
    if len(public_key_bytes) != PUBLIC_KEY_BYTES:
        raise SignatureError(
            f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key_bytes)}"
        )
    multihash = _MULTIHASH_PREFIX + PUBLIC_KEY_PREFIX + public_key_bytes
    return PeerId(base58.b58encode(multihash).decode("ascii"))


@lru_cache(maxsize=PEER_ID_CACHE_SIZE)
def public_key_of(peer_id: PeerId) -> bytes:
    """Return the public key inside an Ed25519 peer ID; SignatureError when it is not one."""
    if len(peer_id) > _MAX_PEER_ID_CHARACTERS:
        raise SignatureError(f"a peer ID of {len(peer_id)} characters is too long")
    try:
        multihash = base58.b58decode(peer_id)
    except ValueError as error:
        raise SignatureError(f"{peer_id!r} is not a peer ID: not base58") from error
    prefix = _MULTIHASH_PREFIX + PUBLIC_KEY_PREFIX
    if len(multihash) != _PEER_ID_BYTES or not multihash.startswith(prefix):
        raise SignatureError(f"{peer_id!r} is not the peer ID of an Ed25519 key")
    public_key: bytes = multihash[len(prefix) :]
    if peer_id_of(public_key) != peer_id:
        # The decoder is lenient about white space; two spellings of one ID must not exist.
        raise SignatureError(f"{peer_id!r} is not spelt as a peer ID")
    return public_key


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> None:
    """Raise SignatureError unless `signature` is `peer_id`'s signature of `message`."""
    key = Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))
    try:
        key.verify(signature, message)
    except InvalidSignature as error:
        raise SignatureError(f"the signature is not one by {peer_id}") from error


def _write_exclusively(path: Path, content: bytes) -> None:
    """Write a new private file that a reader never sees half-written.

    The content goes to a temporary file first; `link` then fails with FileExistsError when `path`
    has appeared in the meantime, which `rename` would overwrite.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _read_private_file(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(
            f"The key file {path} cannot be read ({error.strerror or error}); "
            f"check who owns it: ls -l '{path}'"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(
                f"The key file {path} is not a file; move it away: mv '{path}' '{path}.old'"
            )
        if os.name == "posix" and status.st_mode & 0o077:
            raise ConfigurationError(
                f"The key file {path} can be read by other users of this machine; "
                f"take that away: chmod 600 '{path}'"
            )
        return os.read(descriptor, _MAX_KEY_FILE_BYTES)
    finally:
        os.close(descriptor)
