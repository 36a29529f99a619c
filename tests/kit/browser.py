"""A real browser without a screen, asked over Chromium's DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.kit.processes import within

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-breakpad",
    "--no-first-run", "--no-zygote", "--disable-background-networking", "--disable-extensions",
    "--window-size=1200,1600", "--remote-debugging-port=0",
)  # fmt: skip
"""Options. The browser shows this machine's own pages alone; as root it runs only without its sandbox."""
PATIENCE = 30.0


def program() -> str | None:
    """Return the path of the installed browser; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page. Use as a context; ``folder`` is empty and for its files."""

    def __init__(self, folder: Path) -> None:
        browser = program()
        assert browser is not None
        command = [browser, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        port = folder / "DevToolsActivePort"
        assert within(PATIENCE, lambda: port.exists() and "\n" in port.read_text()), "chromium does not start"
        pages = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
        with urllib.request.urlopen(pages, timeout=PATIENCE) as answer:
            (page,) = [target for target in json.load(answer) if target["type"] == "page"]
        self._ends = ExitStack()
        self._page = self._ends.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
        self._asked = 0
        self.errors: list[str] = []
        """Errors thrown by the page's scripts."""
        for domain in ("Page", "Runtime"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its answer."""
        self._asked += 1
        self._page.send(json.dumps({"id": self._asked, "method": method, "params": params}))
        while True:
            told = json.loads(self._page.recv(timeout=PATIENCE))
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"]))
            if told.get("id") == self._asked:
                assert "error" not in told, told["error"]
                return told["result"]

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def look(self, width: int, height: int = 2000, dark: bool = False) -> None:
        """Set the size of the window and the scheme of colours."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        told = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def becomes(self, expression: str) -> bool:
        """Return True if a JavaScript expression becomes true before long."""
        return within(PATIENCE, lambda: self.value(expression))

    def shows(self, text: str, where: str = "body") -> bool:
        """Return True if ``text`` can be read in the element ``where`` before long."""
        element = f"document.querySelector({json.dumps(where)})"
        return self.becomes(f"({element}?.innerText ?? '').includes({json.dumps(text)})")

    def click(self, where: str) -> None:
        self.value(f"document.querySelector({json.dumps(where)}).click()")
