"""Propositions 1 and 2 of the paper, and the conditions that their proofs need, as numbers."""

import itertools

import pytest
import torch

from megatron_eqlen.objectives.registry import lookup, resolve
from megatron_eqlen.packing.pack import pack
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.training.policy_loss import policy_loss
from tests.kit.theory import (
    A_1,
    A_2,
    A_3,
    B_1,
    B_2,
    PAPERS_RESPONSES,
    UNINFORMATIVE,
    TabularPolicy,
    TransformerPolicy,
    direct_coefficient,
    eqlen_stream,
    fisher_step,
    gradient,
    grpo_group,
    prefix_term,
    recipe,
    slope,
    surrogate,
    survivor_advantage,
    trees_of,
    unfair_policy,
    unlucky_group,
)

torch.set_num_threads(1)


@pytest.fixture
def table():
    return TabularPolicy([A_1, B_1 + A_2, B_1 + B_2 + A_3])


@pytest.fixture(scope="module")
def transformers():
    return [TransformerPolicy(seed) for seed in range(30)]


def after_a_step(policy, rollout, lr=1e-3):
    """Return log pi of B_1 and of B_1 B_2 A_3, before and after one step of gradient descent."""

    def measure():
        with torch.no_grad():
            return [float(policy(B_1).sum()), float(policy(B_1 + B_2 + A_3).sum())]

    before = measure()
    loss = surrogate(policy, trees_of(rollout))
    if loss.requires_grad:
        loss.backward()
        torch.optim.SGD(policy.parameters(), lr).step()
    return before, measure()


def test_proposition_1_one_grpo_step_makes_the_correct_solution_rarer(table):
    before, after = after_a_step(table, unlucky_group())
    assert after[0] < before[0]
    assert after[1] < before[1]


def test_proposition_1_an_eqlen_step_leaves_the_prefix_alone(table):
    before, after = after_a_step(table, eqlen_stream())
    assert after[0] == before[0]
    assert after[1] > before[1]  # B_2, which leads to the right answer, was rewarded


def test_proposition_1_on_a_transformer():
    before, after = after_a_step(TransformerPolicy(0), unlucky_group(), lr=1e-5)
    assert after[0] < before[0]


def test_the_surrogate_is_the_loss_that_training_takes():
    policy = TransformerPolicy(1)
    trees = trees_of(eqlen_stream())
    expected = gradient(policy, surrogate(policy, trees))
    (row,) = pack(trees, 16)[0]
    responses = {tuple(n.token_ids.tolist()): path for n, path in nodes_and_paths(trees[0]) if n.weight}
    settings = recipe("equal_length")
    logprobs = torch.cat([policy(path)[-len(ids) :] for ids, path in responses.items()])
    place = {token: i for i, token in enumerate(t for ids in responses for t in ids)}
    at = [i for i in range(len(row.labels)) if row.weights[i] > 0]
    columns = ("weights", "advantages", "segment_ids")
    loss, _ = policy_loss(
        logprobs[[place[int(row.labels[i])] for i in at]],
        torch.zeros(len(at)),
        **{name: torch.from_numpy(getattr(row, name)[at]) for name in columns},
        rollout_logprobs=torch.from_numpy(row.column("logprobs")[at]),
        objective=resolve(settings),
        loss=settings.loss,
    )
    torch.testing.assert_close(gradient(policy, loss), expected, rtol=1e-12, atol=1e-14)


def nodes_and_paths(tree):
    paths = [[]]
    for node in tree.nodes[1:]:
        paths.append(paths[node.parent] + node.token_ids.tolist())
    return zip(tree.nodes, paths, strict=True)


# ---- where Proposition 1 needs a condition ---------------------------------------------------------------


def test_the_proofs_inequality_is_an_equality_without_shared_parameters(table):
    step = fisher_step(table)
    assert step.left == pytest.approx(step.right)
    assert step.holds


def test_the_proofs_inequality_fails_with_shared_parameters(transformers):
    policy = unfair_policy()
    assert not fisher_step(policy).holds
    assert slope(policy, unlucky_group(), B_1) > 0  # the whole GRPO step raises the penalised prefix
    assert 0 < sum(fisher_step(policy).holds for policy in transformers) < len(transformers)


def test_a_first_token_that_both_responses_share_gets_likelier():
    short, long = [1, 9], [1, 2, 4, 9]  # 1/|o| is larger for the response that is right
    policy = TabularPolicy([short, long])
    assert slope(policy, grpo_group((short, 1.0), (long, 0.0)), [1]) > 0


def test_eqlen_penalises_the_prefix_when_no_right_extension_was_sampled(table):
    assert direct_coefficient(unlucky_group(), B_1) == -1 / 8
    assert direct_coefficient(eqlen_stream(third=0.0), B_1) == -1 / 8
    assert slope(table, eqlen_stream(third=0.0), B_1) < 0


def test_eqlen_moves_the_prefix_of_a_transformer_through_other_positions(transformers):
    slopes = [slope(policy, eqlen_stream(), B_1) for policy in transformers]
    assert min(slopes) < 0 < max(slopes)


# ---- Proposition 2 ---------------------------------------------------------------------------------------


def test_proposition_2_zero_mean_and_positive_variance_where_the_prefix_says_nothing():
    for probabilities in ([0.25] * 4, [0.1, 0.1, 0.4, 0.4]):
        term = prefix_term(UNINFORMATIVE, probabilities)
        assert term.mean == pytest.approx(0, abs=1e-15)
        assert term.variance > 0


def test_proposition_2_on_all_parameters():
    policy = TabularPolicy([response for response, _ in UNINFORMATIVE])
    with torch.no_grad():
        policy.logits.zero_()  # every drawn pair is equally likely
    gradients = torch.stack(
        [
            gradient(policy, surrogate(policy, trees_of(grpo_group(first, second))))
            for first, second in itertools.product(UNINFORMATIVE, repeat=2)
            if first[1] != second[1]
        ]
    )
    of_prefix = gradients.view(len(gradients), *policy.logits.shape)[:, [policy.row[(1,)]]]
    assert of_prefix.mean(0).abs().max() < 1e-16
    assert of_prefix.var(0).sum() > 0


def test_the_papers_own_three_responses_never_have_a_zero_mean():
    # in its second case the wrong response B_1 A_2 holds B_1 too, and being shorter outweighs the right one
    assert direct_coefficient(grpo_group(*PAPERS_RESPONSES[1:]), B_1) == pytest.approx((1 / 6 - 1 / 4) / 2)
    grid = [i / 10 for i in range(1, 9)]
    for first, second in itertools.product(grid, grid):
        if first + second < 1:
            assert prefix_term(PAPERS_RESPONSES, [first, second, 1 - first - second]).mean < 0


def test_eqlen_has_no_term_of_an_inherited_prefix():
    """Whatever the later pairs' rewards are, B_1 is trained by its own pair's advantage or not at all."""
    for second, third in itertools.product([0.0, 1.0], repeat=2):
        stream = eqlen_stream(third)
        pairs_of(stream)[1].a.grade.reward = second
        best = max(second, third)
        assert direct_coefficient(stream, B_1) == (-1 / 8 if best < 1 else 0.0)


def test_prefix_in_gradient_cancels_exactly_on_policy():
    """The pair's two sides carry opposite advantages on one prefix; the ablation changes only 1/L."""
    stream = eqlen_stream()
    assert direct_coefficient(stream, B_1, prefix_in_gradient=True) == 0
    kept, ablated = (trees_of(stream, whole)[0].nodes[-1].weight for whole in (False, True))
    assert ablated == kept * len(B_2) / len(B_1 + B_2)


def test_max_favours_the_longer_side_where_no_side_deserves_it():
    for extensions, success in itertools.product(range(1, 6), (0.1, 0.5, 0.9)):
        term = survivor_advantage(extensions, success)
        wrong = 1 - success
        assert term.mean == pytest.approx(wrong - wrong**extensions)
        assert term.variance > 0
        by_mean = survivor_advantage(extensions, success, "rloo", "mean")
        assert by_mean.mean == pytest.approx(0, abs=1e-12)  # rewards here do not depend on length


# ---- KL estimators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradients_of_the_kl_estimators(estimator):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=random, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, generator=random, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    policy = logprobs.exp()
    loss, _ = policy_loss(
        logprobs,
        torch.zeros(5),
        weights=policy.detach(),  # every token as often as the policy samples it
        advantages=torch.zeros(5),
        segment_ids=torch.arange(5),
        rollout_logprobs=logprobs.detach(),
        others={"ref": ref},
        objective=lookup("grpo"),
        loss=LossRecipe(kl_coef=1.0, kl_estimator=estimator),
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    divergence = {
        "k1": 0.0 * logits.sum(),
        "k2": (policy * (logprobs - ref)).sum(),
        "k3": (ref.exp() * (ref - logprobs)).sum(),
    }[estimator]
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
