#!/usr/bin/env python3
"""Stands in for ``EQLEN_PYTHON`` in ``slurm/serve.sbatch``: a replica that answers ``/health``, nothing else.

``-m megatron_eqlen.engines.server FOLDER ... --port N`` (or ``RECIPE run_dir=FOLDER ...``) notes its
starts in FOLDER/starts, answers when FOLDER/hold-servers is gone, and ends, as if it had crashed, when
FOLDER/crash-NODE-N appears. ``tests/engine`` has the real server.
"""

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def run_folder(arguments: list[str]) -> Path:
    """The folder that stands for a recipe, or is its ``run_dir=``."""
    named = [word.partition("=")[2] for word in arguments if word.startswith("run_dir=")]
    return Path([arguments[0], *named][-1])


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def main() -> None:
    assert sys.argv[1:3] == ["-m", "megatron_eqlen.engines.server"]
    folder, port = run_folder(sys.argv[3:]), int(sys.argv[sys.argv.index("--port") + 1])
    node = os.environ["SLURMD_NODENAME"]
    with open(folder / "starts", "a", encoding="utf-8") as starts:
        starts.write(f"{port} {node}\n")
    while (folder / "hold-servers").exists():
        time.sleep(0.05)
    server = HTTPServer(("", port), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    crash = folder / f"crash-{node}-{port}"
    while not crash.exists():
        time.sleep(0.05)
    crash.unlink()
    os._exit(1)


if __name__ == "__main__":
    main()
