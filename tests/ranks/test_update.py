"""``Policy.update`` on a tiny model: one step is one step, in every parallel layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.training import policy as of_policies
from megatron_eqlen.types import Metrics
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import TWO_EPOCHS, build_policy, layout, one_tree_a_row, update

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(folders):
    return str(folders / "qwen3")


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Return changes that make an update compute all log-probs, those of a teacher of another family, too."""
    path = tmp_path_factory.mktemp("teacher")
    save_tiny(path, "llama", num_hidden_layers=5)
    return TWO_EPOCHS | {"teacher": {"path": str(path)}}


@pytest.mark.parametrize("rows", [1, 5])
def test_a_virtual_pipeline_trains_any_number_of_rows(folder, passes, rows):
    """The update has the reference's, teacher's and old policy's forward passes; the padding rows change no
    number."""
    minibatches = [one_tree_a_row(rows)]
    ((metrics, weights),) = run_ranks(1, update, folder, minibatches, passes)
    interleaved = passes | layout(2, pipeline=2, virtual_pipeline=2)
    for found, moved in run_ranks(2, update, folder, minibatches, interleaved):
        assert (metrics["packing/rows"], found["packing/rows"]) == (rows, rows + rows % 2)
        assert_same_step(found, moved, metrics, weights)


def assert_same_step(found: Metrics, moved: Weights, metrics: Metrics, weights: Weights) -> None:
    for name in (
        "loss/total",
        "loss/ref_kl",
        "loss/teacher_kl",
        "loss/entropy",
        "loss/tokens",
        "train/grad_norm",
    ):
        assert found[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7), name
    for name, weight in weights.items():
        torch.testing.assert_close(moved[name], weight, rtol=1e-4, atol=1e-5)


RATE, LAST_RATE, DECAY, CLIP, EPS = 1e-2, 2e-3, 0.1, 1e-2, 1e-4
"""``EPS`` is far above round-off, which would otherwise decide the direction of gradients near 0."""


def updates_beside_adamw(folder: str, schedule: str) -> tuple[list[float], list[float]]:
    """Train 3 steps of 2 epochs; return the rates, and after each update the largest difference of a weight
    from that of torch's AdamW with these rates and gradients, relative to the largest change."""
    optimizer = {"lr": RATE, "min_lr": LAST_RATE, "lr_schedule": schedule, "warmup_steps": 2}
    megatron = {"adam_eps": EPS, "weight_decay": DECAY, "clip_grad": CLIP}
    sections: dict[str, Any] = {"optimizer": optimizer, "model": {"megatron": megatron}}
    policy = build_policy(folder, {"steps": 3, "loss": {"epochs": 2}} | sections)
    read = HFFolder(Path(folder))
    assert all(torch.equal(weight, read.tensor(name)) for name, weight in policy.weights()), "without a step"
    ours = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    theirs = [parameter.detach().clone().requires_grad_() for parameter in ours]
    # norms and biases do not decay
    groups = [
        {"params": [parameter for parameter in theirs if parameter.ndim > 1]},
        {"params": [parameter for parameter in theirs if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, RATE, (0.9, 0.999), EPS, DECAY)
    rates, differences = list[float](), list[float]()

    def beside(megatrons: Any, grad_norm: float) -> None:
        before = [parameter.detach().clone() for parameter in theirs]
        for parameter, own in zip(theirs, ours, strict=True):
            parameter.grad = own.main_grad.clone()
        assert grad_norm > 2 * CLIP
        torch.nn.utils.clip_grad_norm_(theirs, CLIP)
        rates.append(megatrons.param_groups[0]["lr"])
        for group in adamw.param_groups:
            group["lr"] = rates[-1]
        adamw.step()
        take_step(megatrons, grad_norm)
        change = max(float((b - a).abs().max()) for b, a in zip(before, theirs, strict=True))
        differences.append(
            max(float((a - b).abs().max()) / change for a, b in zip(ours, theirs, strict=True))
        )

    with pytest.MonkeyPatch.context() as patch:
        take_step = of_policies.take_step
        patch.setattr(of_policies, "take_step", beside)
        reported = [policy.update([one_tree_a_row(2)]).metrics["train/lr"] for _ in range(3)]
    assert reported == rates[1::2]
    return rates, differences


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_an_update_is_adamws_with_clipped_gradients_at_the_rate_of_the_schedule(folders, schedule):
    """The rate rises in the first two of six updates, and falls to its last value in the other four."""
    ((rates, differences),) = run_ranks(1, updates_beside_adamw, str(folders / "qwen3-short"), schedule)
    left = [3 / 4, 1 / 2, 1 / 4, 0]
    if schedule == "cosine":
        left = [(1 - math.cos(math.pi * share)) / 2 for share in left]
    falling = [LAST_RATE + (RATE - LAST_RATE) * share for share in left]
    assert rates == pytest.approx([RATE / 2, RATE, *falling], rel=1e-9)
    assert max(differences) < 1e-3
