#!/usr/bin/env python
"""Make rows of a workspace from tasks in Harbor's layout (https://www.harborframework.com/docs/tasks):
folders with an instruction, task.toml, a Dockerfile and tests.

    tools/harbor_tasks.py TASKS --out OUT --readable /venv --variable PATH=/venv/bin:/usr/bin:/bin

A Dockerfile becomes a script, which runs in the sandbox for commands: the machine's own programs stand in for
the image, and a step that needs a network, rights or another place of the machine (all of /opt for a venv
below it) is refused by name. Then the tests must grade the task as it is, and its solution, if there is one,
must get a reward above that. What remains is in OUT: tasks.jsonl, and NAME/files.tar and NAME/tests.tar.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_eqlen.environments.workspace import PackedFolder, Workspace, laid_over
from megatron_eqlen.graders.sandbox.client import SandboxError, pack_folder
from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.types import Grade, Prompt

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.demonstrations import write_lines

TESTS = Path("tests", "test.sh")
NEEDED = "instruction.md", "environment/Dockerfile", TESTS
NEEDS = {
    "": ("steps",),
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"),
    "verifier": ("environment", "collect"),
}
"""Keys of task.toml, by table, for which a folder is not enough."""
NO_EFFECT = ("FROM", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "USER", "VOLUME", "STOPSIGNAL")
CONTEXT = "root/.context"
BEGIN = f"""\
copy() {{
  to="${{@: -1}}"; [ $# -le 2 ] || to="$to/"
  case "$to" in */) mkdir -p "$to";; *) mkdir -p "$(dirname "$to")";; esac || return
  for name in "${{@:1:$#-1}}"; do for path in /{CONTEXT}/$name; do
    if [ -d "$path" ]; then mkdir -p "$to" && cp -R "$path/." "$to"; else cp "$path" "$to"; fi || return
    if [ -z "$mode" ]; then :
    elif [ -f "$path" ] && [ -d "$to" ]; then chmod "$mode" "$to/${{path##*/}}"
    elif [ -f "$path" ]; then chmod "$mode" "$to"
    else (cd "$path" && find . -mindepth 1 -depth ! -type l -print0) | (cd "$to" && xargs -r0 chmod "$mode")
    fi || return
  done; done
}}
mkdir -p /tmp /logs/agent /logs/verifier; cd /
export -p > /root/.before
"""
END = f"""\
[ "$PWD" != / ] || {{ mkdir -p /app; cd /app; }}
export -p | grep -vxFf /root/.before | grep -vE '^declare -x (EQLEN_SEED|OLDPWD|PWD|SHLVL)\\b' > /root/.set
! grep -F "=\\$'" /root/.set || exit
sed 's/^declare -x/export/' /root/.set > /root/.profile
printf 'cd "%s"\\n' "$PWD" >> /root/.profile; rm -r /{CONTEXT} /root/.before /root/.set
"""
VERIFY = """\
cd /; chmod -R u+rwX /tests /logs 2> /dev/null; rm -rf /tests /logs
mkdir -p /logs/verifier && mv /{place} /tests && cd "$OLDPWD" || exit
{variables}chmod +x /tests/test.sh
grep -qs '\\[.*pytest' /tests/*.ini /tests/*.toml /tests/*.cfg || echo '[pytest]' > /tests/pytest.ini
timeout {seconds:f} bash -c /tests/test.sh
ended=$?; cd /logs/verifier && {{ [ -e reward.txt ] || mv reward.json reward.txt 2> /dev/null ||
    [ $ended != 124 ] || echo 0 > reward.txt; }}
"""
OPTIONS: dict[str, Any] = {
    "test": "bash /.verify",
    "reward": "logs/verifier/reward.txt",
    "root": True,
    "folder_mb": 1024,
    "memory_mb": 2048,
}


class Refused(ValueError):
    """A task that a folder cannot hold. ``reason``: the same for tasks of a kind."""

    def __init__(self, where: Path, reason: str, found: object) -> None:
        super().__init__(f"{where}: {reason}, found {found}")
        self.reason = reason


def settings(task: Path) -> dict[str, Any]:
    """Return the tables of task.toml that count."""
    try:
        found = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
        tables = {name: dict(found.get(name, {})) for name in NEEDS if name} | {"": found}
    except (ValueError, TypeError) as error:
        raise Refused(task / "task.toml", "expected a task.toml of Harbor", error) from None
    for name, keys in NEEDS.items():
        for key in keys:
            if value := tables[name].get(key):
                raise Refused(task / "task.toml", f"{name}.{key} needs more than a folder".strip("."), value)
    if (mode := tables["verifier"].get("environment_mode", "shared")) != "shared":
        raise Refused(task / "task.toml", "expected verifier.environment_mode: shared", mode)
    for name in NEEDED:
        if not (task / name).is_file():
            raise Refused(task / name, f"expected {name}", "none")
    for name in ("docker-compose.yaml", ".dockerignore"):
        if (file := task / "environment" / name).exists():
            raise Refused(file, "expected a Dockerfile alone", name)
    for file in task.rglob("*"):
        if not (file.is_symlink() or file.is_file() or file.is_dir()):
            raise Refused(file, "expected files, folders and links alone", "another kind")
    return tables


def seconds(task: Path, table: dict[str, Any], key: str) -> float:
    """Return a limit of task.toml in seconds."""
    if type(value := table.get(key, 600.0)) not in (int, float) or not 0 < value < 1e9:
        raise Refused(task / "task.toml", f"{key}: expected seconds", repr(value))
    return float(value)


def instruction(task: Path) -> str:
    """Return the text that a policy gets."""
    file = task / "instruction.md"
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(file, "expected UTF-8", error) from None
    if not text.strip():
        raise Refused(file, "expected an instruction", "an empty file")
    return text


def exports(task: Path, table: dict[str, Any]) -> str:
    """Return the shell's words that set a table's variables."""
    if not isinstance(table.get("env", {}), dict):
        raise Refused(task / "task.toml", "env: expected a table", repr(table["env"]))
    for name, value in table.get("env", {}).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise Refused(task / "task.toml", "env: expected names of variables", repr(name))
        if not isinstance(value, str):
            raise Refused(task / "task.toml", f"env: {name}: expected text, in quotes", repr(value))
        if "${" in value:
            raise Refused(task / "task.toml", "env needs a value of the machine's", f"{name}={value}")
    quoted = {name: value.replace("'", "'\\''") for name, value in table.get("env", {}).items()}
    return "".join(f"export {name}='{value}'\n" for name, value in quoted.items())


def steps(file: Path, given: re.Pattern[str] | None) -> Iterator[str]:
    """Yield the instructions of a Dockerfile in bash, without RUN of what the machine has ``given``."""
    lines, seen = file.read_text(encoding="utf-8", errors="replace").splitlines(), 0
    while lines:
        text, goes_on = "", True
        while goes_on and lines:
            if (line := lines.pop(0).strip()) and not line.startswith("#"):
                text, goes_on = text + line.removesuffix("\\") + " ", line.endswith("\\")
        word, rest = [*text.split(maxsplit=1), "", ""][:2]
        word, rest = word.upper(), rest.strip()
        for end in re.findall(r"<<-?\s*[\"']?([A-Za-z_]\w*)", rest) if word == "RUN" else ():
            if end in lines:
                at = lines.index(end) + 1
                rest, lines = "\n".join([rest, *lines[:at]]), lines[at:]
        seen += word == "FROM"
        flags = re.findall(r"^(?:--ch(?:own|mod)=\S+ +)+", rest) if word in ("COPY", "ADD") else []
        plain, mode = rest.removeprefix("".join(flags)), "".join(re.findall(r"--chmod=(\S+)", "".join(flags)))
        unpacks = word == "ADD" and re.search(r"://|\.(tar|tgz|gz|bz2|xz)\b", rest)
        odd = word in ("RUN", "COPY", "ADD") and plain.startswith(("--", "<<", "["))
        if seen > 1 or unpacks or odd:
            raise Refused(file, f"{word}: expected a step in a folder", f"{text:.160}")
        name, _, value = rest.partition(" ")
        step = {
            "RUN": f"(\n{rest}\n)",
            "COPY": f'{{ set -f; args=({plain}); set +f; mode="{mode}" copy "${{args[@]}}"; }}',
            "WORKDIR": f"mkdir -p {rest} && cd {rest}",
            "ENV": f"export {rest}" if "=" in name else f"export {name}='{value.strip()}'",
        }.get({"ADD": "COPY", "ARG": "ENV"}.get(word, word))
        if word == "RUN" and given and given.search(rest):
            continue
        if step and (word != "ARG" or "=" in name):
            shown = f"{text.strip():.160}".replace("'", "")
            yield f"{step} || {{ status=$?; printf '\\n%s %s\\n' '{shown}: status' $status; exit 1; }}\n"
        elif word not in ("", "ARG", *NO_EFFECT):
            raise Refused(file, f"{word}: expected a step in a folder", f"{text:.160}")


def archive(to: Path, folders: dict[str, Path | str]) -> Path:
    """Write an archive of folders and texts at their places."""
    with tempfile.TemporaryDirectory() as place:
        for name, content in folders.items():
            target = Path(place, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copytree(content, target, symlinks=True)
            else:
                target.write_text(content)
        to.write_bytes(pack_folder(place))
    return to


def workspace(options: dict[str, Any]) -> Workspace:
    return Workspace(Prompt("", [], "", "", ""), 0, **options)


def make(task: Path, to: Path, given: re.Pattern[str] | None, options: dict[str, Any]) -> tuple[str, str]:
    """Write a task's archives, and try them. Return its instruction and the rewards."""
    tables, question = settings(task), instruction(task)
    to.mkdir(parents=True, exist_ok=True)
    file, environment = task / "environment/Dockerfile", tables["environment"]
    script = BEGIN + "".join(steps(file, given)) + f'cd "{environment.get("workdir") or "."}" || exit\n'
    script += exports(task, environment) + END
    # of another name than the template: a workspace reads a name once
    context = archive(to / "context.tar", {CONTEXT: task / "environment"})
    limit = seconds(task, environment, "build_timeout_sec")
    made = workspace(options | {"template": str(context), "timeout": limit})
    end = made.execute(["bash", "-c", script])
    if end.status != "ended" or end.code or end.unkept:
        said = end.unkept or f"{end.status}: " * (end.code is None) + " ".join(end.output.split())
        step = re.search(r"\n(\w+ \S+)[^\n]*: status \d+\n$", end.output)
        raise Refused(file, f"{step[1] if step else 'a step'} fails in the sandbox", said[-300:])
    context.unlink()
    (template := to / "files.tar").write_bytes(made.folder.read())
    longest = seconds(task, tables["verifier"], "timeout_sec")
    # a place that no policy can guess: what it left there would stay beside the tests
    place = f".{hashlib.sha256(pack_folder(task / 'tests')).hexdigest()}"
    verify = VERIFY.format(place=place, variables=exports(task, tables["verifier"]), seconds=longest)
    hidden = archive(to / "tests.tar", {place: task / "tests", ".verify": verify})
    options |= {"template": str(template), "hidden": str(hidden), "timeout": longest + 60}
    try:
        before = after = graded(workspace(options))
        if solved := (task / "solution/solve.sh").is_file():
            after = solution_grade(task, to, options)
    except ValueError as error:
        raise Refused(task / TESTS, "the tests write no reward", error) from None
    if solved and after.reward > before.reward:
        return question, f"reward {before.reward:g}, solved {after.reward:g}"
    if missing := re.search(
        r"command not found|No module named \S+|(?<=: )not found|Temporary failure", after.detail
    ):
        raise Refused(task / TESTS, f"the tests miss something ({missing[0]})", after.detail)
    if solved:
        raise Refused(task / "solution/solve.sh", "expected more reward for the solution", after)
    return question, f"reward {before.reward:g}"


def solution_grade(task: Path, to: Path, options: dict[str, Any]) -> Grade:
    """Return the grade of a task's own solution."""
    solution = archive(to / "solution.tar", {"solution": task / "solution"})
    made = workspace(options)
    made.folder = PackedFolder.of(laid_over(made.folder.read(), solution.read_bytes()))
    solution.unlink()
    made.execute(["bash", "/solution/solve.sh"])
    return graded(made)


def graded(made: Workspace) -> Grade:
    grade = made.grade()
    assert isinstance(grade, Grade)
    return grade


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path, help="a folder of tasks")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readable", action="append", default=[], help="the workspace's option readable")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--given", type=re.compile, metavar="REGEX", help="RUN steps of which the machine has the result"
    )
    args = parser.parse_args()
    options = OPTIONS | {
        "readable": args.readable,
        "variables": dict(text.split("=", 1) for text in args.variable),
    }
    rows, reasons, solved = list[dict[str, str]](), Counter[str](), 0
    tasks = args.tasks.resolve()
    if not (files := sorted(tasks.rglob("task.toml"))):
        raise ValueError(f"{args.tasks}: expected tasks, folders with a task.toml, found none")
    for file in files:
        # A task given alone has its folder's name, and no other's place in OUT.
        name = str(file.parent.relative_to(tasks)) if file.parent != tasks else tasks.name
        try:
            if not name.isprintable() or "{gold}" in name:
                raise Refused(file.parent, "expected a name that an answer can be", repr(name))
            question, rewards = make(file.parent, args.out / name, args.given, dict(options))
            print(f"{name}: runs; {rewards}", flush=True)
            solved += "solved" in rewards
            rows.append({"question": question, "answer": name})
        except (Refused, SandboxError) as refused:
            shutil.rmtree(args.out / name, ignore_errors=True)
            reasons[getattr(refused, "reason", "the sandbox fails")] += 1
            print(f"{name}: refused: {refused}", flush=True)
    Workspace.end()
    args.out.mkdir(parents=True, exist_ok=True)
    write_lines(args.out / "tasks.jsonl", rows)
    all_tasks = len(rows) + reasons.total()
    print(f"{len(rows)} of {all_tasks} tasks run, {solved} with a solution that is graded higher")
    print("".join(f"{count:6} refused: {reason}\n" for reason, count in reasons.most_common()), end="")


if __name__ == "__main__":
    run_script(main)
