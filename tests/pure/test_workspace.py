"""Workspaces: tools, templates, grades, forks, and states that a resumed run takes up."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from megatron_eqlen.environments import workspace
from megatron_eqlen.environments.conversation import Turn
from megatron_eqlen.environments.environment import Observation
from megatron_eqlen.environments.workspace import PackedFolder, Workspace, packed_template, require_templates
from megatron_eqlen.files import scratch
from megatron_eqlen.graders.sandbox.client import EMPTY_FOLDER, SandboxError, folder_files, pack_folder
from megatron_eqlen.harvest.harvest import harvest, harvest_seed
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.record.partial import HarvestProgress
from megatron_eqlen.types import Grade
from tests.kit.length_bias import QUESTION, Drawing, Suspended
from tests.kit.processes import descendants
from tests.pure import test_environments as enumeration
from tests.pure.test_environments import CALL, COINS, END, Coins, reward, speaking, words
from tests.pure.test_forks import recipe

SUBTRACTS = "def add(a, b):\n    return a - b\n"
TEST = "from add import add\nassert add(1, 2) == 3\n"


@pytest.fixture(scope="module", autouse=True)
def sandboxes():
    yield
    Workspace.end()


@pytest.fixture
def template(tmp_path):
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "add.py").write_text(SUBTRACTS)
    (folder / "test.py").write_text(TEST)
    return folder


def made(template, gold="", **options):
    return Workspace(replace(QUESTION, gold=gold), 5, str(template), **options)


def call(environment, name, **arguments):
    said = json.dumps({"name": name, "arguments": arguments})
    return environment.step(f"Now.\n<tool_call>\n{said}\n</tool_call>").content


def files(environment):
    return folder_files(environment.folder.read())


def test_a_file_is_read_repaired_and_tested(template):
    tested = made(template, test="python3 test.py")
    assert call(tested, "run", command="python3 test.py").endswith("AssertionError\n(exit status 1)")
    assert call(tested, "read", path="add.py") == SUBTRACTS.rstrip()
    assert call(tested, "read", path="add.py", first=2, lines=1) == "    return a - b"
    assert (tested.grade().reward, tested.grade().verdict) == (0.0, "failed")
    assert call(tested, "write", path="add.py", text=SUBTRACTS.replace("-", "+")) == "32"
    assert call(tested, "run", command="python3 test.py") == "(no output)"
    assert tested.step("It is done.").done
    assert tested.grade().reward == 1.0
    assert (template / "add.py").read_text() == SUBTRACTS


@pytest.mark.parametrize(("command", "said"), [
    ("sleep 9 & echo on", "on\n(1 processes that it left were stopped)"),
    ("sleep 9", "(stopped: more than 1 s)"),
    ("truncate -s 9M a b", "(the folder is as it was before, because it cannot be kept: "
     "FolderError: its files are longer than 16 MiB)"),
    ("python3 -c 'import socket; socket.socket(1).bind(\"s\")'", "(1 sockets or devices are not kept)"),
])  # fmt: skip
def test_what_happened_to_a_command_is_said(template, command, said):
    small = made(template, timeout=1.0, folder_mb=16)
    assert call(small, "run", command=command) == said
    assert sorted(files(small)) == ["add.py", "test.py"]


def test_a_test_leaves_its_reward_in_a_file_of_the_root(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".profile").write_text("export WORD=said\nmkdir -p /app; cd /app\n")
    (tmp_path / "half").write_text("0.5")
    here = made(tmp_path, root=True, test="cat /half > /reward", reward="reward")
    assert call(here, "run", command='pwd; echo "$WORD $HOME" > a') == "/app"
    assert call(here, "read", path="a") == "said /root"
    assert (here.grade().reward, here.grade().verdict) == (0.5, "passed")
    call(here, "write", path="/half", text='{"reward": 0.25, "seconds": 3}')
    assert here.grade().reward == 0.25
    for text in (
        "no",
        '{"reward": 1',
        "{}",
        '{"reward": [1]}',
        f'{{"reward": {10**309}}}',
        "[" * 99_999 + "{",
    ):
        call(here, "write", path="/half", text=text)
        with pytest.raises(ValueError, match=rf"reward: expected a number, found b'{re.escape(text[:9])}"):
            here.grade()
    for cheat in (
        "echo 'echo 1 > /reward; exit 0' > /root/.profile",
        "rm -r /root; mkdir x; ln -s x root; cd x; echo 'PATH=/x; exit' > .profile",
    ):
        call(here := made(tmp_path, root=True, test="pwd; false"), "run", command=f"cd /; {cheat}")
        assert (here.grade().reward, here.grade().detail) == (0.0, "/app\n(exit status 1)")


@pytest.mark.parametrize("left", [
    "echo 1 > score", "mkdir score; echo 1 > score/score", "echo 1 > score; chmod 400 score",
    "echo 1 > score; truncate -s 9M a",  # a folder that cannot be kept
    "mkdir logs; echo 1 > logs/score; chmod 500 logs",
])  # fmt: skip
def test_a_reward_that_the_policy_wrote_is_none(template, left):
    reward = "logs/score" if "logs" in left else "score"
    here = made(template, test="[ ! -e a ] || truncate -s 9M b; false", reward=reward, folder_mb=16)
    call(here, "run", command=left)
    with pytest.raises(ValueError, match=r"expected a number, found b''; the test printed '.*status 1\)"):
        here.grade()


def test_a_write_through_a_link_stays_in_the_folder(template, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    here = made(template)
    call(here, "run", command=f"ln -s {outside} link; ln -s {tmp_path} folder; ln -s /etc/shadow secret")
    for path in ("link", "folder/outside", "../../../tmp/x/y", str(outside)):
        call(here, "write", path=path, text="changed")
    assert "root:" not in call(here, "read", path="secret")
    assert outside.read_text() == "kept"


# ---- templates -------------------------------------------------------------------------------------------


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.check_output(["git", *who, "-C", folder, *arguments], text=True)


def test_folders_archives_and_commits_are_templates(template, tmp_path):
    for kind in ("gztar", "zip", "tar"):
        shutil.make_archive(str(tmp_path / "packed"), kind, template)
    repository = tmp_path / "repository"
    shutil.copytree(template, repository)
    git(repository, "init")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "first")
    first = git(repository, "rev-parse", "HEAD").strip()
    (repository / "add.py").write_text("later")
    git(repository, "commit", "-am", "second")
    archives = [f"{tmp_path}/packed.{end}" for end in ("tar.gz", "zip", "tar")]
    names = [str(template), *archives, f"{repository}@{first}"]
    contents = [folder_files(packed_template(name, 16, 100).read()) for name in names]
    assert contents == [{"add.py": SUBTRACTS.encode(), "test.py": TEST.encode()}] * 5
    assert files(made(f"{tmp_path}/{{gold}}", gold="template")) == contents[0]
    git(repository, "branch", "old@1/x", first)
    for commit in (first, f"{first[:12]}^{{tree}}", "old@1/x"):
        assert folder_files(packed_template(f"{repository}@{commit}", 16, 100).read()) == contents[0]
        assert require_templates({"repository": "1"}, {"template": f"{tmp_path}/{{gold}}@{commit}"}) == 1
    with pytest.raises(ValueError, match=r"template: .*: expected .*, found .* --output=out"):
        packed_template(f"{repository}@--output=out", 16, 100)
    assert not (repository / "out").exists()
    with pytest.raises(ValueError, match=r"template: 1: expected a template, found none at .*@no-commit"):
        require_templates({"repository": "1"}, {"template": f"{tmp_path}/{{gold}}@no-commit"})


@pytest.mark.parametrize(("options", "message"), [
    ({"template": "nowhere"}, "environment.options.template: nowhere: expected a folder, an archive"),
    ({"template": "{here}@0000"}, "not a"),
    ({"files": 1}, "expected at most 1 files .files., found 2"),
    ({"timeout": float("nan")}, "options.timeout: expected a number above 0, below 1e9, found nan"),
    ({"longest_output": -1}, "options.longest_output: expected a number above 0, below 1e9, found -1"),
    ({"test": "true", "expected": "{here}"}, "expected one of test, .*, found test and expected"),
    ({"hidden": "{here}"}, "options.hidden acts only with environment.options.test"),
    ({"function": "nowhere:f"}, "options.function"),
    ({"reward": "score"}, "options.reward acts only with environment.options.test"),
    ({"test": "true", "reward": "../score"}, "reward: expected a path .*, found '../score'"),
    ({"test": "true", "reward": "/score"}, "expected a path in the folder, .*'/score'"),
    ({"root": True, "command": ["true"]}, "options.root acts only without environment.options.comm"),
    ({"readable": ["/opt"], "command": ["true"]}, "options.readable acts only without"),
    ({"readable": ["/nowhere"]}, "environment.options: expected absolute paths .* '/nowhere'"),
    ({"readable": ["/etc"]}, "environment.options: cannot isolate: .*'/etc/passwd'"),
    ({"variables": {"A=B": ""}}, "bash starts, found bash: illegal environment variable name"),
    ({"command": ["false"]}, r"expected that bash starts, found \(exit status 1\)"),
    ({"command": ["true"]}, r"command: expected that bash writes a file in {folder}, found \(no"),
    ({"command": ["no-such-container"]}, "found no-such-container: No such file"),
], ids=str)  # fmt: skip
def test_options_that_do_not_fit_are_refused_before_anything_is_generated(template, options, message):
    given = {"template": "{here}"} | options
    filled = {key: text.format(here=template) if text == str(text) else text for key, text in given.items()}
    with pytest.raises(ValueError, match=message):
        Workspace.start(**filled)


def packed(path, *members, mode="w"):
    """Write a tar. ``members``: name, type, what is linked, and bytes."""
    with tarfile.open(path, mode) as archive:
        for name, kind, linked, size in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, linked, size
            archive.addfile(member, io.BytesIO(os.urandom(size)))
    return path.read_bytes()


def zipped(path, name, mode, content):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        archive.writestr(member, content)


FILE, HARD, LINK = tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE


@pytest.mark.parametrize(("write", "found"), [
    (lambda path: packed(path, ("../f", FILE, "", 1)), "outside the destination"),
    (lambda path: packed(path, ("l", LINK, "/tmp", 0), ("l/f", FILE, "", 1)), "outside the destination"),
    (lambda path: packed(path, ("h", HARD, "/etc/passwd", 0)), "an absolute path"),
    (lambda path: packed(path, ("h", HARD, "../../etc/passwd", 0)), "outside the destination"),
    (lambda path: packed(path, ("h", HARD, "nowhere", 0)), "linkname 'nowhere' not found"),
    (lambda path: packed(path, ("f", FILE, "", 2 << 20), ("../f", FILE, "", 1), mode="w:gz"),
     "its files are longer than 1 MiB"),
    (lambda path: zipped(path, "f", 0, bytes(2 << 20)), "its files are longer than 1 MiB"),
    (lambda path: zipped(path, "l", 0o120777, "/etc/passwd"), "a link in a zip: l"),
    (lambda path: path.write_bytes(packed(path, ("f", FILE, "", 9999), mode="w:xz")[:5000]),
     "ended before the end-of-stream"),
    (lambda path: path.write_text("text"), "not a zip file"),
    (os.mkfifo, "expected a file, found a pipe or a device"),
])  # fmt: skip
def test_an_archive_that_leads_out_or_is_damaged_is_refused(tmp_path, write, found):
    write(tmp_path / "packed.tar")
    with pytest.raises(ValueError, match=rf"options.template: {tmp_path}/packed.tar: expected .*{found}"):
        packed_template(f"{tmp_path}/packed.tar", 1, 100)


def test_devices_of_an_archive_are_left_out_whoever_unpacks_it(tmp_path):
    devices = ("d", tarfile.CHRTYPE, "", 0), ("b", tarfile.BLKTYPE, "", 0)
    packed(tmp_path / "packed.tar", *devices, ("f", FILE, "", 1))
    assert [*folder_files(packed_template(f"{tmp_path}/packed.tar", 1, 100).read())] == ["f"]


def test_a_program_in_a_zip_can_be_run(tmp_path):
    zipped(tmp_path / "packed.zip", "program", 0o100755, "#!/bin/sh\necho runs")
    assert call(made(tmp_path / "packed.zip"), "run", command="./program") == "runs"


@pytest.mark.parametrize("gold", ["", "/etc", "a/../../etc", "a\0b"])
def test_a_gold_names_a_template_below_the_folder(tmp_path, gold):
    with pytest.raises(ValueError, match="expected a gold that names a template below it"):
        made(f"{tmp_path}/{{gold}}", gold=gold)


def test_a_template_that_a_row_names_must_be_there(template, tmp_path):
    options = {"template": f"{tmp_path}/{{gold}}", "hidden": f"{tmp_path}/{{gold}}", "test": "true"}
    assert require_templates({"template": "train/1"}, options) == 1
    assert require_templates({"any": "train/1"}, {"template": str(template)}) == 0
    with pytest.raises(ValueError, match=r"hidden: test/2: expected a template, .*/gone \(1 of 2"):
        require_templates({"template": "train/1", "gone": "test/2"}, options)


def test_a_machine_without_isolation_is_refused_by_name(template, monkeypatch):
    monkeypatch.setattr(workspace, "commands_refused", lambda: "new namespaces (user): not permitted")
    with pytest.raises(ValueError, match=r"workspace: new namespaces \(user\): .*ment.options.command"):
        Workspace.start(template=str(template))


# ---- grades ----------------------------------------------------------------------------------------------


BYTECODE = (
    "echo 'add = lambda a, b: a - -b' > add.py; echo wrong=0 > tests/part.py; "
    "python3 -m compileall -q --invalidation-mode unchecked-hash"
)
"""Add right, with a sign that ``tests/part.py`` counts, and compile another ``part`` that is taken for it."""


@pytest.mark.parametrize(("command", "expected"), [
    ("true", 0.0), ("echo > test.py", 0.0), ("rm test.py; ln -s /dev/null test.py", 0.0),
    ("rm -r tests; ln -s /tmp tests", 0.0), ("rm -r tests; echo > tests", 0.0),
    ("rm test.py; mkdir -p test.py/x", 0.0),
    (f"{BYTECODE} tests/part.py", 0.0),
    (f"{BYTECODE} tests/part.py; mv tests/__pycache__ .; ln -s ../__pycache__ tests/__pycache__", 0.0),
    ("head -c 66M /dev/zero > full", 0.0), ("for n in $(seq 1500); do : > $n; done", 0.0),  # no room
    ("sed -i s/-/+/ add.py", 1.0),  # the code itself
])  # fmt: skip
def test_hidden_files_replace_those_of_the_policy(template, tmp_path, command, expected):
    (template / "tests").mkdir()
    (template / "tests" / "more.py").write_text("")
    hidden = tmp_path / "hidden"
    shutil.copytree(template / "tests", hidden / "tests")
    (hidden / "tests" / "more.py").write_text("from part import wrong\nraise SystemExit(wrong)\n")
    (hidden / "tests" / "part.py").write_text("wrong = open('add.py').read().count('-')\n")
    (hidden / "test.py").write_text(TEST)
    (hidden / "long").write_bytes(os.urandom(2 << 20))
    options = {"hidden": str(hidden), "folder_mb": 64, "files": 500}
    graded = made(template, test="python3 test.py && python3 tests/more.py", **options)
    call(graded, "run", command=command)
    assert graded.grade().reward == expected


def copy_pytest(place):
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        source = os.path.dirname(import_module(name).__file__)
        shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(import_module("py").__file__, place)


ENDS = "printf 'import os\nos._exit(0)\n' >"
CHEATS = {
    "none": "sed -i s/-/+/ add.py",
    "package": "mkdir -p tests/part part; echo wrong=0 | tee tests/part/__init__.py part/__init__.py",
    "configuration": f"printf '[pytest]\naddopts = -p evil\npythonpath = .\n' > pytest.ini; {ENDS} evil.py",
    "conftest": f"mkdir -p tests; {ENDS} conftest.py; {ENDS} tests/conftest.py",
    "pytest": f"{ENDS} pytest.py; {ENDS} runpy.py",
    "start": f"{ENDS} sitecustomize.py; {ENDS} usercustomize.py; echo 'import os; os._exit(0)' > a.pth",
    "link": f"{ENDS} conftest.py; ln -s . tests; ln -s . hidden",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_tests_in_a_folder_with_a_configuration_of_its_own_run_nothing_that_the_policy_added(cheat, tmp_path):
    """As docs/agents.md lays them out."""
    (template := tmp_path / "template").mkdir()
    (template / "add.py").write_text(SUBTRACTS)
    (secret := tmp_path / "hidden" / "k7q2").mkdir(parents=True)
    (secret / "pytest.ini").write_text("[pytest]\n")
    (secret / "part.py").write_text("wrong = open('../add.py').read().count('-')\n")
    (secret / "test_add.py").write_text("from part import wrong\ndef test_add():\n    assert not wrong\n")
    copy_pytest(tmp_path / "site")
    options = {"readable": [str(tmp_path / "site")], "variables": {"PYTHONPATH": str(tmp_path / "site")}}
    test = "cd k7q2 && python3 -m pytest -q"
    graded = made(template, test=test, hidden=str(tmp_path / "hidden"), **options)
    call(graded, "run", command=CHEATS[cheat])
    grade = graded.grade()
    assert (grade.reward, grade.verdict, "1 failed" in grade.detail) == (
        (1.0, "passed", False) if cheat == "none" else (0.0, "failed", True)
    )


@pytest.mark.parametrize(("written", "expected"), [("cat want", 0.0), ("cat */want", 0.0), ("echo 7", 1.0)])
def test_the_example_of_a_program_that_is_run_does_not_show_it_what_it_should_print(
    written, expected, template, tmp_path
):
    (hidden := tmp_path / "hidden").mkdir()
    (hidden / "want").write_text("7\n")
    options = yaml.safe_load(Path("recipes/workspace_cpu.yaml").read_text())["environment"]["options"]
    graded = made(template, test=options["test"], hidden=str(hidden))
    call(graded, "write", path="sum", text=written)
    assert graded.grade().reward == expected


def test_to_lay_tests_over_a_folder_costs_as_much_however_deep_its_files_are(tmp_path):
    def calls(depth):
        (place := tmp_path / str(depth) / "/".join("d" * depth)).mkdir(parents=True)
        for number in range(200):
            (place / str(number)).touch()
        folder, counted = pack_folder(tmp_path / str(depth)), count()
        sys.setprofile(lambda *_: next(counted))
        try:
            workspace.laid_over(folder, EMPTY_FOLDER)
        finally:
            sys.setprofile(None)
        return next(counted)

    assert calls(40) < 1.5 * calls(1)  # 240 entries, and 201


def count_files(files, prompt):
    return len(files) + float(prompt.gold)


def test_files_and_functions_grade(template, tmp_path):
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    (wanted / "add.py").write_text("fixed")
    expecting = made(template, expected=str(wanted))
    assert (expecting.grade().reward, expecting.grade().detail) == (0.0, "add.py")
    call(expecting, "write", path="add.py", text="fixed")
    assert expecting.grade().reward == 1.0
    assert made(template, gold="0.5", function=f"{__name__}:count_files").grade() == 2.5
    assert made(template).grade() is None


def test_what_another_holder_and_a_command_that_cannot_start_have_is_kept(template, tmp_path):
    """``end`` takes no folder of an environment that lives on, and each attempt takes no further process."""
    (gone := tmp_path / "gone").mkdir()
    here, blind = made(template), made(template, readable=[str(gone)])
    gone.rmdir()
    call(here, "run", command="echo kept > file")
    before = len(descendants(os.getpid()))
    for _ in range(3):
        with pytest.raises(ValueError, match="expected absolute paths"):
            call(blind, "run", command="true")
    assert len(descendants(os.getpid())) <= before
    Workspace.end()
    assert call(here, "run", command="cat file") == "kept"
    place = here.folder.path.parent
    del here, blind
    assert not os.listdir(place)


# ---- forks -----------------------------------------------------------------------------------------------


class Noting(Workspace):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.notes = []


def test_a_fork_of_ones_own_workspace_has_its_own_state(template):
    line = Noting(QUESTION, 5, str(template))
    line.notes.append("one")
    fork = line.fork()
    fork.notes.append("two")
    assert (line.notes, fork.notes) == (["one"], ["one", "two"])
    assert fork.folder is line.folder


@pytest.mark.parametrize(
    "closed", ["chmod 0 logs", "chmod 500 logs", "chmod 500 .", "rmdir logs; ln -s /tmp logs"]
)
def test_no_mode_or_link_that_the_policy_leaves_keeps_the_test_from_its_reward(template, closed):
    here = made(template, test="mkdir -p logs && echo 0.25 > logs/score", reward="logs/score")
    call(here, "run", command=f"mkdir logs; {closed}")
    assert here.grade().reward == 0.25


def test_a_fork_has_the_same_files_and_another_future(template):
    line = made(template)
    first = call(line, "run", command="echo $EQLEN_SEED | tee drawn")
    fork, other = line.fork(), line.fork()
    assert fork.folder is line.folder
    later = [call(one, "run", command="cat drawn; echo $EQLEN_SEED") for one in (line, fork, other)]
    assert {text.split()[0] for text in later} == {first}
    assert len({text.split()[1] for text in later}) == 3
    call(fork, "run", command="rm *")
    assert (sorted(files(fork)), sorted(files(line))) == ([], ["add.py", "drawn", "test.py"])
    assert call(line, "run", command="cat drawn") == first


def test_a_fork_equals_a_new_environment_that_ran_the_commands(template):
    commands = [
        "mkdir -p a/b; mv add.py a/; ln -s a/add.py link; ln test.py hard",
        "for n in 3 1 2; do echo $n >> a/b/$((n % 2)); done; chmod 700 a/b/0; rm test.py",
        "sed -i s/-/+/ link; mkfifo pipe; printf x > $'new\\nline'",
    ]
    line, again = made(template), made(template)
    for command in commands[:2]:
        call(line, "run", command=command)
    fork = line.fork()
    call(fork, "run", command=commands[2])
    for command in commands:
        call(again, "run", command=command)

    def contents(environment):
        with tarfile.open(environment.folder.path) as archive:
            return [(m.name, m.type, m.mode, m.size, m.linkname) for m in archive], files(environment)

    assert contents(fork) == contents(again)
    assert len(contents(fork)[0]) == 9


@cache
def tossed(folder, coin):
    """Return the folder after a command that adds a coin, and what it printed; equal folders are run once."""
    environment = Workspace.__new__(Workspace)
    environment.__init__(QUESTION, 0, EMPTY, variables={"COIN": str(coin)})
    environment.folder = PackedFolder.of(folder)
    printed = call(environment, "run", command="echo $COIN >> coins; touch -d @0 coins; cat coins")
    return environment.folder.read(), tuple(map(int, printed.split()))


EMPTY = ""


class Tossing(Coins):
    """Coins whose only state between turns is a folder; each copy draws its own."""

    def __init__(self, prompt, seed, flips):
        super().__init__(prompt, seed, flips)
        self.here = Workspace(prompt, seed, EMPTY)

    def step(self, message):
        self.turns += (len(message.split()),)
        if message.split()[0] == str(END):
            return Observation(done=True)
        before = self.here.folder.read()
        after, printed = tossed(before, self.flips(len(self.coins)))
        self.here.folder, self.coins = PackedFolder.of(after), printed
        return Observation(str(COINS[printed[-1]]))

    def grade(self):
        lines = files(self.here).get("coins", b"").split()
        return reward(self.turns, tuple(map(int, lines)))

    def fork(self):
        other = Tossing.__new__(Tossing)
        other.__dict__ |= vars(self)
        other.here, other.flips = self.here.fork(), self.flips.independent(len(self.coins))
        return other


@pytest.mark.parametrize("name", ["forks at a length", "group", "pairs"])
def test_an_expected_step_is_the_policy_gradient_where_the_state_is_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "EMPTY", str(tmp_path))
    monkeypatch.setitem(enumeration.SETTINGS, name, (3, enumeration.SETTINGS[name][1]))
    assert enumeration.error_of_the_step(name, Tossing) < 1e-12
    assert tossed.cache_info().misses > 1


# ---- failures and resuming -------------------------------------------------------------------------------


def test_a_resumed_run_takes_up_the_folder_that_was_saved(template, tmp_path):
    texts = {}

    def turn(command, given=()):
        number = len(texts) + 100
        texts[number] = f'<tool_call>{{"name": "run", "arguments": {{"command": "{command}"}}}}</tool_call>'
        return Turn(np.array([number]), np.array(given, int))

    speak = speaking(lambda prompt, seed: made(template))
    written: list[str] = []
    speak = replace(
        speak, read=lambda ids: texts[int(ids[0])], kept=tmp_path / "streams" / "step-00000001",
        write=lambda observation: written.append(observation.content) or [7],
    )  # fmt: skip
    first = turn("od -N 8 /dev/urandom | tee drawn")
    begun = speak.answer(None, QUESTION, 3, [first])
    second = turn("cat drawn")
    done = [first._replace(given=np.array(begun.given)), second]
    whole = speak.answer(begun.environment, QUESTION, 3, done)
    later = replace(speak, kept=tmp_path / "streams" / "step-00000002")  # of a rollout that was suspended
    resumed = [one.answer(None, QUESTION, 3, done) for one in (speak, later)]
    drawn, *again = written
    assert again == [drawn] * 3
    assert [one.changed for one in resumed] == [0, 0]
    folders = [one.environment.folder.read() for one in (whole, *resumed)]
    assert folders == [folders[0]] * 3
    told = speak.answer(None, QUESTION, 4, done).environment  # of another seed: it is told the messages
    assert told.calls == 2
    assert written[-1] != drawn


class Appends(Workspace):
    """Adds a random line in each of three turns."""

    def step(self, message):
        self.run("od -A n -N 4 -t x4 /dev/urandom >> drawn")
        return Observation("7 7", done=len(files(self)["drawn"].split()) > 2)

    def grade(self):
        return Grade(1.0, "scored", detail=files(self)["drawn"].decode())


@pytest.mark.parametrize("sampling", ["independent", "equal_length"])
def test_a_step_that_ends_in_mid_turn_leaves_the_folder_to_the_next_one(sampling, template, tmp_path):
    settings = recipe(sampling=sampling, objective="grpo", limit=9)
    budget = {"tokens_per_step": 6, "carry_over": True}
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update=budget)})
    engine = Drawing(lambda name, shares: END if name[1][-1:] == (CALL,) else CALL, enumeration.row)
    carried, counts = Suspended([QUESTION]), []
    for number in range(9):
        speak = speaking(lambda prompt, seed: Appends(prompt, seed, str(template)))
        speak = replace(speak, kept=tmp_path / f"step-{number:08d}")
        seed, progress = harvest_seed(settings.seed, number), HarvestProgress(partial=carried.partial)
        plan = HarvestPlan([QUESTION], settings, [END], seed, progress=progress, conversations=speak)
        carried = Suspended([], number + 1, settings.rollout.max_staleness)
        (rollout,), metrics = harvest(engine, plan, [carried])
        counts.append(metrics["environment/replays"])
        if not rollout.suspended:
            break
    assert sum(counts)
    tars = tmp_path.glob("*/environments/*.tar")
    saved = [folder_files(file.read_bytes())["drawn"].decode() for file in tars]
    ended = [part.grade.detail for part in rollout.parts if part.finish_reason == "stop"]
    assert len(ended) == 2
    assert all(sum(text.startswith(before) for before in saved) == 2 for text in ended)


class Writes(Workspace):
    """Answers two turns, each with a command."""

    def step(self, message):
        self.run("echo x >> file")
        return Observation("7 7", done=len(files(self)["file"]) > 4)


def test_a_full_disk_or_a_broken_sandbox_leaves_a_response_unscored(template, monkeypatch, caplog):
    real, number = PackedFolder.of, count()

    def full(content):
        if next(number) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(content)

    packed_template.cache_clear()
    monkeypatch.setattr(PackedFolder, "of", full)
    rollouts, _ = words(lambda prompt, seed: Writes(prompt, seed, str(template)))
    assert sum(len(rollout.unscored()) for rollout in rollouts) == 1
    assert "No space left on device" in caplog.text

    def cut(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", cut)
    with pytest.raises(OSError, match="No space left"):
        made(template).save(template)
    assert sorted(os.listdir(template)) == ["add.py", "test.py"]

    class Broken:
        def run(self, work):
            raise SandboxError("the sandbox's zygote died")

    monkeypatch.setattr(workspace, "_sandboxes", Broken)
    rollouts, _ = words(lambda prompt, seed: Writes(prompt, seed, str(template)))
    assert all(rollout.unscored() for rollout in rollouts)
    assert "the sandbox's zygote died" in caplog.text


KILLED = """
import os, signal
from megatron_eqlen.files import scratch
open(scratch("test") + "/file", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_later_process_removes_the_folders_of_a_killed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = scratch("test")
    for _ in range(2):
        environ = os.environ | {"TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", KILLED], env=environ, check=False)
        (left,) = {str(path) for path in tmp_path.iterdir()} - {mine}
    assert os.path.exists(f"{left}/file")
    other = scratch("test")
    assert {str(path) for path in tmp_path.iterdir()} == {mine, other}


def test_a_place_for_temporary_files_that_has_no_room_is_refused(tmp_path, monkeypatch):
    """Ranks that met at a torn file there waited without end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000, total=10**9))
        with pytest.raises(OSError, match="No space left on device") as error:
            scratch("test")
    assert error.value.filename == str(tmp_path)
    made = scratch("test")
    assert [*map(str, tmp_path.iterdir())] == [made], "the other one was nobody's"


def test_a_place_for_temporary_files_that_counts_nothing_is_not_full(tmp_path, monkeypatch):
    """The ramfs of a node without a disk, for one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0, total=0))
    assert os.path.isdir(scratch("test"))


def test_what_folders_cost_is_counted(template):
    _, metrics = words(lambda prompt, seed: Writes(prompt, seed, str(template)), enumeration.FORKING, count=1)
    size = len(pack_folder(template))
    assert metrics["environment/copies"] > 0
    assert metrics["environment/folder_bytes"] % size == 0
    assert metrics["environment/folder_bytes"] >= 4 * size
    assert metrics["environment/folder_seconds"] > 0


BOX = """#!/bin/bash
# as apptainer: exec --bind SOURCE:TARGET IMAGE COMMAND...
[ "$1 $2" = "exec --bind" ] || exit 9
echo "$4" > "${3%%:*}/image"
exec unshare --user --map-root-user --mount --pid --fork \\
    bash -c 'mount --bind "$0" /mnt; cd /mnt; exec "$@"' "${3%%:*}" "${@:5}"
"""


DEEP = 'python3 -c \'import os\nfor n in range(1100): os.mkdir("d"); os.chdir("d")\'; chmod 0 d'
"""Deeper than Python's recursion: what removes it must not fail, nor any later command."""


def test_commands_run_in_a_container_of_the_cluster(template, tmp_path):
    box = tmp_path / "box"
    box.write_text(BOX)
    box.chmod(0o755)
    prefix = [str(box), "exec", "--bind", "{folder}:/mnt", "image.sif"]
    Workspace.start(template=str(template), command=prefix)
    boxed = made(template, command=prefix, timeout=8.0, test="python3 test.py")
    assert call(boxed, "run", command="pwd; echo kept > file; sleep 615 & cat image") == "/mnt\nimage.sif"
    fork = boxed.fork()
    assert call(fork, "read", path="file") == "kept"
    assert call(fork, "run", command="env | grep -c PYTHONPATH; " + DEEP) == "0"
    assert call(fork, "read", path="file") == "kept"
    leads_out = made(template, command=["env"])
    said = call(leads_out, "run", command='rm -r "$PWD"; ln -s /etc "$PWD"')
    assert said == "(the folder is as it was before, because it cannot be kept: FolderError: it is a link)"
    call(fork, "run", command="chmod 700 d; rm -r d; sed -i s/-/+/ add.py")
    assert (boxed.grade().reward, fork.grade().reward) == (0.0, 1.0)
    assert "file" in files(boxed)
    slow = made(template, command=prefix, timeout=1.0)
    assert call(slow, "run", command="setsid sleep 616; sleep 616").startswith("(stopped: more than 1 s)")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if line.startswith("sleep 61")]
    assert not [name for name in os.listdir("/tmp") if name.startswith("eqlen-folder-")]


def test_rollouts_of_a_prompt_take_its_template_at_the_same_time(template):
    packed_template.cache_clear()
    ready = threading.Barrier(4)

    def begin(number):
        ready.wait()
        return made(template, hidden=str(template), test="true").grade().reward

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(begin, range(4))) == [1.0] * 4


def test_lines_that_said_the_same_save_at_the_same_time(tmp_path):
    class Saves(Coins):
        def save(self, place):
            return "x" * 100_000

    speak = speaking(lambda prompt, seed: Saves(prompt, seed, lambda number: 0))
    speak = replace(speak, kept=tmp_path / "step")
    ready = threading.Barrier(8)

    def turns(line):
        ready.wait()
        said = [Turn(np.array([CALL, END]), np.array([], int))]
        return [speak.answer(None, QUESTION, 3, said).given for _ in range(50)]

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(turns, range(8))] == [[[COINS[0]]] * 50] * 8
    assert len([*(tmp_path / "step" / "environments").iterdir()]) == 1
