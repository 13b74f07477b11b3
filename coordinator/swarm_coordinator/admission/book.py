"""Tokens, the allow-list, bans and members, as data.

Owns the rules that follow from these alone. Pure: records come in as they were written to the run's
database, and times are passed in (Unix seconds). The mode is set by the organiser (run.toml) and
selects what counts: a token's members in mode "token", the list in "allow-list", every peer in
"open"; a ban counts in every mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated_dataclass

from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import PeerId

AdmissionMode = Literal["open", "token", "allow-list"]

MAX_TEXT_CHARACTERS = 200
ShortText = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]


# ---------------------------------------------------------------- records
# Those with a field `do` are also the organiser's requests for them.

_REQUEST = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class TokenCreated:
    """A new token. The secret is shown once and never stored; 24 random bytes need no slow hash."""

    token: int
    secret_sha256: str
    note: str = ""
    uses: int | None = None
    """Number of peers that it admits; None: unlimited."""
    expires_at: float | None = None


@validated_dataclass(frozen=True, slots=True, config=_REQUEST)
class TokenRevoked:
    token: int
    do: Literal["revoke token"] = "revoke token"


@dataclass(frozen=True, slots=True)
class MemberAdmitted:
    """`peer` has presented the token: it is a member until the token is revoked or it is banned."""

    peer: PeerId
    token: int


@validated_dataclass(frozen=True, slots=True, config=_REQUEST)
class PeerAllowed:
    peer: PeerId
    do: Literal["allow"] = "allow"


@validated_dataclass(frozen=True, slots=True, config=_REQUEST)
class PeerDisallowed:
    peer: PeerId
    do: Literal["disallow"] = "disallow"


@validated_dataclass(frozen=True, slots=True, config=_REQUEST)
class PeerBanned:
    peer: PeerId
    reason: ShortText = ""
    do: Literal["ban"] = "ban"


@validated_dataclass(frozen=True, slots=True, config=_REQUEST)
class PeerUnbanned:
    peer: PeerId
    do: Literal["unban"] = "unban"


AdmissionRecord = (
    TokenCreated | TokenRevoked | MemberAdmitted | PeerAllowed | PeerDisallowed
    | PeerBanned | PeerUnbanned
)  # fmt: skip


# ---------------------------------------------------------------- the state derived from them


class TokenState(StrEnum):
    VALID = "valid"
    EXPIRED = "expired"
    USED_UP = "used up"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry(TokenCreated):
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class BanEntry:
    reason: str
    banned_at: float


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(slots=True)
class AdmissionBook:
    """Everything the organiser has decided, and the peers admitted by tokens."""

    tokens: dict[int, TokenEntry] = field(default_factory=dict)
    admitted: dict[int, dict[PeerId, float]] = field(default_factory=dict)
    """token → the peers it has admitted, and when"""
    allowed: dict[PeerId, float] = field(default_factory=dict)
    bans: dict[PeerId, BanEntry] = field(default_factory=dict)
    _tokens_of: dict[PeerId, set[int]] = field(default_factory=dict)
    _by_hash: dict[str, int] = field(default_factory=dict)
    _members: set[PeerId] | None = field(default=None, compare=False)
    """The members in mode "token", None: to be found anew. They are counted every second, and a
    published token admits any number."""

    def enter(self, record: AdmissionRecord, now: float) -> None:
        """Enter a record that is written, or about to be."""
        match record:
            case TokenCreated(token, secret_sha256, note, uses, expires_at):
                self.tokens[token] = TokenEntry(
                    token, secret_sha256, note, uses, expires_at, created_at=now
                )
                self._by_hash[secret_sha256] = token
            case TokenRevoked(token):
                self.tokens[token] = replace(self.tokens[token], revoked_at=now)
            case MemberAdmitted(peer, token):
                self.admitted.setdefault(token, {}).setdefault(peer, now)
                self._tokens_of.setdefault(peer, set()).add(token)
            case PeerAllowed(peer):
                self.allowed.setdefault(peer, now)
            case PeerDisallowed(peer):
                self.allowed.pop(peer, None)
            case PeerBanned(peer, reason):
                self.bans[peer] = BanEntry(reason, now)
            case PeerUnbanned(peer):
                self.bans.pop(peer, None)
        self._update_members(record)

    def _update_members(self, record: AdmissionRecord) -> None:
        if self._members is None:
            return
        match record:
            case TokenRevoked():
                self._members = None
            case MemberAdmitted(peer) | PeerBanned(peer) | PeerUnbanned(peer):
                if self.is_member(peer) and peer not in self.bans:
                    self._members.add(peer)
                else:
                    self._members.discard(peer)

    def withdraw(self, record: MemberAdmitted) -> None:
        """Withdraw an admission that could not be written."""
        self.admitted.get(record.token, {}).pop(record.peer, None)
        tokens = self._tokens_of.get(record.peer, set())
        tokens.discard(record.token)
        if not tokens:
            self._tokens_of.pop(record.peer, None)
        self._update_members(record)

    # ---- tokens

    def uses_left(self, token: TokenEntry) -> int | None:
        """Remaining uses, or None; a returning peer does not use a token again."""
        if token.uses is None:
            return None
        return max(0, token.uses - len(self.admitted.get(token.token, ())))

    def state_of(self, token: TokenEntry, now: float) -> TokenState:
        if token.revoked_at is not None:
            return TokenState.REVOKED
        if token.expires_at is not None and now >= token.expires_at:
            return TokenState.EXPIRED
        return TokenState.USED_UP if self.uses_left(token) == 0 else TokenState.VALID

    def token_of(self, secret: str) -> TokenEntry | None:
        """Find a token by its secret's hash: the search time reveals nothing about the secret."""
        token = self._by_hash.get(hash_of(secret))
        return None if token is None else self.tokens[token]

    def usable_token(self, secret: str | None, now: float) -> TokenEntry:
        """The token with this secret if it admits one more peer; AdmissionError otherwise."""
        if not secret:
            raise AdmissionError(
                "this run is by invitation and the invite carries no token; "
                "ask the organiser for an invite of your own"
            )
        token = self.token_of(secret)
        if token is None:
            raise AdmissionError(
                "this run is by invitation and the invite's token is not the right one; "
                "ask the organiser for a new invite"
            )
        state = self.state_of(token, now)
        if state is not TokenState.VALID:
            raise AdmissionError(
                f"the token of this invite {_STATE_TEXT[state]}; ask the organiser for a new invite"
            )
        return token

    # ---- peers

    def tokens_of(self, peer: PeerId) -> list[TokenEntry]:
        """The tokens that have admitted a peer."""
        return [self.tokens[token] for token in sorted(self._tokens_of.get(peer, ()))]

    def is_member(self, peer: PeerId) -> bool:
        """Whether a token that is not revoked has admitted the peer."""
        return any(token.revoked_at is None for token in self.tokens_of(peer))

    def members(self, mode: AdmissionMode) -> Set[PeerId]:
        """Peers that may join without presenting anything; in mode "open" no peer has to."""
        if mode == "allow-list":
            return self.allowed.keys() - self.bans.keys()
        if self._members is None:
            admitted = {peer for peer in self._tokens_of if self.is_member(peer)}
            self._members = admitted - self.bans.keys()
        return self._members

    def refusal(self, mode: AdmissionMode, peer: PeerId) -> str | None:
        """Why `peer` may not take part now, as a sentence for it; None if it may."""
        ban = self.bans.get(peer)
        if ban is not None:
            why = f": {ban.reason}" if ban.reason else ""
            return f"the organiser has banned this peer from the run{why}"
        if mode == "allow-list" and peer not in self.allowed:
            return (
                "this run admits only the peers on its list, and this one is not on it; "
                f"give the organiser its peer ID: {peer}"
            )
        if mode == "token" and not self.is_member(peer):
            if peer in self._tokens_of:
                return (
                    "the organiser has revoked the token that let this peer in; "
                    "ask for a new invite"
                )
            return (
                "this run is by invitation and no token has let this peer in; "
                "ask the organiser for an invite"
            )
        return None

    def affected_by(self, record: AdmissionRecord) -> tuple[PeerId, ...]:
        """Peers whose right to take part may have changed with an entered record."""
        if isinstance(record, TokenRevoked):
            return tuple(self.admitted.get(record.token, ()))
        if isinstance(record, TokenCreated):
            return ()
        return (record.peer,)


_STATE_TEXT: dict[TokenState, str] = {
    TokenState.EXPIRED: "has expired",
    TokenState.USED_UP: "was used already, as often as it could be",
    TokenState.REVOKED: "was revoked by the organiser",
}
