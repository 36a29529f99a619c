"""Cost of cut trunks, predicted from simulated streams."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_eqlen.metrics import PACKING_REPEATED_TOKENS, PACKING_TOKENS
from megatron_eqlen.objectives.build import build_trees
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.packing.simulated import (
    MEDIAN,
    exchanged_share,
    repeated_share,
    simulated_responses,
    simulated_streams,
)
from megatron_eqlen.plan import describe
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Node, Prompt, TokenTree
from tests.kit import ROOT
from tools.benchmarks.scripted import EOS, ScriptedEngine

RECIPE = ROOT / "recipes" / "qwen3_32b.yaml"


def test_rows_of_one_path_cut_a_fifth_to_a_third_and_rows_of_two_paths_hold_whole_streams():
    assert 0.15 < repeated_share(36864, limit=32768, prompt=2048) < 0.35
    assert repeated_share(4 * 34816, limit=32768, prompt=2048) == 0


def test_the_foretold_share_is_that_of_streams_that_the_harvester_makes():
    limit, prompt = 320, 8
    budget = round(1.06 * (limit + prompt))
    keys = ["model.path=.", f"rollout.max_response_length={limit}", f"data.max_prompt_length={prompt}"]
    recipe = load(RECIPE, [*keys, f"packing.max_tokens_per_row={budget}", "loss.kl_coef=0"])
    prompts = [Prompt(str(n), [1] * prompt, "?", "math", "", number=n) for n in range(16)]
    engine = ScriptedEngine(round(MEDIAN * limit), prompt)
    streams, _ = harvest(engine, HarvestPlan(prompts, recipe, [EOS], seed=0))
    coin = np.random.default_rng(0)
    for segment in (segment for stream in streams for segment, _ in stream.ended()):
        segment.grade = Grade(float(coin.integers(2)), "scored")
    trees, _ = build_trees(streams, recipe)
    metrics = plan_rows(trees, budget).metrics
    measured = metrics[PACKING_REPEATED_TOKENS] / metrics[PACKING_TOKENS]
    assert measured > 0.1
    assert measured == pytest.approx(repeated_share(budget, limit, prompt), abs=0.04)


@pytest.mark.parametrize("ranks", [2, 4])
def test_of_one_sequence_the_rank_with_its_end_gets_all_other_keys_and_of_several_fewer(ranks):
    """A row's padding sees itself alone."""
    chain = TokenTree(
        "chain",
        [Node(-1, Tokens.of(np.zeros(1))), Node(0, Tokens.of(np.zeros(2048), np.zeros(2048)), 1.0, 1.0)],
    )
    assert exchanged_share([chain], 2048, ranks) == (ranks - 1) / ranks
    for simulated in (simulated_streams, simulated_responses):
        trees = simulated(16, limit=4096, prompt=256)
        assert 0.1 < exchanged_share(trees, 8192, ranks) < 0.9 * (ranks - 1) / ranks


@pytest.mark.parametrize(("budget", "warned"), [(36864, True), (139264, False)])
def test_the_plan_warns_of_a_row_budget_that_repeats_trunks_and_says_how_much(budget, warned):
    plan = describe(load(RECIPE, [f"packing.max_tokens_per_row={budget}"]))
    share = repeated_share(budget, limit=32768, prompt=2048)
    assert (f"about {share:.0%} of the positions repeat trunks that rows of {budget:,} cut" in plan) == warned
    assert ("WARNING" in plan) == warned


def test_other_sampling_and_the_expanded_layout_have_no_trunks_to_cut():
    for keys in (["sampling=independent"], ["packing.layout=expanded"]):
        assert "repeat trunks" not in describe(load(RECIPE, ["packing.max_tokens_per_row=36864", *keys]))
