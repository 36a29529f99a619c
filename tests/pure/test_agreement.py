"""Reports and actions of a run whose trainer and engine disagree: once an episode, over a window of steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.recipe import LossRecipe, MismatchRecipe, RecipeError
from megatron_eqlen.recipe.budget import Spent
from megatron_eqlen.run.run import Run
from megatron_eqlen.training.agreement import (
    MismatchError,
    MismatchWatch,
    mismatch_of,
    mismatch_problem,
)
from megatron_eqlen.training.policy_loss import policy_loss, reduce_metrics

SMALL = {"name": "t", "steps": 9, "model": {"path": "m"}, "data": {"sources": [{"name": "a", "path": "b"}]}}


def small(**rollout):
    return parse(SMALL | {"rollout": rollout}, "test")


mismatches = st.one_of(st.none(), st.floats(0, 0.3), st.just(math.nan))


@given(st.lists(mismatches, max_size=30), st.integers(1, 5))
def test_a_warning_comes_when_the_mean_of_the_window_rises_above_the_tolerance_and_not_again(seen, window):
    watch = MismatchWatch(MismatchRecipe(tolerance=0.1, window=window))
    compared, above = [], False
    for mismatch in seen:
        said = watch.see(mismatch)
        if mismatch is None:
            assert said is None
            continue
        compared.append(mismatch)
        newest = compared[-window:]
        now = not math.fsum(newest) / len(newest) <= 0.1
        assert (said is not None) == (now and not above)
        above = now


def test_one_bad_step_among_good_ones_is_not_worth_a_word():
    watch = MismatchWatch(MismatchRecipe())
    healthy = [0.011, 0.02, 0.036, 0.03]
    assert [watch.see(mismatch) for mismatch in [*healthy, 0.3, *healthy]] == [None] * 9
    assert "differ by 0.72 on average of the last step, rollout.mismatch.tolerance is 0.1" in str(
        MismatchWatch(MismatchRecipe()).see(0.72)
    )


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, text: str) -> None:
        self.say(f"WARNING: {text}")

    def finish(self, page: object, learned: str) -> None: ...


@pytest.mark.parametrize("then", ["warn", "stop"])
def test_stop_ends_the_run_after_the_step_and_warn_does_not(then, monkeypatch):
    monkeypatch.setattr("megatron_eqlen.run.run.distributed.is_rank0", lambda: False)
    no_rollouts: Any = None
    run = object.__new__(Run)
    run.recipe, screen = small(mismatch={"then": then}), Screen()
    run.session = SimpleNamespace(progress=screen)
    run.spent, run.stopped_by, run.worst = Spent(3), None, "some token"
    run.report_mismatch(None)
    assert not screen.lines
    run.report_mismatch("they differ")
    assert screen.lines == ["WARNING: they differ; most in some token"]
    if then == "warn":
        return run.report(no_rollouts)
    with pytest.raises(MismatchError, match="they differ: stopped after step 3, with a checkpoint"):
        run.report(no_rollouts)
    run.spent = Spent(9)
    return run.report(no_rollouts)


def test_log_probs_that_are_not_comparable_cannot_stop_or_skip():
    assert small(logprobs_mode="processed").rollout.mismatch.then == "warn"
    for then in ("skip", "stop"):
        with pytest.raises(RecipeError, match=rf"mismatch.then: {then} .* needs rollout.logprobs_mode: raw"):
            small(logprobs_mode="processed", mismatch={"then": then})
        kept = {"logprobs_mode": "processed", "keep_sampling_mask": True}
        assert small(mismatch={"then": then}, **kept).rollout.comparable


EIGHTHS = st.integers(-24, 0).map(lambda n: n / 8)
"""Log-probs whose differences are exact in every precision."""


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS, st.integers(-1, 3)), min_size=1, max_size=20))
def test_the_mismatch_is_of_the_tokens_that_the_policys_own_weights_sampled(tokens):
    trainer, engine, versions = (torch.tensor(column) for column in zip(*tokens, strict=True))
    ones = torch.ones(len(tokens), dtype=torch.float64)
    columns = {"entropy": ones, "weights": ones, "advantages": ones, "rollout_logprobs": engine.double()}
    _, loss = policy_loss(
        trainer.double(), **columns, segment_ids=torch.zeros(len(tokens), dtype=torch.int64),
        objective=lookup("grpo"), loss=LossRecipe(kl_coef=0), compared=versions == 2,
    )  # fmt: skip
    own = [abs(float(a) - float(b)) for a, b, version in tokens if version == 2]
    found = mismatch_of(reduce_metrics([loss]))
    assert found == (pytest.approx(sum(own) / len(own)) if own else None)
    tolerance = sum(own) / len(own) / 2 if own else 1e-9
    rollout = small(mismatch={"then": "skip", "tolerance": max(tolerance, 1e-9)}).rollout
    assert (mismatch_problem(found, None, rollout) is None) == (not any(own))


def test_the_key_of_earlier_recipes_is_named_with_its_new_name():
    with pytest.raises(
        RecipeError, match=r"'rollout.sync_tolerance': it is called 'rollout.mismatch.tolerance'"
    ):
        small(sync_tolerance=0.05)
