"""The same loss, gradient and metrics for any packing, micro-batch split and parallel layout."""

import numpy as np
import pytest
import torch

from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.training.policy_loss import policy_loss, reduce_metrics
from tests.kit.tree_samples import VOCABULARY, forest, pack

LOSS = LossRecipe(kl_coef=0.05, rollout_is="sequence")
LAYOUTS = [(200, 1, "tree"), (200, 2, "tree"), (2000, 1, "tree"), (300, 3, "tree"), (200, 1, "expanded")]


def noise(row, salt):
    """Return [S] numbers that depend on a position's path alone, and so not on the layout."""
    key = row.labels * 7919 + row.position_ids * 104729 + np.rint(row.weights * 1e9).astype(np.int64) * 31
    return np.sin(key * (salt + 1.0))


def train(rows, objective):
    """Return loss, gradient on a vocabulary table, and metrics of one rank's rows, one micro-batch at a
    time."""
    table = torch.linspace(-3, -0.1, VOCABULARY, dtype=torch.float64, requires_grad=True)
    total, logs = 0.0, []
    for row in rows:
        logprobs = table[torch.from_numpy(row.labels)] + torch.from_numpy(noise(row, 0))
        columns = {
            "weights": row.weights,
            "advantages": row.advantages,
            "segment_ids": row.segment_ids,
            "rollout_logprobs": row.column("logprobs"),
        }
        columns = {name: torch.from_numpy(values) for name, values in columns.items()}
        sizes = {"old": 1e-3 * noise(row, 1), "ref": 0.2 * noise(row, 2)}
        columns["others"] = {name: logprobs.detach() + torch.from_numpy(far) for name, far in sizes.items()}
        loss, log = policy_loss(logprobs, logprobs.detach(), **columns, objective=objective, loss=LOSS)
        loss.backward()
        total += loss.item()
        logs.append(log)
    return total, table.grad, logs


@pytest.mark.parametrize("name", ["grpo", "gspo", "vespo", "rloo"])
def test_packing_and_micro_batches_change_nothing(name):
    objective = lookup(name)
    results = []
    for budget, ranks, layout in LAYOUTS:
        parts = [train(rows, objective) for rows in pack(forest(3), budget, ranks, layout=layout)]
        logs = [log for _, _, rank in parts for log in rank]
        results.append((sum(p[0] for p in parts), sum(p[1] for p in parts), reduce_metrics(logs)))
    loss, gradient, metrics = results[0]
    assert metrics["mismatch/rollout_is_truncated_fraction"] > 0
    for other_loss, other_gradient, other_metrics in results[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-13)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=1e-15)
        assert other_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-15)
