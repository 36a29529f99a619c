"""Each thing that users add is one file of their own, in a package of their own, named in the recipe."""

from __future__ import annotations

import json
import sys

import pytest

from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.data.tokenizer_maker import write_hf_tokenizer
from megatron_eqlen.objectives.build import build_trees
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe_load import parse
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.tokenizer import load_tokenizer
from megatron_eqlen.types import Grade, Group, Prompt, Segment

OBJECTIVE = """
from megatron_eqlen.objectives.objective import Objective


def above_half(rewards, lengths):
    return [reward - 0.5 for reward in rewards]


HALF = Objective("half", above_half, "token-mean", "token", 0.1, 0.3)
"""

READER = """
import json
from megatron_eqlen.data.rows import Problem


def read(path, tally):
    for number, line in enumerate(path.read_text().splitlines()):
        question, answer = line.split(" = ")
        yield Problem(f"{path.name}#{number}", question, answer)
"""

GRADER = """
from megatron_eqlen.types import Grade


class Longer:
    def __init__(self, reward):
        self.workers = reward.workers

    def grade(self, texts, golds):
        return [Grade(float(len(text) > len(gold)), "scored") for text, gold in zip(texts, golds)]

    def close(self):
        pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's package ``mine``, found from the working directory as `eqlen` finds it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, source in {"__init__": "", "half": OBJECTIVE, "sums": READER, "longer": GRADER}.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def recipe(source: dict | None = None, **keys) -> Recipe:
    raw = {
        "name": "mine",
        "steps": 1,
        "sampling": "independent",
        "group_size": 2,
        "model": {"path": "model"},
        "data": {
            "max_prompt_length": 64,
            "instruction_role": "none",
            "sources": [{"name": "sums", "path": "sums.txt"} | (source or {})],
        },
        "rollout": {"max_response_length": 8},
        "packing": {"max_tokens_per_row": 128},
        "loss": {"kl_coef": 0.0},
    }
    return parse(raw | keys, "test")


def test_an_objective_is_one_file(package):
    mine = recipe(objective="mine.half:HALF")
    assert resolve(mine).clip_ratio_high == 0.3
    assert mine.method == "HALF"
    rollout = group([1.0, 1.0])
    (tree,), _ = build_trees([rollout], mine)
    assert [node.advantage for node in tree.nodes[1:]] == [0.5, 0.5], (
        "its own advantage, also of equal rewards"
    )
    assert [node.weight for node in tree.nodes[1:]] == [1 / 4, 1 / 4]


def test_a_reader_and_a_grader_are_one_file_each(package):
    (package / "sums.txt").write_text("1 + 1 = 2\n2 + 2 = 4\n")
    write_hf_tokenizer(package / "model", ["1 + 2 = 4"], vocab_size=300)
    mine = recipe({"reader": "mine.sums:read", "grader": "mine.longer:Longer"})
    tokenizer = load_tokenizer(package / "model")
    prompts = PromptSource(mine.data, tokenizer, seed=0)
    (prompt,) = prompts.next(1)
    prompts.close()
    assert prompt.question in ("1 + 1", "2 + 2")
    short, long = (Segment(tokenizer.encode(text), [0.0] * 9, "stop") for text in ("1", "1 + 2 = 4"))
    Scorer(mine.reward, tokenizer).score([Group(prompt, 0, [short, long])])
    assert [one.grade.reward for one in (short, long)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "mine.half:NOTHING"}, r"objective: mine\.half has no 'NOTHING'"),
        ({"objective": "mine.half:above_half"}, "expected a Objective, found a function"),
        ({"objective": "nowhere.at:ALL"}, "objective: 'nowhere.at:ALL' cannot be imported"),
        ({"source": {"reader": "mine.sums:none"}}, "data.sources.0.reader: mine.sums has no 'none'"),
        ({"source": {"reader": "depmath"}}, "nearest: 'deepmath'"),
        ({"source": {"grader": "maths"}}, "nearest: 'math'"),
    ],
)
def test_what_is_not_there_is_named_before_anything_starts(package, keys, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**keys)


def test_rows_cannot_name_code(package):
    """Import paths are the recipe's: a data file must not choose what is run."""
    (package / "rows.jsonl").write_text(
        json.dumps({"question": "?", "answer": "1", "grader": "mine.longer:Longer"})
    )
    write_hf_tokenizer(package / "model", ["1"], vocab_size=300)
    data = recipe({"path": "rows.jsonl", "reader": "jsonl"}).data
    with pytest.raises(ValueError, match="no usable row"):
        PromptSource(data, load_tokenizer(package / "model"), seed=0)


def group(rewards: list[float]) -> Group:
    completions = [Segment([5, 9], [-1.0, -1.0], "stop", Grade(reward, "scored")) for reward in rewards]
    return Group(Prompt("q", [1, 2], "?", "math", "1"), 0, completions)
