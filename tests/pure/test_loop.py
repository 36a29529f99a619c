"""The main loop's order, and with it the owner of the GPU. The verbs themselves are tested in their own
files."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.advantages import gr3, grpo
from megatron_eqlen.recipe import DataRecipe, SourceRecipe
from megatron_eqlen.recipe.budget import Spent
from megatron_eqlen.run import loop, prompts
from megatron_eqlen.run.run import Run
from megatron_eqlen.run.step import Step
from tests.kit.recipes import small
from tools.tokenizer_maker import write_hf_tokenizer

STEPS = 3
VALUES = ("folder", "complete", "mismatch", "checkpoints", "evaluations")
"""Attributes that the loop reads; all others are verbs."""


class Recorded:
    """An object of the loop whose verbs only record their names."""

    def __init__(self, name: str, calls: list[str], answers: dict[str, Any]) -> None:
        self.name, self.calls, self.answers = name, calls, answers

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(f"{self.name}.{verb}")
            answer = self.answers.get(verb, {})
            return answer(*arguments) if callable(answer) else answer

        return self.answers[verb] if verb in VALUES else call


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Return the verbs of a run of three steps, in their order."""
    calls: list[str] = []
    step = Step(0, 0)
    left = iter([True] * STEPS + [False])
    run = Recorded("run", calls, {
        "folder": SimpleNamespace(streams=None), "checkpoints": Recorded("checkpoints", calls, {}),
        "evaluations": Recorded("evaluations", calls, {}), "complete": True, "report_mismatch": None,
        "has_next_step": lambda: next(left), "begin": lambda policy: step,
        "build_trees": lambda step: (step, []), "update": lambda step, policy, trees: (step, None),
        "evaluate_if_due": lambda step, rollouts: step,
    })  # fmt: skip
    rollouts = Recorded("engine", calls, {"collect": lambda step: step})
    policy = Recorded("policy", calls, {})

    class NoSession:
        def __init__(self, job: Any) -> None: ...
        def __enter__(self) -> Any:
            return SimpleNamespace(recipe=recipe())

        def __exit__(self, *_: object) -> None: ...

    def built(name: str, what: Any) -> Any:
        return lambda *arguments, **keys: calls.append(f"{name}.build") or what

    monkeypatch.setattr(loop, "Session", NoSession)
    monkeypatch.setattr(loop, "Run", lambda session, until: run)
    monkeypatch.setattr(loop, "Policy", built("policy", policy))
    monkeypatch.setattr(loop, "start_prompts", lambda session: None)
    monkeypatch.setattr(loop, "Generator", built("engine", rollouts))
    loop.train(Job(recipe()))
    return calls


def recipe() -> Any:
    return small(steps=STEPS)


def test_the_trainer_is_parked_whenever_the_engine_is_awake(calls):
    awake = parked = False
    for call in calls:
        parked = {"run.park": True, "run.unpark": False}.get(call, parked)
        awake = {"engine.build": True, "engine.update_weights": True, "engine.sleep": False}.get(call, awake)
        assert parked or not awake, call
        if call == "run.update":
            assert not parked
            assert not awake
        if call in ("engine.collect", "evaluations.evaluate", "run.evaluate_if_due"):
            assert awake, call
    assert calls.count("run.update") == STEPS


def test_steps_that_are_trained_again_may_cost_more_than_the_runs_limits():
    """A probe trains steps again for their weights, perhaps on a slower machine."""
    run = object.__new__(Run)
    run.recipe, run.spent, run.stopping = small(steps=None, gpu_hours=1.0), Spent(5, gpu_hours=1.02), False
    run.until = None
    assert run.complete
    run.until = 8
    assert not run.complete
    assert run.has_next_step()
    run.spent = Spent(8, gpu_hours=1.7)
    assert not run.has_next_step()


def test_a_checkpoint_is_in_force_before_what_it_is_written_from_changes(calls):
    being_written = False
    for call in calls:
        if call == "run.checkpoint_if_due":
            being_written = True  # ``Run`` waits for the last one itself
        elif call == "checkpoints.finish":
            being_written = False
        assert not (being_written and call in ("run.unpark", "run.update")), call
    assert calls.count("checkpoints.finish") == STEPS


def half(response: str, answer: int) -> float:
    return 1.5 if response == f"\\boxed{{{answer}}}" else -0.5


def unknown(respones: str, answer: int) -> float:
    return 1.0


def fails(response: str) -> float:
    return float(response.split("=")[1])


@pytest.mark.parametrize(("grader", "advantage", "error"), [
    ("half", grpo, ""),
    ("half", gr3, "first rewards of sums .*half.: .*expected rewards of at least 0, found -0.5"),
    ("unknown", grpo, r"a parameter that takes the response.*found \(respones, answer\)"),
    ("fails", grpo, "IndexError at"),
])  # fmt: skip
def test_a_reward_function_is_called_on_a_row_before_anything_is_built(
    tmp_path, monkeypatch, grader, advantage, error
):
    write_hf_tokenizer(tmp_path, ["What is 1 + 1?"] * 8)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "label": 2}\n')
    source = {"name": "sums", "path": f"{tmp_path}/rows.jsonl", "grader": f"{__name__}:{grader}"}
    made = recipe().model_copy(update={"data": DataRecipe(sources=[SourceRecipe(**source)])})
    said, ends = [], []
    progress = SimpleNamespace(say=said.append, warn=lambda text: said.append(f"WARNING: {text}"))
    session = SimpleNamespace(recipe=made, tokenizer=load_tokenizer(tmp_path), progress=progress)
    session.ends_with, session.objective = ends.append, SimpleNamespace(advantage=advantage)
    monkeypatch.setattr(prompts.distributed, "is_rank0", lambda: True)
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        prompts.try_rewards(session, prompts.start_prompts(session))
    for end in ends:
        end()
    if not error:
        right = "right 1.5, wrong -0.5, empty -0.5, without its form -0.5"
        assert said == [
            "data source sums: question from prompt, answer from label",
            f"first rewards of sums ({__name__}:half): {right}",
        ]


def test_a_replay_tells_that_benchmarks_are_not_evaluated(tmp_path):
    for benchmarks in ([], [{"name": "b", "path": "none"}]):
        said: list[str] = []
        progress = SimpleNamespace(say=said.append)
        session: Any = SimpleNamespace(recipe=small(evaluation__benchmarks=benchmarks), progress=progress)
        loop.start_rollouts(session, tmp_path, tmp_path, None)
        assert said == ["--replay starts no engine: no benchmark is evaluated"] * len(benchmarks)
