"""A policy's update on rollouts of a program that kept its routes: here Transformers' model in float32, with
routers that are off by a little at each position, as those of an engine that rounds in another way are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Metrics, TokenTree
from tests.kit.distributed import run_ranks
from tests.kit.marks import weekly
from tests.kit.tiny_models import save_tiny
from tests.kit.tree_samples import stream
from tests.kit.updates import build_policy, layout

pytestmark = pytest.mark.slow  # test_router_replay.py is not
torch.set_num_threads(1)

WORST = "mismatch/logprob_abs_diff_max"
SAME = 1e-4
"""Bound of differences in float32; 1e-6 is seen on average, and 1e-5 at most."""


def sampled_by(folder: Path) -> list[TokenTree]:
    """Return streams with the log-probs, and the routes if any, of the model in ``folder``, whose routers
    choose by logits of which each is off by a twentieth of their spread."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    chosen: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)

    def choose(gate, args, output):
        logits, _, experts = output
        off = noise[len(chosen), : len(logits), : logits.shape[-1]] * logits.std(-1, keepdim=True)
        experts = (logits + off).topk(experts.shape[-1]).indices
        weights = logits.softmax(-1).gather(1, experts)
        chosen.append(experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    noise = 0.05 * torch.randn(len(model.model.layers), 300, 32, generator=generator)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(choose)
    rng = np.random.default_rng(0)
    trees = [stream(rng, 4, [40, 70, 20]) for _ in range(4)]
    for tree in trees:
        for node in tree.nodes[1:]:
            path = [node]
            while path[0].parent >= 0:
                path.insert(0, tree.nodes[path[0].parent])
            tokens = torch.from_numpy(np.concatenate([part.token_ids for part in path])).long()
            chosen.clear()
            with torch.no_grad():
                logprobs = model(tokens[None, :-1]).logits[0].float().log_softmax(-1)
            mine = logprobs.gather(1, tokens[1:, None])[-len(node) :, 0]
            node.tokens = node.tokens.with_column("logprobs", mine.numpy())
            if chosen:
                routes = torch.stack(chosen, 1).numpy().astype(np.uint8)
                node.tokens = node.tokens.with_column("routes", routes[-len(node) :])
                of_prompt = np.concatenate([np.zeros_like(routes[:1]), routes[: len(path[0]) - 1]])
                path[0].tokens = path[0].tokens.with_column("routes", of_prompt)
    return trees


def update(folder: str, trees: list[TokenTree], changes: dict[str, Any]) -> Metrics:
    loss = {"kl_coef": 0.1, "epochs": 2} | changes.get("loss", {})
    rollout = {"max_response_length": 300, "temperature": 1.0} | changes.get("rollout", {})
    recipe = {"packing": {"max_tokens_per_row": 700}, "rollout": rollout}
    return build_policy(folder, recipe | changes | {"loss": loss, "rollout": rollout}).update([trees])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dense", "qwen3")
    save_tiny(root / "moe", "qwen3_moe", num_experts=32, num_experts_per_tok=4)
    save_tiny(root / "next", "qwen3_next", num_experts=8)
    return {name: root / name for name in ("dense", "moe", "next")}


@pytest.fixture(scope="module")
def sampled(folders) -> dict[str, list[TokenTree]]:
    return {name: sampled_by(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def replayed(folders, sampled) -> dict[str, Metrics]:
    return {name: run_ranks(1, update, str(folders[name]), sampled[name], {})[0] for name in folders}


def test_routers_that_choose_themselves_disagree_with_the_engine_and_replay_does_not(
    folders, sampled, replayed
):
    free = {"loss": {"router_replay": False}, "rollout": {"keep_routes": True}}
    (free,), given = run_ranks(1, update, str(folders["moe"]), sampled["moe"], free), replayed["moe"]
    assert (
        free["mismatch/expert_agreement"]
        == free["mismatch/router_agreement"]
        < given["mismatch/router_agreement"]
        < 1.0
    )
    assert given["mismatch/expert_agreement"] == 1.0
    assert given[WORST] < SAME < free["mismatch/logprob_abs_diff"] / 10


def test_with_replay_a_model_with_experts_differs_no_more_than_a_dense_one(replayed):
    assert all(replayed[name][WORST] < SAME for name in ("dense", "moe", "next"))
    assert "mismatch/expert_agreement" not in replayed["dense"]


LAYOUTS = [("next", {"tensor": 2, "expert": 2}), weekly("moe", {"pipeline": 2})]


@pytest.mark.parametrize(("name", "layers"), LAYOUTS, ids=str)
def test_every_layout_trains_the_same_on_arrays_of_all_ranks(name, layers, folders, sampled, replayed):
    """Each tree's arrays are on one of two ranks only."""
    whole = replayed[name]
    for found in run_ranks(2, update_of_shared, str(folders[name]), sampled[name], layout(2, **layers)):
        assert found["exchange/routes_bytes"] > 0
        assert found["mismatch/expert_agreement"] == 1.0
        assert found["mismatch/router_agreement"] == pytest.approx(
            whole["mismatch/router_agreement"], abs=1e-3
        )  # near ties
        for metric in ("mismatch/logprob_abs_diff", "loss/total", "loss/ref_kl", "train/grad_norm"):
            assert found[metric] == pytest.approx(whole[metric], rel=1e-3, abs=1e-7), metric


def update_of_shared(folder: str, trees: list[TokenTree], changes: dict[str, Any]) -> Metrics:
    for number, node in ((number, node) for number, tree in enumerate(trees) for node in tree.nodes):
        node.home = number // 2 % 2
        if node.home != dist.get_rank():
            known = node.tokens.only(["token_ids"] if node.parent < 0 else [])
            node.tokens = Tokens({**node.tokens.bare().columns, **known.columns})
    return update(folder, trees, changes)


def test_routes_of_another_model_are_refused(folders, sampled):
    message = "expected routes of the model's 4 MoE layers x 2 experts a token, found 4 x 4"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(1, update, str(folders["next"]), sampled["moe"], {})
