"""tools/setup refuses unfit machines and words; tools/quickstart chooses a device, tools/test its workers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT


class Machine:
    """A checkout's tools without its packages, and commands of our own before those on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir()
        for name in ("tools/setup", "tools/quickstart", "tools/test", "pyproject.toml", "uv.lock"):
            shutil.copy(ROOT / name, folder / name)
        self.environ: dict[str, str] = {}
        self.command("bin/nvidia-smi", "echo 580.95.05")

    def command(self, name: str, line: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | self.environ | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        return subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("answer", "message"), [
    ("echo 570.133.20", "expected NVIDIA's driver 580 or newer (for CUDA 13), found 570.133.20"),
    ("echo NVIDIA-SMI has failed because it could not communicate; exit 9", "found none"),
    ("echo No devices were found; exit 6", "tools/setup gpu --no-driver"),
])  # fmt: skip
def test_a_driver_that_is_missing_or_too_old_is_refused_before_anything_is_made(answer, message, machine):
    machine.command("bin/nvidia-smi", answer)
    ended = machine.run("tools/setup", "gpu")
    assert ended.returncode == 1
    assert message in ended.stderr
    assert not (machine.folder / ".venv").exists()


@pytest.mark.parametrize("place", ["the PATH", "pyenv", "uv", "nowhere", "PYTHON"])
def test_a_python_is_found_on_the_path_under_pyenv_or_by_uv_and_its_absence_is_explained(place, machine):
    """The next check, for a compiler, shows that one was found."""
    for name in ("python3.12", "python3.13", "python3", "uv"):
        machine.command(f"bin/{name}", "exit 127")
    machine.environ = {"PYENV_ROOT": f"{machine.folder}/pyenv", "PYTHON": "", "CXX": "no-such-compiler"}
    ours = f'exec "{sys.executable}" "$@"'
    if place == "the PATH":
        machine.command("bin/python3.13", ours)
    elif place == "pyenv":
        machine.command("pyenv/versions/3.12.7/bin/python", ours)
    elif place == "uv":
        machine.command("bin/uv", f'echo "{sys.executable}"')
    elif place == "PYTHON":
        machine.command("bin/python3.13", ours)
        machine.environ |= {"PYTHON": "python3.12"}
    ended = machine.run("tools/setup", "gpu", "--no-driver")
    assert ended.returncode == 1
    expected = {
        "nowhere": "found no Python 3.12 or 3.13 with venv. Install one",
        "PYTHON": "found no Python 3.12 or 3.13 with venv as PYTHON=python3.12. Install one",
    }
    assert expected.get(place, "expected a C++ compiler") in ended.stderr


def test_an_environment_keeps_the_python_that_was_named_for_it(machine):
    for version in ("3.12", "3.13"):
        name = machine.folder / f"bin/python{version}"
        answers = f"""case "$*" in
            *base_executable*) echo {name} ;;
            *python_version*) echo {version} ;;
            "-m venv"*)
                echo {version} >>made
                mkdir -p .venv/bin && cp {name} .venv/bin/python && cp {name} .venv/bin/uv ;;
        esac"""
        machine.command(f"bin/python{version}", answers)
    for named in ("python3.13", "", "python3.12", ""):
        machine.environ = {"PYTHON": named}
        ended = machine.run("tools/setup")
        assert ended.returncode == 0, ended.stderr
        assert bool(ended.stderr) == bool(named)
    assert (machine.folder / "made").read_text().split() == ["3.13", "3.12"]


def test_a_compiler_must_be_there(machine):
    machine.environ = {"CXX": "no-such-compiler"}
    ended = machine.run("tools/setup", "gpu", "--no-driver")
    assert ended.returncode == 1
    assert "expected a C++ compiler" in ended.stderr
    assert not (machine.folder / ".venv").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["gpus"], "expected cpu, gpu, docs or programs, found gpus"),
    (["gpu", "--with-te"], "gpu has no option --with-te"),
    (["cpu", "--no-driver"], "cpu has no option --no-driver"),
])  # fmt: skip
def test_an_unknown_word_is_an_error(arguments, message, machine):
    ended = machine.run("tools/setup", *arguments)
    assert ended.returncode == 1
    assert message in ended.stderr


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("before", ["", "cpu", "gpu"])
def test_the_quickstart_uses_a_gpu_where_there_is_one_and_else_what_was_set_up(machine, has_gpu, before):
    machine.command("bin/nvidia-smi", "echo GPU 0: NVIDIA H100" if has_gpu else "exit 9")
    machine.command("tools/setup", "mkdir -p .venv; [ -e .venv/state ] || echo ${1:-cpu}, >.venv/state")
    machine.command(".venv/bin/python", "")
    machine.command(".venv/bin/eqlen", 'echo "eqlen $*"')
    if before:
        machine.run("tools/setup", before)
    uses_gpu = before == "gpu" or (has_gpu and not before)
    device = "cluster.device=gpu cluster.processes_per_node=1 " * uses_gpu
    ran = machine.run("tools/quickstart", "seed=2").stdout.splitlines()
    assert ran[0] == f"eqlen train recipes/tiny_cpu.yaml {device}seed=2"


@pytest.mark.parametrize(("cores", "usable", "given", "threads"), [
    ("0,0 0,0", 2, "", 1),  # two threads of a core
    ("0,0 1,0 0,1 1,1", 16, "", 4),
    ("0,0 1,0 0,1 1,1", 2, "", 2),  # by affinity or a container's quota
    ("0,0 1,0", 2, "1", 1),
])  # fmt: skip
def test_the_real_model_trains_with_a_thread_for_each_core_that_it_may_use(
    cores, usable, given, threads, machine
):
    machine.command("bin/lscpu", f"printf '%s\\n' '# core,socket' {cores}")
    machine.command("tools/setup", "mkdir -p .venv; echo cpu, >.venv/state")
    machine.command(".venv/bin/python", f'[ "$1" != -c ] || echo {usable}')
    machine.command(".venv/bin/eqlen", 'echo "$OMP_NUM_THREADS $2"')
    machine.environ = {"OMP_NUM_THREADS": given}
    ran = machine.run("tools/quickstart", "smollm2").stdout.splitlines()
    assert ran == [f"{threads} recipes/smollm2_sft_cpu.yaml", f"{threads} recipes/smollm2_cpu.yaml"]


def test_a_machine_that_cannot_have_the_python_of_programs_is_told_what_needs_it(machine):
    machine.environ = {"PYENV_ROOT": str(machine.folder)}
    ended = machine.run("tools/setup", "programs")
    assert (ended.returncode, ended.stderr) == (1, "tools/setup: expected .venv first: tools/setup\n")
    machine.command(".venv/bin/uv", "echo no network; exit 2")
    ended = machine.run("tools/setup", "programs")
    assert ended.returncode == 1
    assert "Programs of code rewards need it, or another that reward.code_python names" in ended.stderr
    assert (machine.folder / ".venv/programs.log").read_text().count("no network") == 3


def test_transformer_engine_is_compiled_and_downloads_no_wheel_that_the_lock_does_not_name(machine):
    """Its build, unless told otherwise, first tries a wheel of its maker's, without a hash."""
    python = """case "$*" in
        *base_executable*) echo "$0" ;;
        *get_path*) echo include ;;
        "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv ;;
        *"-m pip"*) echo "${NVTE_PYTORCH_FORCE_BUILD:-} $*" >>installed ;;
        export*) echo "$*" ;;
    esac"""
    machine.command("bin/any-python", python)
    machine.command("include/Python.h", "")
    machine.environ = {"PYTHON": str(machine.folder / "bin/any-python"), "CXX": "true", "CC": "true"}
    ended = machine.run("tools/setup", "gpu", "--no-driver")
    assert ended.returncode == 0, ended.stderr
    calls = (machine.folder / "installed").read_text().splitlines()
    locked = [call for call in calls if "--require-hashes" in call]
    assert [call.startswith("TRUE ") for call in locked] == [False, True]
    assert "--no-emit-package" not in (machine.folder / ".venv/packages.txt").read_text()


@pytest.mark.parametrize(("tests", "workers", "sees_gpus"), [
    ("tests/gpu", False, True),
    ("tests/gpu/test_runs.py", False, True),
    ("tests/pure/test_plan.py", True, False),
])  # fmt: skip
def test_tests_of_a_gpu_run_in_one_process_that_is_not_forked(tests, workers, sees_gpus, machine):
    for name in ("tools/setup", ".venv/bin/ruff", ".venv/bin/basedpyright"):
        machine.command(name, "exit 0")
    machine.command("bin/nproc", "echo 8")
    machine.command(".venv/bin/python", 'echo "$@"; echo "GPUs: ${CUDA_VISIBLE_DEVICES-all}"')
    (machine.folder / ".venv/state").write_text("gpu\n")
    machine.environ = {"CUDA_VISIBLE_DEVICES": "0"}
    ended = machine.run("tools/test", tests, "-x")
    arguments, gpus = ended.stdout.splitlines()
    assert arguments.endswith(f"{tests} -x")
    assert (" -n 4 " in arguments) == workers
    assert gpus == f"GPUs: {'0' if sees_gpus else ''}"
