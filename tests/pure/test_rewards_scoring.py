"""Scoring: every ended response is graded, once, by its prompt's grader."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import tests.kit.rollouts as kit
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.recipe import RewardRecipe, SourceRecipe
from megatron_eqlen.rewards.functions import RewardFunction
from megatron_eqlen.rewards.measured import reward_metrics, scored
from megatron_eqlen.rewards.scoring import Scorer, weighed
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of, tail_of
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout
from tests.pure.test_rewards_background import END, Letters


def segment(text: str, ended: bool = False, reason: str | None = None) -> Part:
    tokens = [ord(letter) for letter in text] + [END] * ended
    return Part(Tokens.of(tokens, [0.0] * len(tokens)), "stop" if ended else reason)


def prompt(name: str = "q", grader: str = "math", gold: str = "5", source: str = "sums") -> Prompt:
    return Prompt(name, [1], "What is 2 + 3?", grader, gold, source)


def make_stream(index: int = 0) -> Rollout:
    pairs = [
        (segment(r"x \boxed{5}", ended=True), segment(r"so it is \bo")),
        (segment("xed{6}", ended=True), segment("xed{5}", ended=True)),
    ]
    return kit.stream(prompt("q"), index, 0, pairs, "both_ended")


@pytest.fixture
def scorer():
    scorer = Scorer(RewardRecipe(), Letters())
    yield scorer
    scorer.close()


def test_a_segment_is_graded_as_the_whole_response_it_ends(scorer):
    """A_2 and B_2 hold half a box; with the trunk before them they are answers."""
    stream = make_stream()
    scorer.score([stream])
    _, metrics = scored([stream], RewardRecipe())
    assert [grade and grade.answer for grade in grades(stream)] == ["5", None, "6", "5"]
    assert [grade and grade.reward for grade in grades(stream)] == [1.0, None, 0.0, 1.0]
    assert metrics["reward/ended"] == 3
    assert metrics["reward/mean"] == metrics["reward/source/sums/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/verdict/correct"] == pytest.approx(2 / 3)
    assert metrics["policy/reward"] == 1 / 2 * 1 + 1 / 4 * 0 + 1 / 4 * 1
    lengths = [len(tokens) for _, tokens in stream.ended()]
    assert metrics["policy/response_length"] == lengths[0] / 2 + lengths[1] / 2, "A_2 and B_2 end alike"


def grades(stream: Rollout) -> list[Grade | None]:
    return [side.grade for pair in pairs_of(stream) for side in (pair.a, pair.b)]


def test_an_ended_tail_is_graded_and_a_truncated_one_is_not(scorer):
    tails = segment("xed{5}", ended=True), segment("xed{5}", reason="length")
    ended, cut = (
        kit.stream(prompt("q"), 0, 0, pairs_of(make_stream())[:1], "max_pairs", tail) for tail in tails
    )
    scorer.score([ended, cut])
    assert tail_of(ended).grade.reward == 1.0
    assert tail_of(cut).grade is None


def test_each_source_has_its_own_grader():
    def group(prompt: Prompt, text: str) -> Rollout:
        return kit.group(prompt, 0, [segment(text, ended=True)])

    scorer, own = Scorer(RewardRecipe(), Letters()), f"{__name__}:shorter_is_better"
    rollouts = [group(prompt("a"), r"\boxed{5}"), group(prompt("b", own, "10", "judged"), "12345")]
    scorer.score(rollouts)
    _, metrics = scored(rollouts, RewardRecipe())
    assert [rollout.parts[0].grade.reward for rollout in rollouts] == [1.0, 0.5]
    assert metrics["reward/source/judged/mean"] == 0.5
    assert rollouts[1].parts[0].grade.grader.endswith(":shorter_is_better")
    scorer.score([negative := group(prompt("b", own, "1", "judged"), "12345")])
    assert negative.parts[0].grade.reward == -4, "any finite number"


def shorter_is_better(question: str, response: str, gold: str) -> float:
    return 1 - len(response) / int(gold)


def ours(question: str, response: str, gold: str) -> float:
    return 0.25 * (question == "?") + 0.25 * (response == "so") + 0.5 * (gold == "1")


def gold_first(gold: str, question: str, response: str) -> float:
    return ours(question, response, gold)


def of_verl(solution_str, ground_truth, extra_info=None):
    return {"score": ours("?", solution_str, ground_truth), "acc": extra_info["index"] == 3}


def of_verl_with_source(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("openai/gsm8k", {"index": 3})
    return ours("?", solution_str, ground_truth)


def of_verl_in_batches(data_sources, solution_strs, ground_truths, extra_infos=None):
    rows = zip(solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": ours("?", text, gold) * (info["index"] == 3)} for text, gold, info in rows]


def of_trl(prompts, completions, completion_ids, difficulty, **kwargs):
    (prompt,), (completion,), (ids,) = prompts, completions, completion_ids
    assert kwargs["extra_info"] == [{"index": 3}]
    return [ours(prompt, completion, kwargs["answer"][0]) * (ids == [7, 8]) * (difficulty == [2.5])]


def of_trl_for_chats(completions, **kwargs):
    return [0.5 + 0.5 * (completion[0]["content"] == "so") for completion in completions]


def not_applicable(completions, **kwargs):
    return [None]


def of_openrlhf(queries, prompts, labels, **kwargs):
    right = [query == prompt + "so" for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": np.array(right) * np.array([label == "1" for label in labels])}


async def of_verifiers(completion: str, answer: str, prompt, info, state, **kwargs) -> float:
    assert kwargs["difficulty"] == 2.5
    return float((completion, answer, prompt, state["answer"], info) == ("so", "1", "?", "1", {}))


def by_position(response, answer, /, *, question):
    return ours(question, response, answer)


def of_messages(completion) -> float:
    return float(completion[-1]["content"] == "so")


def in_decimals(response):
    return Decimal(response == "so")


ROW = {
    "data_source": "openai/gsm8k", "question": "?", "answer": "1", "difficulty": 2.5,
    "extra_info": {"index": 3},
}  # fmt: skip
FUNCTIONS = [
    ours, gold_first, of_verl, of_verl_in_batches, of_verl_with_source, of_trl, of_trl_for_chats,
    of_openrlhf, of_verifiers, of_messages, by_position, in_decimals,
]  # fmt: skip


def of_names(response):
    return {"right": response == "so", "brief": 0.5}


def read_rows(tmp_path, rows, **keys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*open_source(SourceRecipe(name="sums", path=str(tmp_path), **keys), Tally())]


def graded(tmp_path, function, row=ROW, completion="so", weights=(), others=(), **keys):
    """Return the grade of a response to the last question of a file."""
    path = f"{__name__}:{function.__name__}"
    problem = read_rows(tmp_path, [*others, row], grader=path, **keys)[-1]
    asked = Prompt("b", [1], problem.question, path, problem.gold, "sums")
    reward = RewardRecipe(weights=dict(weights), on_error="end")
    return Scorer(reward, Letters()).grade_texts([completion], [asked], [[7, 8]])[0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_gets_what_its_parameters_name(tmp_path, function):
    grade = graded(tmp_path, function)
    assert (grade.reward, grade.verdict) == (1.0, "scored")
    assert grade.grader == f"{__name__}:{function.__name__}"


async def of_loops(completion, loops=set()):  # noqa: B006
    loops.add(asyncio.get_running_loop())
    return len(loops)


def test_async_functions_share_a_loop_to_which_their_clients_belong_also_in_a_notebook(tmp_path):
    async def cell():
        return graded(tmp_path, of_loops)

    grades = [graded(tmp_path, of_loops), asyncio.run(cell())]
    with pytest.raises(ValueError, match=r"ends_a_loop: SystemExit at .*: 3"):
        graded(tmp_path, ends_a_loop)
    grades.append(graded(tmp_path, of_loops))
    assert [grade.reward for grade in grades] == [1.0, 1.0, 1.0]


async def ends_a_loop(completion):
    raise SystemExit(3)


async def never_ends(completion):
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(1000)


def test_a_program_is_interrupted_while_an_async_function_waits(tmp_path):
    called = f"import pathlib, {__name__} as t; t.graded(pathlib.Path({str(tmp_path)!r}), t.never_ends)"
    done = subprocess.run([sys.executable, "-c", called], timeout=60, capture_output=True, text=True)
    assert done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


def told(question, completion, answer, hint="none"):
    return float((question, answer, hint) == ("2+2?", "4", "none"))


@pytest.mark.parametrize("row", [
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"},
    {"question": None, "prompt": "2+2?", "answer": "4"},
])  # fmt: skip
def test_a_row_without_a_column_that_others_have_gives_what_is_known_by_its_name(tmp_path, row):
    assert graded(tmp_path, told, row, others=[{"question": "1+1?", "answer": "2"}]).reward == 1.0


def test_columns_of_the_recipe_come_before_those_of_the_functions_names(tmp_path):
    row = {"question": "adding", "task": "2+2?", "answer": "it is 4", "short": "4"}
    columns = {"question": "task", "answer": "short"}
    assert graded(tmp_path, told, row, columns=columns).reward == 1.0


def test_columns_that_begin_late_in_a_file_are_read(tmp_path):
    early = [{"question": f"{n}+2?", "answer": n + 2} for n in range(120)]
    row = {"question": "2+2!", "answer": "4", "hint": "none", "instruction": "Briefly."}
    problems = read_rows(tmp_path, [*early, row], grader=f"{__name__}:told")
    assert problems[-1].instruction == "Briefly."
    assert json.loads(problems[-1].gold)["columns"]["hint"] == "none"
    (*_, left) = read_rows(tmp_path, [*early, row | {"difficulty": 0.5}], grader=None)
    assert left.difficulty == 0.5


def test_a_list_of_golds_is_read_as_its_text_is(tmp_path):
    golds = ([1, -1], ["1", "-1"], '["1", "-1"]', ["π"], [70.0], [], [None, 1], [True, 1])
    rows = [{"question": f"roots {n}", "answer": gold} for n, gold in enumerate(golds)]
    read = [problem.gold for problem in read_rows(tmp_path, rows, grader="math")]
    assert read == ["1, -1"] * 3 + ["π", "70"]


def hard(completion, answer, difficulty, labels=("none",)):
    return float((answer, difficulty, [*labels]) == ("4", 3, ["4"]))


def test_columns_of_the_functions_own_names_stay_what_they_are(tmp_path):
    """``difficulty`` is also a name of ours, ``labels`` a plural, which another row has."""
    row = {"question": "2+2?", "answer": "4", "difficulty": 3, "pass_rate": 0.5}
    others = [{"question": "1+1?", "answer": "2", "difficulty": 1, "labels": "x"}]
    assert graded(tmp_path, hard, row, others=others, columns={"difficulty": "pass_rate"}).reward == 1.0


@pytest.mark.parametrize(("function", "reward"), [(of_messages, 0.0), (of_trl_for_chats, 0.5)])
def test_a_function_of_messages_grades_a_first_response_that_is_empty(tmp_path, function, reward):
    assert graded(tmp_path, function, completion="").reward == reward


def length_of_completions(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize(("asked", "reward"), [("?", 2.0), ([{"role": "user", "content": "?"}], 1.0)])
def test_a_function_of_trl_gets_messages_where_the_prompts_of_the_file_are_messages(tmp_path, asked, reward):
    """One that works on text, too, would measure something else there and raise nothing."""
    assert graded(tmp_path, length_of_completions, {"prompt": asked, "answer": "1"}).reward == reward


def first_letter(response):
    return float(response[0] == "s")


def test_an_empty_response_does_not_tell_what_a_function_takes():
    function = RewardFunction(f"{__name__}:first_letter", "grader")
    assert [function.grade(prompt("b"), text).reward for text in ("", "so")] == [0.0, 1.0]
    with pytest.raises(ValueError, match="IndexError"):
        function.grade(prompt("b"), "")


def test_a_function_gets_a_gold_of_any_type_and_a_reward_that_does_not_apply_is_0(tmp_path):
    assert graded(tmp_path, gold_first, {"question": "?", "answer": ["1", "2"]}).reward == 0.5
    grade = graded(tmp_path, not_applicable, {"question": "?"})
    assert (grade.reward, grade.verdict) == (0.0, "not_applicable")


def test_named_rewards_are_weighed_and_names_without_a_weight_are_refused(tmp_path):
    grade = graded(tmp_path, of_names, weights={"right": 1.0, "brief": -0.5})
    assert (grade.reward, grade.rewards) == (0.75, {"right": 1.0, "brief": 0.5})
    assert reward_metrics([(prompt("b"), grade)])["reward/named/brief"] == 0.5
    assert weighed(Grade(0.0, "timeout"), {"right": 1.0}).rewards == {"right": 0.0}
    for names in (["right"], ["right", "form"], []):
        said = f"names in reward.weights, {', '.join(names) or 'none'}; found right, brief"
        with pytest.raises(ValueError, match=said):
            graded(tmp_path, of_names, weights=dict.fromkeys(names, 1))


def test_named_rewards_of_an_environment_are_weighed_too():
    part = segment("so", ended=True)
    part.grade = Grade(0.0, "scored", rewards={"right": 1.0, "brief": 1.0})
    scorer = Scorer(RewardRecipe(weights={"right": 1.0, "brief": -0.25}), Letters())
    scorer.score([kit.group(prompt(), 0, [part])])
    assert part.grade.reward == 0.75


@pytest.mark.parametrize("name", ["score", "reward", "rewards"])
def test_a_named_reward_that_is_called_as_the_only_one_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"reward.weights: expected names other than .*, found '{name}'"):
        graded(tmp_path, of_names, weights={"right": 1.0, name: 1.0})


def of_other_names(a, b, c):
    return 1.0


def one_name(response, rules):
    return 1.0


def text_of_a_name(response):
    return {"right": 1.0, "wrong": "x"}


def returns_two(completions, **kwargs):
    return [1.0, 0.0]


def ends(response):
    raise SystemExit(3)


def takes_too_long(response):
    raise asyncio.CancelledError("late")


def fails(response):
    return 1 / len("")


class Called:
    def __call__(self, response):
        return 1.0


def not_a_grader(reward):
    return 1.0


@pytest.mark.parametrize(("function", "message"), [
    (of_other_names, r"expected a parameter that takes the response, one of comp.*, found \(a, b, c\)"),
    (one_name, r"no value for the parameter 'rules': expected a column of the data file \(data_so"),
    (text_of_a_name, r"text_of_a_name: wrong: expected a finite number as reward, got 'x'"),
    (returns_two, r"expected a finite number as reward, got \[1.0, 0.0\]"),
    (ends, r"ends: SystemExit at test_rewards_scoring.py:\d+: 3"),
    (takes_too_long, r"takes_too_long: CancelledError at test_rewards_scoring.py:\d+: late"),
    (fails, r"fails: ZeroDivisionError at test_rewards_scoring.py:\d+: division by zero"),
    (Called, r"a class to be called: write `reward = Called\(\)` below it and name .*:reward"),
    (not_a_grader, r"or a factory whose result has grade\(texts, golds\) and close\(\), found 1.0"),
])  # fmt: skip
def test_a_mistake_in_a_function_is_named(tmp_path, function, message):
    with pytest.raises(ValueError, match=message):
        graded(tmp_path, function)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Decimal("0.5")])
def test_a_grade_may_have_numbers_of_other_kinds(number):
    """Records take Python's own alone, and so do logs."""
    values: dict[str, Any] = {
        "reward": number, "answer": np.int64(42), "rewards": {"right": number}, "seconds": number
    }  # fmt: skip
    grade = Grade(verdict="scored", **values)
    assert [grade, json.loads(json.dumps(asdict(grade)))] == [
        Grade(0.5, "scored", answer="42", seconds=0.5, rewards={"right": 0.5}), asdict(grade)
    ]  # fmt: skip
    assert {type(value) for value in (grade.reward, *grade.rewards.values())} == {float}
    nothing: Any = None
    assert Grade(1.0, "scored", detail=nothing).detail == ""
    with pytest.raises(ValueError, match=r"^mine: expected right up to 1e15, got 1e\+16$"):
        Grade(1e16, "scored", grader="mine", rewards={"form": 0.5, "right": 1e16})
    with pytest.raises(ValueError, match=r"^mine: expected a reward up to 1e15, got nan$"):
        Grade(float("nan"), "scored", grader="mine")


@pytest.mark.parametrize(("value", "message"), [
    (None, "a finite number as reward, got None"), (float("nan"), "a finite number as reward, got nan"),
    (1e200, "a reward up to 1e15, got 1e.200"), (10**400, "a finite number as reward, got 1000"),
    ("1", "a finite number as reward, got '1'"),
    (Decimal("NaN"), r"a finite number as reward, got Decimal\('NaN'\)"),
])  # fmt: skip
def test_a_reward_that_is_no_usable_number_is_named(tmp_path, monkeypatch, value, message):
    def returned(response):
        return value

    monkeypatch.setitem(globals(), "returned", returned)
    with pytest.raises(ValueError, match=f"returned: expected {message}"):
        graded(tmp_path, returned)


@pytest.mark.parametrize(("grader", "message"), [
    ("code:nothing", r"code has no 'nothing' \(it is /.*/code.py\)"),
    ("nowhere:at_all", "'nowhere:at_all' cannot be imported: No module named 'nowhere'"),
    ("oracle", r"expected math, code or .*, found 'oracle'"),
])  # fmt: skip
def test_a_grader_that_is_none_is_named(grader, message):
    with pytest.raises(ValueError, match=message):
        Scorer(RewardRecipe(), Letters()).grade_texts(["x"], [prompt(grader=grader)])


def test_a_function_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("def half(question, response, gold):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    scorer = Scorer(RewardRecipe(), Letters())
    assert scorer.grade_texts(["x"], [prompt("b", "my_reward:half", "1")])[0].reward == 0.5
