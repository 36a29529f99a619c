"""A process that has imported the heavy libraries once and forks jobs from itself, for ``tests.kit.jobs``.

One JSON object a line on stdin asks for a job, one line on stdout answers with its process id. A job is what
``python ARGUMENTS`` would be: a process with its own environment, folder, output files and exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import sys
import time
from typing import Any

import numpy as np

PRELOADED = (
    "megatron_eqlen.loop",
    "megatron_eqlen.rollout.vllm.colocated",
    "megatron_eqlen.report.page",
    "megatron_eqlen.run",
    "vllm.v1.worker.cpu_worker",  # it and the model are imported when an engine starts
    "vllm.model_executor.models.qwen3",
    "vllm.entrypoints.launchers.api_server.entry",
)
"""Modules that start no threads and keep no state that jobs could share."""


def next_job() -> dict[str, Any] | None:
    """In a new process the job that it is to do; None in this one, when no more is asked for."""
    for line in sys.stdin:
        pid = fork_orphan()
        if pid == 0:
            return json.loads(line)
        print(pid, flush=True)
    return None


def fork_orphan() -> int:
    """``os.fork`` of a process whose parent has ended: it becomes a child of the tests, who adopt orphans."""
    ours, theirs = os.pipe()
    if (middle := os.fork()) == 0:
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            os.close(ours)
            os.close(theirs)
            while os.getppid() == parent:  # it ends now; a job may look who its launcher is
                time.sleep(0.001)
            return 0
        os.write(theirs, str(pid).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(ours, 20))
    os.close(ours)
    os.close(theirs)
    return pid


def run(arguments: list[str], environ: dict[str, str], folder: str, stdout: str, stderr: str) -> None:
    """``python ARGUMENTS``, of a module (``-m``) or a script; what it raises ends the process as ever."""
    vllms = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    os.environ.clear()
    os.environ.update(vllms | environ)
    os.chdir(folder)
    for descriptor, file in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    random.seed()
    np.random.seed()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # else each job would sort through all of it at its end
    if (job := next_job()) is not None:
        run(**job)
