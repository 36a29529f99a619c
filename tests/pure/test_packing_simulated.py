"""What cut trunks cost, foretold from simulated streams."""

from __future__ import annotations

import pytest

from megatron_eqlen.packing.simulated import repeated_share
from megatron_eqlen.plan import describe
from megatron_eqlen.recipe_load import load
from tests.kit import ROOT

RECIPE = ROOT / "recipes" / "qwen3_32b.yaml"


def test_rows_of_one_path_cut_a_fifth_to_a_third_and_rows_of_two_paths_hold_whole_streams():
    assert 0.15 < repeated_share(36864, limit=32768, prompt=2048) < 0.35
    assert repeated_share(4 * 34816, limit=32768, prompt=2048) == 0


@pytest.mark.parametrize(("budget", "warned"), [(36864, True), (139264, False)])
def test_the_plan_warns_of_a_row_budget_that_repeats_trunks_and_says_how_much(budget, warned):
    plan = describe(load(RECIPE, [f"packing.max_tokens_per_row={budget}"]))
    share = repeated_share(budget, limit=32768, prompt=2048)
    assert (f"about {share:.0%} of the positions repeat trunks that rows of {budget:,} cut" in plan) == warned
    assert ("WARNING" in plan) == warned


def test_other_sampling_and_the_expanded_layout_have_no_trunks_to_cut():
    for keys in (["sampling=independent"], ["packing.layout=expanded"]):
        assert "repeat trunks" not in describe(load(RECIPE, ["packing.max_tokens_per_row=36864", *keys]))
