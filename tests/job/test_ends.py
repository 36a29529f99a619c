"""The end of a launcher: its message, its status, and that none of its ranks is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.jobs import Job, start
from tests.kit.processes import are_gone, command_line, running, within
from tests.kit.report_runs import example_stream, make_tokenizer, recipe, write_run

LAUNCH = """
import sys
from pathlib import Path
from megatron_eqlen.processes.interrupts import Interrupts
from megatron_eqlen.processes.launch import launch
how, folder = sys.argv[1:]
sys.exit(launch(2, [how, folder], Interrupts(Path(folder) / "STOP"), "tests.kit.ends"))
"""
ALONE = """
import os, signal, sys, threading, time, warnings
from pathlib import Path
from megatron_eqlen.processes.interrupts import Interrupts, watch
warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, which this is about
watch(Interrupts(Path(sys.argv[1]) / "STOP"))
if (child := os.fork()) == 0:
    time.sleep(600)
os.kill(child, signal.SIGINT)  # as a terminal does
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
print("watches", flush=True)
threading.Event().wait()
"""

STARTS = """
import os, signal, subprocess, sys, time
from megatron_eqlen.cli import commands
from megatron_eqlen.processes.interrupts import Interrupts
from megatron_eqlen.recipe.load import load
how, mark = sys.argv[1:]
def work(_):
    subprocess.Popen(["sleep", mark])
    subprocess.Popen(["sleep", mark], start_new_session=True)
    subprocess.run(["bash", "-c", "setsid sleep " + mark + " & setsid setsid sleep " + mark + " & exit"])
    print("began", flush=True)
    assert how != "raises"
    if how == "sleeps":
        time.sleep(600)
commands._start(load("recipes/tiny_cpu.yaml", ["cluster.processes_per_node=1"]), work, Interrupts(None))
"""


def ranks(folder: Path) -> list[int]:
    """Return the process ids of both ranks, once they run."""
    files = [folder / "pid-0", folder / "pid-1"]
    assert within(60, lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def send(job: Job, *numbers: int) -> None:
    for number in numbers:
        os.kill(job.pid, number)


@pytest.mark.parametrize(("how", "said"), [
    ("raise", "failed first: RuntimeError: no more (and with it ended the other 1)"),
    ("kill", "failed first: it was killed by SIGKILL, as the kernel does where memory runs out"),
])  # fmt: skip
def test_the_last_line_says_which_rank_failed_first_and_why(tmp_path, how, said):
    job = start("-c", LAUNCH, how, tmp_path)
    pids = ranks(tmp_path)
    assert job.wait() == 1
    *before, last = job.stderr.strip().splitlines()
    assert last.startswith("eqlen: rank 1 on ")
    assert said in last
    assert sum(line.startswith("Traceback") for line in before) == (how == "raise")
    assert are_gone(pids)()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_launcher_and_its_ranks_at_once(tmp_path, number):
    killed = number == signal.SIGKILL
    job = start("-c", LAUNCH, "work" if killed else "sleep", tmp_path)
    pids = ranks(tmp_path)
    send(job, number)
    assert job.wait() == (-number if killed else 128 + number)
    assert job.stderr == ("" if killed else f"eqlen: ended by {number.name}; the same command resumes it\n")
    assert within(20, are_gone(pids))


@pytest.mark.parametrize("script", [LAUNCH, ALONE])
def test_ctrl_c_asks_for_a_stop_and_the_second_one_ends_it(tmp_path, script):
    job = start("-c", script, *(["sleep"] if script is LAUNCH else []), tmp_path)
    if script is LAUNCH:
        pids = ranks(tmp_path)
    else:
        pids = []
        assert within(60, lambda: "watches" in job.stdout)
    send(job, signal.SIGINT)
    assert within(60, (tmp_path / "STOP").exists)
    assert not within(0.7, lambda: job.poll() is not None)
    send(job, signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    assert job.stderr == (
        "eqlen: stops after this step, with a checkpoint; Ctrl-C again ends it at once\n"
        "eqlen: ended by SIGINT; the same command resumes it\n"
    )
    assert not (tmp_path / "STOP").exists(), "the next try would stop after a step"
    assert within(30, are_gone(pids))


@pytest.mark.parametrize(("how", "number"), [("returns", 0), ("raises", 0), ("sleeps", signal.SIGTERM)])
def test_what_a_run_has_started_ends_with_it_in_whatever_session(how, number):
    mark = f"{secrets.randbelow(10**9)}.5"
    run = start("-c", STARTS, how, mark)
    assert within(60, lambda: run.stdout == "began\n")
    send(run, number)
    run.wait()
    assert not [pid for pid in running() if mark in command_line(pid)]


FIRST = "megatron_eqlen.processes.failures"
STATUS, CHECK, TRAIN = ["status", "."], ["check"], ["train", "recipes/tiny_cpu.yaml", "run_dir=nowhere"]


@pytest.mark.parametrize(("command", "module"), [
    (STATUS, FIRST),
    (CHECK, "pyarrow"),
    (TRAIN, "torch"),
])  # fmt: skip
def test_ctrl_c_ends_a_command_in_one_line_while_it_imports(command, module):
    job = interrupted_at(module, command)
    assert (job.returncode, job.stderr) == (130, "eqlen: ended by SIGINT\n")


def test_ctrl_c_ends_a_rank_without_a_word_while_it_imports():
    job = interrupted_at(FIRST, TRAIN, RANK="1")
    assert (job.returncode, job.stderr) == (-signal.SIGINT, "")


def interrupted_at(module: str, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``eqlen command`` with Ctrl-C at the import of ``module``, inside code that loses exceptions."""
    code = """
import contextlib, os, signal, sys
module = sys.argv[1]
class Finder:
    def find_spec(name, *_):
        if name == module:
            with contextlib.suppress(BaseException):  # as C modules and dill do
                os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from megatron_eqlen.cli.__main__ import main
sys.exit(main(sys.argv[2:]))
"""
    words = [sys.executable, "-c", code, module, *command]
    return subprocess.run(words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)


@pytest.mark.parametrize("verb", ["plan", "status", "inspect"])
def test_a_reader_that_leaves_ends_a_command_without_a_word(verb, tmp_path):
    """The reader is like ``| head``."""
    make_tokenizer(tmp_path / "base")
    run = write_run(tmp_path / "run", recipe(tmp_path / "base"), {"step-00000000": [example_stream()]})
    command = [sys.executable, "-m", "megatron_eqlen.cli", verb]
    command.append("recipes/qwen3_32b.yaml" if verb == "plan" else str(run))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.close()
        assert job.stderr is not None
        assert job.stderr.read() == b""
    assert job.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("code", [
    "print('out'); print('err', file=sys.stderr)",
    "sys.exit()",
    "sys.exit(3)",
    "sys.exit(259)",
    "sys.exit(True)",
    "sys.exit('a reason')",
    "raise KeyError('a cause')",
    "import atexit; atexit.register(print, 'at exit')",
    "import threading, time; threading.Timer(0.3, print, ['a thread']).start()",
    "sys.stdout.close()",
    "os.kill(os.getpid(), 9)",
])  # fmt: skip
def test_jobs_of_the_tests_end_as_python_does(code):
    code = f"import os, sys; {code}"
    truth = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    job = start("-c", code)
    assert job.wait() == truth.returncode
    assert job.stdout == truth.stdout
    assert job.stderr.splitlines()[-1:] == truth.stderr.splitlines()[-1:]
