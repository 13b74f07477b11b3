"""OpenTelemetry: one trace for each applied step, sent over OTLP/HTTP.

The ids of traces and spans are hashes of the run, the step and its attempt. So a step that is sent
once more after a kill has the ids that it had, and one that is applied again after a rollback has
others. OpenTelemetry's own environment variables (`OTEL_*`) apply. To be imported for this target
only, because it needs packages that the others do not.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from swarm_coordinator.status.redact import without_addresses
from swarm_coordinator.tracking.targets import TrackedRun, needs
from swarm_coordinator.tracking.trace_reader import StepTrace
from swarm_shared.base.errors import NetworkError, UsageError

with needs("opentelemetry", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"):
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import INVALID_SPAN, Span, StatusCode, set_span_in_context

SERVICE = "swarmtrain"
SPANS_PER_REQUEST = 512
"""As in the SDK's own batches; it bounds the size of a request."""

TRACES_PATH = "/v1/traces"
"""Where an OTLP/HTTP receiver takes traces."""

_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] [\w ]+")

Attributes = dict[str, str | int | float]


class OpenTelemetryTraces:
    """An OTLP/HTTP receiver, such as a collector, Jaeger or Tempo."""

    def __init__(self, run: TrackedRun, endpoint: str | None) -> None:
        """Without an endpoint, OpenTelemetry's environment variables name it, or it is port 4318
        of this machine."""
        url = None if endpoint is None else traces_url(endpoint)
        self._run = run
        self._ids = _StepIds()
        self._ended = _EndedSpans()
        self._failures = _Failures()
        self._exporter: SpanExporter = OTLPSpanExporter(url)
        about = {SERVICE_NAME: SERVICE, "swarm.run.id": run.id, "swarm.run.name": run.name}
        provider = TracerProvider(
            resource=Resource.create(about), id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(__name__)

    def put(self, record: StepTrace) -> None:
        """Make the spans of one step. It lasts from the first computing until the last member has
        applied it, as far as that is recorded; the run's own duration of it is an attribute."""
        self._ids.begin(f"{self._run.id} {record.step} {record.attempt}")
        began = min((part.began for part in record.parts), default=-record.seconds)
        ended = max((part.ended for part in record.parts), default=0.0)
        root = self._start(record, INVALID_SPAN, "step", began, _attributes(record))
        for event in record.events:
            of_peer = {} if event.peer is None else {"swarm.peer.id": event.peer}
            # A receiver may be another company's, and a note names the address that failed.
            text = without_addresses(event.text)
            root.add_event(text, of_peer, _nanoseconds(event.written_at))
        whole: dict[str, Span] = {}
        for part in record.parts:
            if part.stage is None:
                span = whole[part.name] = self._start(record, root, part.name, part.began, {})
            else:
                parent = whole["apply" if part.name == "apply" else "close"]
                name = f"{part.name} stage {part.stage}"
                of_stage: Attributes = {"swarm.stage": part.stage}
                span = self._start(record, parent, name, part.began, of_stage)
            if part.name == "failed attempt":
                span.set_status(StatusCode.ERROR)
            span.end(_at(record, part.ended))
        root.end(_at(record, ended))

    def _start(
        self, record: StepTrace, parent: Span, name: str, began: float, attributes: Attributes
    ) -> Span:
        return self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=attributes,
            start_time=_at(record, began),
        )

    def flush(self) -> None:
        """Send all spans. NetworkError if the receiver has not taken them within the exporter's
        time limit."""
        spans = self._ended.take()
        for start in range(0, len(spans), SPANS_PER_REQUEST):
            self._failures.first = ""
            result = self._exporter.export(spans[start : start + SPANS_PER_REQUEST])
            if result is not SpanExportResult.SUCCESS:
                raise NetworkError(
                    f"the OTLP/HTTP receiver did not take the spans ({self._failures.first}); "
                    "--endpoint names another, and this command continues where it stopped"
                )

    def close(self) -> None:
        self._exporter.shutdown()
        self._failures.close()


def traces_url(endpoint: str) -> str:
    """Return the address for traces of a receiver, which may be named without the path."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            f"--endpoint {endpoint!r} is not the address of an OTLP/HTTP receiver; it looks like "
            "http://localhost:4318"
        )
    if parts.path.endswith(TRACES_PATH):
        return endpoint
    return parts._replace(path=parts.path.rstrip("/") + TRACES_PATH).geturl()


def _attributes(record: StepTrace) -> Attributes:
    numbers: Mapping[str, int | float] = {
        "swarm.step": record.step,
        "swarm.version.before": record.step - 1,
        "swarm.step.attempt": record.attempt,
        "swarm.step.repetition": record.earlier,
        "swarm.step.seconds": record.seconds,
        "swarm.loss": record.loss,
        "swarm.learning_rate": record.learning_rate,
        "swarm.gradient_norm": record.global_norm,
        "swarm.tokens": record.tokens,
        "swarm.peers": record.peers,
        "swarm.stages": record.stages,
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _at(record: StepTrace, seconds: float) -> int:
    """Return, in Unix nanoseconds, a time that is given in seconds from the step's decision."""
    return _nanoseconds(record.decided_at) + _nanoseconds(seconds)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class _StepIds(IdGenerator):
    """Ids that follow from the step and from the order of its spans."""

    def begin(self, key: str) -> None:
        self._key, self._spans = key, 0

    def generate_trace_id(self) -> int:
        return self._hash("trace", bits=128)

    def generate_span_id(self) -> int:
        self._spans += 1
        return self._hash(f"span {self._spans}", bits=64)

    def _hash(self, of: str, bits: int) -> int:
        digest = hashlib.sha256(f"{self._key} {of}".encode()).digest()
        return int.from_bytes(digest[: bits // 8], "big") or 1  # 0 is no id


class _EndedSpans(SpanProcessor):
    """Keeps spans until they are sent. The SDK's own processors send in the background, and do not
    report what they could not send."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class _Failures(logging.Handler):
    """Takes the exporter's log, which alone has the reason for a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""
        self._logger = logging.getLogger("opentelemetry.exporter")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        # requests and urllib3 wrap the system's reason in four layers of their own.
        reason = _SYSTEM_ERROR.search(message)
        self.first = self.first or (message if reason is None else reason[0])

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()
