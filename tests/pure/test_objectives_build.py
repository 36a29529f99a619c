"""Advantages and weights of token trees, on the worked example of types.py and on groups."""

import dataclasses
import functools
import itertools
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.advantages import dr_grpo, rloo, whiten
from megatron_eqlen.objectives.aggregation import token_mean
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.dynamic_sampling import filter_groups, select
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.objectives.surrogates import Reinforce
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.tokens import Ragged, Tokens
from megatron_eqlen.types import Grade, Part, Prompt
from tests.kit.marks import examples
from tests.kit.recipes import OWN_GRADER, small
from tests.kit.rollouts import build_trees

QUESTION = Prompt("q", [1, 2], "?", "math", "1")


def prompt(name: str) -> Prompt:
    return Prompt(name, [1], "?", "math", "1")


WITHOUT_RATIO = Objective("mine", rloo, token_mean, Reinforce())


def recipe(**keys):
    limits = {"max_response_length": 50, "top_k": 0, "top_p": 1.0}
    sections = {"rollout": limits, "packing": {"max_tokens_per_row": 128}, "loss": {"kl_coef": 0.0}}
    return small(
        **{"group_size": 2, "data": {"max_prompt_length": 8, "prompts_per_step": 4}} | sections | keys
    )


def segment(tokens, reward=None):
    """Return a segment that ended with this reward, or that did not end (None)."""
    ended = reward is not None
    return Part(
        Tokens.of(list(tokens), [-0.5] * len(tokens)),
        "stop" if ended else None,
        Grade(reward, "correct" if reward else "wrong") if ended else None,
    )


def worked_example(a1=0.0, a2=1.0, tail=0.0):
    """Return A_1 = 5 9, B_1 = 6 7, A_2 = 8 9, B_2 = 4 4, and a tail that ends."""
    pairs = [(segment([5, 9], a1), segment([6, 7])), (segment([8, 9], a2), segment([4, 4]))]
    return kit.stream(QUESTION, 0, 0, pairs, "max_pairs", tail=segment([9], tail))


def build(rollouts, **keys):
    return build_trees(rollouts, recipe(**keys))


# one prompt, G/2 = 1 subgroup, N_k = 2 pairs, two sides, two tokens: 1/8 a token
@pytest.mark.parametrize(("a1", "keys", "advantages", "weights", "metrics"), [
    (0, {}, [-1, 1, 1, -1], [1 / 8] * 4, {"effective_samples": 4}),
    # the first pair is skipped, but one of N_k
    (1, {"loss__kl_coef": 0.1}, [0, 0, 1, -1], [0, 0, 1 / 8, 1 / 8], {"skip_rate": 0.5}),
    (1, {"equal_length__pair_count": "effective"}, [0, 0, 1, -1], [0, 0, 1 / 4, 1 / 4], {}),
    (1, {"equal_length__suffix_reward": "mean", "objective": "rloo"}, [0.5, -0.5, 1, -1], [1 / 8] * 4,
     {"reward_gap_max_mean": 0.25, "advantage_max": 1, "advantage_std": ((0.5**2 + 1) / 2) ** 0.5}),
])  # fmt: skip
def test_a_stream_is_a_caterpillar_with_the_weights_of_eq_5_and_6(a1, keys, advantages, weights, metrics):
    (tree,), found = build([worked_example(a1=a1, a2=1, tail=0)], **keys)
    assert [node.token_ids.tolist() for node in tree.nodes] == [[1, 2], [5, 9], [6, 7], [8, 9], [4, 4]]
    assert [node.parent for node in tree.nodes] == [-1, 0, 0, 2, 2]
    assert tree.nodes[3].tokens["logprobs"].tolist() == [-0.5, -0.5]
    assert [node.advantage for node in tree.nodes] == [0, *advantages]
    assert [node.weight for node in tree.nodes] == [0, *weights]
    assert {name: found[f"objective/{name}"] for name in metrics} == pytest.approx(metrics)


def test_the_longest_segment_is_measured():
    shorter = (segment([9], 1.0), segment([4]))
    stream = kit.stream(QUESTION, 0, 0, [*pairs_of(worked_example())[:1], shorter], "truncated")
    assert build([stream])[1]["objective/segment_length_max"] == 2


def test_maximum_and_mean_of_a_side_that_no_response_extends_are_equal():
    stream = kit.stream(QUESTION, 0, 0, pairs_of(worked_example(a1=0.0, a2=1.0)), "truncated")
    assert build([stream])[1]["objective/reward_gap_max_mean"] == 0


def test_a_teacher_trains_equal_pairs_and_the_tail_too_alone_or_beside_the_rewards():
    (tree,), _ = build([worked_example(1.0, 1.0, 1.0)], teacher__path="t")
    assert [node.weight for node in tree.nodes[1:]] == [1 / 12] * 4 + [1 / 3], (
        "N is 3, and the tail one token"
    )
    (tree,), _ = build([worked_example()], teacher__path="t", loss__advantage="none")
    assert all(node.weight and not node.advantage for node in tree.nodes[1:])


def test_the_only_stream_of_a_prompt_is_compared_within_its_pairs():
    keys = {"equal_length__pair_weight": "on_policy", "group_size": 4}
    (tree,), _ = build([worked_example()], **keys, equal_length__baseline="streams")
    (within,), _ = build([worked_example()], **keys)
    assert [node.advantage for node in tree.nodes] == [node.advantage for node in within.nodes]


def test_a_named_reward_is_compared_with_the_other_streams_of_its_prompt_too():
    streams = [worked_example(a1=1, a2=1, tail=0), worked_example(a1=0, a2=1, tail=1)]
    streams[1].index = 1
    for grade in (part.grade for stream in streams for part in stream.parts if part.grade):
        grade.rewards = {"a": grade.reward}
    keys = {"equal_length__pair_weight": "on_policy", "equal_length__baseline": "streams", "group_size": 4}
    keys |= {"objective": "rloo", "reward__weights": {"a": 1.0}, "packing__max_tokens_per_row": 4096}
    apart, together = (
        build(streams, **keys, data=OWN_GRADER, loss__rewards=rewards)[0] for rewards in ("apart", "together")
    )
    advantages = [[node.advantage for node in tree.nodes] for tree in together]
    assert [[node.advantage for node in tree.nodes] for tree in apart] == advantages
    assert [sum(of_pair) != 0 for of_pair in (advantages[0][1:3], advantages[1][1:3])] == [True, True]


def test_a_stream_is_compared_with_the_mean_of_all_other_streams_of_its_prompt():
    """First pairs have the means 1/4, 1/2 and 3/4: a B side the mean of A_2 = 1 and the tail, 0."""
    streams = [worked_example(a1, a2=1, tail=0) for a1 in (0, 0.5, 1)]
    for index, stream in enumerate(streams):
        stream.index = index
    keys = {"equal_length__pair_weight": "on_policy", "equal_length__baseline": "streams", "group_size": 6}
    trees, _ = build(streams, objective="rloo", **keys)
    for a1, others, tree in zip((0, 0.5, 1), (5 / 8, 1 / 2, 3 / 8), trees, strict=True):
        rewards = np.array([a1, 0.5, 1, 0, 0])  # A_1, B_1, A_2, B_2 and the tail
        assert [node.advantage for node in tree.nodes[1:]] == pytest.approx(rewards - others)


def test_a_pair_is_skipped_only_where_all_its_named_rewards_are_equal():
    stream = worked_example()
    for part in stream.parts:
        if part.grade:
            part.grade.rewards = {"right": 1.0, "brief": float(part is not stream.parts[0])}
    for brief, weights in ((0.5, [1 / 8, 1 / 8, 0, 0]), (0.0, [0] * 4)):
        keys = {"objective": "gdpo", "reward__weights": {"right": 1.0, "brief": brief}, "data": OWN_GRADER}
        (tree,), _ = build([stream], **keys, packing__max_tokens_per_row=4096)
        assert [node.weight for node in tree.nodes[1:]] == weights, f"brief counts {brief}"


def test_equal_rewards_in_a_group_are_trained_for_their_kl_alone():
    group = kit.group(QUESTION, 0, [segment([3, 9], 1.0), segment([4, 9], 1.0)])
    for kl_coef, weight in ((0.0, 0.0), (0.1, 0.25)):
        (tree,), metrics = build([group], sampling="independent", loss__kl_coef=kl_coef)
        assert [node.advantage for node in tree.nodes] == [0, 0, 0]
        assert [node.weight for node in tree.nodes] == [0, weight, weight]
        assert (metrics["objective/zero_advantage_fraction"], metrics["objective/advantage_std"]) == (1, 0)


@pytest.mark.parametrize("keys", [{}, {"loss__baseline": "alive", "objective": "dr_grpo"}], ids=str)
def test_rewards_equal_up_to_round_off_are_equal(keys):
    group = kit.group(QUESTION, 0, [segment([3, 9], 0.1 + 0.2), segment([4, 9], 0.3)])
    (tree,), _ = build([group], sampling="independent", **keys)
    assert [node.advantage for node in tree.nodes] == [0, 0, 0]


def test_an_unscored_response_is_refused_by_name():
    group = kit.group(QUESTION, 0, [segment([3, 9], 1.0), Part(Tokens.of([4, 9], [-1, -1]), "stop")])
    with pytest.raises(ValueError, match=r"prompt q: .*no grade"):
        build([group], sampling="independent")


@pytest.mark.parametrize(("keys", "reason"), [
    ({"objective": "grop"}, "nearest: 'grpo'"),
    ({"objective": "gr3"}, "1 for both sides"),
    ({"objective": "maxrl", "equal_length__pair_weight": "on_policy"}, "no estimate of the prompt"),
    ({"objective": "delta_l", "equal_length__pair_weight": "on_policy"}, "averages by length"),
    ({"sampling": "independent", "objective": "maxrl", "loss__overlong_buffer": 2}, "rewards of at least 0"),
    ({"objective": "sapo", "loss__clip_ratio_high": 0.2}, "soft gate"),
    ({"objective": "ctpo"}, "from its first token on"),
    ({"objective": "treerpo"}, "expected sampling: tree"),
    (
        {"objective": "grpo_ma", "sampling": "tree", "tree_sampling__forks": 2},
        "pools the answers to a prompt's thoughts",
    ),
    ({"sampling": "independent", "equal_length__max_pairs": 1}, "acts only with sampling: equal_length"),
    ({"objective": "rloo", "loss__minibatches": 2}, "no importance ratio"),
    ({"objective": "rloo", "loss__epochs": 2}, "loss.minibatches 1 x loss.epochs 2 = 2 updates"),
    ({"objective": "rloo", "loss__clip_ratio_low": 0.2}, "set both"),
    ({"objective": "vespo", "loss__clip_ratio_high": 0.2}, "soft kernel"),
    ({"objective": "dapo", "loss__overlong_buffer": 50}, "is not below"),
    ({"loss__minibatches": 5}, "more than data.prompts_per_step"),
    ({"loss__old_logprobs": "rollout", "loss__rollout_is": "token"}, "already starts from"),
    ({"loss__clip_ratio_low": 1.5}, "below zero"),
    ({"loss__overlong_factor": 0.5}, "acts only with loss.overlong_buffer set, found 0"),
    ({"objective": "vespo", "loss__rollout_is": "token"}, "takes an importance weight already"),
    ({"loss__rollout_rs": {"seq_max_k2": [0.5, 2]}},
     r"rollout_rs.seq_max_k2: expected one number.*\[0.5, 2.0\]"),
    ({"loss__rollout_rs": {"seq_max_k1": 2}}, "seq_max_k1"),
    ({"objective": "cispo", "loss__clip_ratio_c": 3.0}, "cispo clips only the "),
    ({"loss__clip_ratio_c": 1.0}, "loss.clip_ratio_c: 1.0: expected a bound above 1"),
    ({"objective": "p-gspo"}, "p-gspo is not here: its paper was withdrawn"),
    ({"objective": "T2T"}, "T2T is not here: the equations of its paper .* are not transcribed"),
    ({"objective": "lspo"}, "sampling: equal_length: its responses share prefixes"),
    ({"sampling": "independent", "loss__length_quantiles": [0.3, 0.6, 0.9]}, "set loss.dynamic_sampling"),
    ({"sampling": "independent", "objective": "lspo", "loss__length_quantiles": [0.3, 0.2, 0.9]},
     "expected .low, high, max. with low <= high <= max"),
    ({"loss__rollout_is_threshold": [2, 1]}, r"expected \[low, high\], found \[2, 1\]"),
    ({"loss__advantage": "none"}, "trains nothing without a teacher: expected teacher.path"),
    ({"objective": "dapo", "teacher__path": "t"}, "loss.dynamic_sampling: true with teacher: t: equal"),
    ({"objective": "reinforce_pp_baseline", "sampling": "independent", "loss__baseline": "alive"},
     "expected objective: dr_grpo or rloo, .*, found objective: reinforce_pp_baseline, adv"),
    ({"objective": "rloo", "sampling": "independent", "loss__baseline": "fitted", "loss__advantage": "grpo"},
     "found objective: rloo, advantage grpo and rewards: together"),
    ({"loss__teacher_coef": 0.5}, "loss.teacher_coef: 0.5: expected teacher.path or teacher.url"),
    ({"teacher__path": "t", "equal_length__pair_count": "effective"}, "effective has no effect with a tea"),
    ({"teacher__path": "t", "teacher__url": "http://t"}, "teacher.url: http://t with teacher.path: set one"),
    ({"teacher__url": "http://t", "rollout__temperature": 0.6}, "found 0.6 and false"),
    ({"objective": "gdpo"}, "compares named rewards apart: expected reward.weights, found none"),
    ({"reward__weights": {"a": 1}}, r"expected a grader of your own at data.sources.0.grader, found none"),
    ({"reward__weights": {"a": 1}, "data": OWN_GRADER, "objective": "gdpo", "loss__overlong_buffer": 2,
      "packing__max_tokens_per_row": 4096},
     "loss.overlong_buffer: 2 with loss.rewards: apart: the penalty has no name"),
    ({"sampling": "independent", "objective": "reinforce_pp", "rollout__carry_over": True,
      "rollout__tokens_per_step": 9, "loss__rollout_is": "token"}, "depends on its own length"),
    ({"sampling": "independent", "objective": "reinforce_pp", "loss__dynamic_sampling": True},
     "equal rewards have a gradient, too"),
])  # fmt: skip
def test_combinations_without_sense_are_refused_with_the_reason(keys, reason):
    with pytest.raises(RecipeError, match=reason):
        recipe(**keys)


UNMASKED = {"rollout__top_k": 20}
MASKED = UNMASKED | {"rollout__keep_sampling_mask": True}
CARRIED = {"rollout__carry_over": True, "rollout__tokens_per_step": 9}


@pytest.mark.parametrize(("keys", "named"), [
    ({"loss__old_logprobs": "rollout"}, "loss.old_logprobs: rollout"),
    ({"loss__rollout_is": "sequence"}, "loss.rollout_is: sequence"),
    ({"loss__rollout_rs": {"seq_mean_k3": 0.01}}, "loss.rollout_rs"),
    ({"rollout__mismatch": {"then": "stop"}}, "rollout.mismatch.then: stop"),
    ({"rollout__mismatch": {"tolerance": 0.2}}, "rollout.mismatch.tolerance: 0.2"),
    (CARRIED, "rollout.carry_over: true"),
    (CARRIED | {"loss__rollout_is": "token"}, "loss.rollout_is: token"),
])  # fmt: skip
def test_a_comparison_with_the_engine_needs_log_probs_of_the_trained_distribution(keys, named):
    with pytest.raises(RecipeError, match=f"{named} compares the engine's log-probs.*keep_sampling_mask"):
        recipe(**UNMASKED | keys)
    if keys != CARRIED:
        recipe(**MASKED | keys)


@pytest.mark.parametrize(
    "older",
    [CARRIED, {"rollout__engine": "server", "rollout__servers": ["http://a"], "rollout__staleness": 2}],
    ids=["carry_over", "staleness"],
)
@pytest.mark.parametrize("objective", ["rloo", "tests.pure.test_objectives_build:WITHOUT_RATIO"])
def test_old_log_probs_that_no_ratio_reads_do_not_correct_for_staleness(objective, older):
    keys = {"objective": objective, "loss__old_logprobs": "rollout"} | older
    with pytest.raises(RecipeError, match=r"only in an importance ratio, .* has none"):
        recipe(**keys)
    recipe(**keys | {"loss__clip_ratio_low": 0.2, "loss__clip_ratio_high": 0.2})
    recipe(**keys | {"loss__old_logprobs": "recompute", "loss__rollout_is": "token"})


def test_minibatches_hold_whole_prompts_and_average_over_their_own():
    groups = [kit.group(prompt(name), 0, [segment([3, 9], 1.0), segment([4, 9], 0.0)]) for name in "abc"]
    keys = {"sampling": "independent", "loss__minibatches": 2}
    batches, metrics = build_minibatches(groups, Job(recipe(**keys)))
    assert [[tree.name for tree in batch] for batch in batches] == [["a", "b"], ["c"]]
    assert [batch[0].nodes[1].weight for batch in batches] == [1 / 8, 1 / 4]
    assert metrics["objective/units"] == 3
    assert len(build_minibatches(groups[:1], Job(recipe(**keys)))[0]) == 1
    for of_kind in (keys, {}):
        assert build_minibatches([], Job(recipe(**of_kind)))[0] == [[]], "an update without a token"


def test_dynamic_sampling_drops_prompts_whose_verifier_rewards_are_all_equal():
    long = segment([7] * 49 + [9], 1.0)  # correct but penalised for its length: still nothing to learn
    groups = [
        kit.group(prompt("a"), 0, [segment([3, 9], 1.0), segment([4, 9], 0.0)]),
        kit.group(prompt("b"), 0, [segment([3, 9], 1.0), long]),
        kit.group(prompt("c"), 0, [segment([3, 9], 0.5), Part(Tokens.of([7], [-1.0]), "length")]),
    ]
    dapo = Job(recipe(sampling="independent", objective="dapo"))
    assert filter_groups(groups, dapo) == (["a", "c"], ["b"])
    assert select(groups, dapo, room=1) == ([groups[0]], 1)
    carried = Job(recipe(sampling="independent", objective="dapo", loss__rollout_is="token", **CARRIED))
    assert select(groups, carried, room=1) == ([groups[0], groups[2]], 1), "no later step trains them"
    streams = [worked_example(a1=1, a2=1, tail=1), worked_example(a1=0, a2=0, tail=1)]
    streams[1].prompt = prompt("r")
    assert filter_groups(streams, Job(recipe(objective="dapo"))) == (["r"], ["q"])


def quantile_by_definition(values, share):
    """Return inf {t: F(t) >= share}, F the empirical distribution; exact for shares of two decimals."""
    hundredths = round(100 * share)
    return min(t for t in values if 100 * sum(v <= t for v in values) >= hundredths * len(values))


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=25),
    shares=st.lists(st.integers(1, 100), min_size=3, max_size=3).map(sorted),
    draws=st.integers(1, 3),
)
@examples(50)
def test_lspo_keeps_prompts_up_to_the_low_quantile_and_from_high_to_max_of_each_draw(lengths, shares, draws):
    size = -(-len(lengths) // draws)
    groups = []
    for number, (right, wrong) in enumerate(lengths):
        asked = dataclasses.replace(prompt(f"p{number}"), number=number)
        responses = [segment([3] * right, 1.0), segment([3] * wrong, 0.0)]
        groups.append(kit.group(asked, 0, responses))
    dull = kit.group(dataclasses.replace(prompt("dull"), number=0), 0, [segment([3] * 50, 1.0) for _ in "ab"])
    low, high, top = (share / 100 for share in shares)
    expected = set()
    for first in range(0, len(groups), size):
        drawn = groups[first : first + size]
        means = [sum(map(len, group.parts)) / 2 for group in drawn]
        q_low, q_high, q_max = (quantile_by_definition(means, share) for share in (low, high, top))
        kept = (mean <= q_low or q_high <= mean <= q_max for mean in means)
        expected |= {group.prompt_id for group, keep in zip(drawn, kept, strict=True) if keep}
    settings = recipe(
        sampling="independent", objective="lspo", loss__length_quantiles=[low, high, top],
        data__prompts_per_step=size,
    )  # fmt: skip
    keep, drop = filter_groups([dull, *groups], Job(settings))
    assert set(keep) == expected
    assert set(drop) == {group.prompt_id for group in [dull, *groups]} - expected


def test_what_the_budget_cut_off_is_no_response_of_a_mean_length_of_lspo():
    cut = Part(Tokens.of([3] * 40, -1.0))
    groups = [
        kit.group(prompt(f"p{n}"), 0, [segment([3] * n, 1.0), segment([3] * n, 0.0), *[cut] * (n == 1)])
        for n in (1, 2, 3)
    ]
    keys = {"sampling": "independent", "objective": "lspo", "loss__length_quantiles": [0.3, 1.0, 1.0]}
    assert filter_groups(groups, Job(recipe(**keys))) == (["p1", "p3"], ["p2"])


def test_lspo_trains_what_it_keeps_as_grpo_does():
    lspo, grpo = (Job(recipe(sampling="independent", objective=name)).objective for name in ("lspo", "grpo"))
    assert lspo.length_quantiles == (0.3, 0.65, 0.95)
    assert dataclasses.replace(lspo, name="grpo", dynamic_sampling=False, length_quantiles=None) == grpo


def test_rollouts_of_another_sampling_are_refused():
    with pytest.raises(ValueError, match="expected a rollout of sampling: independent, found equal_length"):
        build([worked_example()], sampling="independent")


def test_sampling_masks_go_with_their_tokens_and_must_be_what_the_recipe_says():
    masked = {"rollout__keep_sampling_mask": True, "rollout__top_k": 20}
    stream = worked_example()
    with pytest.raises(ValueError, match="keep_sampling_mask: true, found a rollout recorded without"):
        build([stream], **masked)
    for sampled in stream.parts:
        kept = Ragged.of((token, token + 10) for token in sampled.token_ids)
        sampled.tokens = sampled.tokens.with_column("kept", kept)
    for changes in ({}, {"equal_length__prefix_in_gradient": True, "packing__layout": "expanded"}):
        (tree,), _ = build([stream], **masked, **changes)
        for node in tree.nodes[1:]:
            assert node.tokens["kept"] == Ragged.of((token, token + 10) for token in node.token_ids)
    with pytest.raises(ValueError, match="keep_sampling_mask: false, found a rollout recorded with"):
        build([stream])


def test_a_tree_has_policy_versions_only_where_a_step_trains_older_tokens():
    stream = worked_example()
    for sampled in stream.parts:
        sampled.tokens = sampled.tokens.with_column("versions", np.full(len(sampled), 3, np.int32))
    servers = {"rollout__engine": "server", "rollout__servers": ["http://localhost:8000"]}
    for older in (False, True):
        (tree,), _ = build([stream], **servers, rollout__staleness=int(older), loss__rollout_is="token")
        assert all(("versions" in node.tokens) == older for node in tree.nodes[1:])
    assert all("versions" in sampled.tokens for sampled in stream.parts)


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1 + 0.2, 0.3, 0.3]], ids=str)
def test_a_batch_of_equal_rewards_is_not_whitened_to_differences_of_round_off(rewards):
    group = kit.group(QUESTION, 0, [segment([3, 9], reward) for reward in rewards])
    (tree,), _ = build([group], sampling="independent", objective="reinforce_pp", group_size=3)
    assert [node.advantage for node in tree.nodes] == [0, 0, 0, 0]


def test_whitening_leaves_an_advantage_of_0_as_it_is():
    centred = dr_grpo([0.1, 0.2, 0.4], [1, 1, 1])
    assert fmean(centred) != 0, "but for round-off"
    assert whiten([centred, [0.0, 0.0]], centre=False)[1] == [0.0, 0.0]


def test_a_completion_that_the_budget_cut_off_is_in_no_unit():
    cut = Part(Tokens.of([3, 4], [-1.0, -1.0]))
    group = kit.group(QUESTION, 0, [segment([3, 9], 1.0), segment([4, 9], 0.0), cut])
    (tree,), metrics = build([group], sampling="independent")
    assert [node.weight for node in tree.nodes] == [0, 1 / 4, 1 / 4]
    assert metrics["objective/effective_samples"] == 2
    (tree,), _ = build([kit.group(QUESTION, 0, [cut])], sampling="independent")
    assert len(tree.nodes) == 1
    assert filter_groups([kit.group(QUESTION, 0, [cut])], Job(recipe(sampling="independent"))) == ([], ["q"])


def test_sides_of_unequal_length_are_refused_by_name():
    stream = worked_example()
    pairs_of(stream)[1].b.tokens = Tokens.of([4, 4, 3], -0.5)
    with pytest.raises(ValueError, match=r"stream q/0: pair 1: .* found 2 and 3 tokens"):
        build([stream])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_prompts_whose_other_rollouts_are_not_complete_keep_their_mean_over_tokens(minibatches):
    """One of two streams of the prompt is complete: its tokens stand for twice as many, of 4 prompts."""
    carried = CARRIED | {"loss__rollout_is": "token", "loss__loss_agg_mode": "prompt-mean-token-mean"}
    settings = recipe(group_size=4, loss__minibatches=minibatches, **carried)
    stream = kit.stream(QUESTION, 0, 0, [(segment([5, 9], 1.0), segment([6, 7], 0.0))], "both_ended")
    for part in stream.parts:
        part.tokens = part.tokens.with_column("versions", np.zeros(2, np.int64))
    (tree,), _ = build_trees([stream], settings)
    assert [node.weight for node in tree.nodes[1:]] == [minibatches / (4 * 2 * 4)] * 2


def test_few_lines_that_are_alive_weigh_against_four_of_the_prompts_mean():
    ends = [([3, 9], 1.0), ([3, 4, 9], 0.0), ([3, 4, 9], 0.5)]
    group = kit.group(QUESTION, 0, [segment(tokens, reward) for tokens, reward in ends])
    keys = {"sampling": "independent", "objective": "dr_grpo", "group_size": 3, "loss__baseline": "alive"}
    (tree,), _ = build_trees([group], recipe(**keys))
    # of the last token: one other is alive, with 0.5, and the prompt's mean is 0.75
    np.testing.assert_allclose(tree.nodes[2].advantage, [-0.75, -0.75, -(0.5 + 4 * 0.75) / 5])


def test_lines_behind_a_fork_share_its_weight_among_those_that_are_alive():
    steps = [segment([3, 3]), segment([4, 9], 1.0), segment([5, 9], 1.0), *[segment([3] * 4, 0.0)] * 2]
    steps[4] = dataclasses.replace(steps[4])
    tree = kit.tree(QUESTION, 0, steps, [-1, 0, 0, -1, -1])
    keys = {"sampling": "tree", "objective": "rloo", "group_size": 3, "loss__baseline": "alive"}
    (built,), _ = build_trees([tree], recipe(**keys, tree_sampling={"branching": 2, "forks": 1}))
    # the other line of the fork is right and weighs 1/6, two that are wrong 1/3 each, like their mean 4 times
    np.testing.assert_allclose(built.nodes[2].advantage, [1 - 1 / 6 / (1 / 6 + 2 / 3 + 4 / 3)] * 2)


def at_random(kind: str, seed: int, homes: int) -> list:
    """Return rollouts of four prompts, on random ranks of ``homes``."""
    draw, rollouts = random.Random(seed), []

    def part(ends: bool) -> Part:
        length = draw.randint(1, 9)
        return segment(
            [draw.randint(1, 9) for _ in range(length)], draw.choice([0, 0.3, 1]) if ends else None
        )

    for name in "abcd":
        asked = Prompt(name, [draw.randint(1, 9) for _ in range(3)], "?", "math", "1")
        if kind == "equal_length":
            for index in range(2):
                lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
                sides = [
                    (segment([5] * length, draw.choice([0, 1])), segment([6] * length)) for length in lengths
                ]
                rollouts.append(kit.stream(asked, index, 0, sides, "max_pairs", tail=part(True)))
        elif kind == "independent":
            rollouts.append(kit.group(asked, 0, [part(True) for _ in range(3)]))
        else:
            steps = [part(False), part(True), part(True), part(True)]
            rollouts.append(kit.tree(asked, 0, steps, [-1, 0, 0, -1]))
        for rollout in rollouts:
            home = draw.randrange(homes)
            for each in rollout.parts:
                each.home = home
    return rollouts


@pytest.mark.parametrize(("kind", "keys"), [
    *itertools.product(["equal_length", "independent", "tree"], [
        {"objective": "grpo"},
        {"objective": "dapo", "loss__minibatches": 2},
        {"objective": "reinforce_pp"},  # whitened over the batch
    ]),
    *itertools.product(["equal_length", "independent"], [
        {"objective": "grpo", "loss__loss_agg_mode": "prompt-mean-token-mean", "loss__kl_coef": 0.1},
    ]),
    ("independent", {"objective": "dr_grpo", "loss__baseline": "fitted"}),  # to the batch's spans
    ("equal_length", {"objective": "rloo", "equal_length__pair_weight": "on_policy",
                      "equal_length__baseline": "streams", "group_size": 4}),
])  # fmt: skip
def test_ranks_that_compare_their_own_rollouts_get_the_trees_of_one_that_compares_all(kind, keys):
    job = Job(recipe(sampling=kind, **keys))
    for seed in range(3):
        expected, metrics = build_minibatches(at_random(kind, seed, 3), job, 1)
        barrier, sent = threading.Barrier(3), {}

        def gather(items: list, rank: int, barrier=barrier, sent=sent) -> list:
            barrier.wait(60)
            sent[rank] = pickle.dumps(items)
            barrier.wait(60)
            return [item for each in sorted(sent) for item in pickle.loads(sent[each])]

        def of_rank(rank: int, gather=gather, seed=seed) -> tuple:
            rollouts = at_random(kind, seed, 3)
            for part in (part for rollout in rollouts for part in rollout.parts if part.home != rank):
                part.tokens = part.tokens.bare()  # as it comes from another rank
            return build_minibatches(rollouts, job, 1, functools.partial(gather, rank=rank), rank)

        with ThreadPoolExecutor(3) as pool:
            of_ranks = list(pool.map(of_rank, range(3)))
        for trees, found in of_ranks:
            assert list(map(described, trees)) == list(map(described, expected))
            assert found == pytest.approx(metrics, rel=1e-12)


def described(trees: list) -> list:
    """Return what must be the same on each rank."""
    nodes = [
        [(n.parent, len(n.tokens), n.home, np.ravel(n.advantage).tolist(), n.weight) for n in tree.nodes]
        for tree in trees
    ]
    return [(t.name, t.nodes[0].token_ids.tolist(), found) for t, found in zip(trees, nodes, strict=True)]
