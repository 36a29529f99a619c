"""Sending programs to a SandboxFusion-compatible server instead of running them on this machine.

``POST URL/run_code``, with the secret in ``SANDBOX_API_KEY`` if there is one. The tests' outputs stay here,
unless a checker reads them, in a run of its own. A function is called by code around the program, which
prints its result behind a marker.
"""

from __future__ import annotations

import inspect
import json
import os
import secrets
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from megatron_eqlen.graders.code import rules as own_rules
from megatron_eqlen.graders.code.judge import judge
from megatron_eqlen.graders.code.rules import Rules
from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.graders.sandbox.client import Execution, SandboxError
from megatron_eqlen.graders.sandbox.program import REPORT_TEXT, Limits
from megatron_eqlen.processes.failures import PAUSES

REQUESTS_PER_WORKER = 8
ERRORS = {"MemoryError": "memory_limit"} | dict.fromkeys(
    ("SyntaxError", "IndentationError", "TabError"), "compile_error"
)
"""Verdicts by the exception that a program ends with; ``runtime_error`` for any other."""
BY_RULES = """\
{library}
_kept = sys.modules["__main__"]
sys.modules["__main__"] = _main = ModuleType("__main__")
_code = compile({source!r}, "solution.py", "exec", dont_inherit=True)
try:
    _result = call(_main, _code, {function!r}, {rules!r})
    if _result is not None:
        print("\\n" + {marker!r} + _result)
except SystemExit:
    if {rules!r} != "livecodebench" or {function!r}:
        raise
"""


def whole_program(source: str, function: str | None, rules: Rules, marker: str) -> str:
    """Return the program for the server: ``source`` under ``rules``; what ``function`` returns follows
    ``marker``."""
    if function is None and rules == "plain":
        return source
    library = inspect.getsource(own_rules)
    return BY_RULES.format(library=library, source=source, function=function, rules=rules, marker=marker)


class SandboxServer:
    """A client of the server at ``url`` (without ``/run_code``)."""

    def __init__(self, url: str, workers: int) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._size = workers * REQUESTS_PER_WORKER
        self._threads: ThreadPoolExecutor | None = None

    def submit(
        self, item: dict[str, Any], seconds: float, read: Callable[[dict[str, Any]], Any], **options: Any
    ) -> Future[Any]:
        """Return a future of what ``read`` makes of a Judgement's fields, for a ``{"program", "tests",
        "limits"}``. The server keeps its own time limits."""
        tests, limits = CodeTests.from_json(item["tests"]), Limits(**item["limits"])
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, "sandbox-server")
        return self._threads.submit(lambda: read(asdict(judge(item["program"], tests, limits, self.run))))

    def close(self) -> None:
        """Cancel queued requests; running ones finish on the server."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def run(
        self, source: str, stdin: str, limits: Limits, function: str | None = None, rules: Rules = "plain"
    ) -> Execution:
        """Run a program on the server. Raises SandboxError if the server gives no verdict in three
        attempts."""
        marker = secrets.token_hex(16)
        result = self._post(
            {
                "code": whole_program(source, function, rules, marker),
                "language": "python",
                "stdin": stdin,
                "run_timeout": limits.cpu_seconds,
                "memory_limit_MB": limits.memory_mb,
            }
        )
        stdout, stderr = result.get("stdout") or "", (result.get("stderr") or "")[-REPORT_TEXT:]
        seconds = float(result.get("execution_time") or 0.0)
        if result["status"] == "TimeLimitExceeded":
            return Execution("time_limit", stdout, None, f"limit {limits.cpu_seconds:g} s", seconds)
        if result["status"] != "Finished" or result.get("return_code") != 0:
            error = stderr.strip().rpartition("\n")[2].partition(":")[0]
            return Execution(ERRORS.get(error, "runtime_error"), stdout, None, stderr, seconds)
        if function is None:
            return Execution("finished", stdout[: limits.output_bytes], None, "", seconds)
        printed, marked, value = stdout.rpartition("\n" + marker)
        if not marked:
            early = f"it ended before {function} returned"
            return Execution("runtime_error", stdout, None, early, seconds)
        return Execution("finished", printed, value.strip(), "", seconds)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the ``run_result`` of the server's answer."""
        key = os.environ.get("SANDBOX_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        problem = ""
        for pause in (0.0, *PAUSES):
            time.sleep(pause)
            try:
                with urllib.request.urlopen(request, timeout=body["run_timeout"] * 4 + 30) as response:
                    answer = json.load(response)
            except (OSError, ValueError) as error:  # URLError is an OSError
                problem = str(error)
                continue
            found = answer if isinstance(answer, dict) else {}
            if found.get("status") != "SandboxError" and found.get("run_result"):
                return found["run_result"]
            problem = f"answer {str(answer)[:200]}"
        raise SandboxError(f"{self._url}: no verdict in {1 + len(PAUSES)} attempts: {problem}")
