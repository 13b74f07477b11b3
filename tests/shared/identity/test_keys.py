from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from swarm_shared.base.errors import ConfigurationError, SignatureError, StorageError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity, peer_id_of, public_key_of, verify


@given(st.binary(min_size=32, max_size=32))
def test_the_peer_id_is_the_one_libp2p_gives_the_key(seed: bytes) -> None:
    identity = Identity.from_seed(seed)
    key_pair = create_new_key_pair(seed)
    assert identity.peer_id == ID.from_pubkey(key_pair.public_key).to_base58()
    assert identity.public_key_bytes == key_pair.public_key.to_bytes()
    assert identity.private_seed == seed
    assert public_key_of(identity.peer_id) == identity.public_key_bytes


def test_the_text_of_an_identity_does_not_show_its_key() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer_id})"
    assert identity.private_seed.hex() not in str(identity)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base58: 0OIl",
        "12D3KooW",
        # An RSA key's peer ID: a hash, in which there is no key.
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "1" * 10_000,
        "12D3KooW\u00e9",
    ],
)
def test_what_is_no_ed25519_peer_id_is_refused(text: str) -> None:
    with pytest.raises(SignatureError):
        public_key_of(PeerId(text))


def test_a_second_spelling_of_a_peer_id_is_refused() -> None:
    peer_id = Identity.generate().peer_id
    for other in (f" {peer_id}", f"{peer_id}\n", f"1{peer_id}"):
        with pytest.raises(SignatureError):
            public_key_of(PeerId(other))


@given(st.text(max_size=80))
def test_any_text_is_a_peer_id_or_refused_with_a_signature_error(text: str) -> None:
    try:
        key = public_key_of(PeerId(text))
    except SignatureError:
        return
    assert peer_id_of(key) == text


@given(st.binary(max_size=60))
def test_any_multihash_is_a_peer_id_or_refused_with_a_signature_error(data: bytes) -> None:
    text = PeerId(base58.b58encode(data).decode())
    try:
        key = public_key_of(text)
    except SignatureError:
        return
    assert peer_id_of(key) == text


@given(st.binary(max_size=200), st.integers(0, 511))
def test_a_signature_holds_and_a_changed_one_does_not(message: bytes, bit: int) -> None:
    identity = Identity.from_seed(b"s" * 32)
    signature = bytearray(identity.sign(message))
    verify(identity.peer_id, message, bytes(signature))
    signature[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SignatureError):
        verify(identity.peer_id, message, bytes(signature))
    with pytest.raises(SignatureError):
        verify(identity.peer_id, message + b"x", identity.sign(message))
    with pytest.raises(SignatureError):
        verify(Identity.generate().peer_id, message, identity.sign(message))


def test_a_signature_of_the_wrong_length_is_refused() -> None:
    identity = Identity.generate()
    for length in (0, 63, 65):
        with pytest.raises(SignatureError):
            verify(identity.peer_id, b"message", bytes(length))


def test_the_key_file_is_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "identity.pem"
    previous = os.umask(0)
    try:
        identity = Identity.load_or_create(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert Identity.load_or_create(path).private_seed == identity.private_seed
    assert list(path.parent.iterdir()) == [path]


def test_a_key_of_which_the_disk_takes_only_a_part_leaves_no_key_file(
    tmp_path: Path, files_no_larger_than: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "identity.pem"
    with files_no_larger_than(50), pytest.raises(StorageError, match="cannot be written"):
        Identity.load_or_create(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file modes")
def test_a_key_file_that_others_can_read_is_refused_with_the_mending_command(
    tmp_path: Path,
) -> None:
    path = tmp_path / "identity.pem"
    Identity.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match=f"chmod 600 '{path}'"):
        Identity.load_or_create(path)


def other_key() -> bytes:
    key = generate_private_key(SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"\xff" * 10_000, b"-----BEGIN PRIVATE KEY-----\nMC4CAQAw", other_key()],
    ids=["empty", "nonsense", "long", "cut short", "of another kind"],
)
def test_a_damaged_key_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"damaged.*mv "):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_what_stands_in_the_place_of_the_key_file_or_its_folder_is_a_configuration_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "identity.pem").mkdir()
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "identity.pem", tmp_path / "file" / "identity.pem"):
        with pytest.raises(ConfigurationError):
            Identity.load_or_create(path)


def test_of_many_first_starts_at_once_one_key_stays(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    barrier = threading.Barrier(8)
    seeds: list[bytes] = []

    def start() -> None:
        barrier.wait()
        seeds.append(Identity.load_or_create(path).private_seed)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seeds) == 8
    assert len(set(seeds)) == 1
