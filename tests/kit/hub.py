"""A stand-in for the Hugging Face Hub: the part of its API that ``huggingface_hub`` uses here."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

Files = dict[str, bytes]


class Hub:
    """Repositories by kind and name. ``requests``: method and path of every request."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, Files]] = {}
        self.branches: dict[tuple[str, str], dict[str, str]] = {}
        self.gated: set[str] = set()
        self.answer: tuple[int, str] | None = None
        """Status and message for every request about a repository, in place of its contents."""
        self.requests: list[str] = []

    def commit(self, kind: str, name: str, files: Files) -> str:
        """Make ``files`` the newest commit of a repository's branch ``main``; return its hash."""
        commits = self.commits.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        self.branches.setdefault((kind, name), {})["main"] = commit
        return commit


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve ``hub``; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(patch: pytest.MonkeyPatch, address: str, cache: Path, offline: bool = False) -> None:
    """Make ``huggingface_hub`` use the hub at ``address`` and a cache of its own: it reads HF_ENDPOINT,
    HF_HUB_CACHE and HF_HUB_OFFLINE when it is imported."""
    close_session()
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setenv("HF_TOKEN", "hf_test")
    patch.setenv("NO_PROXY", "127.0.0.1")
    patch.delenv("EQLEN_REVISIONS", raising=False)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._note()
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            return self._repo(found[1], found[2], found[3], unquote(found[4] or "main"))
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file("dataset" if found[1] else "model", found[2], found[3], unquote(found[4]))
        return self._refuse(404, "EntryNotFound")

    def _repo(self, kind: str, name: str, what: str | None, revision: str) -> None:
        if not (found := self._commit(kind, name, revision)):
            return
        commit, files = found
        if what == "tree":
            self._json([
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ])  # fmt: skip
        else:
            self._json({"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        if not (found := self._commit(kind, name, revision)):
            return
        commit, files = found
        if path not in files:
            self._refuse(404, "EntryNotFound")
            return
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        self._send(200, files[path], {"X-Repo-Commit": commit, "ETag": etag})

    def _commit(self, kind: str, name: str, revision: str) -> tuple[str, Files] | None:
        """Return the commit and its files; None if the request was refused."""
        if self.hub.answer is not None:
            status, message = self.hub.answer
            self._send(status, b"", {"X-Error-Message": message})
            return None
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return None
        commits = self.hub.commits.get((kind, name))
        if commits is None:
            self._refuse(404, "RepoNotFound")
            return None
        commit = self.hub.branches[kind, name].get(revision, revision)
        if commit not in commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit, commits[commit]

    def _note(self) -> str:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
