"""Tokens of older weights: the expected gradient of the pipeline, in closed form.

A bandit: responses of one token, whose rewards are known, and policies that are tables of logits. All
responses that weights of an age may sample are enumerated, so that expectations are exact.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import build_minibatches, weighted_units
from megatron_eqlen.objectives.checks import check_combination
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.logprobs import masked_token_logprobs
from megatron_eqlen.training.policy_loss import policy_loss
from megatron_eqlen.types import Grade, Part, Prompt, Rollout
from tests.pure.test_rollout_harvest import make_recipe

ACTIONS = 5
REWARDS = [0.0, 1.0, 0.25, 0.75, 0.5]
LOGITS = torch.tensor(np.random.default_rng(0).normal(size=(4, ACTIONS)))
"""Logits of versions 0 to 2, which sampled, and of the policy after an update; version 2 is the proximal
policy."""
PROBS = LOGITS.softmax(-1)


MASKS = {"keep_sampling_mask": True, "top_k": ACTIONS, "center_scores": True}


def exact_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the expected reward, by the logits."""
    probs, rewards = logits.softmax(-1), torch.tensor(REWARDS, dtype=torch.float64)
    return probs * (rewards - probs @ rewards)


def drawn(action: int, version: int, masked: bool = False) -> Tokens:
    """Return one token that weights of ``version`` sampled; log-probs are float64 here."""
    logprob = LOGITS[version].log_softmax(-1)[action : action + 1].numpy()
    kept = {"kept": [[*range(ACTIONS)]], "kept_logprobs": [LOGITS[version].log_softmax(-1).tolist()]}
    columns = kept if masked else {}
    return Tokens.of([action], versions=version, **columns).with_column("logprobs", logprob)


def groups_of(versions: tuple[int, int], masked: bool = False) -> list[tuple[float, Rollout]]:
    """Return every group of two responses, sampled by weights of these versions, with its probability."""
    found = []
    for number, actions in enumerate(itertools.product(range(ACTIONS), repeat=2)):
        aged = zip(actions, versions, strict=True)
        segments = [Part(drawn(a, version, masked), "stop", Grade(REWARDS[a], "")) for a, version in aged]
        probability = float(PROBS[versions[0], actions[0]] * PROBS[versions[1], actions[1]])
        found.append((probability, kit.group(Prompt(f"q{number}", [1], "", "", ""), 2, segments)))
    return found


def expected_gradient(policy: int, versions: tuple[int, int], centered=False, **recipe) -> torch.Tensor:
    """Return the expected gradient of the maximised objective, by the logits of the policy
    ``LOGITS[policy]``."""
    mine = make_recipe(
        sampling="independent", group_size=2,
        rollout={"carry_over": True, "tokens_per_step": 1, "max_staleness": 2, **(MASKS if centered else {})},
        data={"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 8, "prompts_per_step": 1},
        **recipe,
    )  # fmt: skip
    logits = LOGITS[policy].clone().requires_grad_()
    old = LOGITS[2].log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for probability, group in groups_of(versions, centered):
        units = weighted_units([group], Job(mine))
        nodes = [node for unit in units for node in unit.nodes if unit.trained]
        if not nodes:
            continue
        actions = torch.tensor([int(node.token_ids[0]) for node in nodes])
        engine = np.concatenate([member.tokens["logprobs"] for unit in units for member in unit.members])
        logprobs = logits.log_softmax(-1)[actions]
        if centered:
            sampled = torch.tensor(np.concatenate([node.tokens["kept_logprobs"].values for node in nodes]))
            ids, counts = torch.arange(ACTIONS).repeat(len(nodes)), torch.full((len(nodes),), ACTIONS)
            rows = logits.expand(len(nodes), -1)
            logprobs, _ = masked_token_logprobs(rows, actions, ids, counts, sampled=sampled)
        weights, advantages = torch.tensor([(n.weight, n.advantage) for n in nodes], dtype=torch.float64).T
        loss, _ = policy_loss(
            logprobs, torch.zeros_like(weights), weights=weights, advantages=advantages,
            segment_ids=torch.arange(len(nodes)), rollout_logprobs=torch.tensor(engine),
            objective=Job(mine).objective, loss=mine.loss,
            others={} if policy == 2 else {"old": old[actions]},
        )  # fmt: skip
        total = total - probability * loss
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


WIDE = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e6, "kl_coef": 0.0, "loss_agg_mode": "seq-mean-token-mean"}
DECOUPLED = {"rollout_is": "token", "rollout_is_threshold": 1e6}
FROM_ENGINE = WIDE | {"old_logprobs": "rollout"}
EXACT = {
    "rloo, decoupled": ("rloo", DECOUPLED | {"kl_coef": 0.0}, 1.0, 2),
    "dr_grpo, decoupled": ("dr_grpo", DECOUPLED | WIDE, 0.5, 2),
    "dr_grpo, decoupled, after an update": ("dr_grpo", DECOUPLED | WIDE, 0.5, 3),
    "dr_grpo, from the engine's": ("dr_grpo", FROM_ENGINE, 0.5, 2),
    "dr_grpo, from the engine's, after an update": ("dr_grpo", FROM_ENGINE, 0.5, 3),
}
"""(objective, loss, the estimator's scale (r - mean of two is half of r - the other), policy)."""


@pytest.mark.parametrize("versions", [(2, 2), (0, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("case", EXACT)
def test_responses_of_any_age_give_the_gradient_of_the_expected_reward(case, versions):
    """The members of one group may be of different ages."""
    objective, loss, scale, policy = EXACT[case]
    gradient = expected_gradient(policy, versions, objective=objective, loss=loss)
    torch.testing.assert_close(gradient, scale * exact_gradient(LOGITS[policy]), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("versions", [(2, 2), (0, 1)], ids=str)
def test_centered_scores_are_the_gradient_on_policy_and_never_drift_by_equal_rewards(versions, monkeypatch):
    """Engines record log-probs as float32."""
    own = {"objective": "rloo", "loss": {"kl_coef": 0.0}}
    if versions == (2, 2):
        gradient = expected_gradient(2, versions, centered=True, **own)
        torch.testing.assert_close(gradient, exact_gradient(LOGITS[2]), atol=1e-7, rtol=0)
    monkeypatch.setitem(globals(), "REWARDS", [1.0] * ACTIONS)
    whole = {"objective": "rloo", "loss": {"kl_coef": 0.0, "advantage": "reward", "rollout_is": "none"}}
    assert expected_gradient(2, versions, centered=True, **whole).abs().max() < 1e-7
    if versions != (2, 2):
        plain = whole | {"loss": whole["loss"] | {"rollout_rs": {"token_k1": 1e9}}}
        assert expected_gradient(2, versions, **plain).abs().max() > 0.1


@pytest.mark.parametrize("threshold", [1.2, [0.5, 1.5]], ids=["truncated", "icepop"])
def test_truncated_importance_is_the_gradient_with_truncated_weights(threshold):
    """Expected: E over two old policies of w(a) (r_a - r_b) grad log pi(a), w the truncated or masked pi /
    mu."""
    gradient = expected_gradient(
        2, (0, 1), objective="rloo",
        loss={"rollout_is": "token", "rollout_is_threshold": threshold, "kl_coef": 0.0},
    )  # fmt: skip
    rewards, want = torch.tensor(REWARDS, dtype=torch.float64), torch.zeros(ACTIONS, dtype=torch.float64)
    for mine, other in ((0, 1), (1, 0)):
        ratio = PROBS[2] / PROBS[mine]
        if isinstance(threshold, float):
            weight = ratio.clamp(max=threshold)
        else:
            weight = ratio * ((ratio >= threshold[0]) & (ratio <= threshold[1]))
        factor = PROBS[mine] * weight * (rewards - PROBS[other] @ rewards)
        want += (factor - factor.sum() * PROBS[2]) / 2  # grad log pi(a) is e_a - pi
    torch.testing.assert_close(gradient, want, atol=1e-12, rtol=1e-10)
    assert not torch.allclose(gradient, exact_gradient(LOGITS[2]), atol=1e-3), "which is biased"


def test_without_a_correction_stale_responses_give_another_gradient_and_carry_over_is_refused():
    loss = {"rollout_rs": {"token_k1": 1e6}, "kl_coef": 0.0}
    gradient = expected_gradient(2, (0, 1), objective="rloo", loss=loss)
    assert not torch.allclose(gradient, exact_gradient(LOGITS[2]), atol=1e-3)
    older = {"carry_over": True, "tokens_per_step": 1, "max_response_length": 12}
    with pytest.raises(ValueError, match=r"older weights sampled, and nothing corrects for it"):
        check_combination(Job(make_recipe(sampling="independent", objective="rloo", rollout=older)))


def test_staleness_is_counted_in_trained_tokens():
    recipe = make_recipe(
        sampling="independent", group_size=2, rollout={"carry_over": True, "tokens_per_step": 1},
        loss=DECOUPLED, objective="grpo",
    )  # fmt: skip
    old, new = Grade(0.0, ""), Grade(1.0, "")
    group = kit.group(Prompt("q", [1], "", "", ""), 5, [
        Part(Tokens.of([3, 3, 9], [-1, -1, -1], versions=[2, 2, 5]), "stop", old),
        Part(Tokens.of([9], [-1], versions=4), "stop", new),
    ])  # fmt: skip
    _, metrics = build_minibatches([group], Job(recipe), policy_version=5)
    assert {name: value for name, value in metrics.items() if name.startswith("staleness")} == {
        "staleness/mean": pytest.approx((3 + 3 + 0 + 1) / 4), "staleness/max": 3.0,
        "staleness/share/0": 0.25, "staleness/share/1": 0.25, "staleness/share/3": 0.5,
    }  # fmt: skip
    # a run that went back to version 4 trains what another version 5 sampled
    assert build_minibatches([group], Job(recipe), policy_version=4)[1]["staleness/share/0"] == 0.5
