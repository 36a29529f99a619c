"""tools/setup takes its steps in order, goes on where it stopped, and refuses unfit machines."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT

FAKE_PYTHON = f"""#!/bin/bash
# A python whose venv, pip and packages only write down that they were called. FAIL names what fails.
case "$*" in
    "-m venv"*)
        rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/eqlen
        call="venv" ;;
    tools/make_*) call="${{1#tools/}}" ;;
    train*) call="eqlen $*" ;;
    *"import torch; assert"*) call="check torch" ;;
    *"import torch"*) call="import torch" ;;
    *_base_executable*) echo "$BASE"; exit ;;
    *"sys.version,"*) echo "3.12 $0"; exit ;;
    *sysconfig*) echo "$HEADERS"; exit ;;
    "-m "*) call="${{*//$PWD\\//}}"; call="${{call#-m pip --disable-pip-version-check --quiet }}" ;;
    *) exec {sys.executable} "$@" ;;
esac
[[ -z $FAIL || $call != *$FAIL* ]] || {{ echo "why it failed" >&2; exit 1; }}
echo "$call" >>calls
"""
NVIDIA_SMI = """#!/bin/bash
[ "$1" = -L ] && echo "GPU 0: NVIDIA H100" || echo 580.95.05
"""
WHEELS = "install --no-deps --only-binary :all: --require-hashes -r .venv/packages.txt"
BUILD = "install --no-deps --no-build-isolation --require-hashes -r .venv/apart.txt"
REMOVAL = "uninstall --yes -r .venv/apart.txt"
PACKAGE = "install --no-deps --no-build-isolation -e ."
CHECK = "-m megatron_eqlen.packages"


class Machine:
    """A copy of what tools/setup reads, and a PATH with a driver, a compiler and Python's headers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("bench*"))
        shutil.copy(ROOT / "setup.py", folder)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in {
            "python": FAKE_PYTHON,
            "nvidia-smi": NVIDIA_SMI,
            "c++": "#!/bin/bash\n",
            "nvcc": "#!/bin/bash\n",
        }.items():
            self.command(name, text)
        (folder / "Python.h").touch()
        python = str(self.bin / "python")
        self.environ = {"PYTHON": python, "BASE": python, "HEADERS": str(folder)}

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def setup(self, *arguments: str, fail: str = "", tool: str = "setup") -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{self.bin}:{os.environ['PATH']}", "FAIL": fail, **self.environ}
        command = [str(self.folder / "tools" / tool), *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    def requirements(self, name: str) -> set[str]:
        """Names of the packages in ``.venv/NAME.txt``."""
        return names((self.folder / f".venv/{name}.txt").read_text())

    def calls(self, *arguments: str, fail: str = "", tool: str = "setup") -> list[str]:
        """What a set-up called, in order, or the quickstart."""
        record = self.folder / "calls"
        record.write_text("")
        ended = self.setup(*arguments, fail=fail, tool=tool)
        assert (ended.returncode != 0) == bool(fail), ended.stderr
        return record.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_transformer_engine_is_built_against_the_torch_that_was_installed_before(machine):
    assert machine.calls("gpu") == ["venv", WHEELS, "check torch", BUILD, PACKAGE, CHECK]
    wheels, built = machine.requirements("packages"), machine.requirements("apart")
    assert "torch" in wheels
    assert {"transformer-engine", "transformer-engine-torch"} <= built
    assert not wheels & built
    assert wheels | built == names((ROOT / "tools/requirements-gpu.txt").read_text())


def test_without_arguments_a_new_environment_is_for_cpus(machine):
    packages = "install --no-deps --no-compile --require-hashes -r .venv/packages.txt"
    torch = "install --no-deps --no-compile -r .venv/apart.txt"
    assert machine.calls() == ["venv", packages, torch, "import torch", PACKAGE]
    assert machine.requirements("apart") == {"torch"}
    assert machine.calls() == []


def test_an_activated_environment_is_found_ready(machine):
    machine.calls()
    machine.environ["PYTHON"] = str(machine.folder / ".venv/bin/python")
    assert machine.calls() == []


def test_cuda_libraries_come_where_torch_does_not_import_without(machine):
    machine.command("python", FAKE_PYTHON.replace('*) call="import torch" ;;', "*) exit 1 ;;"))
    assert machine.calls()[3] == "install -r .venv/apart.txt"


def test_without_arguments_an_environment_stays_what_it_is(machine):
    machine.calls("gpu", "--without-te")
    assert machine.calls() == []
    with open(machine.folder / "setup.py", "a") as file:
        file.write("# changed")
    assert machine.calls() == ["venv", WHEELS, "check torch", REMOVAL, PACKAGE, CHECK]
    assert machine.calls("cpu")[0] == "venv"


def names(requirements: str) -> set[str]:
    return {*re.findall(r"^([\w.-]+)==", requirements, re.MULTILINE)}


@pytest.mark.parametrize(
    ("broken_off", "done"),
    [("packages.txt", ["venv"]), ("apart.txt", ["venv", WHEELS, "check torch"])],
)
def test_an_interrupted_set_up_goes_on_in_the_same_environment(broken_off, done, machine):
    assert machine.calls("gpu", fail=broken_off) == done
    assert machine.calls("gpu") == [WHEELS, "check torch", BUILD, PACKAGE, CHECK]
    assert machine.calls("gpu") == []


def test_transformer_engine_can_be_left_out_and_taken_in_later(machine):
    assert REMOVAL in machine.calls("gpu", "--without-te")
    assert machine.calls("gpu") == [WHEELS, "check torch", BUILD, PACKAGE, CHECK]


def test_a_failure_shows_the_log_and_what_failed(machine):
    ended = machine.setup("gpu", fail="apart.txt")
    assert "why it failed" in ended.stderr
    assert "Transformer Engine: failed" in ended.stderr
    assert not (machine.folder / ".venv/ready").exists()


def test_a_torch_for_other_cuda_is_refused_before_anything_is_built_against_it(machine):
    assert machine.calls("gpu", fail="check torch") == ["venv", WHEELS]


def test_a_machine_whose_check_fails_is_not_ready(machine):
    assert machine.calls("gpu", fail=CHECK)[-1] == PACKAGE
    assert machine.calls("gpu")[-1] == CHECK


SMI = "#!/bin/bash\necho '{}'\nexit {}\n"


@pytest.mark.parametrize(
    ("smi", "message"),
    [
        (
            SMI.format("570.133.20", 0),
            "expected NVIDIA's driver 580 or newer (for CUDA 13), found 570.133.20",
        ),
        (SMI.format("NVIDIA-SMI has failed because it could not communicate", 9), "found none"),
        (SMI.format("", 0), "found none"),
        (SMI.format("No devices were found", 6), "tools/setup gpu --no-driver"),
    ],
)
def test_a_driver_that_is_missing_or_too_old_is_refused_before_anything_is_made(smi, message, machine):
    machine.command("nvidia-smi", smi)
    ended = machine.setup("gpu")
    assert ended.returncode == 1
    assert message in ended.stderr
    assert not (machine.folder / ".venv").exists()
    assert machine.calls("gpu", "--no-driver")[0] == "venv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"HEADERS": "/nowhere"}, "/nowhere/Python.h"),
        ({"CXX": "no-such-compiler"}, "expected a C++ compiler"),
    ],
)
def test_what_kernels_are_compiled_with_must_be_there(change, message, machine):
    machine.environ |= change
    ended = machine.setup("gpu")
    assert ended.returncode == 1
    assert message in ended.stderr
    assert not (machine.folder / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpus"], "expected cpu or gpu, found gpus"),
        (["gpu", "--with-te"], "gpu has no option --with-te"),
        (["cpu", "--no-driver"], "cpu has no option --no-driver"),
    ],
)
def test_an_unknown_word_is_an_error(arguments, message, machine):
    ended = machine.setup(*arguments)
    assert ended.returncode == 1
    assert message in ended.stderr


def test_scripts_are_executable():
    assert all(os.stat(ROOT / "tools" / name).st_mode & stat.S_IXUSR for name in ("setup", "lock"))


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("before", ["", "cpu", "gpu"])
def test_the_quickstart_uses_a_gpu_where_there_is_one_and_else_what_was_set_up(machine, has_gpu, before):
    if before:
        machine.calls(before)
    if not has_gpu:
        machine.command("nvidia-smi", "#!/bin/bash\necho no driver >&2\nexit 9\n")
    uses_gpu = before == "gpu" or (has_gpu and not before)
    calls = machine.calls("seed=2", tool="quickstart")
    assert (calls[0] == "venv") == (not before)
    assert (WHEELS in calls) == (uses_gpu and not before)
    device = "cluster.device=gpu cluster.processes_per_node=1 " * uses_gpu
    assert calls[-3:] == [
        "make_search.py", "make_tiny_model.py", f"eqlen train recipes/tiny_cpu.yaml {device}seed=2",
    ]  # fmt: skip
