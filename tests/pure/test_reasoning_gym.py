"""Tasks of reasoning-gym: mixes, golds that lose nothing, and scores computed in the sandbox."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.recipe import DataRecipe, RewardRecipe, SourceRecipe
from megatron_eqlen.rewards.functions import referred
from recipes.reasoning_gym_tasks import GRADER, ReasoningGymGrader, TaskRows
from tests.kit import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="tools/setup installs it where a C compiler is"
)
READER = "recipes.reasoning_gym_tasks:read"


def mix(folder: Path, *datasets: dict, size: int = 400, **changes) -> Path:
    file = folder / "mix.yaml"
    file.write_text(yaml.safe_dump({"size": size, "seed": 7, "datasets": [*datasets]} | changes))
    return file


def test_a_mix_gives_each_task_its_share_and_the_same_rows_again(tmp_path):
    file = mix(tmp_path, {"name": "gcd", "weight": 3}, {"name": "chain_sum", "config": {"max_digits": 1}})
    source = SourceRecipe(name="gym", reader=READER, path=str(file))
    rows = open_source(source, Tally())
    shares = Counter(rows[number].row_id.partition("#")[0] for number in range(len(rows)))
    assert shares["gcd"] / len(rows) == pytest.approx(0.75, abs=0.06)
    assert [TaskRows(file)[number] for number in range(9)] == [rows[number] for number in range(9)]
    assert "<answer>" in str(rows[0].instruction)


class Words:
    """A tokenizer of one token a word."""

    special_tokens = ()

    def render_chat(self, messages, enable_thinking=None, tools=()):
        return " ".join(message["content"] for message in messages)

    def encode(self, text):
        return [1 for _ in text.split()]


def test_a_row_that_its_task_cannot_generate_is_counted_and_replaced(tmp_path):
    """No sum of two or three numbers below 10 is 900."""
    config = {"min_numbers": 2, "max_numbers": 3, "max_value": 10, "min_target": 900}
    file = mix(tmp_path, {"name": "countdown", "config": config}, {"name": "gcd"}, size=9)
    source = SourceRecipe(name="gym", reader=READER, path=str(file))
    prompts = PromptSource(DataRecipe(sources=[source], shuffle=False), Words(), seed=0)
    assert {prompt.prompt_id.partition("#")[0] for prompt in prompts.next(4)} == {"gym/gcd"}
    assert prompts.state_dict()["sources"]["gym"]["dropped"]["not_generated"] > 0
    assert 0 < len(list(TaskRows(file))) < 9


@pytest.mark.parametrize(("datasets", "changes", "message"), [
    ([{"name": "countdwn"}], {}, "datasets.0.name: no task 'countdwn' (nearest: 'countdown')"),
    ([{"name": "gcd", "config": {"hard": 1}}], {}, "datasets.0.config: unknown key 'hard'"),
    ([{"name": "gcd", "config": {"min_numbers": 2.5}}], {}, "datasets.0.config.min_numbers: .* found '2.5'"),
    ([{"name": "gcd", "config": None}], {}, "datasets.0.config: .* found None"),
    ([{"name": "gcd", "weight": "nan"}], {}, "datasets.0.weight: .* found 'nan'"),
    ([{"name": "gcd"}], {"size": 5.5}, "size: .* found '5.5'"),
    ([{"name": "gcd"}], {"sizes": 5}, "unknown key 'sizes' (nearest: 'size')"),
    ([{"name": "gcd", "config": {"min_numbers": 0}}], {}, "reasoning-gym refuses it: min_numbers"),
    ([{"name": "gcd"}], {"seed": None}, "seed: .* found None"),
])  # fmt: skip
def test_a_mistake_in_a_mix_names_the_file_and_what_is_wrong(tmp_path, datasets, changes, message):
    file = mix(tmp_path, *datasets, **changes)
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=f"mix.yaml: {pattern}"):
        TaskRows(file)


def test_a_repeated_key_of_a_mix_is_an_error(tmp_path):
    file = mix(tmp_path, {"name": "gcd"})
    file.write_text(file.read_text() + "size: 3\n")
    with pytest.raises(ValueError, match=r"mix.yaml: .*key 'size' is given twice"):
        TaskRows(file)


def test_scores_are_the_tasks_own_and_answers_that_are_programs_are_contained(tmp_path):
    """n_queens passes an answer to ``eval``."""
    target = tmp_path / "written"
    program = f"[open({str(target)!r}, 'w').write('x')]"
    asked = {"gcd": ["{}", "{} or so", "-1", None], "n_queens": ["{}", program]}
    texts, golds = [], []
    for task, answers in asked.items():
        row = TaskRows(mix(tmp_path, {"name": task}))[5]
        for answer in answers:
            right = referred(row.gold)[0]
            texts.append("no tags" if answer is None else f"<answer>{answer.format(right)}</answer>")
            golds.append(row.gold)
    grader = ReasoningGymGrader(RewardRecipe(workers=1, timeout=30.0))
    try:
        grades = grader.grade(texts, golds)
    finally:
        grader.close()
    assert [grade.verdict for grade in grades[:4]] == ["correct", "partial", "wrong", "no_answer"]
    assert 0 < grades[1].reward < 1
    assert (grades[4].reward, grades[5].reward < 1) == (1.0, True)
    assert not target.exists()


@pytest.mark.parametrize("file", sorted((ROOT / "recipes/tasks").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_mixes_of_the_recipes_can_be_read(file):
    rows = TaskRows(file)
    assert {rows[number].grader for number in range(3)} == {GRADER}


def test_questions_for_evaluation_are_not_those_of_training():
    for size in ("easy", "hard"):
        files = (ROOT / f"recipes/tasks/reasoning_gym_{name}.yaml" for name in (size, f"{size}_test"))
        train, test = (yaml.safe_load(file.read_text()) for file in files)
        assert train["datasets"] == test["datasets"]
        assert abs(train["seed"] - test["seed"]) > train["size"] + len(train["datasets"])
