"""Contents of a run's inputs: a resumed run refuses others than those that it began with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_eqlen.recipe.contents import BLOCK, BLOCKS, FILE, ContentsError
from megatron_eqlen.recipe.inputs import keep_inputs
from megatron_eqlen.recipe.plugins import digests
from tests.kit.report_runs import recipe

ROWS = [f'{{"question": "Compute {n}+1.", "answer": "{n + 1}"}}\n' for n in range(9)]


GRADER = """
import own_helpers
from own_helpers import VALUE as worth

TABLE = {}
TABLE["right"] = 1.0
PRINTED = 3


class Rules:
    weight = 1.0


def grade(question, response, gold):
    from own_helpers import late
    return TABLE["right"] * worth * own_helpers.clean(late(Rules.weight))


def another(question, response, gold): return PRINTED
"""
HELPERS = """
VALUE = 1.0
def clean(text): return text
def late(text): return text
def unused(text): return text
"""


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Return a recipe whose model, rows and grader lie beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_grader", "own_helpers", "own_agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in {
        "base/chat_template.jinja": "{{ messages }}",
        "base/.cache": "",
        "rows.jsonl": "".join(ROWS),
        "own_grader.py": GRADER,
        "own_helpers.py": HELPERS,
        "own_agent.py": "def play(base_url, prompt, seed, notes): return 1.0\n",
        "notes.txt": "one\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with (tmp_path / "base/model.safetensors").open("wb") as file:
        file.truncate(3 * BLOCK * BLOCKS)
    (tmp_path / "run").mkdir()
    source = {"name": "sums", "reader": "jsonl", "path": "rows.jsonl"}
    source["grader"] = "own_grader:grade"
    sources = [source, {"name": "deepmath", "path": "org/on-the-hub"}]
    options = {"function": "own_agent:play", "notes": "notes.txt"}
    kept = {"environment": {"name": "agent", "options": options}, "sampling": "independent"}
    rows = {"packing": {"max_tokens_per_row": 16384}}
    return recipe(Path("base"), data={"sources": sources}, **kept, **rows)


def replacing(old: str, new: str):
    return lambda file: file.write_text(file.read_text().replace(old, new))


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
    ("own_grader.py", replacing("1.0", "2.0"), "own_grader:grade/own_grader:Rules has changed"),
    ("own_grader.py", replacing("own_helpers.clean", "own_helpers.unused"), "own_grader:grade has changed"),
    ("own_grader.py", replacing("VALUE as", "late as"), "own_grader:grade/own_grader:worth has changed"),
    ("own_helpers.py", replacing("1.0", "2.0"), "own_grader:grade/own_helpers:VALUE has changed"),
    ("own_helpers.py", replacing("clean(text): return", "clean(text): return 2 *"), "own_helpers:clean has"),
    ("own_helpers.py", replacing("late(text): return", "late(text): return 2 *"), "own_helpers:late has"),
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


def test_a_resume_does_not_mind_what_the_runs_code_does_not_use(inputs, tmp_path):
    keep_inputs(tmp_path / "run", inputs)
    replacing("PRINTED = 3", "PRINTED = 4\ndef third(): return grade")(tmp_path / "own_grader.py")
    replacing("    return TABLE", "    # a comment\n    return TABLE")(tmp_path / "own_grader.py")
    replacing("unused(text): return", "unused(text): return 2 *")(tmp_path / "own_helpers.py")
    keep_inputs(tmp_path / "run", inputs)


@pytest.mark.parametrize(("file", "old", "new", "changed"), [
    ("rules.py", "total += 2", "total += 3", True),
    ("rules.py", "total = 9", "total = 8", False),
    ("parts.py", "return text", "return 2 * text", True),
    ("deep.py", "depth = 1", "depth = 2", True),
    ("whole.py", "one = 1", "one = 2", True),
    ("whole.py", "other = 1", "other = 2", False),
    ("late.py", "two = 1", "two = 2", True),
    ("space/far.py", "three = 1", "three = 2", True),
    ("dynamic.py", "return 1", "return 2", True),
    ("rules.py", "script = 0", "script = 1", False),
    ("rules.py", "script = 2", "script = 3", True),
    ("rules.py", "rule_a = 1", "rule_a = 2", True),  # from here on: of a registry
    ("rules.py", "unused = 1", "unused = 2", False),
    ("more.py", "rule_b = 1", "rule_b = 2", True),
    ("more.py", "rule_c = 1", "rule_c = 2", True),
    ("more.py", "Sub = 1", "Sub = 2", True),
    ("named.py", "five = 1", "five = 2", True),
])  # fmt: skip
def test_code_of_a_package_is_followed_through_its_imports(tmp_path, monkeypatch, file, old, new, changed):
    package = tmp_path / f"own_{tmp_path.name.replace('-', '_')}"
    package.mkdir()
    texts = {
        "__init__.py": "",
        "rules.py": "from .parts import *\nfrom .deep import depth\ntotal = 1\ntotal += 2\n"
        f"from . import dynamic, whole\nimport {package.name}.space.far\ndef grade(text):\n"
        f"    import {package.name}.late\n    _ = whole.one, dynamic.four, {package.name}.space.far.three\n"
        "    import importlib\n    _ = RULES, Base.known, script\n"
        "    _ = importlib.import_module('PACKAGE.named').five\n"
        "    return total * star(depth)\nif __name__ == '__main__':\n    total = 9\n    script = 0\n"
        "else:\n    script = 2\nfrom .rules_of import RULES, register, Base\nfrom . import more\n"
        "@register\ndef first():\n    rule_a = 1\nOTHER = []\ndef note(f): OTHER.append(f)\n"
        "@note\ndef noted():\n    unused = 1\n".replace("PACKAGE", package.name),
        "rules_of.py": "RULES = []\ndef register(f): RULES.append(f)\n"
        "class Base:\n    known = []\n    def __init_subclass__(cls): Base.known.append(cls)\n",
        "more.py": "from .rules_of import *\n@register\ndef second():\n    rule_b = 1\n"
        "def third():\n    rule_c = 1\nregister(third)\nclass Own(Base):\n    Sub = 1\n",
        "named.py": "five = 1\n",
        "whole.py": "one = 1\nother = 1\n",
        "late.py": "two = 1\n",
        "space/far.py": "three = 1\n",  # without __init__.py
        "dynamic.py": "def __getattr__(name): return 1\n",
        "parts.py": "def star(text): return text\n",
        "deep.py": "depth = 1\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = digests(f"{package.name}.rules:grade")
    replacing(old, new)(package / file)
    assert (digests(f"{package.name}.rules:grade") != before) == changed


def test_digests_do_not_depend_on_the_order_of_sets(tmp_path):
    (tmp_path / "own").mkdir()
    for name in ("__init__", "one", "two"):
        (tmp_path / f"own/{name}.py").write_text("value = 1\n")
    (tmp_path / "rules.py").write_text("import own.one, own.two\ndef grade(text): return own.one.value\n")
    code = "from megatron_eqlen.recipe.plugins import digests; print(sorted(digests('rules:grade').items()))"
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    found = {
        subprocess.check_output([sys.executable, "-c", code],
                                env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path})
        for seed in "14"
    }  # fmt: skip
    assert len(found) == 1
