"""The cost of a step: counted from its tokens, and equal to counting operation by operation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

import tests.kit.rollouts as kit
from megatron_eqlen.harvest.meter import rollout_metrics
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.plan.flops import achieved, counted, forward_flops
from megatron_eqlen.plan.model import KNOWN_MODELS
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Node, Part, Prompt, Rollout, TokenTree
from tests.kit import ROOT
from tests.kit.marks import examples

QWEN3 = KNOWN_MODELS / "qwen3-0.6b.json"
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
names = map(str, itertools.count())
LEAVES = ((4, 0), (6, 0), (3, 2))
"""(tokens, parent) of nodes after the root."""


def test_utilisation_is_flops_over_time_and_what_the_gpus_can_do():
    recipe, model = load(ROOT / "recipes/qwen3_8b.yaml"), read_config(KNOWN_MODELS / "qwen3-8b.json")
    step = {
        "packing/tokens": 1e6, "packing/context": 2e3, "packing/unique_tokens": 9e5, "time/train": 10.0,
        "packing/expanded_tokens": 3e6, "harvest/generated_tokens": 8e5, "time/harvest": 20.0,
    }  # fmt: skip
    found = achieved(recipe, model, step, "NVIDIA H100 80GB HBM3")
    assert found["train/mfu"] == pytest.approx(found["train/flops"] / (10 * 8 * 989e12))
    assert found["harvest/mfu"] == pytest.approx(found["harvest/flops"] / (20 * 8 * 989e12))
    assert 0.01 < found["train/mfu"] < 1.5
    assert found["train/tokens_per_gpu_second"] == pytest.approx(recipe.loss.epochs * 9e5 / 80)
    assert found["train/expanded_tokens_per_gpu_second"] == pytest.approx(recipe.loss.epochs * 3e6 / 80)
    assert found["harvest/tokens_per_gpu_second"] == pytest.approx(8e5 / 160)
    for unknown in (None, "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 3060"):
        assert "train/mfu" not in achieved(recipe, model, step, unknown)


def prompt() -> Prompt:
    return Prompt(next(names), [1, 2, 3], "", "", "")


def segment(length: int) -> Part:
    return Part(Tokens.of(list(range(length)), [0.0] * length), "stop")


def stream(sides: list[int]) -> Rollout:
    pairs = [(segment(length), segment(length)) for length in sides]
    return kit.stream(prompt(), 0, 0, pairs, "truncated", segment(3))


def tree(steps: list[int]) -> Rollout:
    """Return a tree in which each step continues the one before the last."""
    return kit.tree(
        prompt(), 0, [segment(n) for n in steps], [n - 2 if n > 1 else -1 for n in range(len(steps))]
    )


rollouts = st.lists(
    st.one_of(
        lengths.map(stream),
        lengths.map(lambda many: kit.group(prompt(), 0, [*map(segment, many)])),
        lengths.map(tree),
    ),
    min_size=1,
    max_size=3,
)


def seen_one_by_one(rollout: Rollout) -> list[int]:
    """Return for each generated token of a rollout, as it is drawn, the number of tokens before it on its
    path."""
    ends = rollout.ends()
    return [3 + ends[part.parent] + n for part in rollout.parts for n in range(len(part))]


@given(rollouts)
@examples(30)
def test_the_context_of_a_rollout_is_what_its_tokens_see(rollouts):
    for kind in dict.fromkeys(rollout.kind for rollout in rollouts):  # a step has rollouts of one kind
        mine = [rollout for rollout in rollouts if rollout.kind == kind]
        seen = [count for rollout in mine for count in seen_one_by_one(rollout)]
        metrics = rollout_metrics(mine)
        assert metrics["harvest/context"] == pytest.approx(np.mean(seen))
        assert metrics["harvest/prompt_tokens"] == 3 * len(mine)


@pytest.mark.parametrize("layout", ["tree", "expanded"])
def test_the_context_of_rows_is_what_their_positions_see(layout):
    nodes = [
        Node(-1, Tokens.of(np.arange(5))),
        *(Node(above, Tokens.of(np.arange(n), np.zeros(n)), weight=1.0) for n, above in LEAVES),
    ]
    planned = plan_rows([TokenTree("t", nodes)], max_tokens_per_row=40, layout=layout)
    pairs = 0
    for row in planned.ranks[0]:
        ends = planned.fill(row, for_loss=False).visible_until
        query, key = np.indices((len(ends), len(ends)))
        pairs += ((key <= query) & (query < ends[key])).sum()
    assert planned.metrics["packing/context"] * planned.metrics["packing/tokens"] == pytest.approx(pairs)


def test_a_token_costs_what_counting_each_matrix_product_gives():
    config = Qwen3Config.from_pretrained(QWEN3, attn_implementation="eager")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(1, 256, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids)  # each of the 256 queries is multiplied with all 256 keys
    ours = 256 * forward_flops(read_config(QWEN3), 256)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.001)


def test_a_steps_flops_are_its_generated_prefilled_and_trained_tokens():
    model = read_config(QWEN3)
    metrics = {
        "harvest/generated_tokens": 1000, "harvest/context": 50.0, "harvest/prompt_tokens": 20,
        "harvest/branches": 4, "packing/tokens": 300, "packing/context": 80.0,
    }  # fmt: skip

    def flops(*overrides: str) -> dict[str, float]:
        return counted(load(ROOT / "recipes/qwen3_0.6b.yaml", overrides), model, metrics)

    base = flops("loss.kl_coef=0", "rollout.block_size=31")
    assert base["harvest/flops"] == (1000 + 20 + 4 * 16) * forward_flops(model, 50)
    assert base["train/flops"] == 3 * 300 * forward_flops(model, 80)
    assert flops("loss.minibatches=2")["train/flops"] == 5 / 3 * base["train/flops"], (
        "reference and old log-probs"
    )
    assert counted(load(ROOT / "recipes/qwen3_0.6b.yaml"), model, {}) == {
        "harvest/flops": 0,
        "train/flops": 0,
    }
