"""Log-probs, entropy and the loss against independent fp64 arithmetic."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.objectives.segments import Segments
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.training.logprobs import masked_token_logprobs, token_logprobs
from megatron_eqlen.training.mismatch import correct
from megatron_eqlen.training.policy_loss import RowLoss, policy_loss, reduce_metrics

N = 6


@pytest.fixture
def logits():
    return torch.randn(N, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4


@pytest.fixture
def labels():
    return torch.tensor([0, 10, 3, 3, 7, 1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_logprobs_and_entropy_are_those_of_log_softmax(logits, labels, dtype, tolerance):
    ours = logits.to(dtype).requires_grad_()
    plain = logits.to(dtype).double().requires_grad_()
    logprobs, entropy = token_logprobs(ours, labels, temperature=0.7)
    check_logprobs(logprobs, entropy, ours, plain, labels, torch.zeros_like(logits), tolerance)


def check_logprobs(logprobs, entropy, ours, plain, labels, mask, tolerance):
    """Compare with log_softmax of the ``plain`` logits plus ``mask`` in float64; gradients, too."""
    expected = (plain / 0.7 + mask).log_softmax(-1)
    chosen = expected.gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), chosen, atol=tolerance, rtol=0)
    terms = torch.where(mask == 0, expected.exp() * expected, 0.0)
    torch.testing.assert_close(entropy.double(), -terms.sum(-1), atol=tolerance, rtol=0)
    upstream = torch.arange(1.0, N + 1).to(ours.dtype)
    (logprobs * upstream).sum().backward()
    (chosen * upstream).sum().backward()
    torch.testing.assert_close(ours.grad.double(), plain.grad, atol=10 * tolerance, rtol=0)
    assert logprobs.dtype == ours.grad.dtype == ours.dtype


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_masked_logprobs_are_those_of_log_softmax_over_the_kept_tokens(logits, labels, dtype, tolerance):
    kept = [(0,), (2, 10), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (3, 4), (7, 1), (1, 10, 0)]
    mask = torch.full_like(logits, -torch.inf)
    for row, ids in enumerate(kept):
        mask[row, list(ids)] = 0
    ids, counts = torch.tensor([token for row in kept for token in row]), torch.tensor([*map(len, kept)])
    ours = logits.to(dtype).requires_grad_()
    plain = logits.to(dtype).double().requires_grad_()
    logprobs, entropy = masked_token_logprobs(ours, labels, ids, counts, temperature=0.7)
    check_logprobs(logprobs, entropy, ours, plain, labels, mask, tolerance)
    assert logprobs[0] == 0, "the only token that was kept"


def test_logits_are_not_overwritten(logits, labels):
    before = logits.clone()
    token_logprobs(logits.requires_grad_(), labels)[0].sum().backward()
    assert torch.equal(logits, before)


def test_huge_logits_and_no_rows():
    logprobs, entropy = token_logprobs(torch.tensor([[1e4, -1e4]]), torch.tensor([1]))
    assert logprobs.item() == -2e4
    assert entropy.item() == 0
    empty = torch.zeros(0, 5, requires_grad=True)
    logprobs, _ = token_logprobs(empty, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert empty.grad.shape == (0, 5)


def row(**changes):
    values = {
        "logprobs": [-1.0, -2.0, -0.5, -1.5], "entropy": [0.1, 0.2, 0.3, 0.4],
        "weights": [0.25, 0.25, 0.0, 0.5], "advantages": [1.0, 1.0, 0.0, -2.0], "segment_ids": [4, 4, -1, 9],
        "rollout_logprobs": [-1.1, -2.0, -0.5, -1.0], "old": [-1.5, -2.1, -0.5, -1.0],
        "ref": [-1.2, -1.9, -0.5, -1.6],
    } | changes  # fmt: skip
    tensors = {name: torch.tensor(value) for name, value in values.items() if value is not None}
    tensors["logprobs"] = tensors["logprobs"].double().requires_grad_()
    return tensors | {"others": {name: tensors.pop(name) for name in ("old", "ref") if name in tensors}}


def test_a_ratio_counts_as_clipped_where_its_advantage_pulls_beyond_the_bound():
    tokens = row(advantages=[1.0, 0.0, 0.0, -2.0], old=[-1.5, -2.5, -0.5, -1.0])  # ratios e^±0.5
    metrics = reduce_metrics([policy_loss(**tokens, objective=lookup("grpo"), loss=LossRecipe(kl_coef=0))[1]])
    assert metrics["loss/clip_fraction_high"] == metrics["loss/clip_fraction_low"] == pytest.approx(1 / 3)


def test_without_old_logprobs_the_policy_is_the_old_policy():
    tensors = row(old=None, ref=None)
    loss, log = policy_loss(**tensors, objective=lookup("grpo"), loss=LossRecipe(kl_coef=0))
    loss.backward()
    assert tensors["logprobs"].grad.tolist() == [-0.25, -0.25, 0, 1]
    metrics = reduce_metrics([log])
    assert (metrics["loss/ratio"], metrics["loss/ref_kl"]) == (1, 0)


def test_a_row_of_padding_adds_nothing_and_has_a_gradient():
    tensors = row(weights=[0.0] * 4)
    settings = {"objective": lookup("gspo"), "loss": LossRecipe(kl_coef=0.1, rollout_is="sequence")}
    loss, empty = policy_loss(**tensors, **settings)
    loss.backward()
    assert loss.item() == 0
    _, full = policy_loss(**row(), **settings)
    assert reduce_metrics([full, empty]) == reduce_metrics([full])
    assert reduce_metrics([empty])["loss/tokens"] == 0


def test_supervised_positions_alone_give_the_same_loss():
    settings = {"objective": lookup("gspo"), "loss": LossRecipe(kl_coef=0.1, rollout_is="sequence")}
    at = torch.tensor([0, 1, 3])
    whole, log = policy_loss(**row(), **settings)
    own = row()
    others = {name: values[at] for name, values in own.pop("others").items()}
    own = {name: values[at] for name, values in own.items()}
    part, part_log = policy_loss(**own, others=others, **settings)
    assert whole.item() == part.item()
    assert reduce_metrics([log]) == reduce_metrics([part_log])


def test_the_expected_step_to_the_teacher_is_the_slope_of_the_reverse_kl_in_the_visited_states():
    """All responses of two tokens out of three, each by its probability; the KL of what follows a token is
    not part of its advantage."""
    torch.manual_seed(0)
    logits = [torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)]
    teacher = [torch.randn_like(table).log_softmax(-1) for table in logits]
    policy = [table.requires_grad_().log_softmax(-1) for table in logits]
    expected_loss = torch.zeros((), dtype=torch.float64)
    for a, b in product(range(3), repeat=2):
        logprobs, of_teacher = (torch.stack([one[a], two[a, b]]) for one, two in (policy, teacher))
        loss, _ = policy_loss(
            logprobs, torch.zeros(2), weights=torch.ones(2), advantages=torch.zeros(2),
            segment_ids=torch.zeros(2, dtype=torch.int64), rollout_logprobs=logprobs.detach(),
            others={"teacher": of_teacher}, objective=lookup("grpo"),
            loss=LossRecipe(kl_coef=0, teacher_coef=0.5),
        )  # fmt: skip
        expected_loss = expected_loss + logprobs.detach().sum().exp() * loss
    kl = [(p.exp() * (p - q)).sum(-1) for p, q in zip(policy, teacher, strict=True)]
    objective = 0.5 * (kl[0] + (policy[0].exp().detach() * kl[1]).sum())
    values = expected_loss, objective
    ours, exact = (torch.autograd.grad(value, logits, retain_graph=True) for value in values)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_a_missing_reference_is_an_error():
    with pytest.raises(ValueError, match=r"loss\.kl_coef: 0\.1 needs the reference"):
        policy_loss(**row(ref=None), objective=lookup("grpo"), loss=LossRecipe(kl_coef=0.1))


@pytest.mark.parametrize("distance", [-1e4, -21.0, -19.0, 0.5, 19.0, 21.0, 1e4])
def test_exponents_are_clamped_to_20_as_in_verl_and_counted(distance):
    """Both the token ratio without a gain from clipping (A < 0) and k3 are finite, and flat beyond."""
    logprobs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    unit = torch.ones(1, dtype=torch.float64)
    loss, log = policy_loss(
        logprobs, unit, weights=unit, advantages=-unit, segment_ids=torch.zeros(1, dtype=torch.int64),
        rollout_logprobs=0 * unit, others=dict.fromkeys(("old", "ref"), -distance * unit),
        objective=lookup("grpo"), loss=LossRecipe(kl_coef=0.5),
    )  # fmt: skip
    loss.backward()
    inside = min(max(distance, -20.0), 20.0)
    ratio, k3 = math.exp(inside), math.exp(-inside) + inside - 1
    assert loss.item() == pytest.approx(max(ratio, 0.8) + 0.5 * k3)
    slope = (ratio if ratio > 0.8 else 0.0) + 0.5 * (1 - math.exp(-inside))
    assert logprobs.grad.item() == pytest.approx(slope if inside == distance else 0.0)
    metrics = reduce_metrics([log])
    clamped = float(inside != distance)
    assert metrics["loss/ratio_clamped_fraction"] == metrics["loss/kl_clamped_fraction"] == clamped


def test_equal_tokens_and_sequences_are_counted():
    """``test_verl_corrections.py`` has every other metric of the mismatch."""
    trainer, engine = (torch.tensor([[-1.0, -1.5, -0.5], [-1.0, -2.0, -0.5]][n]).double() for n in (0, 1))
    found = correct(trainer, engine, Segments(torch.tensor([0, 0, 1])), LossRecipe()).metrics
    assert found["mismatch/equal_tokens"].tolist() == [True, False, True]
    assert found["mismatch/sequences"].sum() == 2


def test_metrics_of_rows_are_those_of_one_row_with_all_their_segments():
    """The metrics are means over tokens, means over segments, and extremes."""
    torch.manual_seed(0)
    trainer, engine = torch.rand(2, 60, dtype=torch.float64).log()
    segment_ids = torch.arange(60) // 7

    def row(part: slice) -> RowLoss:
        columns = [x[part] for x in (trainer, torch.ones(60), torch.ones(60), -engine)]
        _, found = policy_loss(
            columns[0], columns[1], weights=columns[2], advantages=columns[3], segment_ids=segment_ids[part],
            rollout_logprobs=engine[part], objective=lookup("grpo"),
            loss=LossRecipe(rollout_rs={"seq_mean_k1": 1.05}, rollout_is="token", kl_coef=0),
        )  # fmt: skip
        return found

    whole = reduce_metrics([row(slice(60))])
    parts = [row(slice(0, 14)), row(slice(14, 14)), row(slice(14, 60))]
    assert reduce_metrics(parts) == pytest.approx(whole)
    assert 0 < whole["mismatch/rollout_rs_seq_masked_fraction"] < 1


def test_rows_with_other_metrics_are_an_error_that_names_them():
    def own(tokens):
        long = {"loss/own/long": tokens.advantages} if len(tokens.advantages) > 3 else {}
        return -tokens.log_ratio, long

    objective = replace(lookup("grpo"), surrogate=own)
    rows = [
        policy_loss(**row(weights=weights), objective=objective, loss=LossRecipe())[1]
        for weights in ([0.25, 0.25, 0.0, 0.5], [0.25] * 4)
    ]
    with pytest.raises(ValueError, match=r"the same metrics of all rows, found \{'loss/own/long'\} of some"):
        reduce_metrics(rows)


def test_a_surrogate_that_changes_what_it_gets_changes_no_penalty_and_no_other_metric():
    def plain(tokens):
        return -tokens.advantages * tokens.logprobs, {}

    def changing(tokens):
        losses = plain(tokens)
        for values in (tokens.logprobs.detach(), tokens.old_logprobs, tokens.advantages, tokens.kept):
            values.add_(5.0)
        return losses

    found = [
        policy_loss(**row(old=None), objective=replace(lookup("grpo"), surrogate=own), loss=LossRecipe())
        for own in (plain, changing)
    ]
    assert found[0][0] == found[1][0]
    assert reduce_metrics([found[0][1]]) == reduce_metrics([found[1][1]])


def test_a_sequences_importance_clamps_the_sum_of_its_log_ratios():
    trainer = torch.tensor([30.0, -29.5, -30.0, 5.0]).double()
    segments = Segments(torch.tensor([0, 0, 1, 1]))
    loss = LossRecipe(rollout_is="sequence", rollout_is_threshold=100.0)
    importance = correct(trainer, torch.zeros(4).double(), segments, loss).importance
    expected = torch.tensor([0.5, 0.5, -20.0, -20.0]).double().exp()
    torch.testing.assert_close(importance, expected)


def loss_of(objective, log_ratio, loss=None, **given):
    """Return (gradient by the log-probs, metrics) of three tokens of one segment with advantage 1, whose
    old log-probs are those of the trainer before and the engine's less ``apart``."""
    old = torch.full((3,), given.pop("old", -2.0), dtype=torch.float64)
    logprobs = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    ones = torch.ones(3, dtype=torch.float64)
    total, row = policy_loss(
        logprobs, 0 * ones, weights=ones, advantages=ones, segment_ids=torch.zeros(3, dtype=torch.int64),
        rollout_logprobs=old - torch.tensor(given.pop("apart", [0.0] * 3), dtype=torch.float64),
        objective=lookup(objective), loss=LossRecipe.model_validate({"kl_coef": 0.0} | (loss or {})),
        others={"old": old}, **given,
    )  # fmt: skip
    (slopes,) = torch.autograd.grad(total, logprobs)
    return slopes.tolist(), reduce_metrics([row])


def test_a_rejected_token_is_no_position_of_ctpos_bounds():
    """The log of the product, 0.08, is above 0.05 x sqrt(2), and would be below 0.05 x sqrt(3)."""
    slopes, _ = loss_of("ctpo", [0.0, 0.0, 0.08], {"rollout_rs": {"token_k3": 0.1}}, apart=[0.0, 5.0, 0.0])
    assert slopes == [-1.0, 0.0, 0.0]
    slopes, _ = loss_of("ctpo", [0.0, 0.0, 0.08])
    assert slopes[2] == pytest.approx(-math.exp(0.08)), "three kept tokens"


def test_a_rare_token_of_dppo_counts_at_most_as_verl_truncates_it():
    """Its probability has hardly moved, so that the mask lets any ratio through."""
    slopes, metrics = loss_of("dppo", [1.0, 6.0, -6.0], old=-30.0)
    assert slopes == pytest.approx([-math.e, -20.0, -math.exp(-6)])
    assert metrics["loss/clip_fraction_dual"] == pytest.approx(1 / 3)
