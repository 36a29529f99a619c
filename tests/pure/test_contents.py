"""Contents of a run's inputs: a resumed run refuses others than those that it began with."""

import os
import sys
from pathlib import Path

import pytest

from megatron_eqlen.recipe.contents import BLOCK, BLOCKS, FILE, ContentsError
from megatron_eqlen.recipe.inputs import keep_inputs
from tests.kit.report_runs import recipe

ROWS = [f'{{"question": "Compute {n}+1.", "answer": "{n + 1}"}}\n' for n in range(9)]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Return a recipe whose model, rows and grader lie beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_grader", raising=False)
    for name, text in {
        "base/chat_template.jinja": "{{ messages }}",
        "base/.cache": "",
        "rows.jsonl": "".join(ROWS),
        "own_grader.py": "def grade(question, response, gold): return 1.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with (tmp_path / "base/model.safetensors").open("wb") as file:
        file.truncate(3 * BLOCK * BLOCKS)
    (tmp_path / "run").mkdir()
    source = {"name": "sums", "reader": "jsonl", "path": "rows.jsonl"}
    source["grader"] = "own_grader:grade"
    return recipe(Path("base"), data={"sources": [source, {"name": "deepmath", "path": "org/on-the-hub"}]})


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
    ("own_grader.py", lambda file: file.write_text("grade = max"), "has changed"),
])  # fmt: skip
def test_a_resume_names_the_input_that_was_replaced(inputs, tmp_path, file, change, what):
    keep_inputs(tmp_path / "run", inputs)
    (tmp_path / "base/.cache").write_text("tools write here")
    keep_inputs(tmp_path / "run", inputs)
    change(tmp_path / file)
    named = "own_grader:grade" if file == "own_grader.py" else file
    with pytest.raises(ContentsError, match=f"began with other inputs: {named} {what}; put them back"):
        keep_inputs(tmp_path / "run", inputs)
    (tmp_path / "run" / FILE).unlink()
    keep_inputs(tmp_path / "run", inputs)
