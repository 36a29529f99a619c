"""A process that has imported heavy libraries once and forks others from itself, which need not import them.

Each fork behaves like ``python ARGUMENTS``: a process with its own environment, folder, standard files and
exit status. It ends as Python does up to the functions of ``atexit``, and leaves its memory to the kernel: to
free what the zygote has imported would take 0.7 s of a core, as much as most commands. Jobs with ``FREES`` in
their environment, and all of the weekly run, free it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron_eqlen.processes.collector import importing
from tests.kit import ROOT
from tests.kit.processes import adopt_orphans, name

RANKS = (
    "megatron_eqlen.models.build",  # before anything else of Megatron
    "megatron_eqlen.training.saved_state", "megatron_eqlen.training.policy",
    # what follows is imported where it is first used
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.filesystem_async", "megatron.core.models.mimo",
    "torch.utils.serialization.config", "numpy.ma", "torch.profiler._cupti_monitor", "pytest",
    "tests.kit.tiny_models", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.qwen3_next.modeling_qwen3_next",
)  # fmt: skip
JOBS = (
    "megatron_eqlen.run.loop", "megatron_eqlen.engines.servers", "megatron_eqlen.report.page",
    "megatron_eqlen.plan", "megatron_eqlen.run.run", "megatron_eqlen.processes.launch", "pyarrow.compute",
    # what follows is imported when an engine starts
    "megatron_eqlen.engines.colocated", "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base", "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.scheduler",
    "vllm.entrypoints.launchers.api_server.entry", "tests.kit.patient_vllm",
)  # fmt: skip
"""Modules that start no threads and keep no state that processes could share."""
START = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.kit import zygote; zygote.main(*sys.argv[1:])"
brought = dict.fromkeys(("vllm", "torch._dynamo", "scipy.signal"), "")
"""The one of a zygote's imports that has imported each of these."""
FEW = 5
"""Number of modules up to which a later request's imports are not worth gathering in huge pages."""
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
LARGEST = 1 << 18
"""Bytes of a request: the environment is most of it."""
FREES = "EQLEN_TEST_FREES"
"""Name of a variable with which a fork frees its memory when it ends, as Python does."""


class Zygote:
    """A zygote that ends with this process."""

    inherited: Zygote | None = None
    """Zygote of a process which was itself forked by a zygote's ``python``."""

    def __init__(self, pid: int, listener: socket.socket, lifeline: int) -> None:
        self._pid = pid
        self.address: str = listener.getsockname().decode().removeprefix("\0")
        self._lifeline = lifeline
        listener.close()

    @classmethod
    def spawn(cls, imports: Sequence[str] = ()) -> Zygote:
        """Start a fresh interpreter, which imports these modules first."""
        adopt_orphans()  # what it forks
        listener, (theirs, ours) = _listener(), os.pipe()
        command = [sys.executable, "-c", START, "--serve", str(listener.fileno()), str(theirs), *imports]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        pid = subprocess.Popen(command, env=environ, pass_fds=[listener.fileno(), theirs]).pid
        os.close(theirs)
        return cls(pid, listener, ours)

    @classmethod
    def split(cls) -> Zygote:
        """Fork this process, which has done nothing yet but import."""
        adopt_orphans()
        listener, (theirs, ours) = _listener(), os.pipe()
        if (pid := os.fork()) == 0:
            os.close(ours)
            _serve(listener, theirs)
        os.close(theirs)
        return cls(pid, listener, ours)

    def fork(
        self, arguments: Sequence[str], environ: Mapping[str, str], folder: str, files: Sequence[int],
        imports: Sequence[str] = (),
    ) -> int:  # fmt: skip
        """Fork ``python ARGUMENTS`` as a child of this process, with ``files`` as standard input, output and
        error; return its process id. The zygote first imports ``imports``, if it has not yet."""
        request = {"arguments": arguments, "environ": dict(environ), "folder": folder, "imports": imports}
        with _ask(self.address, request, files) as connection:
            answer = connection.recv(20)
        assert answer, "the zygote has died"
        return int(answer)

    @property
    def python(self) -> str:
        """Path of a program for shells: ``PYTHON -c CODE`` runs in a process that is forked and has a zygote
        of its own."""
        return shlex.join([sys.executable, "-c", START, self.address])

    def stop(self) -> None:
        os.close(self._lifeline)
        os.waitpid(self._pid, 0)


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel finds a name, which is no file
    listener.listen(64)
    return listener


def _ask(address: str, request: dict[str, Any], files: Sequence[int]) -> socket.socket:
    """Send a request; return a connection that brings the process id and stays open until it ends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    connection.connect("\0" + address)
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection


def _serve(listener: socket.socket, lifeline: int) -> NoReturn:
    """Serve requests until nobody holds the other end of ``lifeline``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the tests
    while lifeline not in select.select([listener, lifeline], [], [])[0]:
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
        request = json.loads(message)
        _import(request.pop("imports"))
        if (pid := _fork_orphan()) == 0:
            listener.close()
            os.close(lifeline)
            _end(functools.partial(_become, files, **request))
        connection.send(str(pid).encode())
        connection.close()
        for file in files:
            os.close(file)
    os._exit(0)


def _import(names: Sequence[str]) -> None:
    if not set(names) <= sys.modules.keys():
        with importing():
            for name in names:
                importlib.import_module(name)
                for heavy in brought.keys() & sys.modules.keys():
                    brought[heavy] = brought[heavy] or name
        gc.collect()
        gc.freeze()  # and so would each fork
        if len(names) > FEW:
            _use_huge_pages()


def _use_huge_pages() -> None:
    """Gather what has been allocated in huge pages, if the kernel does that: a fork copies the page table."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for at in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                libc.madvise(at, HUGE_PAGE, MADV_COLLAPSE)


def _fork_orphan() -> int:
    """Fork a process whose parent has ended: it becomes a child of the process that adopts orphans."""
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


def _become(
    files: list[int], arguments: list[str], environ: dict[str, str], folder: str, splits: bool = False
) -> None:
    """Run ``python ARGUMENTS``, code (``-c``), a module (``-m``) or a script; an exception ends the process
    as usual. ``splits``: give it a zygote of its own, since only ancestors can adopt what a zygote forks."""
    if splits:
        Zygote.inherited = Zygote.split()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):  # which whoever runs the tests may ignore (nohup)
        signal.signal(number, signal.SIG_DFL)
    vllms = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    os.environ.clear()
    os.environ.update(vllms | environ)
    test, _, _ = environ.get("PYTEST_CURRENT_TEST", "").partition("::")
    name(test.rpartition("/")[2].removeprefix("test_"))
    os.chdir(folder)
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  the zygote's has asked whether its file can seek
    gc.freeze = gc.unfreeze = lambda: None  # vLLM's engine would freeze itself, and unfreeze all at its end
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    kind, *sys.argv = arguments
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(code, vars(main))
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def _end(work: Callable[[], None]) -> NoReturn:
    """Work, then end this process with the status that Python would give it. Exceptions but SystemExit are
    left to Python."""
    status: Any = None
    try:
        work()
    except SystemExit as ended:
        status = ended.code
    frees = FREES in os.environ or "EQLEN_RANDOM_EXAMPLES" in os.environ
    if not frees and isinstance(status, int | None):
        threading._shutdown()  # wait for threads
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):  # closed, or nobody reads: Python has a status for that
            for file in filter(None, (sys.stdout, sys.stderr)):
                file.flush()
            os._exit((status or 0) & 0xFF)
    sys.exit(status)


def main(first: str, *rest: str) -> None:
    if first == "--serve":
        listener, lifeline, *imports = rest
        _import(imports)
        _serve(socket.socket(fileno=int(listener)), int(lifeline))
    request = {"arguments": [argument for argument in rest if argument != "-u"], "environ": dict(os.environ)}
    with _ask(
        first, request | {"folder": os.getcwd(), "imports": [], "splits": True}, [0, 1, 2]
    ) as connection:
        while connection.recv(20):  # its process id; then nothing, when it has ended
            pass
