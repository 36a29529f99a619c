"""Contents of a run's inputs: a resumed run refuses others than those that it began with."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_eqlen.recipe import contents
from megatron_eqlen.recipe.contents import BLOCK, BLOCKS, FILE, ContentsError, function
from megatron_eqlen.recipe.inputs import keep_inputs
from megatron_eqlen.recipe.plugins import digests
from tests.kit.report_runs import recipe

ROWS = [f'{{"question": "Compute {n}+1.", "answer": "{n + 1}"}}\n' for n in range(9)]


GRADER = """
from own_helpers import VALUE as worth

TABLE = {"right": 1.0}


def grade(question, response, gold):
    return TABLE["right"] * worth
"""


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Return a recipe whose model, rows and grader lie beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_grader", "own_helpers", "own_agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in {
        "base/chat_template.jinja": "{{ messages }}", "base/.cache": "", "rows.jsonl": "".join(ROWS),
        "own_grader.py": GRADER, "own_helpers.py": "VALUE = 1.0\n", "notes.txt": "one\n",
        "own_agent.py": "def play(base_url, prompt, seed, notes): return 1.0\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with (tmp_path / "base/model.safetensors").open("wb") as file:
        file.truncate(3 * BLOCK * BLOCKS)
    (tmp_path / "run").mkdir()
    source = {"name": "sums", "reader": "jsonl", "path": "rows.jsonl", "grader": "own_grader:grade"}
    sources = [source, {"name": "deepmath", "path": "org/on-the-hub"}]
    options = {"function": "own_agent:play", "notes": "notes.txt"}
    kept = {"environment": {"name": "agent", "options": options}, "sampling": "independent"}
    rows = {"packing": {"max_tokens_per_row": 16384}}
    return recipe(Path("base"), data={"sources": sources}, **kept, **rows)


def replacing(old: str, new: str):
    return lambda file: file.write_text(file.read_text().replace(old, new))


def test_weights_are_what_is_loaded_without_copies_for_other_programs(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = contents.weights(tmp_path)
    (tmp_path / "onnx").mkdir()
    for name in ("onnx/model.safetensors", "pytorch_model.bin", "README.md"):
        (tmp_path / name).write_bytes(b"2")
    assert contents.weights(tmp_path) == before != {}
    (tmp_path / "model.safetensors").write_bytes(b"3")
    assert contents.weights(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["merges.txt", "added_tokens.json", "additional_chat_templates/tool_use.jinja"]
)
def test_each_file_that_decides_tokens_is_part_of_the_function_that_a_model_is(tmp_path, monkeypatch, name):
    @dataclasses.dataclass
    class Config:
        layers: int = 1

    monkeypatch.setattr(contents, "read_config", lambda model: Config())
    before = function(tmp_path, "float32")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    assert function(tmp_path, "float32").keys() - before.keys() == {name}


def write_in_the_middle(path, data: bytes) -> None:
    """Overwrite bytes without a change of size."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(data)


@pytest.mark.parametrize(("file", "change", "what"), [
    ("rows.jsonl", lambda file: file.write_text("".join(reversed(ROWS))), "has changed"),
    ("base/model.safetensors", lambda file: write_in_the_middle(file, os.urandom(6 * BLOCK)), "has changed"),
    ("base/chat_template.jinja", Path.unlink, "is missing"),
    ("base/generation_config.json", Path.touch, "is new"),
    ("notes.txt", lambda file: file.write_text("two"), "has changed"),
    ("own_agent.py", replacing("1.0", "2.0"), "own_agent:play has changed"),
    ("own_grader.py", lambda file: file.write_text("grade = max"), "own_grader:grade has changed"),
    ("own_helpers.py", replacing("1.0", "2.0"), "own_grader:grade/own_helpers has changed"),
])  # fmt: skip
def test_a_resume_names_the_input_that_was_replaced(inputs, tmp_path, file, change, what):
    keep_inputs(tmp_path / "run", inputs)
    (tmp_path / "base/.cache").write_text("tools write here")
    keep_inputs(tmp_path / "run", inputs)
    change(tmp_path / file)
    named = what if file.startswith("own_") else f"began with other inputs: {file} {what}; put them back"
    with pytest.raises(ContentsError, match=named):
        keep_inputs(tmp_path / "run", inputs)
    (tmp_path / "run" / FILE).unlink()
    keep_inputs(tmp_path / "run", inputs)


@pytest.mark.parametrize("key", ["template", "hidden", "expected"])
@pytest.mark.parametrize("name", ["test.py", ".env", ".tests/test.py"])
def test_a_resume_names_the_file_of_a_task_that_was_replaced(inputs, tmp_path, key, name):
    """A task may consist of hidden files; those of Git change with each command."""
    for folder in ("tasks/one/.tests", "tasks/one/.git", "tool"):
        (tmp_path / folder).mkdir(parents=True)
    options = {"template": "repository@main", "readable": ["tool"], key: "tasks"}
    environment = inputs.environment.model_copy(update={"name": "workspace", "options": options})
    workspace = inputs.model_copy(update={"environment": environment})
    keep_inputs(tmp_path / "run", workspace)
    (tmp_path / "tool/cache").touch()
    (tmp_path / "tasks/one/.git/index").touch()
    keep_inputs(tmp_path / "run", workspace)
    (tmp_path / "tasks/one" / name).touch()
    with pytest.raises(ContentsError, match=re.escape(f"began with other inputs: tasks/one/{name} is new")):
        keep_inputs(tmp_path / "run", workspace)


def test_a_resume_names_the_branch_of_tasks_that_has_moved(inputs, tmp_path):
    def git(*words):
        named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path / "tasks", *named, *words], check=True, capture_output=True)

    def commit(text):
        (tmp_path / "tasks/src/task.py").write_text(text)
        git("add", ".")
        git("commit", "--message", text)

    (tmp_path / "tasks/src").mkdir(parents=True)
    git("init", "--initial-branch=main")
    commit("one")
    options = {"template": "tasks@main:src", "hidden": "tasks@main~0", "expected": "tasks@{gold}"}
    environment = inputs.environment.model_copy(update={"name": "workspace", "options": options})
    workspace = inputs.model_copy(update={"environment": environment})
    keep_inputs(tmp_path / "run", workspace)
    git("commit", "--allow-empty", "--message", "the same files")
    keep_inputs(tmp_path / "run", workspace)
    commit("two")
    with pytest.raises(
        ContentsError, match="inputs: tasks@main:src has changed, tasks@main~0 has changed; put"
    ):
        keep_inputs(tmp_path / "run", workspace)
    git("reset", "--hard", "HEAD~1")
    keep_inputs(tmp_path / "run", workspace)


def test_a_resume_does_not_mind_a_comment(inputs, tmp_path):
    keep_inputs(tmp_path / "run", inputs)
    replacing("    return TABLE", "    # a comment\n\n    return TABLE")(tmp_path / "own_grader.py")
    keep_inputs(tmp_path / "run", inputs)


@pytest.mark.parametrize("file", [
    "rules.py", "__init__.py", "parts.py", "deep.py", "late.py", "space/far.py", "dynamic.py", "named.py",
])  # fmt: skip
def test_code_of_a_package_is_followed_through_its_imports(tmp_path, monkeypatch, file):
    package = tmp_path / f"own_{tmp_path.name.replace('-', '_')}"
    (package / "space").mkdir(parents=True)  # without __init__.py
    text = (
        f"from .parts import *\nfrom .deep import depth\nimport {package.name}.space.far\n"
        "from . import dynamic\n"
        f"def grade(text):\n    import importlib\n    import {package.name}.late\n"
        f"    return importlib.import_module('{package.name}.named').five\n"
    )
    for name in ("__init__", "parts", "deep", "late", "space/far", "dynamic", "named", "unused"):
        (package / f"{name}.py").write_text("value = 1\n")
    (package / "rules.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = digests(f"{package.name}.rules:grade")
    (package / "unused.py").write_text("value = 2\n")
    assert digests(f"{package.name}.rules:grade") == before
    with (package / file).open("a") as written:
        written.write("value = 2\n")
    assert digests(f"{package.name}.rules:grade") != before
