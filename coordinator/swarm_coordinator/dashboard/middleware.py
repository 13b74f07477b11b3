"""Checks before every path: the host's name, rate limits and security headers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from math import ceil

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_coordinator.dashboard.http_server import is_this_machine
from swarm_shared.base.endpoint import address_group
from swarm_shared.base.rate_limit import RateLimit

BURST = 120.0
PER_SECOND = 30.0
"""Requests of one IPv4 address or one IPv6 /64: the page makes a dozen when it opens, then two a
second."""
TOTAL_BURST = 600.0
TOTAL_PER_SECOND = 300.0
"""Requests of all other machines together, and as many of this machine: all clients of a reverse
proxy connect from it, unless it is in [http] proxies."""

_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


@dataclass(slots=True, eq=False)
class GuardMiddleware:
    """An ASGI middleware: limits rates, adds headers, counts responses."""

    application: ASGIApp
    per_address: RateLimit = field(default_factory=lambda: RateLimit(BURST, PER_SECOND))
    overall: RateLimit = field(
        default_factory=lambda: RateLimit(TOTAL_BURST, TOTAL_PER_SECOND, max_keys=2)
    )
    hosts: frozenset[str] = frozenset()
    """Names of this machine at its loopback addresses, besides those that it always has."""
    answers: Counter[str] = field(default_factory=Counter)
    """Responses by status class, like 2xx."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answers[f"{message['status'] // 100}xx"] += 1
                message["headers"] = [*message["headers"], *_HEADERS, *_caching(message)]
            await send(message)

        wait_seconds = self._wait_seconds(str(scope["client"][0]))
        if not self._is_for_this_host(scope):
            await _MISDIRECTED(scope, receive, with_headers)
        elif wait_seconds > 0:
            refusal = _refusal(max(1, ceil(wait_seconds)))
            await refusal(scope, receive, with_headers)
        else:
            await self.application(scope, receive, with_headers)

    def _is_for_this_host(self, scope: Message) -> bool:
        """Whether a request at a loopback address names this machine.

        A page of another site can have its own name resolve to 127.0.0.1 after it was loaded (DNS
        rebinding). The browser then takes the dashboard for that site's and gives it the answers,
        but it sends the site's name.
        """
        server = scope["server"]
        if server is None or not is_this_machine(server[0]):
            return True
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = _PORT.sub("", given[0]).strip("[]").lower() if len(given) == 1 else ""
        return name == "localhost" or name in self.hosts or is_this_machine(name)

    def _wait_seconds(self, address: str) -> float:
        if is_this_machine(address):
            return self.overall.take("this machine")
        return self.per_address.take(address_group(address)) or self.overall.take("others")


_PORT = re.compile(r":[0-9]*$")
_MISDIRECTED = JSONResponse(
    {
        "error": "this dashboard does not serve that name; use localhost, or add the name to hosts "
        "in [http] of run.toml if a reverse proxy passes it on"
    },
    421,
)


def _caching(message: Message) -> tuple[tuple[bytes, bytes], ...]:
    named = {name.lower() for name, _ in message["headers"]}
    return () if b"cache-control" in named else ((b"cache-control", b"no-store"),)


def _refusal(seconds: int) -> JSONResponse:
    problem = {"error": f"too many requests; come again in {seconds} s"}
    return JSONResponse(problem, 429, {"retry-after": str(seconds)})
