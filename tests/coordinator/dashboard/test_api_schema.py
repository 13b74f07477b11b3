"""The API conforms to its OpenAPI document for any request: fuzzed by schemathesis."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from kits.coordinator.http_server import pages_of, run_with_pages, write_status
from swarm_coordinator.dashboard.middleware import GuardMiddleware
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.rate_limit import RateLimit

pytestmark = pytest.mark.process

STREAM = "/api/v1/events/stream"
EXAMPLES = 15


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where the dashboard is served, in a thread of its own, and the organiser's token."""
    folder = run_with_pages(tmp_path_factory.mktemp("schema") / "run")
    # Not old for as long as all this takes: a silent coordinator is answered with 503.
    write_status(folder, time=time.time() + 3600.0)
    found: list[tuple[str, str]] = []
    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=trio.run, args=(_serve, folder, found, ready, done))
    thread.start()
    try:
        ready.wait()
        yield found[0]
    finally:
        done.set()
        thread.join()


async def _serve(
    folder: RunFolder, found: list[tuple[str, str]], ready: threading.Event, done: threading.Event
) -> None:
    try:
        async with pages_of(folder) as client:
            # What is tested are the answers; rates have tests of their own.
            unlimited = RateLimit(1e9, 1e9)
            client.pages.server.application = GuardMiddleware(
                client.pages.app, unlimited, unlimited
            )
            found.append((client.address.url, client.token))
            ready.set()
            await trio.to_thread.run_sync(done.wait)
    finally:
        ready.set()


# A request that is wrong for want of the token is what the organiser never sends.
@pytest.mark.parametrize(
    ("organiser", "mode"),
    [
        (False, GenerationMode.POSITIVE),
        (False, GenerationMode.NEGATIVE),
        (True, GenerationMode.POSITIVE),
    ],
    ids=["stranger-right", "stranger-wrong", "organiser-right"],
)
def test_every_response_conforms_to_the_document(
    address: tuple[str, str], organiser: bool, mode: GenerationMode
) -> None:
    """With parameters that the document allows, and with ones that it does not."""
    url, token = address
    headers = {"Authorization": f"Bearer {token}"} if organiser else {}
    schema = schemathesis.openapi.from_url(f"{url}api/v1/openapi.json").exclude(path=STREAM)
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if organiser and "/organiser/" not in operation.path:
            continue
        if mode is GenerationMode.NEGATIVE and not len(operation.query):
            continue  # nothing could be wrong
        _try(operation, mode, headers)
        tried += 1
    assert tried


def _try(operation: Any, mode: GenerationMode, headers: dict[str, str]) -> None:
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=headers)

    one()
