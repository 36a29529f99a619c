"""Rows made from tasks in Harbor's layout: those that run, and those that are refused, by reason."""

import json
import os
import re
import sys

import pytest

from megatron_eqlen.environments.workspace import Workspace
from tests.pure.test_workspace import call, copy_pytest, made
from tools import harbor_tasks

DOCKERFILE = """\
FROM ubuntu:24.04 AS base
ENV WHERE=/srv/x NAME="a b"
ENV OLD two words
# a comment
RUN mkdir -p $WHERE && \\
    # another
    echo made > $WHERE/made
RUN cat > /note <<'EOF'
$WHERE
EOF
WORKDIR /app
COPY data/*.txt ./in/
COPY --chown=1:1 --chmod=711 data /data
COPY data/n.txt later
COPY data/n.txt now
COPY --chmod=711 data/n.txt now
EXPOSE 80
CMD ["bash"]
"""
TEST = """\
#!/bin/bash
printf '%s|' "$PWD" "$WHERE" "$NAME" "$OLD" "$COLOUR" "$(cat /srv/x/made /note /data/n.txt in/n.txt)"
[ -e /srv/x/made -a -x /data/n.txt -a ! -x in/n.txt -a ! -x later -a -x now ] || exit
[ "$(cat out)" = 3 ] && [ ! -e /tests/conftest.py ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
TASK = {
    "instruction.md": "Write 3 to out.",
    "task.toml": '[verifier]\ntimeout_sec = 5.0\n[environment.env]\nCOLOUR = "it\'s red"\n',
    "environment/Dockerfile": DOCKERFILE,
    "environment/data/n.txt": "1 2\n",
    "tests/test.sh": TEST,
    "solution/solve.sh": "echo 3 > out",
}
PARTS = """#!/bin/sh
echo out not found
[ -e out ] && echo 'x: command not found'
cat > /logs/verifier/reward.json <<'END'
{
  "reward" : 2.5e-1, "parts": {"reward": 1}
}
END
"""
LATE = """\
[[ -e out ]] && echo x: command not found
echo $((1 - $?)) > /logs/verifier/reward.txt
timeout 0.1 sleep 9
"""
WORDS = """\
#!/bin/sh
[ -e out -a "$DB_PWD" = 'a PWD b' ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
SCORE = "echo '{\"score\": 1}' > /logs/verifier/reward.json"
CHANGED = {
    "runs": {},
    "unsolved": {"solution/solve.sh": None},
    "parts": {"tests/test.sh": PARTS, "solution/solve.sh": None},
    "late": {"tests/test.sh": LATE},
    "words": {"environment/Dockerfile": "FROM a\nENV DB_PWD='a PWD b'\nRUN\ttrue \\\n\n  more\nWORKDIR /app",
              "instruction.md": "\ufeffWrite 3 to out.",
              "tests/test.sh": WORDS},
    "slow": {"tests/test.sh": "#!/bin/sh\nsleep 9", "task.toml": "[verifier]\ntimeout_sec = 1",
             "solution/solve.sh": None},
}  # fmt: skip
REFUSED = {
    "apt": ({"environment/Dockerfile": "FROM a\nRUN apt-get update"}, "RUN apt-get fails in the sandbox"),
    "place": ({"environment/Dockerfile": "FROM a\nCOPY data /etc/x"}, "COPY data fails in the sandbox"),
    "missing": ({"environment/Dockerfile": "FROM a\nCOPY nothing /x"}, "COPY nothing fails in the sandbox"),
    "stage": ({"environment/Dockerfile": "FROM a\nFROM b"}, "FROM: expected a step in a folder"),
    "image": ({"environment/Dockerfile": "FROM a\nCOPY --from=b /c /d"}, "COPY: expected a step in a folder"),
    "entry": ({"environment/Dockerfile": "FROM a\nENTRYPOINT x"}, "ENTRYPOINT: expected a step in a folder"),
    "compose": ({"environment/docker-compose.yaml": ""}, "expected a Dockerfile alone"),
    "gpus": ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus needs more than a folder"),
    "steps": ({"task.toml": "[[steps]]\nname = 'a'"}, "steps needs more than a folder"),
    "toml": ({"task.toml": "["}, "expected a task.toml of Harbor"),
    "hasty": ({"environment/Dockerfile": "FROM a\nRUN sleep 9",
               "task.toml": "[environment]\nbuild_timeout_sec = 1"}, "a step fails in the sandbox"),
    "lines": ({"task.toml": '[environment.env]\nTWO = "a\\nb"'}, "a step fails in the sandbox"),
    "seconds": ({"task.toml": '[verifier]\ntimeout_sec = "soon"'}, "timeout_sec: expected seconds"),
    "never": ({"task.toml": "[environment]\nbuild_timeout_sec = inf"}, "build_timeout_sec: expected seconds"),
    "list": ({"task.toml": "[verifier]\nenv = ['A=1']"}, "env: expected a table"),
    "number": ({"task.toml": "[environment.env]\nA = true"}, "env: A: expected text, in quotes"),
    "variable": ({"task.toml": "[verifier.env]\nA-B = 1"}, "env: expected names of variables"),
    "folder": ({"task.toml": "[environment]\nworkdir = '/etc/no'"}, "a step fails in the sandbox"),
    "latin": ({"instruction.md": b"Schreib \xe4."}, "expected UTF-8"),
    "empty": ({"instruction.md": "\n"}, "expected an instruction"),
    "{gold}": ({}, "expected a name that an answer can be"),
    "pipe": ({"tests/pipe": None}, "expected files, folders and links alone"),
    "half": ({"tests/test.sh": SCORE.replace("}", "")}, "the tests write no reward"),
    "other": ({"tests/test.sh": SCORE}, "the tests write no reward"),
    "secret": ({"task.toml": '[verifier.env]\nKEY = "${KEY}"'}, "env needs a value of the machine's"),
    "prompt": ({"instruction.md": None}, "expected instruction.md"),
    "no reward": ({"tests/test.sh": "#!/bin/sh\ntrue"}, "the tests write no reward"),
    "wrong": ({"solution/solve.sh": "echo 4 > out"}, "expected more reward for the solution"),
    "tool": ({"tests/test.sh": "#!/bin/sh\nuvx pytest\necho 0 > /logs/verifier/reward.txt"},
             "the tests miss something (not found)"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def sandboxes():
    yield
    Workspace.end()


def write(folder, changes):
    for name, text in (TASK | changes).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_task_alone_has_its_own_place_and_a_folder_without_one_is_an_error(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(tmp_path / "gpus", REFUSED["gpus"][0])
    (out / "earlier").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["harbor_tasks", str(tmp_path / "gpus"), "--out", str(out)])
    harbor_tasks.main()
    assert {path.name for path in out.iterdir()} == {"earlier", "tasks.jsonl"}
    monkeypatch.setattr(sys, "argv", ["harbor_tasks", str(tmp_path / "nowhere"), "--out", str(out)])
    with pytest.raises(ValueError, match=r"nowhere: expected tasks, folders with a task.toml, found none"):
        harbor_tasks.main()


def test_tasks_become_rows_or_are_refused_by_reason(tmp_path, monkeypatch, capsys):
    for name, changes in CHANGED.items():
        write(tmp_path / "tasks/set" / name, changes)
    for name, (changes, _) in REFUSED.items():
        write(tmp_path / "tasks" / name, changes)
    os.mkfifo(tmp_path / "tasks/pipe/tests/pipe")
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["harbor_tasks", str(tmp_path / "tasks"), "--out", str(out)])
    harbor_tasks.main()
    printed = capsys.readouterr().out
    for name, (_, reason) in REFUSED.items():
        assert f" refused: {reason}\n" in printed, (name, printed)
    found = re.findall(r"^(.*): refused: ", printed, re.MULTILINE)
    assert sorted(found) == sorted(REFUSED)
    assert f"\n6 of {6 + len(REFUSED)} tasks run, 3 with a solution that is graded higher\n" in printed
    solved = [f"{name}: runs; reward 0, solved 1" for name in ("runs", "late", "words")]
    for said in (*solved, "parts: runs; reward 0.25", "slow: runs; reward 0"):
        assert f"\nset/{said}\n" in printed
    rows = [json.loads(line) for line in (out / "tasks.jsonl").read_text().splitlines()]
    assert {row["answer"] for row in rows} == {f"set/{name}" for name in CHANGED}
    assert {row["question"] for row in rows} == {"Write 3 to out."}

    options = harbor_tasks.OPTIONS | {"hidden": f"{out}/{{gold}}/tests.tar"}
    task = made(f"{out}/{{gold}}/files.tar", gold="set/runs", **options)
    # what a policy leaves where the tests will be does not stay there
    call(task, "run", command="mkdir -p /tests; touch /tests/conftest.py; echo 1 > /logs/verifier/reward.txt")
    grade = task.grade()
    assert grade.reward == 0.0
    assert grade.detail.startswith("/app|/srv/x|a b|two words|it's red|made\n$WHERE\n1 2\n1 2|cat: out:")
    left = "mkdir /.tests; touch /.tests/conftest.py"
    assert call(task, "run", command=f"{left}; echo 3 > out; pwd") == "/app"
    assert task.grade().reward == 1.0


CHECKS = """\
#!/bin/bash
python3 -m pytest -q /tests/test_outputs.py
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


def test_pytest_takes_no_configuration_that_the_policy_left_above_the_tests(tmp_path, monkeypatch):
    changes = {
        "environment/Dockerfile": "FROM a\nCOPY site /site\nENV PYTHONPATH=/site\nWORKDIR /app\n",
        "tests/test.sh": CHECKS,
        "tests/test_outputs.py": "def test_out():\n    assert open('/app/out').read().strip() == '3'\n",
    }
    write(tmp_path / "task", changes)
    copy_pytest(tmp_path / "task/environment/site")
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["harbor_tasks", str(tmp_path / "task"), "--out", str(out)])
    harbor_tasks.main()
    options = harbor_tasks.OPTIONS | {"hidden": f"{out}/task/tests.tar"}
    task = made(f"{out}/task/files.tar", **options)
    left = "printf '[pytest]\n' > /pytest.ini; printf 'import os\nos._exit(0)\n' > /conftest.py"
    call(task, "run", command=left)
    assert task.grade().reward == 0.0
    call(task, "run", command="echo 3 > out")
    assert task.grade().reward == 1.0
