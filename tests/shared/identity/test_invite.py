from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm_shared.base.errors import InviteError
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.invite import PREFIX, Invite, _checksum, _from_base32, _to_base32
from swarm_shared.identity.keys import Identity

COORDINATOR = Identity.from_seed(b"c" * 32).peer_id
ORGANISER = Identity.from_seed(b"o" * 32).peer_id
RUN = RunId("5b" * 32)

peer_ids = st.binary(min_size=32, max_size=32).map(lambda seed: Identity.from_seed(seed).peer_id)
ports = st.integers(0, 65535)
multiaddrs = st.one_of(
    st.builds(lambda ip, port: f"/ip4/{ip}/tcp/{port}", st.ip_addresses(v=4), ports),
    st.builds(lambda ip, port: f"/ip6/{ip}/tcp/{port}", st.ip_addresses(v=6), ports),
    st.builds(lambda port: f"/dns4/run.example.org/tcp/{port}", ports),
    st.builds(lambda port: f"/ip4/192.0.2.1/tcp/0{port}", ports),
    st.just(f"/ip4/192.0.2.1/tcp/4001/p2p/{ORGANISER}/p2p-circuit"),
)
invites = st.builds(
    Invite,
    coordinator=peer_ids,
    addresses=st.lists(multiaddrs, min_size=1, max_size=6).map(tuple),
    run_id=st.binary(min_size=32, max_size=32).map(lambda data: RunId(data.hex())),
    organiser=peer_ids,
    token=st.none() | st.text("abcXYZ019-é", min_size=1, max_size=50),
)


def an_invite(token: str | None = None, organiser: PeerId = COORDINATOR) -> Invite:
    return Invite(
        coordinator=COORDINATOR,
        addresses=("/ip4/192.0.2.7/tcp/4001", "/dns4/run.example.org/tcp/4001"),
        run_id=RUN,
        organiser=organiser,
        token=token,
    )


def made_by_hand(body: bytes) -> str:
    return PREFIX + _to_base32(body + _checksum(body))


@given(invites)
def test_an_invite_comes_back_equal_from_one_line_of_text(invite: Invite) -> None:
    text = invite.encode()
    assert text.startswith(PREFIX)
    assert text.isascii()
    assert text.isalnum()
    assert Invite.decode(text) == invite


def test_an_ordinary_invite_is_short() -> None:
    invite = Invite(
        coordinator=COORDINATOR,
        addresses=("/ip4/192.0.2.7/tcp/4001",),
        run_id=RUN,
        organiser=COORDINATOR,
    )
    assert len(invite.encode()) < 150


@pytest.mark.parametrize(
    "wrap", ["  {}\n", "'{}'", "`{}`", "<{}>", "“{}”", "\ufeff{}\u200b", "{}."]
)
def test_what_copying_puts_around_an_invite_does_no_harm(wrap: str) -> None:
    invite = an_invite("token")
    assert Invite.decode(wrap.format(invite.encode())) == invite


def test_an_invite_broken_over_lines_and_in_capitals_is_read() -> None:
    invite = an_invite()
    text = invite.encode()
    broken = "\r\n  ".join(text[start : start + 40] for start in range(0, len(text), 40))
    assert Invite.decode(broken.upper()) == invite


def test_the_peer_id_at_the_end_of_an_address_is_left_out() -> None:
    with_id = Invite(
        coordinator=COORDINATOR,
        addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{COORDINATOR}",),
        run_id=RUN,
        organiser=ORGANISER,
    )
    assert with_id.addresses == ("/ip4/192.0.2.7/tcp/4001",)


@settings(max_examples=300)
@given(st.data())
def test_any_single_wrong_character_is_noticed_and_named(data: st.DataObject) -> None:
    text = an_invite("token", ORGANISER).encode()
    position = data.draw(st.integers(len(PREFIX), len(text) - 1))
    wrong = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789-_"))
    damaged = text[:position] + wrong + text[position + 1 :]
    if damaged == text or (position == len(text) - 1 and wrong in "-_"):
        return
    with pytest.raises(InviteError, match=f" {position + 1}(st|nd|rd|th) character|at its end"):
        Invite.decode(damaged)


@given(st.data())
def test_a_missing_or_doubled_or_swapped_character_is_noticed(data: st.DataObject) -> None:
    text = an_invite().encode()
    position = data.draw(st.integers(len(PREFIX), len(text) - 2))
    for damaged in (
        text[:position] + text[position + 1 :],
        text[:position] + text[position] + text[position:],
        text[:position] + text[position + 1] + text[position] + text[position + 2 :],
    ):
        if damaged != text:
            with pytest.raises(InviteError, match=r"damaged"):
                Invite.decode(damaged)


@given(st.data())
def test_an_invite_that_was_cut_off_is_noticed(data: st.DataObject) -> None:
    text = an_invite().encode()
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(InviteError):
        Invite.decode(text[:end])


def test_each_kind_of_damage_gets_its_own_sentence() -> None:
    text = an_invite().encode()
    newer = bytes([2, 0]) + bytes(60)
    for damaged, sentence in (
        ("", "There is no invite here"),
        ("https://example.org/" + text, "This is not an invite"),
        ("swarm-client join " + text, "This is not an invite: it begins with 'swarm-client'"),
        ("token2" + text[6:], "This is not an invite"),
        ("swarm2" + text[6:], "update swarmtrain"),
        (text[:40], "too short"),
        (text[:-1] + "0", "its [0-9]+.. character '0' cannot occur"),
        (made_by_hand(newer), "format 2, made by a newer version"),
        ("swarm1" + "a" * 9000, "too long"),
    ):
        with pytest.raises(InviteError, match=sentence):
            Invite.decode(damaged)


def test_the_unused_bits_of_the_last_character_are_no_second_spelling() -> None:
    refused = 0
    for length in range(1, 6):
        text = an_invite("t" * length).encode()
        for last in "abcdefghijklmnopqrstuvwxyz234567":
            if last != text[-1]:
                with pytest.raises(InviteError):
                    Invite.decode(text[:-1] + last)
                refused += 1
    assert refused == 5 * 31


@given(st.binary(max_size=200))
def test_a_wrongly_made_invite_with_a_right_checksum_is_refused(body: bytes) -> None:
    try:
        invite = Invite.decode(made_by_hand(b"\x01" + body))
    except InviteError:
        return
    assert Invite.decode(invite.encode()) == invite


@given(st.binary(max_size=200))
def test_base32_has_one_spelling_for_each_content(data: bytes) -> None:
    text = _to_base32(data)
    assert _from_base32(text) == data
    assert text == base64.b32encode(data).decode().rstrip("=").lower()


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ()},
        {"addresses": ("192.0.2.1:4001",)},
        {"addresses": ("/dns4/" + "a" * 300,)},
        {"coordinator": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"},
        {"run_id": "not hex"},
        {"run_id": "ab" * 31},
        {"token": ""},
    ],
)
def test_an_invite_that_could_not_be_used_cannot_be_made(change: dict[str, object]) -> None:
    values = an_invite().model_dump() | change
    with pytest.raises(ValidationError):
        Invite(**values)
