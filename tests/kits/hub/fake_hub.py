"""A server with the part of the Hugging Face hub's API that huggingface_hub uses for a model's
upload and download and for a data set's download: real HTTP over localhost, large files by Git
LFS's basic transfer.

Every refusal is one of the hub's own: its status and its `X-Error-Code`.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import huggingface_hub.constants
import pytest
import yaml

TOKEN = "hf_of_a_test"


@dataclass
class FakeRepository:
    private: bool = False
    gated: bool = False
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    """Files of every commit, the oldest first."""
    branches: dict[str, int] = field(default_factory=dict)
    """Numbers of commits by the names of branches and tags; `main` is the newest commit."""

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    def commit_id(self, number: int) -> str:
        named = {name: _sha1(content) for name, content in self.commits[number].items()}
        return _sha1(json.dumps([number, named], sort_keys=True).encode())

    @property
    def head(self) -> str:
        return self.commit_id(len(self.commits) - 1)

    def at(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.files
        if revision in self.branches:
            return self.commits[self.branches[revision]]
        for number, files in enumerate(self.commits):
            if revision == self.commit_id(number):
                return files
        return None


@dataclass
class FakeHub:
    url: str
    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    """Those of models."""
    datasets: dict[str, FakeRepository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each, in order."""
    may_write: bool = True
    breaks: dict[str, int] = field(default_factory=dict)
    """Bytes of a file after which the connection breaks once, by the file's path."""
    ranges: list[tuple[str, int]] = field(default_factory=list)
    """Paths of which a rest was asked for, and where it begins."""


class Refusal(Exception):
    def __init__(self, status: int, code: str, text: str, url: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.text, self.url = status, code, text, url


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[FakeHub]:
    """Serve a hub, and let this process's huggingface_hub use it, with an empty cache and without
    a token."""

    class Handler(_Handler):
        hub = FakeHub("")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        _use(monkeypatch, Handler.hub.url, home)
        try:
            yield Handler.hub
        finally:
            huggingface_hub.close_session()
            server.shutdown()
            thread.join()


def _use(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """huggingface_hub reads its environment when it is imported, which another test may have
    caused."""
    for name, value in (
        ("ENDPOINT", url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_DISABLE_TELEMETRY", True),
        ("HF_HUB_CACHE", str(home / "hub")),
        ("HF_TOKEN_PATH", str(home / "token")),
    ):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 (names of http.server)

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self._body()
        try:
            for method, pattern, act in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match is not None and self.command in method:
                    headers, content = act(self, body, *match.groups())
                    self._send_range(path, headers, content)
                    return
            raise Refusal(404, "", f"no such address: {path}")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.text}
            content = json.dumps({"error": refusal.text, "url": refusal.url}).encode()
            self._send(refusal.status, headers, content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send_range(self, path: str, headers: dict[str, str], content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None:
            cut = self.hub.breaks.pop(path, None) if self.command == "GET" else None
            self._send(200, headers, content, cut)
            return
        first = int(asked[1])
        self.hub.ranges.append((path, first))
        place = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(206, {**headers, "Content-Range": place}, content[first:])

    def _send(
        self, status: int, headers: dict[str, str], content: bytes, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
            self.close_connection = self.close_connection or cut is not None

    # ------------------------------------------------------------ rights

    def _logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _writer(self) -> None:
        if not self._logged_in():
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        if not self.hub.may_write:
            raise Refusal(403, "", "You don't have the rights to write here")

    def _readable(self, name: str, kind: str = "models") -> FakeRepository:
        of_kind = self.hub.datasets if kind == "datasets" else self.hub.repositories
        found = of_kind.get(name)
        if found is None or (found.private and not self._logged_in()):
            raise Refusal(404 if self._logged_in() else 401, "RepoNotFound", "Repository not found")
        return found

    def _files(self, name: str, revision: str, kind: str = "models") -> dict[str, bytes]:
        files = self._readable(name, kind).at(revision)
        if files is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return files

    # ------------------------------------------------------------ upload

    def create(self, body: bytes) -> _Answer:
        self._writer()
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            raise Refusal(409, "", "You already created this model repo", url)
        self.hub.repositories[name] = FakeRepository(wanted.get("visibility") == "private")
        return _json({"url": url})

    def validate_yaml(self, body: bytes) -> _Answer:
        _, front_matter, text = json.loads(body)["content"].split("---\n", 2)
        if not isinstance(yaml.safe_load(front_matter), dict) or not text:
            raise Refusal(400, "", "no metadata")
        return _json({})

    def preupload(self, body: bytes, name: str, revision: str) -> _Answer:
        self._writer()
        self._files(name, revision)
        return _json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        )

    def batch(self, body: bytes, name: str) -> _Answer:
        self._writer()
        self._readable(name)
        objects = [
            one
            if one["oid"] in self.hub.objects
            else one | {"actions": {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}}
            for one in json.loads(body)["objects"]
        ]
        return _json({"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> _Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "", "another content")
        self.hub.objects[oid] = body
        return {}, b""

    def commit(self, body: bytes, name: str, revision: str) -> _Answer:
        self._writer()
        repository = self._readable(name)
        files = dict(self._files(name, revision))
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        repository.commits.append(files)
        head = repository.head
        return _json({"commitUrl": f"{self.hub.url}/{name}/commit/{head}", "commitOid": head})

    # ------------------------------------------------------------ download

    def info(self, _: bytes, kind: str, name: str, revision: str | None) -> _Answer:
        repository = self._readable(name, kind)
        files = self._files(name, revision or "main", kind)
        head = repository.commit_id(repository.commits.index(files))
        return _json({"id": name, "sha": head, "private": repository.private})

    def tree(self, _: bytes, kind: str, name: str, revision: str) -> _Answer:
        return _json(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": _sha1(content),
                }
                for path, content in self._files(name, revision, kind).items()
            ]
        )

    def resolve(self, _: bytes, kind: str | None, name: str, revision: str, path: str) -> _Answer:
        kind = kind or "models"
        files = self._files(name, revision, kind)
        if self._readable(name, kind).gated:
            raise Refusal(403, "GatedRepo", f"Access to {kind[:-1]} {name} is restricted")
        if path not in files:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        etag = _sha1(files[path])
        return {"ETag": f'"{etag}"', "X-Repo-Commit": revision}, files[path]


_Answer = tuple[dict[str, str], bytes]
"""Headers and content."""


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(content: object) -> _Answer:
    return {"Content-Type": "application/json"}, json.dumps(content).encode()


_REPOSITORY = r"([^/]+/[^/]+)"
_KIND = r"(models|datasets)"
_REVISION = r"((?:refs/\w+/)?[^/]+)"
_ROUTES: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    (("POST",), r"/api/repos/create", _Handler.create),
    (("POST",), r"/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), rf"/api/models/{_REPOSITORY}/preupload/([^/]+)", _Handler.preupload),
    (("POST",), rf"/api/models/{_REPOSITORY}/commit/([^/]+)", _Handler.commit),
    (("POST",), rf"/{_REPOSITORY}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), r"/objects/([0-9a-f]{64})", _Handler.store),
    (("GET",), rf"/api/{_KIND}/{_REPOSITORY}(?:/revision/{_REVISION})?", _Handler.info),
    (("GET",), rf"/api/{_KIND}/{_REPOSITORY}/tree/{_REVISION}", _Handler.tree),
    (("GET", "HEAD"), rf"(?:/(datasets))?/{_REPOSITORY}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
