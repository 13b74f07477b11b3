"""The HTTP paths as one ASGI application: `/api/v1`, the web page, health and metrics.

Every response is one of `dashboard.api_models`, encoded from the newest snapshot; nothing here
reads files. FastAPI generates the OpenAPI document from the same models. Its own pages for that
document are disabled because they load scripts from elsewhere.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from swarm_coordinator.dashboard import page
from swarm_coordinator.dashboard.api_models import (
    Contributions,
    Curve,
    ErrorBody,
    Events,
    FullPeers,
    Page,
    Peers,
    RunStatus,
    Stages,
    Steps,
    Teams,
    Tokens,
    Trust,
)
from swarm_coordinator.dashboard.snapshot import Snapshot
from swarm_coordinator.dashboard.snapshot_loop import SnapshotLoop
from swarm_coordinator.dashboard.sse import encode_event
from swarm_coordinator.status.document import (
    STALE_SECONDS,
    AdmissionOverview,
    Health,
    HealthState,
)

MAX_PAGE = 500
MAX_STEPS = 1_000
MAX_INTEGER = 2**53 - 1

BEARER = HTTPBearer(auto_error=False, description="Made by `start`, printed by `dashboard`.")
Offset = Annotated[int, Query(ge=0, le=MAX_INTEGER)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[int, Query(ge=0, le=MAX_INTEGER)]


def build_app(loop: SnapshotLoop, token: str, exposition: Callable[[Snapshot], bytes]) -> FastAPI:
    """Make the application. `token` is the organiser's; `exposition` encodes the metrics."""
    app = FastAPI(
        title="swarmtrain coordinator",
        version="1",
        summary="The state of a run. Losses are in nats per token, times in Unix seconds.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            429: {"model": ErrorBody, "description": "Too many requests."},
            503: {
                "model": ErrorBody,
                "description": "Too many connections, or no status yet.",
            },
        },
    )
    _add_error_handlers(app)
    _add_public_paths(app, loop)
    _add_history_paths(app, loop)
    _add_organiser_paths(app, loop, token)
    _add_monitoring_paths(app, loop, exposition)
    page.add_to(app)
    app.openapi()  # made once, at the start: a mistake in it must not appear in a request
    return app


def answer(document: BaseModel, status: int = 200) -> Response:
    return Response(document.model_dump_json(), status, media_type="application/json")


def _page(kind: Callable[..., Page], offset: int, limit: int, **lists: Sequence[Any]) -> Response:
    """Answer with a page of the one list, under its name."""
    [(name, rows)] = lists.items()
    part = {name: rows[offset : offset + limit]}
    return answer(kind(total=len(rows), offset=offset, **part))


def _current_snapshot(loop: SnapshotLoop) -> Snapshot:
    if loop.snapshot is None:
        raise HTTPException(503, "the coordinator has written no status yet; try again")
    return loop.snapshot


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error with an `ErrorBody`."""

    @app.exception_handler(StarletteHTTPException)
    async def answer_http_error(request: Request, error: StarletteHTTPException) -> Response:
        problem = ErrorBody(error=str(error.detail))
        return JSONResponse(problem.model_dump(), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def answer_unexpected_error(request: Request, error: Exception) -> Response:
        """Answer an unexpected error, which the server logs and counts."""
        return answer(ErrorBody(error="unexpected error; details are in the log"), 500)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        return answer(ErrorBody(error=f"{place}: {first['msg']}"[:300]), 422)


_INVALID_PARAMETER: dict[int | str, dict[str, Any]] = {
    422: {"model": ErrorBody, "description": "An invalid parameter."}
}


def _add_public_paths(app: FastAPI, loop: SnapshotLoop) -> None:
    @app.get("/api/v1/run", response_model=RunStatus)
    async def run() -> Response:
        """The state of the run."""
        return answer(_current_snapshot(loop).run)

    @app.get("/api/v1/health", response_model=Health)
    async def health() -> Response:
        """The run's health and its reason."""
        return answer(_current_snapshot(loop).health)

    @app.get("/api/v1/stages", response_model=Stages)
    async def stages() -> Response:
        """The pipeline by stage, and the newest decisions of rebalancing."""
        return answer(_current_snapshot(loop).stages)

    @app.get("/api/v1/trust", response_model=Trust)
    async def trust() -> Response:
        """Audits, the standing of owners, and the newest verdicts."""
        return answer(_current_snapshot(loop).trust)

    @app.get("/api/v1/peers", response_model=Peers, responses=_INVALID_PARAMETER)
    async def peers(offset: Offset = 0, limit: Limit = 100) -> Response:
        """The attached peers, without addresses."""
        return _page(Peers, offset, limit, peers=_current_snapshot(loop).peers)

    async def room_for_a_reader() -> None:
        _current_snapshot(loop)
        if loop.hub.full:
            raise HTTPException(503, "too many readers; try again", {"Retry-After": "30"})

    @app.get(
        "/api/v1/events/stream",
        response_class=EventSourceResponse,
        dependencies=[Depends(room_for_a_reader)],
    )
    async def stream() -> AsyncIterator[ServerSentEvent]:
        """Server-sent events: `run`, `stages`, `step` and `event`, as they happen."""
        # Ends when the reader disconnects or is too slow.
        with loop.hub.reader() as events:
            yield encode_event("run", _current_snapshot(loop).run)
            async for event in events:
                yield event


def _add_history_paths(app: FastAPI, loop: SnapshotLoop) -> None:
    @app.get("/api/v1/steps", response_model=Steps, responses=_INVALID_PARAMETER)
    async def steps(
        after: After = 0, limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = 100
    ) -> Response:
        """Applied steps, oldest first, after step `after`."""
        read = _current_snapshot(loop).database
        # Steps of a run's history are numbered without gaps.
        first = read.steps.row(0).step if read.step_count else 1
        begin = min(read.step_count, max(0, after - first + 1))
        end = min(read.step_count, begin + limit)
        rows = tuple(read.steps.row(index) for index in range(begin, end))
        return answer(
            Steps(steps=rows, next_after=rows[-1].step if end < read.step_count else None)
        )

    @app.get("/api/v1/curve", response_model=Curve)
    async def curve() -> Response:
        """Loss and throughput over the whole run, in a bounded number of points."""
        return answer(_current_snapshot(loop).database.curve)

    @app.get("/api/v1/contributions", response_model=Contributions, responses=_INVALID_PARAMETER)
    async def contributions(offset: Offset = 0, limit: Limit = 100) -> Response:
        """The contributions by owner, the most credit first."""
        found = _current_snapshot(loop).database.contributions
        return _page(Contributions, offset, limit, contributions=found)

    @app.get("/api/v1/teams", response_model=Teams, responses=_INVALID_PARAMETER)
    async def teams(offset: Offset = 0, limit: Limit = 100) -> Response:
        """The contributions by team, the most credit first."""
        return _page(Teams, offset, limit, teams=_current_snapshot(loop).database.teams)

    @app.get("/api/v1/events", response_model=Events, responses=_INVALID_PARAMETER)
    async def events(after: After = 0, limit: Limit = 100) -> Response:
        """The newest `limit` of the last few hundred events after `after`."""
        found = [event for event in _current_snapshot(loop).events if event.id > after][-limit:]
        return answer(Events(events=tuple(found), next_after=found[-1].id if found else after))


def _add_organiser_paths(app: FastAPI, loop: SnapshotLoop, token: str) -> None:
    def organiser_only(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    ) -> None:
        given = "" if credentials is None else credentials.credentials
        # In constant time, so that timing reveals nothing about the token.
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(
                401,
                "this is for the run's organiser; `swarm-coordinator dashboard RUN_DIR` prints a "
                "link with the token",
                {"WWW-Authenticate": "Bearer"},
            )

    organiser = APIRouter(
        prefix="/api/v1/organiser",
        dependencies=[Depends(organiser_only)],
        responses={401: {"model": ErrorBody, "description": "Without the organiser's token."}},
    )

    @organiser.get("/peers", response_model=FullPeers, responses=_INVALID_PARAMETER)
    async def full_peers(offset: Offset = 0, limit: Limit = 100) -> Response:
        """The attached peers, with all that is known of them."""
        snapshot = _current_snapshot(loop)
        own = partial(FullPeers, coordinator=snapshot.status.coordinator)
        return _page(own, offset, limit, peers=snapshot.full_peers)

    @organiser.get("/bans", response_model=AdmissionOverview)
    async def bans() -> Response:
        """The admission mode and the bans."""
        return answer(_current_snapshot(loop).admission)

    @organiser.get("/tokens", response_model=Tokens)
    async def tokens() -> Response:
        """Invite tokens. Their secrets are not stored."""
        return answer(_current_snapshot(loop).tokens)

    app.include_router(organiser)


def _add_monitoring_paths(
    app: FastAPI, loop: SnapshotLoop, exposition: Callable[[Snapshot], bytes]
) -> None:
    @app.get("/healthz", response_model=Health, responses={503: {"model": Health | ErrorBody}})
    async def healthz() -> Response:
        """200 while the coordinator writes its status."""
        snapshot = _current_snapshot(loop)
        fresh = snapshot.taken_at - snapshot.status.time <= STALE_SECONDS
        return answer(snapshot.health, 200 if fresh else 503)

    @app.get("/readyz", response_model=Health, responses={503: {"model": Health | ErrorBody}})
    async def readyz() -> Response:
        """200 while the run trains or is finished."""
        health = _current_snapshot(loop).health
        ready = health.state in (HealthState.HEALTHY, HealthState.FINISHED)
        return answer(health, 200 if ready else 503)

    @app.get("/metrics", response_class=MetricsText)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return MetricsText(exposition(_current_snapshot(loop)))


class MetricsText(Response):
    media_type = "text/plain; version=0.0.4; charset=utf-8"
