"""An OTLP/HTTP receiver on this machine: it decodes the spans that arrive, and keeps them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class OtlpReceiver:
    port: int
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    status: int = 200
    """What every request is answered with; only those answered with 200 are kept."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spans(self) -> list[Span]:
        """All spans, in the order in which they arrived."""
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def traces(self) -> list[list[Span]]:
        """The spans of each trace, by their beginnings; of those that begin together, the one that
        lasts longest comes first. The traces are in the order in which they arrived."""
        found: dict[bytes, list[Span]] = {}
        for span in self.spans():
            found.setdefault(span.trace_id, []).append(span)
        for of_trace in found.values():
            of_trace.sort(key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))
        return list(found.values())


def values(attributes: Iterable[KeyValue]) -> dict[str, str | int | float]:
    """The attributes of a span, an event or a resource."""
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.paths.add(self.path)
            if receiver.status == 200:
                receiver.requests.append(ExportTraceServiceRequest.FromString(content))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    class Listener(http.server.ThreadingHTTPServer):
        daemon_threads = True

    with Listener(("127.0.0.1", 0), Handler) as listener:
        receiver = OtlpReceiver(listener.server_address[1])
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            listener.shutdown()
            thread.join()
