"""``eqlen report RUN --serve``: the page of a run, for this machine's browsers (or ``ssh -L``).

/            the page, once there is a run   /rollout?step=&prompt=&index=    one rollout, whole
/news?...    sections that have changed      /graded?step=&verdict=           responses by verdict
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from megatron_eqlen.recipe.load import may_become_run
from megatron_eqlen.report import page
from megatron_eqlen.report.page import Page
from megatron_eqlen.report.template import policy

HOST, PORT = "127.0.0.1", 8423
LOCAL = ("127.0.0.1", "localhost")

WAITING = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="{seconds:g}"><title>{run}</title></head>
<body><p>Waiting for {run}: no run has begun there yet, and none was submitted with eqlen submit.</p></body>
</html>
"""

Query = dict[str, str]


class LiveServer(ThreadingHTTPServer):
    """Listens on ``port`` of this machine alone (0: any that is free). Raises ValueError if the port is taken
    or may not be used, or if ``run`` neither is a run's folder nor may become one."""

    daemon_threads = True

    def __init__(self, run: Path, port: int = PORT) -> None:
        self.run = run
        self._page = None if may_become_run(run) else Page(run, live=True)
        self.answers: dict[str, Callable[[Query], tuple[str, str]]] = {
            "/": lambda query: ("text/html", self.start()),
            "/news": lambda query: ("application/json", json.dumps(self.page.news(query))),
            "/rollout": lambda query: ("text/html", self.page.rollout(query["step"], _key(query))),
            "/graded": lambda query: ("text/html", self.page.graded(query["step"], query["verdict"])),
        }
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "is in use" if taken else f"cannot be used: {error}"
            raise ValueError(
                f"--port: port {port} of {HOST} {why}; name another (0: any that is free)"
            ) from None

    @property
    def page(self) -> Page:
        """Page. Raises ValueError before the run begins."""
        if self._page is None:
            self._page = Page(self.run, live=True)
        return self._page

    def start(self) -> str:
        """Return the page, or before the run begins a page that asks again."""
        if self._page is None and may_become_run(self.run):
            return WAITING.format(run=escape(str(self.run)), seconds=page.POLL)
        return self.page.html()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that left before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer a request; refuse pages from elsewhere whose host name resolves to this machine."""
        try:
            where, host = urlsplit(self.path), urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"malformed address or Host header: {error}")
            return
        answer = self.server.answers.get(where.path)
        if host is None:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "expected a Host header with a name")
        elif host not in LOCAL:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"expected the host {' or '.join(LOCAL)}")
        elif answer is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"nothing here: {where.path}")
        else:
            self._answer(answer, dict(parse_qsl(where.query)))

    def _answer(self, answer: Callable[[Query], tuple[str, str]], query: Query) -> None:
        """Send an answer, or an error: files may be removed meanwhile (``report.keep_streams``), and names in
        the address may be too long for a file system."""
        try:
            kind, text = answer(query)
        except (ValueError, OSError) as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", str(error))
        except KeyError as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"expected {error} in the address")
        else:
            self._send(HTTPStatus.OK, kind, text)

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""


def _key(query: Query) -> tuple[str, int]:
    return query["prompt"], int(query["index"])


def serve(run: Path, port: int = PORT) -> None:
    """Answer requests until Ctrl-C."""
    with LiveServer(run, port) as server:
        waits = ", where no run has begun yet" if may_become_run(run) else ""
        print(f"{run}{waits}: live on {server.address} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
