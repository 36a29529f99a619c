"""Run folders: a function of the recipe, different for different experiments, and readable."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.job import load
from megatron_eqlen.recipe import MAY_CHANGE, differences, is_under
from megatron_eqlen.recipe.load import dump
from tests.kit import ROOT
from tests.kit.marks import examples

TINY = ROOT / "recipes/tiny_cpu.yaml"

VALUES = {
    "group_size": ["8", "4"], "seed": ["0", "7"], "objective": ["grpo", "rloo"],
    "sampling": ["equal_length", "independent"], "equal_length.suffix_reward": ["max", "mean"],
    "loss.kl_coef": ["0.002", "0.0", "0"], "optimizer.lr": ["3e-4", "1e-3"],
    "model.path": ["runs/search/base", "a/b", "a_b", '"8"', "a,seed=7"], "data.sources.0.path": ["x", "y"],
    "model.revision": ["null", '"null"', "m:f"], "rollout.keep_sampling_mask": ["false"],
    "data.sources": ["[{name: arithmetic, path: x}]", "[{name: a, path: x}, {name: b, path: y}]"],
    "steps": ["30", "5"], "cluster.processes_per_node": ["2", "1"],
}  # fmt: skip
overrides = (
    st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4)
    .flatmap(
        lambda keys: st.tuples(
            *(st.sampled_from([f"{key}={value}" for value in VALUES[key]]) for key in keys)
        )
    )
    .filter(lambda given: not {"sampling=independent", "equal_length.suffix_reward=mean"} <= {*given})
)


@pytest.mark.parametrize(("given_", "folder"), [
    ((), "eqlen-grpo-seed0"),
    (("group_size=8", "steps=3", "cluster.processes_per_node=1"), "eqlen-grpo-seed0"),
    (("group_size=4",), "eqlen-grpo-group_size=4-seed0"),
    (("loss.kl_coef=0", "group_size=4", "seed=2"), "eqlen-grpo-group_size=4,loss.kl_coef=0.0-seed2"),
    (("objective=dapo", "sampling=independent"), "dapo-seed0"),
    (("model.megatron={weight_decay: 0.1}",), "eqlen-grpo-model.megatron.weight_decay=0.1-seed0"),
    (("model.megatron.weight_decay=0.1",), "eqlen-grpo-model.megatron.weight_decay=0.1-seed0"),
    (("equal_length.max_pairs=1",), "eqlen-grpo-single-pair-equal_length.max_pairs=1-seed0"),
])  # fmt: skip
def test_a_folders_name_says_what_the_command_line_changed(given_, folder):
    assert load(TINY, given_).run_folder == Path("runs/tiny_cpu") / folder


@examples(60)
@given(first=overrides, second=overrides)
def test_two_recipes_share_a_folder_only_if_one_may_continue_as_the_other(first, second):
    recipe, other = load(TINY, first), load(TINY, second)
    found = differences(recipe.model_dump(mode="json"), other.model_dump(mode="json"))
    apart = [key for key in found if not is_under(key, MAY_CHANGE)]
    assert (recipe.run_folder != other.run_folder) == bool(apart), apart


@examples(15)
@given(keys=overrides)
def test_the_resolved_recipe_names_the_same_folder(tmp_path_factory, keys):
    recipe = load(TINY, keys)
    file = tmp_path_factory.mktemp("dump") / "recipe.yaml"
    file.write_text(dump(recipe))
    assert load(file) == recipe
    assert load(file, ["steps=9"]).run_folder == recipe.run_folder


def test_names_stay_short_enough_for_a_folder():
    many = [f"model.path={'m' * 300}", "model.revision=" + "x" * 300]
    names = {load(TINY, keys).run_folder.name for keys in itertools.permutations(many)}
    assert len(names) == 1
    assert len(names.pop()) < 200


def test_a_file_that_is_complete_only_with_its_overrides_is_named_by_them(tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text("name: base\nsteps: 3\ndata: {sources: [{name: a, path: b}], max_prompt_length: 10}\n")
    keys = ["rollout.max_response_length=10", "model.path=m"]
    assert load(file, keys).run_name == "eqlen-grpo-model.path=m,rollout.max_response_length=10-seed0"
