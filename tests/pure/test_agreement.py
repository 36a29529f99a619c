"""Reports and actions of a run whose trainer and engine disagree."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.job import parse
from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.recipe import LossRecipe, RecipeError, RolloutRecipe
from megatron_eqlen.recipe.budget import Spent
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.run.run import Run
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.agreement import (
    Compared,
    MismatchError,
    WorstToken,
    check_servers,
    disagreement,
    drawn_lines,
    mismatch_of,
)
from megatron_eqlen.training.policy_loss import policy_loss, reduce_metrics
from megatron_eqlen.types import Part
from tests.kit.report_runs import example_group, example_stream, example_tree

SMALL = {"name": "t", "steps": 9, "model": {"path": "m"}, "data": {"sources": [{"name": "a", "path": "b"}]}}


def small(**rollout):
    return parse(SMALL | {"rollout": {"top_k": 0, "top_p": 1.0} | rollout}, "test")


@pytest.mark.parametrize(("mismatch", "quantization", "message"), [
    (None, None, None), (0.1, None, None), (math.nan, None, "nan"), (0.4, "fp8", None),
    (0.11, None, "differ by 0.11 on average of the step, rollout.mismatch.tolerance is 0.1"),
    (0.6, "fp8", "tolerance is 0.5"),
])  # fmt: skip
def test_a_step_disagrees_above_the_tolerance_which_is_larger_in_fp8(mismatch, quantization, message):
    said = disagreement(mismatch, RolloutRecipe(quantization=quantization, top_p=1.0, top_k=0))
    assert said is None if message is None else message in str(said)


@pytest.mark.parametrize(("dtype", "rollout", "refused"), [
    ("float32", {}, True), ("float32", {"mismatch": {"tolerance": 0.1}}, False), ("bfloat16", {}, False),
])  # fmt: skip
def test_a_server_without_round_off_has_the_trainers_log_probs_but_for_a_hundredth(dtype, rollout, refused):
    recipe = small(**rollout)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    job: Any = SimpleNamespace(recipe=recipe, model=SimpleNamespace(delta_net=None))
    compared = {"http://a": Compared(10, -10.0, -10.0, 0.2, WorstToken(0.1, "some token"))}
    with pytest.raises(MismatchError, match="log-probs of the trainer") if refused else nullcontext():
        check_servers(compared, job)


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, text: str) -> None:
        self.say(f"WARNING: {text}")

    def finish(self, page: object, learned: str) -> None: ...


def differing(mismatch: float) -> Any:
    return SimpleNamespace(mismatch=mismatch, worst=WorstToken(2.5, "some token"))


class Sampled(Rollouts):
    from_engine = True


@pytest.mark.parametrize("then", ["warn", "stop"])
def test_stop_ends_the_run_after_the_step_and_warn_does_not(then, monkeypatch):
    monkeypatch.setattr("megatron_eqlen.run.run.distributed.is_rank0", lambda: False)
    no_rollouts: Any = None
    run = object.__new__(Run)
    run.recipe, screen = small(mismatch={"then": then}), Screen()
    run.session = SimpleNamespace(progress=screen)
    run.spent, run.stopped_by, run.disagrees, run.until = Spent(3), None, False, None
    run.report_mismatch(differing(0.1), Sampled())
    run.report_mismatch(differing(0.7), Rollouts())
    assert not screen.lines
    for _ in range(2):
        run.report_mismatch(differing(0.7), Sampled())
    (line,) = screen.lines
    assert "differ by 0.7 " in line
    assert line.endswith("; most, by 2.5, in some token")
    if then == "warn":
        return run.report(no_rollouts)
    with pytest.raises(MismatchError, match=r"differ by 0.7 .*: stopped after step 3"):
        run.report(no_rollouts)
    run.spent = Spent(9)
    return run.report(no_rollouts)


def test_log_probs_that_are_not_comparable_cannot_stop_a_run():
    truncated = small(top_k=20).rollout
    assert truncated.mismatch.then == "warn"
    assert disagreement(9.0, truncated) is None
    with pytest.raises(RecipeError, match=r"mismatch.then: stop .* needs rollout.keep_sampling_mask: true"):
        small(top_k=20, mismatch={"then": "stop"})
    assert small(top_k=20, mismatch={"then": "stop"}, keep_sampling_mask=True).rollout.comparable


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


@pytest.mark.parametrize("example", [example_stream, example_group, example_tree])
def test_lines_are_drawn_among_all_that_was_generated_and_on_every_rank_the_same(example):
    """Rewards decide nothing, and ranks that have skeletons draw as those that have the tokens."""
    rollouts = [replace(example(), index=number) for number in range(40)]
    bare = [replace(rollout.skeleton(), prompt=rollout.prompt) for rollout in rollouts]
    longest = max(len(rollout.prompt.token_ids) + max(rollout.ends().values()) for rollout in rollouts)
    generated = sum(len(part) for rollout in rollouts for part in rollout.parts)
    seen = set()
    for step in range(60):
        packing = small().packing.model_copy(
            update={"max_tokens_per_row": 1 + longest * (2 if step % 2 else 9)}  # a row ends it, or the share
        )
        recipe = small().model_copy(update={"packing": packing})
        trees = drawn_lines(rollouts, recipe, step)
        drawn = [sum(map(len, tree.nodes)) for tree in trees]
        assert sum(drawn[:-1]) < generated / 16  # a sixteenth is enough
        forest, other = Forest.of(trees), Forest.of(drawn_lines(bare, recipe, step))
        assert forest.names == other.names
        assert (forest.weight == other.weight).all()
        assert 1 <= len(trees) < len(rollouts)
        assert (forest.length.sum() + len(trees)) <= recipe.packing.max_tokens_per_row
        assert all(node.parent == number - 1 for tree in trees for number, node in enumerate(tree.nodes))
        seen |= set(forest.names)
    assert len(seen) > 30


def test_a_line_that_the_budget_cut_before_its_first_token_is_not_drawn():
    empty = kit.group(example_group().prompt, 3, [Part(Tokens.of([]))], outcome="budget")
    assert drawn_lines([empty], small(), 0) == []
    assert Forest.of(drawn_lines([example_group(), empty], small(), 0)).names == ["sums/a.parquet#2/0"]
