"""Every correction of the mismatch against verl's own ``rollout_corr_helper``: a table of what that computed.

make_verl_rollout_corr in ``docs/archives/scripts.tar.xz`` made the table.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.objectives.segments import Segments
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.training.mismatch import correct
from megatron_eqlen.training.policy_loss import policy_loss, reduce_metrics
from tests.kit import ROOT

TABLE = json.loads((ROOT / "tests/tables/verl_rollout_corr.json").read_text())
TRAINER, ENGINE = (
    torch.tensor([x for row in TABLE[name] for x in row], dtype=torch.float64)
    for name in ("trainer", "engine")
)
SEGMENTS = torch.repeat_interleave(
    torch.arange(len(TABLE["engine"])), torch.tensor([len(row) for row in TABLE["engine"]])
)
KEYS = ("rollout_is", "rollout_is_threshold", "rollout_rs")


def name_of(case: dict[str, Any]) -> str:
    return " ".join(str(case[key]) for key in KEYS if key in case)


@pytest.mark.parametrize("case", TABLE["cases"], ids=name_of)
def test_weights_masks_and_metrics_are_verls(case):
    loss = LossRecipe(kl_coef=0, **{key: case[key] for key in KEYS if key in case})
    found = correct(TRAINER, ENGINE, Segments(SEGMENTS), loss)
    kept = torch.tensor(case["kept"], dtype=torch.float64)
    torch.testing.assert_close(found.kept, kept)
    weights = torch.tensor(case["weights"], dtype=torch.float64)
    torch.testing.assert_close(found.importance, weights * kept, atol=1e-8, rtol=0)
    ones = torch.ones_like(TRAINER)
    columns = {"weights": ones, "advantages": ones, "segment_ids": SEGMENTS, "rollout_logprobs": ENGINE}
    metrics = reduce_metrics([policy_loss(TRAINER, ones, **columns, objective=lookup("grpo"), loss=loss)[1]])
    verl = case["metrics"]
    same = {name: value for name, value in verl.items() if f"mismatch/{name}" in metrics}
    assert len(same) == 5 + ("rollout_is" in case) + 2 * ("rollout_rs" in case)
    assert {name: metrics[f"mismatch/{name}"] for name in same} == pytest.approx(same, abs=1e-6)
    if isinstance(case.get("rollout_is_threshold"), list):
        beyond = verl["rollout_is_oob_ratio"]
    elif case.get("rollout_is") == "token":
        beyond = verl["rollout_is_ratio_fraction_high"]
    else:
        return
    assert metrics["mismatch/rollout_is_truncated_fraction"] == pytest.approx(beyond, abs=1e-6)


def test_the_table_has_every_option():
    options = {option for case in TABLE["cases"] for option in case.get("rollout_rs", {})}
    assert len(options) == 11
