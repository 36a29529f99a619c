"""The sandbox under attack: no attack succeeds, and none slows or spoils the next job.

Everything runs through one real sandbox of the strongest kind this machine offers. A machine without
Landlock or seccomp fails the strict tests: it could not run strict recipes either.
"""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_eqlen.graders.code.grader import WORKER_MODULE
from megatron_eqlen.graders.sandbox import kernel, probe, seccomp
from megatron_eqlen.graders.sandbox.client import Execution, Sandbox
from megatron_eqlen.graders.sandbox.probe import (
    find_python,
    offered_isolation,
    required_isolation,
    shortcoming,
)
from megatron_eqlen.graders.sandbox.program import Isolation, Limits, enter
from megatron_eqlen.graders.sandbox.seccomp import MACHINES, build_filter
from megatron_eqlen.graders.workers.pool import WorkerPool
from tests.kit.processes import are_gone, descendants, within
from tests.kit.programs import PYTHON

LIMITS = Limits(cpu_seconds=1, wall_seconds=20, memory_mb=512, output_bytes=1 << 20)
ROOMY = Limits(cpu_seconds=10, wall_seconds=60, memory_mb=1 << 16, output_bytes=1 << 20)
"""Limits for sandboxes that are forks of this large process."""
SECRET = "the-parents-secret"
OTHERS = set[int]()
"""Processes that were there before the module's sandbox."""
PATH = find_python(PYTHON)


@pytest.fixture(scope="module")
def sandbox():
    """Yield a worker with a sandbox, forked from a clean process as in training."""
    os.environ["SECRET_TOKEN"] = SECRET
    OTHERS.update(descendants(os.getpid()))
    pool = WorkerPool(WORKER_MODULE, 1, {"isolation": vars(offered_isolation(PATH)), "python": PATH})
    run(pool, "pass")  # the worker starts with its first job
    yield pool
    pool.close()
    del os.environ["SECRET_TOKEN"]


def run(
    sandbox: WorkerPool, program: str, stdin: str = "", limits: Limits = LIMITS, function: str | None = None
) -> Execution:
    item = {"program": program, "stdin": stdin, "limits": vars(limits), "function": function}
    (answer,) = sandbox.map([item], 120.0, wall_factor=1.0)
    assert "status" in answer, answer
    return Execution(**answer)


def test_isolation_is_strict_here():
    assert offered_isolation(PATH).strict
    assert "rlimits + landlock + seccomp" in str(offered_isolation(PATH))


PROGRAMS = {
    "input and print": "a, b = map(int, input().split())\nprint(a + b)",
    "readline": "import sys\nread = sys.stdin.buffer.readline\nprint(sum(map(int, read().split())))\nread()",
    "iterating stdin": "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))",
    "stdout.buffer": "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.read().split())))",
    "os.read and os.write": "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "top-level global": "global x\nx = sum(map(int, input().split()))\ndef f():\n    return x\nprint(f())",
    "main guard": "if __name__ == '__main__':\n    print(sum(map(int, input().split())))",
    "sys.exit": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
    "exit without newline": "print(sum(map(int, input().split())), end='')\nexit()",
    "threads with a big stack": (
        "import threading, sys\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def depth(n):\n    return n and depth(n - 1)\n"
        "def main():\n    depth(50000)\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=main).start()"
    ),
    "dataclass": (
        "import dataclasses, typing\n@dataclasses.dataclass\nclass P:\n    x: typing.List[int]\n"
        "print(sum(P(list(map(int, input().split()))).x))"
    ),
    "/dev/null": (
        "import contextlib, os, pathlib\n"
        "with open(os.devnull, 'w') as null, contextlib.redirect_stdout(null):\n    print('noise')\n"
        "os.write(os.open('/dev/null', os.O_WRONLY | os.O_CREAT), b'noise')\n"
        "pathlib.Path('/dev/null').write_text('noise')\nassert open('/dev/null').read() == ''\n"
        "print(sum(map(int, input().split())))"
    ),
    "100 threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(100)]\n"
        "for t in threads:\n    t.start()\nfor t in threads:\n    t.join()\n"
        "print(sum(map(int, input().split())))"
    ),
    "32 threads": (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(32) as pool:\n"
        "    list(pool.map(lambda n: (time.sleep(0.1), bytearray(10**5)), range(32)))\n"
        "print(sum(map(int, input().split())))"
    ),
    "a stack of any size": (
        "import resource\nfor size in (2**29, resource.RLIM_INFINITY):\n"
        "    resource.setrlimit(resource.RLIMIT_STACK, (size, resource.RLIM_INFINITY))\n"
        "print(sum(map(int, input().split())))"
    ),
    "/dev/stdout": (
        "import os, sys\nsys.stderr = open('/dev/stderr', 'w')\n"
        "os.write(os.open('/dev/stdout', os.O_WRONLY), b' ')\n"
        "open('/dev/stdout', 'w').write(str(sum(map(int, open('/dev/stdin').read().split()))))"
    ),
    "a file on its output": "out = open(1, 'w')\nout.write(str(sum(map(int, input().split()))))",
    "a copy of its output, in a frame that exits": (
        "import os, sys\ndef main():\n    out = os.fdopen(os.dup(1), 'w')\n"
        "    out.write(str(sum(map(int, input().split()))))\n    sys.exit()\nmain()"
    ),
    "detached output": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')\n"
        "print(sum(map(int, input().split())))"
    ),
    "numpy": "import numpy as np\nprint(np.array(input().split(), dtype=int).sum())",
    "memoised recursion": (
        "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n"
        "@lru_cache(None)\ndef depth(n):\n    return n and 1 + depth(n - 1)\n"
        "print(sum(map(int, input().split())) + depth(10**5) - 10**5)"
    ),
}
NEEDS = {
    "numpy": "import numpy",
    "memoised recursion": "import sys; assert sys.version_info < (3, 12), 'its C stack is small'",
}
"""Requirements of a program on the interpreter."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_honest_programs_work(sandbox, name):
    needed = [PATH, "-c", NEEDS.get(name, "")]
    if subprocess.run(needed, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip(f"programs' Python does not do: {NEEDS[name]}")
    ended = run(sandbox, PROGRAMS[name], "2 3\n", Limits(10, 60, 1024))
    assert (ended.status, ended.stdout.strip()) == ("finished", "5"), ended.error


def test_a_function_gets_its_arguments_and_returns_a_value(sandbox):
    source = "class Solution:\n    def pair(self, a, b):\n        print('noise')\n        return (a, b)\n"
    assert run(sandbox, source, '1\n[2, "x"]', function="pair").result == '[1, [2, "x"]]'
    assert run(sandbox, "def f(a):\n    return {a}", "1", function="f").status == "runtime_error"
    assert run(sandbox, "x = 1", "1", function="f").status == "runtime_error"


RAW_THREADS = """
import ctypes, mmap
code = bytes.fromhex(
    "41bca00f0000" "b838000000" "bf000f0500" "31f6" "31d2" "4d31d2" "4d31c0" "0f05" "85c0" "7405"
    "41ffcc" "75e1" "b822000000" "0f05" "ebf7"
)
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
"""Program that calls clone 4,000 times and waits, in machine code: neither a stack nor Python limits its
threads."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86_64")
def test_a_program_with_too_many_threads_is_killed_soon(sandbox):
    ended = run(sandbox, RAW_THREADS, limits=Limits(10, 30, 512))
    assert (ended.status, ended.error) == ("runtime_error", "more than 256 threads")
    assert ended.seconds < 5
    assert run(sandbox, "print(1)").stdout == "1\n"


def test_a_runtime_error_shows_the_programs_own_lines(sandbox):
    ended = run(sandbox, "def f():\n    raise KeyError('lost')\nf()")
    assert "KeyError: 'lost'" in ended.error
    assert "megatron_eqlen" not in ended.error


def test_nothing_of_one_program_is_left_for_the_next(sandbox):
    """This covers its text, its input, and its changes to the interpreter."""
    first = "import json, builtins\nMARK = 'mark-of-the-first'\nbuiltins.print = json.dumps = None"
    run(sandbox, first, "stdin-1")
    hunt = (
        "import gc, sys\n"
        "found = [o for o in gc.get_objects() if 'mark-of-' + 'the-first' in repr(type(o) is str and o)]\n"
        "import json\nprint(json.dumps(len(found)), input())"
    )
    assert run(sandbox, hunt, "2").stdout == "0 2\n"


def succeeded(name: str) -> str:
    return f"print('succeeded: {name}')"


ATTACKS = {
    "another end": "import os\nos._exit = lambda *_: print('succeeded: returned', flush=True)\nexit()",
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "thread bomb": "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=(9,)).start()",
    "memory bomb": "x = []\nwhile True:\n    x.append(bytearray(10**7))",
    "endless output": "import os\nwhile True:\n    os.write(1, b'x' * 65536)",
    "endless errors": "import os\nwhile True:\n    os.write(2, b'x' * 65536)",
    "sleeping": "import time\ntime.sleep(3600)",
    "ignoring signals": (
        "import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass"
    ),
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo succeeded: exec'])",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        pass",
    "environment": f"import os\nprint('succeeded' if {SECRET!r} in str(os.environ) else '')",
    "own old environment": "print('succeeded', open('/proc/self/environ').read())",
    "writing to tmp": "open('/tmp/from-the-sandbox', 'w')\n" + succeeded("write"),
    "rm -r": "import shutil\nshutil.rmtree('/work')\n" + succeeded("delete"),
    "inherited descriptors": (
        "import os\nfor fd in range(6, 4096):\n    try:\n        os.fstat(fd)\n"
        "        print('succeeded', fd)\n    except OSError:\n        pass"
    ),
    "killing everyone": "import os\nos.kill(-1, 9)\n" + succeeded("kill"),
    "a forged report": 'import os\nos.write(4, b\'{"result": 5, "error": []}\')',
    "a garbage report": "import os\nos.write(4, b'[' * 100000)",
    "exit status 0 after nothing": "import os\nos._exit(0)",
}
"""Attacks that ESCAPES, one program with many calls, does not try."""


ESCAPES = """\
import ctypes, fcntl, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
ready, told = os.pipe()
x86 = os.uname().machine == "x86_64"
def kernel(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
def call(number, *arguments):
    kernel(libc.syscall(number, *arguments, *[0] * (6 - len(arguments))))
def ioctl(request):
    fcntl.ioctl(ready, request, (1).to_bytes(4, "little"))
def raise_limit():
    limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit + 1, limit + 1))
    except ValueError:
        raise PermissionError from None
attempts = {
    "reads the root folder": lambda: os.listdir("/"),
    "reads /proc": lambda: os.listdir("/proc"),
    "reads its parent": lambda: open(f"/proc/{parent}/environ").read(),
    "reads /etc/passwd": lambda: open("/etc/passwd").read(),
    "writes here": lambda: open("escaped", "w"),
    "writes to a library": lambda: open(os.__file__, "a"),
    "removes a library": lambda: os.remove(os.__file__),
    "changes a mode": lambda: os.chmod(".", 0o777),
    "locks a library": lambda: fcntl.lockf(open(os.__file__), fcntl.LOCK_SH),
    "seals its output": lambda: fcntl.fcntl(1, 1033, 15),
    "opens a network socket": lambda: socket.socket(),
    "opens a local socket": lambda: socket.socket(socket.AF_UNIX),
    "starts a process": lambda: os.fork() or os._exit(0),
    "starts a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "raises its limits": raise_limit,
    "becomes root": lambda: os.setuid(0),
    "enters a namespace": lambda: kernel(libc.unshare(0x10000000)),
    "traces its parent": lambda: kernel(libc.ptrace(16, parent, 0, 0)),
    "signals its parent": lambda: os.kill(parent, 0),
    "signals a parent's thread": lambda: call(234 if x86 else 131, parent, parent, 0),
    "queues a signal": lambda: call(129 if x86 else 138, parent, 0, bytes(128)),
    "signals a process's descriptor": lambda: call(424, 0, 0),
    "signals by fcntl F_SETOWN": lambda: fcntl.fcntl(ready, 8, parent),
    "signals by fcntl F_SETOWN_EX": lambda: fcntl.fcntl(ready, 15, bytes(8)),
    "signals by fcntl F_SETSIG": lambda: fcntl.fcntl(ready, 10, 9),
    "signals by fcntl O_ASYNC": lambda: fcntl.fcntl(ready, fcntl.F_SETFL, 0x2000),
    "signals by fcntl F_SETLEASE": lambda: fcntl.fcntl(0, 1024, 0),
    "signals by fcntl F_NOTIFY": lambda: fcntl.fcntl(0, 1026, 0),
    "signals by ioctl FIOASYNC": lambda: ioctl(0x5452),
    "signals by ioctl FIOSETOWN": lambda: ioctl(0x8901),
    "signals by ioctl SIOCSPGRP": lambda: ioctl(0x8902),
    "signals by prctl PR_SET_PDEATHSIG": lambda: kernel(libc.prctl(1, 9, 0, 0, 0)),
    "signals by a timer": lambda: call(222 if x86 else 107, 0, 0, 0),
    "signals by a message queue": lambda: call(244 if x86 else 184, 0, 0),
    "signals by a poisoned page": lambda: call(28 if x86 else 233, 0, 0, 100),
    "submits input and output": lambda: call(206 if x86 else 0, 0, 0),
    "sets up io_uring": lambda: call(425, 1, 0),
    "counts events": lambda: call(298 if x86 else 241, 0, 0, 0, 0, 0),
    "handles page faults": lambda: call(282 if x86 else 74, 0),
    "loads a kernel program": lambda: call(321 if x86 else 280, 0, 0, 0),
    "adds a key": lambda: call(248 if x86 else 217, 0, 0, 0, 0, 0),
}
for name, act in attempts.items():
    try:
        act()
    except (PermissionError, FileNotFoundError):
        continue
    except OSError as error:
        name += f" ({error.strerror})"
    print("a program", name)
"""
"""A program that prints every call that was not refused. A call with meaningless arguments counts if it
reaches the kernel."""


def test_no_call_of_the_list_is_let_through(sandbox):
    ended = run(sandbox, ESCAPES)
    assert (ended.status, ended.stdout) == ("finished", ""), ended.error


def test_no_attack_succeeds_where_landlock_has_no_signal_scopes(monkeypatch):
    """Kernels before 6.12 have none: only the system-call filter stands between a program and a signal."""
    monkeypatch.setattr(kernel, "SCOPE_ABI", 1 << 30)
    attacks = [text for name, text in ATTACKS.items() if "kill" in name]
    with contextlib.closing(Sandbox(Isolation(True, True, False))) as sandbox:
        printed = [sandbox.run(attack, "", ROOMY).stdout for attack in [*attacks, ESCAPES]]
    assert printed == [""] * len(printed)


@pytest.mark.parametrize("hole", ["fcntl", "madvise", "clone", "prctl", "timer_create", "kill"])
def test_a_hole_in_the_filter_is_noticed(monkeypatch, hole):
    """Without signal scopes only the filter refuses these calls."""
    numbers = {"fcntl": 72, "madvise": 28, "clone": 56, "prctl": 157, "timer_create": 222, "kill": 62}
    plain = seccomp.X86_64.plain | {hole: numbers[hole]}
    monkeypatch.setitem(seccomp.MACHINES, "x86_64", dataclasses.replace(seccomp.X86_64, plain=plain))
    monkeypatch.setattr(kernel, "SCOPE_ABI", 1 << 30)
    with contextlib.closing(Sandbox(Isolation(True, True, False))) as sandbox:
        assert "a program" in sandbox.run(ESCAPES, "", ROOMY).stdout


@pytest.mark.parametrize("hole", [56, 41])  # clone, socket
def test_a_machine_that_lets_a_program_fork_or_connect_is_not_called_strict(monkeypatch, hole):
    plain = seccomp.X86_64.plain | {"hole": hole}
    monkeypatch.setitem(seccomp.MACHINES, "x86_64", dataclasses.replace(seccomp.X86_64, plain=plain))
    assert "a program" in shortcoming(Isolation(True, True, False))


def test_a_program_that_runs_as_root_has_no_capability(caplog):
    """The capabilities are read from outside, in /proc; running as root is a warning."""
    closing = contextlib.closing(Sandbox(Isolation(True, True, False)))
    with closing as sandbox, ThreadPoolExecutor() as threads:
        sleeper = threads.submit(sandbox.run, "import time\ntime.sleep(2)", "", Limits(9, 9, 256))
        status = ""
        while not (sleeper.done() or "Seccomp:\t2" in status):  # on its way to the program until then
            with contextlib.suppress(OSError, ValueError):
                *_, pid = sorted(descendants(sandbox._zygote))
                status = Path(f"/proc/{pid}/status").read_text()
            time.sleep(0.01)
        assert sleeper.result().status == "finished"
    sets = re.findall(r"Cap(?:Inh|Prm|Eff|Bnd|Amb):\s*([0-9a-f]+)", status)
    assert sets[:3] + sets[4:] == ["0" * 16] * 4
    assert sets[3] == "0" * 16 or os.geteuid() != 0
    assert "NoNewPrivs:\t1" in status


def test_programs_that_run_as_root_are_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(probe, "offered_isolation", lambda python: Isolation(True, True, drop_user=False))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    required_isolation("strict", PATH)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "root without capabilities (programs run as root: nobody cannot read" in caplog.text


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_fail_and_the_next_job_runs(sandbox, name):
    ended = run(sandbox, ATTACKS[name], limits=Limits(1, 3, 256, 1 << 20))
    assert "succeeded" not in ended.stdout
    # the host, its worker, the zygote, and its fork for the next program
    assert within(20, lambda: len(descendants(os.getpid()) - OTHERS) == 4)
    assert not Path("/tmp/from-the-sandbox").exists()
    after = run(sandbox, "print(int(input()) + 1)", "1")
    assert (after.status, after.stdout) == ("finished", "2\n")


def test_expected_outputs_are_not_in_the_programs_memory(sandbox):
    """The zygote is forked before any test arrives: a search through all objects finds no output."""
    hunt = (
        "import gc, re\n"
        "text = ' '.join(repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple))\n"
        "print(*re.findall('expected-[0-9a-f]{32}', text) or ['nothing'])"
    )
    tests = json.dumps({"inputs": [""], "outputs": [f"expected-{secrets.token_hex(16)}"]})
    item = {"program": hunt, "tests": tests, "limits": vars(Limits(20, 60, 1024))}
    (judged,) = sandbox.map([item], 120.0, wall_factor=1.0)
    assert judged["verdict"] == "wrong_answer"
    assert "found 'nothing" in judged["detail"]


def test_a_killed_worker_takes_its_program_with_it():
    pool = WorkerPool(WORKER_MODULE, 1, {"isolation": vars(offered_isolation(PATH)), "python": PATH})
    item = {"program": "import time\ntime.sleep(99)", "tests": '{"inputs": [""], "outputs": [""]}'}
    # a busy machine may need seconds until the program runs
    judging = pool.submit(item | {"limits": vars(Limits(50, 50, 256))}, 15.0, wall_factor=1.0)
    assert within(60, lambda: len(descendants(pool._host.pid)) == 4)  # worker, zygote, its fork, program
    born = descendants(pool._host.pid)
    assert judging.result()["timeout"]
    assert within(20, are_gone(born))
    pool.close()


TRAINER = """
import os, sys, time
from megatron_eqlen.graders.code.grader import WORKER_MODULE
from megatron_eqlen.graders.workers.pool import WorkerPool
limits = {"cpu_seconds": 100, "wall_seconds": 100, "memory_mb": 256}
item = {"program": "import time\\nprint(1)\\ntime.sleep(99)", "stdin": "", "limits": limits}
isolation = {"landlock": True, "seccomp": True, "drop_user": False}
pool = WorkerPool(WORKER_MODULE, 1, {"isolation": isolation, "python": sys.argv[1]})
keeper = os.fork()  # a child that holds the trainer's end of every socket
if keeper == 0:
    time.sleep(60)
    os._exit(0)
print(keeper, flush=True)
pool.map([item], 100.0, 1.0)
"""


@pytest.mark.parametrize("victim", ["trainer", "host", "worker", "zygote"])
def test_what_a_killed_process_started_dies_with_it(victim):
    """The chain is trainer > host > worker > zygote > program, and a process that keeps the sockets open."""
    command = [sys.executable, "-P", "-c", TRAINER, PATH]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert within(30, lambda: deepest_chain(trainer.pid, 5) is not None)
        chain = deepest_chain(trainer.pid, 5)
        at = ["trainer", "host", "worker", "zygote"].index(victim)
        os.kill(chain[at], signal.SIGKILL)
        if victim == "trainer":
            trainer.wait()
        assert within(20, are_gone(chain[at + 1 :]))
    finally:
        trainer.kill()
        trainer.wait()
        os.kill(int(trainer.stdout.readline()), signal.SIGKILL)


def test_a_program_whose_zygote_is_gone_already_does_not_run():
    """The zygote may end before the program looks for its parent, and then any process may be the parent."""
    if (pid := os.fork()) == 0:
        try:
            os.closerange(3, 4096)  # a zygote has few files, and the limit is 64
            another = os.getpid()  # nobody's own parent
            enter(Limits(9, 9, 1 << 20), Isolation(False, False, False), zygote=another)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def deepest_chain(pid: int, length: int) -> list[int] | None:
    """Return a line of descent of ``length`` processes from ``pid`` on."""
    if length == 1:
        return [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    chains = (deepest_chain(int(child), length - 1) for child in children)
    return next(([pid, *chain] for chain in chains if chain), None)


def emulate(program: bytes, number: int, arguments: tuple[int, ...], arch: int) -> int:
    """Return a classic-BPF program's result for a system call; interprets the five instructions used."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, *[0] * (6 - len(arguments))))
    at, value = 0, 0
    while True:
        code, if_true, if_false, constant = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            return constant
        else:
            test = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            at += if_true if test else if_false


ALLOWED, DENIED, KILLED, NO_SUCH = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_of_every_machine(machine):
    """The filter is emulated, so that the aarch64 filter is checked here too."""
    calls = MACHINES[machine]
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    openat = {"x86_64": 257, "aarch64": 56}[machine]
    socket_call, execve, kill = {"x86_64": (41, 59, 62), "aarch64": (198, 221, 129)}[machine]
    program = build_filter(calls, pid=77)

    def verdict(number, *arguments, arch=arch):
        return emulate(program, number, arguments, arch)

    for number in calls.plain.values():
        assert verdict(number) == ALLOWED
    for number in (socket_call, execve, kill, 999):
        assert verdict(number) == DENIED
    assert verdict(openat, 0, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOWED
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC):
        assert verdict(openat, 0, 0, flags) == DENIED
    assert verdict(calls.clone, 0x10000 | 0x100) == ALLOWED
    for flags in (17, 0x10000 | 17, 0x10000 | 0x40000000, 0x10000 | 0x8000):
        assert verdict(calls.clone, flags) == DENIED
    harmless = {0: 9, 1030: 9, 1: 0, 2: 1, 3: 0, 4: os.O_NONBLOCK | os.O_APPEND, 5: 0}
    for command, value in harmless.items():
        assert verdict(calls.fcntl, 0, command, value) == ALLOWED
    for command in set(range(2048)) - set(harmless):
        assert verdict(calls.fcntl, 0, command, 0) == DENIED
    assert verdict(calls.fcntl, 0, 4, 0x2000 | os.O_NONBLOCK) == DENIED
    for advice, expected in {4: ALLOWED, 14: ALLOWED, 100: DENIED, 101: DENIED}.items():
        assert verdict(calls.madvise, 0, 0, advice) == expected
    assert verdict(435) == NO_SUCH
    assert [verdict(calls.tgkill, pid) for pid in (77, 1)] == [ALLOWED, DENIED]
    assert [verdict(calls.prlimit64, pid) for pid in (0, 77, 1)] == [ALLOWED, ALLOWED, DENIED]
    assert verdict(calls.ioctl, 0, 0x5401) == ALLOWED
    for request in (0x5412, 0x5452, 0x8901, 0x8902):
        assert verdict(calls.ioctl, 0, request) == DENIED
    assert verdict(0, arch=0x40000003) == KILLED
    if machine == "x86_64":
        assert verdict(0x40000000) == KILLED
