"""The experts that vLLM's CPU build chose, as harvests record them, against Transformers' routers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.sampling import kind_of
from megatron_eqlen.types import Prompt, Rollout, Stream, joined
from tests.kit.rollout_kit import EOS, folder, open_engine
from tests.pure.test_rollout_harvest import make_recipe

PROMPTS = [Prompt(f"p{i}", [5 + i, 6, 7, 8] * 17, "?", "math", "1", number=i) for i in range(4)]
"""Two blocks of the cache and a half."""


def recipe_of(**over) -> Recipe:
    rollout = {"max_response_length": 60, "max_num_seqs": 64, "keep_routes": True}
    data = {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 70}
    return make_recipe(rollout=rollout, data=data, **over)


@pytest.fixture(scope="module")
def engine():
    """In float32, to be left as it was but for what its cache holds."""
    engine = open_engine(folder("qwen3_moe"), temperature=1.0, keep_routes=True)
    yield engine
    engine.close()


def harvested(engine, **over) -> list[Rollout]:
    return harvest(engine, PROMPTS, recipe_of(**over), EOS, seed=3)[0]


def paths(rollout: Rollout):
    """Of each of its segments the path to its end, and the rows of it."""
    parts = {part.number: part for part in kind_of(rollout).parts(rollout)}
    for part in parts.values():
        if isinstance(rollout, Stream):
            above = [
                one.segment for one in parts.values() if one.role == "b" and one.number < part.number - 1
            ]
            if part.role != "b":
                above = [
                    one.segment for one in parts.values() if one.role == "b" and one.number < part.number
                ]
            whole = [*above, part.segment]
        else:
            whole = rollout.path(list(parts).index(part.number)) if part.role == "step" else [part.segment]
        tokens = [*rollout.prompt.token_ids, *joined([one.token_ids for one in whole]).tolist()]
        yield tokens, joined([rollout.prompt_routes, *(one.routes for one in whole)])


def router_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """[tokens, layers, experts] float32"""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda gate, args, _: found.append(args[0] @ gate.weight.T))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack([one.reshape(len(tokens), -1) for one in found], 1).numpy()


def check(path: Path, rollouts: list[Rollout], round_off: float) -> None:
    """Rows are what Transformers chooses, wherever its choice is clear of round-off."""
    compared = []
    for rollout in rollouts:
        for tokens, routes in paths(rollout):
            logits = router_logits(path, tokens)[:-1]
            order = np.argsort(-logits, axis=-1)
            ranked = np.take_along_axis(logits, order, -1)
            k = routes.shape[-1]
            clear = ranked[..., k - 1] - ranked[..., k] > round_off
            same = (np.sort(order[..., :k]) == np.sort(routes)).all(-1)
            assert same[clear].all()
            compared.append(clear.mean())
    assert np.mean(compared) > 0.5, compared


@pytest.mark.parametrize("sampling", ["equal_length", "tree"])
def test_recorded_experts_are_those_of_transformers(engine, sampling):
    over = (
        {"objective": "treerpo", "tree_sampling": {"branching": 2, "depth": 3}} if sampling == "tree" else {}
    )
    check(folder("qwen3_moe"), harvested(engine, sampling=sampling, **over), 1e-4)
