"""Authorisation of calls to hivemind's DHT: members of the run only.

hivemind asks an authorizer to sign what it sends and to check what it receives, requests and
answers alike. Its own authorizers need RSA keys and a token server; this one uses what a member has
anyway: the organiser's certificate of its main key, that key's signature on its p2pd's ID (the
carrier binding), and p2pd's own key, which signs each call. A non-member has no certificate, and a
copied certificate is useless without the member's key.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict
from typing import Any

from swarm_client.averaging.protocol.messages import SetMembership
from swarm_shared.base.clock import Clock, RunClock, clock_through_sleep
from swarm_shared.base.errors import AdmissionError, NetworkError, ProtocolError, SignatureError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.credentials import (
    CLOCK_SKEW_SECONDS,
    MembershipCertificate,
    check_certificate,
    open_carrier_binding,
)
from swarm_shared.identity.keys import Identity, verify
from swarm_shared.identity.signing import MAX_CREDENTIAL_BYTES

_CALL_DOMAIN = b"swarmtrain-directory-call-1\x00"
_NONCE_BYTES = 16
_MAX_NONCES = 65_536
_MAX_TOKENS = 4096

logger = logging.getLogger(__name__)


class RunAuthorizer:
    """Implements hivemind.utils.auth.AuthorizerBase. `set_membership` must precede the first
    call."""

    def __init__(self, p2pd_key: Identity, clock: Clock = clock_through_sleep) -> None:
        self._key = p2pd_key
        self.clock = RunClock(clock)
        self.membership: SetMembership | None = None
        """This peer's proof of membership; None before it is admitted."""
        self._revoked: frozenset[PeerId] = frozenset()
        self._tokens: OrderedDict[bytes, tuple[PeerId, PeerId, float]] = OrderedDict()
        """Verified tokens: member, peer ID of its p2pd, and the time of expiry."""
        self._nonces: OrderedDict[bytes, float] = OrderedDict()

    def set_membership(self, membership: SetMembership) -> None:
        """Set the proof that this peer sends from now on, and the revoked peers."""
        self.clock.learn(membership.unix_seconds)
        before, now = self.membership, membership
        if before is None or (before.run, before.organiser) != (now.run, now.organiser):
            self._tokens.clear()
        self.membership = membership
        self._revoked = frozenset(membership.revoked)

    # ----------------------------------------------------------------------- hivemind's interface

    async def sign_request(self, request: Any, service_public_key: object) -> None:
        self._put_token(request.auth.client_access_token)
        request.auth.time = self.clock()
        request.auth.nonce = secrets.token_bytes(_NONCE_BYTES)
        request.auth.signature = self._key.sign(_signed_part(request))

    async def validate_request(self, request: Any) -> bool:
        auth = request.auth
        try:
            self._check_signed(request, auth.client_access_token)
            self._check_fresh(auth.time, auth.nonce)
        except (AdmissionError, ProtocolError) as error:
            return self._refuse("a call", error)
        return True

    async def sign_response(self, response: Any, request: Any) -> None:
        self._put_token(response.auth.service_access_token)
        response.auth.nonce = request.auth.nonce
        response.auth.signature = self._key.sign(_signed_part(response))

    async def validate_response(self, response: Any, request: Any) -> bool:
        try:
            self._check_signed(response, response.auth.service_access_token)
            if response.auth.nonce != request.auth.nonce:
                raise SignatureError("it answers another call")
        except (AdmissionError, ProtocolError) as error:
            return self._refuse("an answer", error)
        return True

    # ------------------------------------------------------------------------------------- checks

    def _put_token(self, token: Any) -> None:
        """Put the two envelopes into hivemind's token fields."""
        if self.membership is None:
            raise NetworkError("this peer is not admitted to a run yet")
        token.public_key = self.membership.binding
        token.signature = self.membership.certificate

    def _check_signed(self, message: Any, token: Any) -> None:
        member, p2pd = self._verify_token(token.signature, token.public_key)
        if member in self._revoked:
            raise AdmissionError(f"{member} is revoked")
        signature = message.auth.signature
        message.auth.signature = b""
        verify(p2pd, _signed_part(message), signature)

    def _verify_token(self, certificate: bytes, binding: bytes) -> tuple[PeerId, PeerId]:
        """Verify a token; returns the member and its p2pd. Raises if it is invalid."""
        membership, now = self.membership, self.clock()
        if membership is None:
            raise AdmissionError("this peer is not admitted to a run yet")
        if max(len(certificate), len(binding)) > MAX_CREDENTIAL_BYTES:
            raise SignatureError("its token is too long")
        key = hashlib.sha256(hashlib.sha256(certificate).digest() + binding).digest()
        verified = self._tokens.get(key)
        if verified is not None and now <= verified[2]:
            return verified[0], verified[1]
        named = MembershipCertificate.open(certificate, membership.organiser)
        valid = check_certificate(
            certificate, membership.run, membership.organiser, now, named.peer
        )
        bound = open_carrier_binding(binding, valid.peer, now)
        p2pd = PeerId(bound.carrier_peer_id)
        self._tokens[key] = (valid.peer, p2pd, min(valid.expires, bound.expires))
        if len(self._tokens) > _MAX_TOKENS:
            self._tokens.popitem(last=False)
        return valid.peer, p2pd

    def _check_fresh(self, sent_at: float, nonce: bytes) -> None:
        now = self.clock()
        if not abs(sent_at - now) <= CLOCK_SKEW_SECONDS:
            raise SignatureError(f"it was signed {now - sent_at:.0f} s ago, or clocks differ")
        if len(nonce) != _NONCE_BYTES or nonce in self._nonces:
            raise SignatureError("it repeats an earlier call")
        self._nonces[nonce] = now
        while self._nonces:
            oldest, seen_at = next(iter(self._nonces.items()))
            # A member that floods others could have an old call of its own repeated, without
            # gain.
            if now - seen_at <= 2 * CLOCK_SKEW_SECONDS and len(self._nonces) <= _MAX_NONCES:
                break
            del self._nonces[oldest]

    def _refuse(self, what: str, error: Exception) -> bool:
        logger.info("%s of the directory was refused: %s", what, error)
        return False


def _signed_part(message: Any) -> bytes:
    """The signed bytes: everything but the signature. The type name prevents the use of a request
    as another kind of request."""
    assert message.auth.signature == b""
    name: str = message.DESCRIPTOR.full_name
    content: bytes = message.SerializeToString(deterministic=True)
    return _CALL_DOMAIN + name.encode() + b"\x00" + content
