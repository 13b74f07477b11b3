"""A web server on this machine that answers Range requests, and what has arrived at it."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FileOf = Callable[[str, int, int], bytes]
"""(path, first byte, count) → those bytes, as far as the file has them."""


@dataclass
class RangeServer:
    port: int
    read: FileOf
    connections: int = 0
    requests: list[str] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    """False: it sends whole files, as simple servers do."""
    status: int = 0
    """Another status than the right one, for every request."""
    shift: int = 0
    """Bytes by which its ranges are not those asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def range_server(read: FileOf, tls: ssl.SSLContext | None = None) -> Iterator[RangeServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            server.requests.append(self.path)
            location = server.redirects.get(self.path)
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end = int(first) + server.shift, int(last) + server.shift
            content = b""
            if location is not None:
                self.send_response(302)
                self.send_header("Location", location)
            elif server.status:
                self.send_response(server.status)
            elif not server.ranges:
                content = server.read(self.path, 0, 2**30)
                self.send_response(200)
            else:
                content = server.read(self.path, start, end + 1 - start)
                self.send_response(206 if content else 404)
                self.send_header("Content-Range", f"bytes {start}-{end}/*")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Listener(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
            connected, remote = self.socket.accept()
            server.connections += 1
            if tls is not None:
                connected = tls.wrap_socket(connected, server_side=True)
            return connected, remote

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server = RangeServer(listener.server_address[1], read)
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
