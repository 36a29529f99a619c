"""A real model's policy loss: one number, one gradient and the same metrics in every parallel layout."""

import pytest
import torch

from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.recipe import LossRecipe, ParallelRecipe
from megatron_eqlen.training.forward import row_multiple, run_rows
from megatron_eqlen.training.policy_loss import policy_loss, reduce_metrics
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow
from tests.kit.tree_samples import forest, masked
from tests.kit.tree_training import build, gradients

LOSS = LossRecipe(kl_coef=0.1, rollout_is="sequence", rollout_rs={"token_k1": [0.001, 40.0]})
"""The bound rejects some tokens of most segments."""
LAYOUTS = {"dp2": (2, {}), "tp2": (2, {"tensor": 2}), "tp2-pp2": (4, {"tensor": 2, "pipeline": 2})}


def train(folder, layers, budget, with_masks, logits_chunk=None):
    """Train with KL and truncated importance sampling; return (metrics or None before the last stage,
    gradients)."""
    from megatron.core import parallel_state  # after megatron_eqlen, which makes it run on CPU

    parallel = ParallelRecipe(**layers)
    start(parallel, seed=1)
    model = build(folder, parallel)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    trees = masked(forest(3)) if with_masks else forest(3)
    rows = plan_rows(trees, budget, ranks, row_multiple(model[0].config)).rows(rank)

    def loss(logprobs, entropy, row, at):
        names = ("weights", "advantages", "segment_ids")
        columns = {name: torch.from_numpy(getattr(row, name)[at]) for name in names}
        engine = columns["rollout_logprobs"] = torch.from_numpy(row.column("logprobs")[at])
        return policy_loss(
            logprobs,
            entropy,
            **columns,
            others={
                "old": logprobs.detach() - 1e-4 * torch.sin(engine),
                "ref": logprobs.detach() + 0.1 * torch.cos(engine),
            },
            objective=lookup("gspo"),
            loss=LOSS,
        )

    logs = run_rows(model, rows, 0.6, loss, train=True, logits_chunk=logits_chunk)
    metrics = reduce_metrics(logs, parallel_state.get_data_parallel_group()) if logs else None
    result = metrics, gradients(model)
    stop()
    return result


@pytest.fixture(scope="module")
def one_process(folder):
    return [run_ranks(1, train, folder, {}, 2000, with_masks)[0] for with_masks in (False, True)]


@pytest.mark.parametrize(("name", "with_masks"), [("dp2", True), ("tp2", True), slow("tp2-pp2", False)])
def test_every_layout_gives_the_loss_of_one_process(folder, one_process, name, with_masks):
    world, layers = LAYOUTS[name]
    ranks = run_ranks(world, train, folder, layers, 200, with_masks, 64)
    assert_same(ranks, *one_process[with_masks])


def assert_same(ranks, expected_metrics, expected):
    reported = [metrics for metrics, _ in ranks if metrics is not None]
    assert reported
    assert 0.01 < expected_metrics["mismatch/rollout_rs_masked_fraction"] < 0.9
    for metrics in reported:
        assert metrics == pytest.approx(expected_metrics, rel=1e-10, abs=1e-13)
    found = ranks[0][1]
    assert found.keys() == expected.keys()
    for weight, gradient in expected.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-9, atol=1e-12)
