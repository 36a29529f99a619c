"""Length bias of EqLen's gradient, exactly: all streams of small processes, enumerated in float64."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_eqlen.job import Job, load
from megatron_eqlen.objectives.checks import remarks
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.recipe import RecipeError, TeacherRecipe
from megatron_eqlen.rewards.scoring import make_grader
from tests.kit import ROOT
from tests.kit.length_bias import Process
from tests.kit.recipes import small
from tests.kit.rollouts import build_trees

LIMIT = 3


def recipe(
    limit=LIMIT, objective="rloo", group_size=2, loss=None, rollout=None, sampling="equal_length", prompts=1,
    **equal_length,
):  # fmt: skip
    layout = "expanded" if equal_length.get("prefix_in_gradient") else "tree"
    return small(
        group_size=group_size, sampling=sampling, objective=objective, equal_length=equal_length,
        data={"max_prompt_length": 1, "prompts_per_step": prompts},
        rollout={"max_response_length": limit, "top_k": 0, "top_p": 1.0} | (rollout or {}),
        packing={"max_tokens_per_row": 16, "layout": layout}, loss={"kl_coef": 0.0} | (loss or {}),
    )  # fmt: skip


def repaired(**keys):
    keys["loss"] = {"loss_agg_mode": "seq-mean-token-sum"} | keys.pop("loss", {})
    return recipe(pair_weight="on_policy", **keys)


@cache
def reward_of(path):
    """An arbitrary reward in [0, 1] of each response."""
    return float(np.random.default_rng([7, *path]).random())


@pytest.fixture(scope="module")
def process():
    return Process.random(3, LIMIT, reward_of)


@pytest.fixture(scope="module")
def line():
    """A process with one token that does not end a response: few streams, of up to 3 pairs."""
    return Process.random(2, LIMIT, reward_of)


def stopping(gradient):
    """Derivative of the expected reward by a number that is added to the logits of both ends."""
    return float(gradient[:, :2].sum())


@pytest.mark.parametrize("keys", [{}, {"max_pairs": 1}, {"max_pairs": 2}], ids=str)
def test_on_policy_pairs_have_exactly_the_policy_gradient(process, keys):
    found = process.expected_estimate(repaired(**keys))
    np.testing.assert_allclose(found, process.gradient(), rtol=0, atol=1e-12)
    assert np.abs(process.gradient()).max() > 0.01


@pytest.mark.parametrize(("objective", "factor"), [
    *((name, 1.0) for name in ("rloo", "grpo", "dapo", "gspo", "luspo", "cispo")),
    *((name, 0.5) for name in ("dr_grpo", "vespo")),  # r - mean is half of r - the other's
])  # fmt: skip
def test_every_objective_keeps_the_on_policy_gradient_up_to_a_constant(line, objective, factor):
    found = line.expected_estimate(repaired(objective=objective))
    np.testing.assert_allclose(found, factor * line.gradient(), rtol=0, atol=1e-12)
    by_default = line.expected_estimate(recipe(objective=objective, pair_weight="on_policy"))
    np.testing.assert_allclose(LIMIT * by_default, found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_pairs", [None, 1])
def test_other_streams_of_the_prompt_are_an_exact_baseline(line, max_pairs):
    found = line.expected_estimate(repaired(baseline="streams", group_size=4, max_pairs=max_pairs))
    np.testing.assert_allclose(found, line.gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_pairs", [None, 1])
def test_a_length_penalty_is_a_part_of_the_on_policy_reward(process, max_pairs):
    loss = {"overlong_buffer": 2, "overlong_factor": 0.5, "dynamic_sampling": False}
    less = lambda path: reward_of(path) - 0.25 * max(len(path) - 1, 0)  # noqa: E731
    penalised = replace(process, reward=less, truncated=-0.5)
    found = process.expected_estimate(repaired(objective="dapo", loss=loss, max_pairs=max_pairs))
    np.testing.assert_allclose(found, penalised.gradient(), rtol=0, atol=1e-12)


def test_the_papers_weights_make_responses_longer_where_length_says_nothing():
    process = Process.coin_flips(1.0, LIMIT, last=-60.0)  # every response ends before the limit
    assert stopping(process.gradient()) == pytest.approx(0, abs=1e-12)
    assert stopping(process.expected_estimate(repaired())) == pytest.approx(0, abs=1e-12)
    assert stopping(process.expected_estimate(recipe(objective="grpo"))) < -0.02
    by_mean = process.expected_estimate(recipe(suffix_reward="mean"))
    assert stopping(by_mean) == pytest.approx(0, abs=1e-12)


def test_the_papers_weights_push_to_the_limit_where_the_truth_pulls_from_it():
    """A truncated response has reward 0, so that stopping pays."""
    process = Process.coin_flips(-0.5, LIMIT)
    assert stopping(process.gradient()) > 0.01
    np.testing.assert_allclose(process.expected_estimate(repaired()), process.gradient(), rtol=0, atol=1e-12)
    assert stopping(process.expected_estimate(recipe(objective="grpo"))) < 0
    dropped = process.expected_estimate(recipe(suffix_reward="mean", unfinished="drop"))
    assert stopping(dropped) == pytest.approx(0, abs=1e-12)


TAUGHT = TeacherRecipe(path="teacher")


@pytest.mark.parametrize("keys", [{"loss": {"kl_coef": 0.1}}, {"teacher": TAUGHT}], ids=["kl", "teacher"])
@pytest.mark.parametrize("max_pairs", [None, 1])
def test_kl_and_teacher_cover_each_token_as_often_as_the_policy_samples_it(keys, max_pairs):
    """A third of the responses is truncated, and all rewards are equal. Distilled like this the expected step
    is the slope of the reverse KL."""
    settings = repaired(loss=keys.get("loss", {}), max_pairs=max_pairs)
    settings = settings.model_copy(update={"teacher": keys.get("teacher", TeacherRecipe())})
    logits = np.random.default_rng(3).normal(size=(1 + 2, 3))
    process = Process(logits, 2, lambda path: 0.0)
    visits = np.zeros(len(logits))
    for stream, probability in process.streams(settings):
        (tree,), _ = build_trees([stream], settings)
        paths = [()]
        for node in tree.nodes[1:]:
            paths.append((*paths[node.parent], *node.token_ids.tolist()))
            for end in range(len(paths[node.parent]), len(paths[-1])):
                visits[process.contexts[paths[-1][:end]]] += probability * node.weight
    np.testing.assert_allclose(visits, [1, *process.probabilities[0, 1:]], rtol=0, atol=1e-12)


def test_a_teacher_trains_the_tail_of_the_papers_streams_and_leaves_its_advantage_at_0():
    """Nothing of a stream without a pair is trained otherwise."""
    settings, process = recipe(), Process.random(3, LIMIT, reward_of)
    taught = settings.model_copy(update={"teacher": TAUGHT})
    for stream, _ in process.streams(settings):
        (tree,), _ = build_trees([stream], settings)
        (with_tail,), _ = build_trees([stream], taught)
        assert all(node.weight > 0 for node in with_tail.nodes[1:])
        assert len(with_tail.nodes) == 1 + len(stream.parts)
        before, advantages = ([node.advantage for node in each.nodes] for each in (tree, with_tail))
        assert advantages == before + [0] * (len(advantages) - len(before))


def carried(**rollout):
    """Return keys of a run in which no stream of LIMIT tokens is complete in its first step."""
    limits = {"carry_over": True, "tokens_per_step": 2} | rollout
    return {"rollout": limits, "loss": {"rollout_is": "token"}}


@pytest.mark.parametrize(("keys", "bias"), [
    (carried(), 0),
    (carried(max_staleness=2), 0),
    (carried(max_staleness=1), 0.607),  # cuts what is open after two steps of two tokens
    ({"rollout": {"tokens_per_step": 4}}, 0.607),
    ({"rollout": {"tokens_per_step": 2}}, 2.406),
], ids=str)  # fmt: skip
def test_the_steps_of_carry_over_have_the_policy_gradient_but_for_what_max_staleness_cuts(line, keys, bias):
    truth = line.gradient()
    found = np.linalg.norm(line.expected_steps(repaired(**keys)) - truth) / np.linalg.norm(truth)
    assert found == pytest.approx(bias, abs=1e-3 if bias else 1e-12)


@pytest.mark.parametrize("keys", [
    {"objective": "grpo"},
    {"suffix_reward": "mean", "unfinished": "drop"},
    {"pair_weight": "on_policy", "loss": {"minibatches": 2}, "objective": "dr_grpo"},
    {"sampling": "independent", "objective": "dr_grpo"},
    {"sampling": "independent", "objective": "ba", "loss": {"minibatches": 2}},
    {"loss": {"loss_agg_mode": "prompt-mean-token-mean"}},
], ids=str)  # fmt: skip
def test_the_steps_of_carry_over_sum_to_the_estimate_of_one_step_without_a_budget(keys):
    process = Process.random(2, 2, reward_of)
    suspending = carried()
    suspending["loss"] |= keys.get("loss", {})
    at_once, in_steps = recipe(2, prompts=2, **keys), recipe(2, prompts=2, **keys | suspending)
    found = process.expected_steps(in_steps, prompts=2)
    np.testing.assert_allclose(found, process.expected_steps(at_once, prompts=2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys", [
    {"prompts": 2, "loss": {"minibatches": 2}},
    {"group_size": 4, "baseline": "streams", "objective": "dapo"},  # dynamic sampling leaves prompts out
], ids=str)  # fmt: skip
def test_the_updates_of_a_step_have_the_policy_gradient_each(keys):
    """Rewards are 0 or 1, so that many pairs and streams are equal."""
    process, prompts = Process.random(2, 2, lambda path: float(len(path) == 1)), keys.get("prompts", 1)
    found = process.expected_steps(repaired(**{"limit": 2, "objective": "grpo"} | keys), prompts)
    np.testing.assert_allclose(found, prompts * process.gradient(), rtol=0, atol=1e-12)


def test_dynamic_sampling_has_the_mean_gradient_of_all_prompts_over_the_share_that_it_keeps():
    """Draws two prompts, easy or hard, with groups of two responses of one token."""
    coins = Process.coin_flips(0.0, 1)
    processes = [coins, replace(coins, logits=np.array([[2.0, 0.0, -1.0]]))]
    settings = recipe(1, "dr_grpo", prompts=2, sampling="independent", loss={"dynamic_sampling": True})
    drawn = [
        (number, replace(groups[0], prompt=replace(groups[0].prompt, prompt_id=name)), share / 2)
        for number, process in enumerate(processes)
        for (groups,), share in process.steps(settings, 1)
        for name in "ab"
    ]
    found, kept, some = [np.zeros((1, 3)) for _ in processes], 0.0, 0.0
    for (i, first, p), (j, second, q) in itertools.product(drawn[::2], drawn[1::2]):
        left = trained([first, second], Job(settings))
        kept, some = kept + p * q * len(left) / 2, some + p * q * bool(left)
        for number, group in ((i, first), (j, second)):
            trees = [tree for tree in build_trees(left, settings)[0] if tree.name == group.prompt_id]
            found[number] += p * q * processes[number].estimate(trees)
    assert 0.1 < kept < 0.9
    for process, estimate in zip(processes, found, strict=True):
        expected = some / kept * process.gradient() / 2 / 2  # r - mean is half of r - the other's
        np.testing.assert_allclose(estimate, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("keys", "message"), [
    ({"suffix_reward": "mean"}, "suffix_reward: mean acts only with equal_length.pair_weight: paper"),
    ({"unfinished": "drop"}, "unfinished: drop acts only with"),
    ({"pair_count": "effective"}, "pair_count: effective acts only with"),
    ({"prefix_in_gradient": True}, "prefix_in_gradient: true acts only with"),
    ({"loss": {"advantage": "grpo"}}, "loss.advantage: grpo with .*only the sign"),
    ({"loss": {"loss_agg_mode": "token-mean"}}, "loss.loss_agg_mode: token-mean with .*biases"),
    ({"objective": "ba"}, "objective: ba with"),
    ({"baseline": "streams"}, "expected group_size of at least 4, found 2"),
    ({"baseline": "streams", "group_size": 4, "loss": {"rollout_is": "token"},
      "rollout": {"carry_over": True, "tokens_per_step": 100}},
     "baseline: streams acts only with rollout.carry_over: false"),
])  # fmt: skip
def test_on_policy_refuses_what_would_bias_it(keys, message):
    with pytest.raises(RecipeError, match=message):
        repaired(**keys)


def test_a_budget_that_cuts_on_policy_streams_or_responses_is_remarked():
    cut = {"rollout": {"tokens_per_step": 100}}
    for settings in (repaired(**cut), recipe(sampling="independent", objective="dr_grpo", **cut)):
        assert "unbiased only with rollout.carry_over" in [*remarks(Job(settings))][-1]
    carried = repaired(rollout={"tokens_per_step": 100, "carry_over": True}, loss={"rollout_is": "token"})
    assert "unbiased" not in "".join(remarks(Job(carried)))


def test_the_coin_grader_flips_anew_for_a_text_that_it_has_seen():
    rewards = flips("null_coin", "the same")
    assert 450 < sum(rewards) < 550
    assert flips("null_coin", "the same") == rewards, "by the run's seed"
    both = sum(map(float.__eq__, flips("null_coin", "the same", seed=1), rewards))
    assert 450 < both < 550, "independent of another seed's"


def test_longer_and_shorter_texts_win_by_their_graders():
    assert sum(flips("null_longer", "a" * 50)) < 300 < 700 < sum(flips("null_longer", "a" * 800))
    assert sum(flips("null_shorter", "a" * 800)) < 300 < 700 < sum(flips("null_shorter", "a" * 50))


def flips(recipe, text, seed=0):
    settings = load(ROOT / "recipes" / f"{recipe}.yaml", ["reward.workers=1"])
    grader = make_grader(settings.data.sources[0].grader or "", settings.reward, seed)
    return [grade.reward for grade in grader.grade([text] * 1000, ["1"] * 1000)]
