"""``eqlen new``: the files work as they are written, and so do the recipe's lines."""

import re
import subprocess
import sys

import pytest

from megatron_eqlen.cli.__main__ import COMMANDS, main
from megatron_eqlen.job import load
from tests.kit import ROOT

KINDS = COMMANDS["new"][1]["kind"][1]["choices"]
NAMES = {
    "reward": "written_reward:reward", "environment": "written_environment:Game",
    "objective": "written_objective:OBJECTIVE", "reader": "written_reader:read",
}  # fmt: skip


def test_the_written_tests_pass_and_the_printed_lines_make_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    printed = {}
    for kind in KINDS:
        assert main(["new", kind, f"written_{kind}"]) == 0
        printed[kind] = capsys.readouterr().out
    tried = subprocess.run([sys.executable, "-m", "pytest", "-q", "."], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stdout
    assert "5 passed" in tried.stdout
    for kind, text in printed.items():
        file, _, lines = text.partition("In a recipe:\n")
        assert file.startswith(f"written_{kind}.py, tried by: python -m pytest test_written_{kind}.py")
        (tmp_path / "mine.yaml").write_text(f"extends: {ROOT}/recipes/tiny_cpu.yaml\nname: mine\n{lines}")
        recipe = load(tmp_path / "mine.yaml", ["run_dir=x"])
        source = recipe.data.sources[0]
        assert NAMES[kind] in (source.grader, source.reader, recipe.environment.name, recipe.objective)


@pytest.mark.parametrize(("name", "message"), [
    ("kept", "test_kept.py: exists already"),
    ("folder", "folder: exists already"),
    ("json", "expected a name of your own, found the module json: .*json"),
    ("os.path", "letters, digits and _, found 'os.path'"),
    ("__main__", "letters, digits and _, found '__main__'"),
    ("class", "letters, digits and _, found 'class'"),
])  # fmt: skip
def test_a_name_that_is_taken_or_no_module_writes_nothing(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_kept.py").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    assert main(["new", "reward", name]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(tmp_path.iterdir()) == before
