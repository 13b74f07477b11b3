"""The web page's files, read once at the start.

The same page serves all users. A token in the link's fragment, which browsers never send, opens the
organiser's part.
"""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from fastapi.responses import Response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def add_to(app: FastAPI) -> None:
    """Add a path for each file."""
    folder = resources.files(__name__)
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (folder / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def file() -> Response:
        # Browsers must revalidate: another release's page does not fit this one's API.
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    app.add_api_route(path, file, methods=["GET"], include_in_schema=False)
