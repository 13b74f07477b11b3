"""The organiser's admission requests: their effect, and the text that reports it.

Owns the meaning of `token`, `allow`, `ban` and `unban`, both with a running coordinator (which
executes the requests, sent over the run folder's socket) and without one (the command executes them
itself). The command line is in `swarm_coordinator.cli.admission`, the rules in
`swarm_coordinator.admission.book`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, assert_never

from pydantic import Field, TypeAdapter, ValidationError

from swarm_coordinator.admission.authority import WriteRecord
from swarm_coordinator.admission.book import (
    AdmissionBook,
    AdmissionMode,
    AdmissionRecord,
    PeerAllowed,
    PeerBanned,
    PeerDisallowed,
    PeerUnbanned,
    ShortText,
    TokenCreated,
    TokenRevoked,
    TokenState,
    hash_of,
)
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.document import AdmissionStatus, BanRow
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import SignatureError, UsageError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import public_key_of

SECRET_BYTES = 24


class CreateToken(FrozenModel):
    do: Literal["create token"] = "create token"
    uses: int | None = Field(default=None, ge=1, lt=2**53)
    expires_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    note: ShortText = ""


Request = Annotated[
    CreateToken | TokenRevoked | PeerAllowed | PeerDisallowed | PeerBanned | PeerUnbanned,
    Field(discriminator="do"),
]
requests: TypeAdapter[Request] = TypeAdapter(Request)


@dataclass(frozen=True, slots=True)
class AdmissionChange:
    """The effect of a request. Without a record, nothing changes."""

    record: AdmissionRecord | None
    text: str
    details: dict[str, Any] = field(default_factory=dict)
    warning: str = ""

    def answer(self, effect: str) -> dict[str, Any]:
        """The answer to the request, with a sentence about the effect."""
        text = "; ".join(part for part in (self.text, effect) if part)
        return {"ok": True, "text": text, "warning": self.warning, "details": self.details}


async def carry_out(
    request: Request, folder: RunFolder, mode: AdmissionMode, organiser: PeerId,
    book: AdmissionBook, write: WriteRecord, clock: Clock,
) -> tuple[AdmissionChange, tuple[PeerId, ...]]:  # fmt: skip
    """Execute a request, whose record `write` makes durable first; returns the change and the
    peers whose right to take part may be affected."""
    change = plan(book, mode, organiser, request, clock())
    if change.record is None:
        return change, ()
    await write(change.record)
    book.enter(change.record, clock())
    if isinstance(change.record, TokenRevoked):
        _forget_standing_token(folder, book, change.record.token)
    return change, book.affected_by(change.record)


def _forget_standing_token(folder: RunFolder, book: AdmissionBook, token: int) -> None:
    """Delete a revoked standing token, which must not be printed in invites any more."""
    if folder.token_file.exists():
        found = book.token_of(folder.admission_token())
        if found is not None and found.token == token:
            folder.token_file.unlink(missing_ok=True)


def parse_request(question: dict[str, Any]) -> Request:
    try:
        return requests.validate_python(question)
    except ValidationError as error:
        raise UsageError(
            f"this is not an admission request: {first_error(error)}; is it of the same version "
            "as this program?"
        ) from error


def plan(
    book: AdmissionBook, mode: AdmissionMode, organiser: PeerId, request: Request, now: float
) -> AdmissionChange:
    """What the request changes, and the text about it. UsageError if it is invalid."""
    match request:
        case CreateToken():
            return _create(book, mode, request, now)
        case TokenRevoked():
            return _revoke(book, mode, request)
        case PeerAllowed(peer):
            _check_peer(peer, organiser)
            if peer in book.allowed:
                return AdmissionChange(None, f"{peer} is on the list already")
            return AdmissionChange(
                request, f"{peer} is on the list", warning=_unused_list_warning(mode)
            )
        case PeerDisallowed(peer):
            if peer not in book.allowed:
                raise UsageError(
                    f"{peer} is not on the list; see `swarm-coordinator allow list RUN_DIR`"
                )
            return AdmissionChange(
                request, f"{peer} is off the list", warning=_unused_list_warning(mode)
            )
        case PeerBanned(peer, reason):
            _check_peer(peer, organiser)
            held = book.bans.get(peer)
            if held is not None and held.reason == reason:
                return AdmissionChange(None, f"{peer} is banned already")
            return AdmissionChange(
                request,
                f"banned {peer}",
                warning=_new_identity_warning(book, mode, peer, now),
            )
        case PeerUnbanned(peer):
            if peer not in book.bans:
                raise UsageError(
                    f"{peer} is not banned; `swarm-coordinator status` lists the banned peers"
                )
            return AdmissionChange(request, f"{peer} is not banned any more")
        case _:
            assert_never(request)


def _create(
    book: AdmissionBook, mode: AdmissionMode, request: CreateToken, now: float
) -> AdmissionChange:
    secret = secrets.token_urlsafe(SECRET_BYTES)
    number = max(book.tokens, default=0) + 1
    expires_at = None if request.expires_seconds is None else now + request.expires_seconds
    warning = ""
    if mode != "token":
        warning = (
            f'[admission] mode is "{mode}", so no token is required; set it to "token" in '
            "run.toml and start the coordinator again"
        )
    return AdmissionChange(
        TokenCreated(number, hash_of(secret), request.note, request.uses, expires_at),
        f"token {number} is created",
        {"token": number, "secret": secret, "uses": request.uses, "expires_at": expires_at},
        warning,
    )


def _revoke(book: AdmissionBook, mode: AdmissionMode, request: TokenRevoked) -> AdmissionChange:
    number = request.token
    token = book.tokens.get(number)
    if token is None:
        raise UsageError(f"there is no token {number}; see `swarm-coordinator token list RUN_DIR`")
    if token.revoked_at is not None:
        return AdmissionChange(None, f"token {number} is revoked already")
    count = len(book.admitted.get(number, ()))
    ended = f"; it had admitted {count} peer(s)" if count else ""
    warning = ""
    if count and mode != "token":
        warning = (
            f'[admission] mode is "{mode}": the peers that it had admitted may still take part'
        )
    return AdmissionChange(request, f"token {number} is revoked{ended}", warning=warning)


def _unused_list_warning(mode: AdmissionMode) -> str:
    if mode == "allow-list":
        return ""
    return (
        f'[admission] mode is "{mode}", so the list is not used; set it to "allow-list" '
        "in run.toml and start the coordinator again"
    )


def _new_identity_warning(
    book: AdmissionBook, mode: AdmissionMode, peer: PeerId, now: float
) -> str:
    """How the owner of a banned peer could join again with a new identity, which costs nothing."""
    if mode == "open":
        return (
            '[admission] mode is "open", so its owner can come back with a new identity; '
            'mode "token" or "allow-list" in run.toml keeps it out'
        )
    open_tokens = [
        token for token in book.tokens_of(peer)
        if book.state_of(token, now) is TokenState.VALID
    ]  # fmt: skip
    if mode == "token" and open_tokens:
        names = ", ".join(str(token.token) for token in open_tokens)
        return (
            f"it came in by token {names}, which admits its owner again with a new identity; "
            "`swarm-coordinator token revoke` ends that, for every peer that it has admitted"
        )
    return ""


def _check_peer(peer: PeerId, organiser: PeerId) -> None:
    try:
        public_key_of(peer)
    except SignatureError as error:
        raise UsageError(
            f"{error}; a peer ID looks like {organiser}, and `swarm-client join` prints it"
        ) from error
    if peer == organiser:
        raise UsageError(f"{peer} is this run's own coordinator; name a volunteer")


# ---------------------------------------------------------------- the run's standing token


def standing_token(
    folder: RunFolder, book: AdmissionBook
) -> tuple[str | None, TokenCreated | None]:
    """The secret that `invite` prints in mode "token", and its record if it is not written yet.

    It is stored in the run folder in clear, so that the same invite can be printed again. A run
    whose organiser revoked it, or created other tokens before the first start, has none.
    """
    if folder.token_file.exists():
        secret = folder.admission_token()
        known = book.token_of(secret)
        if known is None:
            number = max(book.tokens, default=0) + 1
            return secret, TokenCreated(number, hash_of(secret), STANDING_NOTE)
        if known.revoked_at is None:
            return secret, None
        folder.token_file.unlink(missing_ok=True)
        return None, None
    if book.tokens:
        return None, None
    secret = folder.admission_token()
    return secret, TokenCreated(1, hash_of(secret), STANDING_NOTE)


STANDING_NOTE = "the run's standing invite"


def token_document(book: AdmissionBook, now: float) -> list[dict[str, Any]]:
    """The document of `token list --json`."""
    return [
        {
            "token": token.token,
            "note": token.note,
            "state": book.state_of(token, now).value,
            "uses": token.uses,
            "uses_left": book.uses_left(token),
            "admitted": sorted(book.admitted.get(token.token, ())),
            "created_at": token.created_at,
            "expires_at": token.expires_at,
            "revoked_at": token.revoked_at,
        }
        for token in book.tokens.values()
    ]


def admission_status(
    book: AdmissionBook, mode: AdmissionMode, now: float, attached: int
) -> AdmissionStatus:
    """The admission section of the status. In mode "open" the members are the attached peers."""
    return AdmissionStatus(
        mode=mode,
        members=attached if mode == "open" else len(book.members(mode)),
        valid_tokens=sum(
            book.state_of(token, now) is TokenState.VALID for token in book.tokens.values()
        ),
        bans=tuple(
            BanRow(peer=peer, reason=ban.reason, banned_at=ban.banned_at)
            for peer, ban in book.bans.items()
        ),
    )
