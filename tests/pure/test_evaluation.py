"""avg@k, its intervals, and evaluation through the engine protocol with the real grader."""

import hashlib
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_eqlen.cli import commands
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.evaluation import statistics
from megatron_eqlen.evaluation.evaluate import subject
from megatron_eqlen.evaluation.result import (
    Answers,
    EvaluationResult,
    asked,
    compare,
    evaluation_files,
    file_hashes,
    has_all,
    over_seeds,
    read_evaluations,
    read_results,
    write_results,
)
from megatron_eqlen.job import Job, answering, load
from megatron_eqlen.objectives.checks import remarks
from megatron_eqlen.recipe import BenchmarkRecipe, RolloutRecipe
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.rewards.scoring import UnscoredError
from megatron_eqlen.run.evaluations import Evaluations, leaderboard
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.types import Delta, Prompt
from tests.kit.evaluations import evaluated
from tests.kit.recipes import SAMPLED, SMALL, small
from tests.pure.test_ahead import world_of_one

__all__ = ["world_of_one"]

EOS = 0


class Letters:
    """A tokenizer of characters: token n is ``chr(n)``, 0 ends."""

    eos_token_ids = frozenset({EOS})

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token != EOS)


class AnsweringEngine:
    """Answers from a table: completion ``number`` of a prompt is ``answers[prompt][number]``."""

    max_model_len = 200
    max_num_seqs = 64
    vocab_size = 0x110000

    def __init__(self, answers: dict[str, list[str]], policy_version: int = 0) -> None:
        self.policy_version = policy_version
        self._answers = answers
        self._open: dict[str, Delta] = {}
        self.asked: list[str] = []
        self.seeds: list[int] = []
        self.sampled_as: list[RolloutRecipe] = []

    def sample_as(self, rollout):
        self.sampled_as.append(rollout)

    def submit(self, request):
        question = "".join(map(chr, request.token_ids))
        number = sum(name == question for name in self.asked)
        self.asked.append(question)
        self.seeds.append(request.seed)
        tokens = [*map(ord, self._answers[question][number]), EOS][: request.max_tokens]
        reason = "stop" if tokens[-1] == EOS else "length"
        self._open[request.request_id] = Delta(
            request.request_id, tokens, {"logprobs": [-0.1] * len(tokens)}, reason
        )

    def step(self):
        deltas, self._open = list(self._open.values()), {}
        return deltas

    def abort(self, request_ids):
        pass

    def metrics(self):
        return {}

    @property
    def has_unfinished(self):
        return bool(self._open)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "test.parquet").write_bytes(b"the benchmark's file")
    benchmarks = [{"name": "sums", "path": str(tmp_path / "test.parquet")}]
    return small(
        group_size=4, data__max_prompt_length=8, reward={"workers": 1}, packing={"max_tokens_per_row": 64},
        rollout={"max_response_length": 16, "tokens_per_step": 3},
        evaluation={"samples": 3, "benchmarks": benchmarks},
    )  # fmt: skip


ANSWERS = {"1+1": ["\\boxed{2}", "so \\boxed{2}", "\\boxed{3}"], "2+2": ["four", "\\boxed{4}", "no end " * 3]}
PROBLEMS = [Prompt(f"sums/{q}", [*map(ord, q)], q, "math", str(eval(q))) for q in ANSWERS]


def run(recipe, engine, responses=None, **more) -> EvaluationResult:
    return evaluated(recipe, engine, PROBLEMS, Letters(), responses, **more)


def test_an_evaluation_by_hand(recipe):
    engine = AnsweringEngine(ANSWERS, policy_version=7)
    result = run(recipe, engine)
    assert sorted(engine.asked) == ["1+1"] * 3 + ["2+2"] * 3  # 3 samples, whatever training's group size
    assert [answers.rewards for answers in result.answers] == [[1, 1, 0], [0, 1, 0]]
    assert result.answers[1].verdicts == ["no_answer", "correct", "truncated"]
    assert result.scores.shape == (3, 2)
    assert result.accuracy.mean == 0.5
    metrics = result.metrics()
    assert metrics["evaluation/sums/avg@3"] == 0.5
    # all three pairs of answers hold a right one, and two of the three
    assert metrics["evaluation/sums/pass@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert metrics["evaluation/sums/pass@3"] == 1.0
    assert metrics["evaluation/sums/no_answer_fraction"] == 1 / 6
    assert metrics["evaluation/sums/truncated_fraction"] == 1 / 6
    assert metrics["evaluation/sums/mean_tokens"] == (10 + 13 + 10 + 5 + 10 + 16) / 6


def test_samples_are_drawn_again_before_and_after_a_run_and_others_with_its_seed(recipe):
    drawn = []
    for seed, version in ((0, 0), (0, 3), (1, 0)):
        engine = AnsweringEngine(ANSWERS, policy_version=version)
        run(recipe.model_copy(update={"seed": seed}), engine)
        drawn.append(engine.seeds)
    assert drawn[0] == drawn[1]
    assert not {*drawn[0]} & {*drawn[2]}, "runs that differ in their seed are no replicates of one another"


def test_the_manifest_says_what_was_measured(recipe):
    manifest = run(recipe, AnsweringEngine(ANSWERS, policy_version=7)).manifest
    assert manifest["question_ids"] == ["sums/1+1", "sums/2+2"]
    assert manifest["sha256"] == {"test.parquet": hashlib.sha256(b"the benchmark's file").hexdigest()}
    assert "math_verify-" in manifest["graders"][0]
    assert manifest["policy_version"] == 7
    assert manifest["rollout"]["max_response_length"] == 16


@pytest.mark.parametrize(("of_all", "of_one", "expected", "text"), [
    ({}, {}, (0.6, 0.95, 20, 16, 3), "temperature 0.6, top-p 0.95, top-k 20, at most 16 tokens"),
    ({"temperature": 1.0, "top_p": 1, "top_k": -1}, {"max_response_length": 9}, (1.0, 1.0, -1, 9, 3),
     "temperature 1, at most 9 tokens"),
    ({"temperature": 1.0, "max_response_length": 30}, {"temperature": 0}, (0, 0.95, 20, 30, 1),
     "greedy, at most 30 tokens"),
])  # fmt: skip
def test_an_evaluation_samples_as_it_says_and_training_as_before(recipe, of_all, of_one, expected, text):
    evaluation = recipe.evaluation.model_dump() | of_all
    evaluation["benchmarks"][0] |= of_one
    recipe = recipe.model_validate(recipe.model_dump() | {"evaluation": evaluation})
    engine = AnsweringEngine(ANSWERS)
    result = run(recipe, engine)
    used, after = engine.sampled_as
    longest = used.max_response_length
    assert (used.temperature, used.top_p, used.top_k, longest, result.samples) == expected
    assert after == recipe.rollout
    assert result.sampling == text
    assert result.manifest["rollout"] == used.model_dump(include={*result.manifest["rollout"]})
    assert max(max(a.lengths) for a in result.answers) == min(longest, 16 if expected[4] > 1 else 10)
    assert recipe.longest_context == recipe.longest_path + (14 if longest == 30 else 0)


def test_replicas_together_give_what_one_gives(recipe):
    alone = run(recipe, AnsweringEngine(ANSWERS))
    gathered = []

    def gather(answers):
        gathered.extend(answers)
        return list(reversed(gathered))

    with pytest.raises(KeyError):  # the first replica is still alone
        run(recipe, AnsweringEngine(ANSWERS), share=lambda all: all[1::2], gather=gather)
    together = run(recipe, AnsweringEngine(ANSWERS), share=lambda all: all[0::2], gather=gather)
    assert together == alone


class TokenByToken(AnsweringEngine):
    """Generates a token of each open request a step, and dies after ``steps`` of them."""

    def __init__(self, policy_version: int = 0, steps: int = -1) -> None:
        super().__init__(ANSWERS, policy_version)
        self.left, self.generated = steps, 0
        self._tokens: dict[str, list[int]] = {}

    def submit(self, request):
        path = "".join(map(chr, request.token_ids))
        number = int(request.request_id.partition("~")[0].rpartition("/")[2])
        answer = [*map(ord, ANSWERS[path[:3]][number]), EOS]
        assert path[3:] == "".join(map(chr, answer))[: len(path) - 3], "it goes on where it was"
        self.asked.append(path)
        self._tokens[request.request_id] = answer[len(path) - 3 :][: request.max_tokens]

    def step(self):
        if self.left == 0:
            raise EngineError("it died")
        self.left -= 1
        self.generated += len(self._tokens)
        ends = {
            name: "stop" if left == [EOS] else "length"
            for name, left in self._tokens.items()
            if len(left) == 1
        }
        deltas = [
            Delta(name, left[:1], {"logprobs": [-0.1]}, ends.get(name)) for name, left in self._tokens.items()
        ]
        self._tokens = {name: left[1:] for name, left in self._tokens.items() if name not in ends}
        return deltas


@pytest.fixture
def each_step_is_recorded(monkeypatch):
    monkeypatch.setattr("megatron_eqlen.record.recorder.INTERVAL", 0.0)


def changed(recipe, **of_all):
    raw = recipe.model_dump()
    return recipe.model_validate(raw | {"evaluation": raw["evaluation"] | of_all})


@pytest.mark.parametrize("deaths", [(1,), (7, 4), (12,), (15, 0, 0)])
def test_an_evaluation_that_died_goes_on_with_its_responses(recipe, tmp_path, each_step_is_recorded, deaths):
    responses = tmp_path / "responses"
    whole = TokenByToken(policy_version=7)
    expected, said, generated = run(recipe, whole), [], 0
    for steps in deaths:
        engine = TokenByToken(7, steps)
        with pytest.raises(EngineError, match="it died"):
            run(recipe, engine, responses, say=said.append)
        generated += engine.generated
    last, journals = TokenByToken(7), []

    def gather(answers):
        """Look at the journals while other ranks may still read theirs, or generate."""
        journals.extend(responses.glob("*/open-*"))
        return answers

    assert run(recipe, last, responses, say=said.append, gather=gather) == expected
    assert journals
    assert generated + last.generated == whole.generated, "no token twice"
    (folder,) = responses.iterdir()
    assert said == [f"sums: goes on from the responses in {folder}"] * len(deaths)
    assert not [*folder.glob("open-*")]
    texts = {
        rollout.prompt_id: [Letters().decode(part.tokens.token_ids) for part in rollout.parts]
        for rollout in read_step(folder)
    }
    assert texts["sums/1+1"] == ANSWERS["1+1"]
    assert [part.grade.reward for part in read_step(folder)[0].parts] == [1, 1, 0]
    # the next one generates nothing, but grades
    idle = TokenByToken(7, 0)
    assert run(recipe, idle, responses) == expected
    assert [len(grades) for grades in (read_step(folder), [*folder.glob("grades-*")])] == [2, 1]


@pytest.mark.parametrize("change", ["version", "sampling", "prompts", "weights", "environment"])
def test_responses_of_something_else_are_not_taken(recipe, tmp_path, monkeypatch, change):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    model = recipe.model.model_copy(update={"path": str(tmp_path / "model")})
    recipe = recipe.model_copy(update={"model": model})
    run(recipe, TokenByToken(), tmp_path / "responses")
    if change == "weights":
        (tmp_path / "model/model.safetensors").write_bytes(b"others")
    if change == "environment":
        talks = recipe.environment.model_copy(update={"options": {"hints": 3}})
        recipe = recipe.model_copy(update={"environment": talks})
    if change == "prompts":
        again = [replace(problem, prompt_id=f"{problem.prompt_id}#2") for problem in PROBLEMS]
        monkeypatch.setitem(globals(), "PROBLEMS", again)
    engine = TokenByToken(policy_version=int(change == "version"))
    run(changed(recipe, temperature=1.0) if change == "sampling" else recipe, engine, tmp_path / "responses")
    assert len(engine.asked) == 6
    assert len([*(tmp_path / "responses").iterdir()]) == 2


def test_other_graders_and_golds_are_tried_on_the_recorded_responses(recipe, tmp_path, monkeypatch):
    """Without a token more."""
    first = run(recipe, TokenByToken(), tmp_path / "responses")
    (tmp_path / "test.parquet").write_bytes(b"the benchmark with other golds")
    monkeypatch.setitem(globals(), "PROBLEMS", [replace(problem, gold="3") for problem in PROBLEMS])
    second = run(recipe, TokenByToken(steps=0), tmp_path / "responses")
    lengths = [replace(problem, grader="tests.kit.rubrics:even_length") for problem in PROBLEMS]
    monkeypatch.setitem(globals(), "PROBLEMS", lengths)
    raw = recipe.model_dump()
    raw["evaluation"]["benchmarks"][0]["grader"] = "tests.kit.rubrics:even_length"
    third = run(recipe.model_validate(raw), TokenByToken(steps=0), tmp_path / "responses")
    assert [answers.rewards for answers in first.answers] == [[1, 1, 0], [0, 1, 0]]
    assert [answers.rewards for answers in second.answers] == [[0, 0, 1], [0, 0, 0]]
    assert [answers.rewards for answers in third.answers] == [[0, 1, 0], [1, 0, 0]]


class Grades(Environment):
    """Gives ``reward``; None: 1, and the second problem's environment fails."""

    reward: float | None = None

    def __init__(self, prompt, seed):
        self.problem = prompt.prompt_id

    def step(self, message):
        if self.reward is None and self.problem == "sums/2+2":
            raise ConnectionError("no server")
        return Observation(done=True)

    def grade(self):
        return 1 if self.reward is None else self.reward


def speaking(make=Grades):
    return Conversations(make, Letters().decode, lambda observation: [])


def test_samples_have_their_own_environments_and_a_problem_whose_own_fails_is_left_out(recipe, caplog):
    seeds = []

    def make(prompt, seed):
        seeds.append(seed)
        return Grades(prompt, seed)

    result = run(recipe, AnsweringEngine(ANSWERS), conversations=speaking(make))
    assert [answers.rewards for answers in result.answers] == [[1, 1, 1]]
    assert result.manifest["question_ids"] == ["sums/1+1"]
    assert result.manifest["graders"] == ["Grades"]  # what is lost has none, and evaluations stay alike
    assert "sums: 1 of 2 problems are left out: its environment failed: ConnectionError" in caplog.text
    assert len({*seeds}) == len(seeds)


class Drawn(Grades):
    """Grades by its seed."""

    def __init__(self, prompt, seed):
        super().__init__(prompt, seed)
        self.reward = seed % 1000 / 1000


def test_recorded_samples_are_graded_by_the_environments_that_they_had(recipe, tmp_path):
    expected = run(recipe, TokenByToken(), tmp_path, conversations=speaking(Drawn))
    assert run(recipe, TokenByToken(steps=0), tmp_path, conversations=speaking(Drawn)) == expected
    assert len({reward for answers in expected.answers for reward in answers.rewards}) == 6


def test_a_response_whose_grading_fails_counts_as_0_where_the_recipe_says_so(recipe):
    zero = recipe.model_copy(update={"reward": recipe.reward.model_copy(update={"on_error": "zero"})})
    result = run(zero, AnsweringEngine(ANSWERS), conversations=speaking())
    assert [answers.rewards for answers in result.answers] == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_rewards_that_are_no_accuracy_are_refused(recipe, monkeypatch, reward):
    monkeypatch.setattr(Grades, "reward", reward)
    with pytest.raises(ValueError, match=rf"rewards in \[0, 1\], Grades gave {reward}: give the benchmark"):
        run(recipe, AnsweringEngine(ANSWERS), conversations=speaking())


def test_results_survive_the_disk_and_bad_files_are_named(recipe, tmp_path):
    result = run(recipe, AnsweringEngine(ANSWERS))
    path = tmp_path / "evaluation" / "before.json"
    write_results(path, [result])
    assert read_results(path) == [result]
    summary = json.loads(path.read_text())[0]["summary"]
    assert [interval["mean"] for interval in summary["intervals"]] == [0.5]
    path.write_text('[{"benchmark": "sums"}]')
    with pytest.raises(ValueError, match=r"before\.json: expected an evaluation result"):
        read_results(path)


CHANGES = {
    "weights": (1, {}, {}, False),
    "samples": (0, {"samples": 2}, {}, False),
    "sampling": (0, {"temperature": 1.0}, {}, False),
    "limit": (0, {}, {"limit": 1}, False),
    "seed": (0, {}, {}, True),
    "nothing": (0, {}, {}, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stored_result_stands_for_the_same_weights_questions_and_sampling_alone(recipe, tmp_path, name):
    write_results(tmp_path / "stored.json", [run(recipe, AnsweringEngine(ANSWERS))])
    (stored,) = read_results(tmp_path / "stored.json")
    version, of_all, of_one, seed = CHANGES[name]
    raw = recipe.model_dump() | {"seed": recipe.seed + seed}
    raw["evaluation"] |= of_all
    raw["evaluation"]["benchmarks"][0] |= of_one
    changed = recipe.model_validate(raw)
    assert stored.is_of(subject(changed.evaluation.benchmarks[0], changed, version)) == (name == "nothing")


def test_a_stored_result_stands_until_its_file_changes(recipe):
    stored, file = run(recipe, AnsweringEngine(ANSWERS)), Path(recipe.evaluation.benchmarks[0].path)
    # as an older version of the package, which knew fewer settings, wrote it
    older = {key: value for key, value in stored.manifest["rollout"].items() if key != "min_p"}
    stored = replace(stored, manifest=stored.manifest | {"rollout": older})
    assert stored.is_of(subject(recipe.evaluation.benchmarks[0], recipe, 0))
    file.write_bytes(b"another file")
    assert not stored.is_of(subject(recipe.evaluation.benchmarks[0], recipe, 0))


def test_what_a_download_leaves_beside_a_benchmarks_files_is_no_part_of_it(tmp_path):
    (tmp_path / "lcb/.cache/huggingface").mkdir(parents=True)
    (tmp_path / "lcb/.cache/huggingface/test.jsonl.metadata").write_text("the time of the download")
    (tmp_path / "lcb/test.jsonl").write_text("{}")
    assert file_hashes(tmp_path / "lcb") == {"lcb/test.jsonl": hashlib.sha256(b"{}").hexdigest()}


def test_a_result_of_a_commit_of_the_hub_is_of_a_recipe_that_names_none(recipe, tmp_path):
    benchmark = recipe.evaluation.benchmarks[0].model_copy(update={"revision": "b" * 40})
    pinned = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"benchmarks": [benchmark]})}
    )
    file = tmp_path / "after.json"
    write_results(file, [run(pinned, AnsweringEngine(ANSWERS))])
    assert [has_all(file, each) for each in (pinned, recipe)] == [True, True]
    other = benchmark.model_copy(update={"revision": "c" * 40})
    assert not read_results(file)[0].is_of(asked(other, recipe))


def test_the_evaluation_after_a_run_comes_behind_that_of_its_last_step(tmp_path):
    labels = ["before", "step-00000002", "step-00000003", "after"]
    for label in labels:
        (tmp_path / f"{label}.json").touch()
    assert [path.stem for _, path in evaluation_files(tmp_path, 3)] == labels


def test_a_change_is_said_where_both_were_sampled_and_graded_alike(recipe, tmp_path):
    raw = recipe.model_dump() | {"seed": 5}
    raw["evaluation"] |= {"temperature": 1.0}
    before = run(recipe, AnsweringEngine(ANSWERS))
    write_results(tmp_path / "before.json", [before])
    later = run(recipe, AnsweringEngine(ANSWERS, policy_version=1))
    assert before.manifest["graders"]
    for after, is_shown in (
        (later, True),
        (run(recipe.model_validate(raw), AnsweringEngine(ANSWERS, policy_version=1)), False),
        (replace(later, manifest=later.manifest | {"graders": ["math-of-another-version"]}), False),
        (replace(later, manifest=later.manifest | {"graders": []}), True),  # all responses were truncated
    ):
        write_results(tmp_path / "after.json", [after])
        _, last = read_evaluations(evaluation_files(tmp_path, 3))
        assert (last.gain is not None) == after.is_like(before) == is_shown


class Scored(Rollouts):
    """Rollouts whose benchmarks have given results; one is out of order. Measures what is not recorded."""

    def __init__(self, *names: str) -> None:
        self.benchmarks = [BenchmarkRecipe(name=name, path="x") for name in names]
        self.fails, self.measured = "", []

    def evaluate(self, benchmark, responses, earlier):
        if earlier is None and benchmark.name == self.fails:
            raise UnscoredError("no grader")
        if earlier is None and not (responses / benchmark.name).exists():
            self.measured.append(benchmark.name)
            (responses / benchmark.name).mkdir(parents=True)
        return earlier or replace(make_result(np.ones((2, 3))), benchmark=benchmark.name)


@contextmanager
def stage(name, patience):
    yield {}


def test_a_benchmark_that_fails_costs_no_other_and_no_weights_of_before_are_invented(tmp_path):
    said: list[str] = []
    session = SimpleNamespace(recipe=small(), stage=stage, progress=SimpleNamespace(say=said.append))
    folder = SimpleNamespace(evaluation=lambda label: tmp_path / f"{label}.json")
    evaluations, rollouts = Evaluations(session, folder), Scored("first", "second")
    rollouts.fails = "second"
    with pytest.raises(UnscoredError):
        evaluations.evaluate("after", rollouts, 3)
    assert not (tmp_path / "after.json").exists(), "a run with that file has ended"
    rollouts.fails = ""
    evaluations.evaluate("after", rollouts, 3)
    assert rollouts.measured == ["first", "second"]
    assert [result.benchmark for result in read_results(tmp_path / "after.json")] == ["first", "second"]
    assert {path.name for path in tmp_path.iterdir()} == {"after-responses", "after.json"}
    shutil.copy(tmp_path / "after.json", tmp_path / "step-00000003.json")
    evaluations.evaluate("before", rollouts, 3)
    assert rollouts.measured == ["first", "second"], "a run that began without benchmarks has no first result"
    assert not (tmp_path / "before.json").exists()
    evaluations.evaluate("after", rollouts, 3)
    assert evaluations.learned() == "", "nothing was measured before training"
    evaluations.evaluate("before", rollouts, 0)
    assert rollouts.measured[2:] == ["first", "second"]


def test_a_step_that_is_taken_again_takes_no_responses_of_weights_that_may_be_others(tmp_path):
    session = SimpleNamespace(recipe=small(), stage=stage, progress=SimpleNamespace(say=str))
    evaluations = Evaluations(session, SimpleNamespace(evaluation=lambda label: tmp_path / f"{label}.json"))
    seen = {}

    class Looking(Scored):
        def evaluate(self, benchmark, responses, earlier):
            seen[responses.name] = responses.exists()
            return super().evaluate(benchmark, responses, earlier)

    for label in ("before", "step-00000003", "after"):
        (tmp_path / f"{label}-responses/first-0123456789ab").mkdir(parents=True)
        evaluations.evaluate(label, Looking("first"), 0 if label == "before" else 3)
    assert seen == {"before-responses": True, "step-00000003-responses": False, "after-responses": True}


def make_result(scores: np.ndarray, first_question: int = 0) -> EvaluationResult:
    """``scores`` [k, P]."""
    answers = [
        Answers(f"q{first_question + n}", list(column), ["correct"] * len(column), [1] * len(column))
        for n, column in enumerate(scores.T)
    ]
    return EvaluationResult("b", answers, {"question_ids": [answer.prompt_id for answer in answers]})


def test_a_recipe_without_benchmarks_is_not_evaluated_in_silence(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(json.dumps(SMALL | {"model": {"path": str(tmp_path)}}))
    assert main(["evaluate", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "out.json")]) == 2
    expected = "small.yaml: evaluation.benchmarks: expected what to evaluate, found none"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("file", "more", "words"), [
    ("small.yaml", {"teacher": {"path": "none"}}, "{here}/small.yaml --out {here}/out.json"),
    ("recipe.yaml", {"lora": {"alpha": 16}}, "{here} --model {here}"),  # a run's, with a key without effect
])  # fmt: skip
def test_what_a_recipe_trains_on_need_not_be_here_to_evaluate(tmp_path, monkeypatch, file, more, words):
    """Nor is it downloaded: a training set has gigabytes."""
    (tmp_path / "test.jsonl").write_text("{}")
    benchmark = {"name": "b", "reader": "jsonl", "path": str(tmp_path / "test.jsonl")}
    raw = SMALL | {"model": {"path": str(tmp_path)}, "evaluation": {"benchmarks": [benchmark]}}
    (tmp_path / file).write_text(json.dumps(raw | more))
    monkeypatch.setattr(commands, "_on_ranks", lambda job, work: job.fetch() or 0)
    assert main(["evaluate", *words.format(here=tmp_path).split()]) == 0


def test_a_folder_without_a_recipe_is_no_run_to_evaluate(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "found none: the folder has no recipe.yaml" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text(json.dumps(SMALL))
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "found none: the run has not ended" in capsys.readouterr().err


def test_the_leaderboard_shares_the_time_by_tokens_and_names_benchmarks_older_than_the_model():
    result = make_result(np.array([[1.0, 0.0], [1.0, 0.0]]))
    results = []
    for reader, length in (("aime25", 3000), ("aime26", 1000), ("jsonl", 4000)):
        manifest = {"model": "org/Qwen3-4B", "benchmark": {"reader": reader}, "rollout": SAMPLED}
        answers = [replace(each, lengths=[length, length]) for each in result.answers]
        results.append(replace(result, benchmark=reader, answers=answers, manifest=manifest))
    model, table, unit, note = leaderboard(results, rank_seconds=80.0).split("\n\n")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert model == "org/Qwen3-4B"
    assert head[2:5] + head[6:8] == ["avg@2", "pass@2", "Tokens an answer", "Rank-seconds", "Public since"]
    assert [row[:2] + row[3:5] + row[6:8] for row in rows] == [
        ["aime25", "2", "50.0%", "3,000", "30", "2025-02-12"],
        ["aime26", "2", "50.0%", "1,000", "10", "2026-02-06"],
        ["jsonl", "2", "50.0%", "4,000", "40", "–"],
        ["mean", "–", "–", "–", "80", "–"],
    ]
    assert unit == "Rank-seconds: a rank is a process, with at most one GPU."
    assert note == "aime25: public before the model (2025-04-29), which may have trained on it."


def test_the_difference_is_paired_by_problem():
    """Problems differ widely and all improve alike: the paired interval is a point, the single ones are
    wide."""
    hard = np.linspace(0, 0.5, 30)
    before, after = make_result(np.tile(hard, (4, 1))), make_result(np.tile(hard + 0.25, (4, 1)))
    gain = compare([before], [after])
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.25, 0.25, 0.25))
    assert before.accuracy.high > after.accuracy.low - 0.2
    with pytest.raises(ValueError, match="different questions"):
        compare([before], [make_result(np.tile(hard, (4, 1)), first_question=9)])


@pytest.mark.parametrize(("files", "lost", "is_refused"), [
    (("a", "a"), 3, False),  # problems that one evaluation left out, of 30
    (("a", "a"), 4, True),
    (("a", "b"), 1, True),
])  # fmt: skip
def test_results_are_compared_on_nine_tenths_of_either_ones_questions(files, lost, is_refused):
    """Whichever of them has more."""
    scores = np.tile(np.linspace(0, 1, 30), (2, 1))
    whole, part = make_result(scores), make_result(scores[:, lost:], first_question=lost)
    for result, file in zip((whole, part), files, strict=True):
        result.manifest["sha256"] = file
    for pair in ((whole, part), (part, whole)):
        if is_refused:
            with pytest.raises(ValueError, match="different questions: q0 is in"):
                compare(*([each] for each in pair))
        else:
            assert compare(*([each] for each in pair)).mean == pytest.approx(0)


def test_intervals_over_seeds():
    """Five seeds agree on each of 30 problems: there is no spread between seeds, but between problems."""
    seeds = [make_result(np.tile(np.repeat([0.0, 1.0], 15), (2, 1))) for _ in range(5)]
    headline, paper = over_seeds(seeds)
    assert (paper.low, paper.high) == (0.5, 0.5)
    assert headline.low == pytest.approx(0.5 - 1.96 * np.sqrt(0.25 / 30), abs=0.02)
    assert "paper" in paper.method


def test_students_interval():
    """The quantiles are from a printed table of Student's t."""
    interval = statistics.seed_difference(np.zeros(3), np.array([0.4, 0.5, 0.6]))
    half = 4.3027 * 0.1 / np.sqrt(3)
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    assert np.isnan(statistics.seed_difference(np.zeros(1), np.ones(1)).low)


@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    scores = (np.random.default_rng(0).random((6, 5)) < 0.3) * [0.5, 1, 1, 0.25, 1]  # some partly right
    subsets = [(scores[list(rows)].max(axis=0) > 0).mean() for rows in combinations(range(6), k)]
    assert statistics.pass_at_k(scores, k) == pytest.approx(np.mean(subsets))


def test_more_passes_than_samples_is_an_error():
    with pytest.raises(ValueError, match="k <= 4 samples, found 5"):
        statistics.pass_at_k(np.ones((4, 2)), 5)


def test_only_the_crossed_interval_covers_other_problems(monkeypatch):
    """30 problems from a population with mean 0.5, 5 seeds: the seeds' own spread says little about it."""
    monkeypatch.setattr(statistics, "DRAWS", 400)
    rng = np.random.default_rng(0)
    found = []
    for trial in range(200):
        scores = rng.binomial(32, np.tile(rng.beta(0.5, 0.5, size=30), (5, 1))) / 32
        both = statistics.crossed_bootstrap(scores, trial), statistics.replicate_bootstrap(scores, trial)
        found.append([interval.low <= 0.5 <= interval.high for interval in both])
    crossed, paper = np.mean(found, axis=0)
    assert crossed > 0.85
    assert paper < 0.4


def test_the_same_scores_give_the_same_interval():
    scores = np.random.default_rng(0).random((8, 20))
    assert statistics.crossed_bootstrap(scores) == statistics.crossed_bootstrap(scores)
    with pytest.raises(ValueError, match=r"found shape \(0,\)"):
        statistics.crossed_bootstrap(np.array([]))


@pytest.mark.parametrize(
    "name", ["qwen3_32b_fp8", "qwen3_32b_servers", "qwen3_235b_a22b", "qwen3_32b_carry_over"]
)
def test_a_harvest_of_a_benchmark_has_no_limits_of_a_step_nor_asks_for_a_loss(name):
    over = ["rollout.servers=[http://a:1]"] if "servers" in name else []
    recipe = load(f"recipes/{name}.yaml", over)
    first = recipe.evaluation.benchmarks[0]
    asked, benchmark = answering(recipe, first.name)
    assert benchmark == first
    assert asked.rollout.quantization == recipe.rollout.quantization
    limits = asked.rollout.staleness, asked.rollout.carry_over, asked.rollout.tokens_per_step
    assert limits == (0, False, None)
    few, _ = answering(load(f"recipes/{name}.yaml", [*over, "steps=6"]), first.name)
    assert "warmup" not in str([*remarks(Job(few))]), "nothing is trained"
    greedy = load(f"recipes/{name}.yaml", [*over, "evaluation.samples=1"])
    with pytest.raises(ValueError, match=r"expected evaluation.samples above 1 .*, found one response"):
        answering(greedy, first.name)
