"""Models, and optimizer steps of a real ``Policy``, on a tiny model and any number of gloo ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_eqlen.hf.config import read_config
from megatron_eqlen.job import Job
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.groups import start
from megatron_eqlen.models.policy_model import PolicyModel
from megatron_eqlen.models.weights import load_hf
from megatron_eqlen.recipe import ParallelRecipe, Recipe
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics, TokenTree
from tests.kit.recipes import small
from tests.kit.tree_samples import stream

ROW = 24
"""Number of positions in a row: one tree of ``one_tree_a_row``."""
TWO_EPOCHS: dict[str, Any] = {"loss": {"kl_coef": 0.1, "epochs": 2}}
"""Changes that make an update compute the old policy's log-probs, too, and take two optimizer steps."""


def recipe_of(folder: str, changes: dict[str, Any]) -> Recipe:
    """Return a recipe for updates alone; ``changes`` are whole sections, but for those of ``model``."""
    sections: dict[str, Any] = {
        "data": {"max_prompt_length": 4}, "packing": {"max_tokens_per_row": ROW},
        "rollout": {"max_response_length": 20, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0}, "loss": {"kl_coef": 0.1},
    }  # fmt: skip
    model = {"path": folder, "dtype": "float32"} | changes.get("model", {})
    return small(**{"steps": 4} | sections | changes | {"model": model})


def one_tree_a_row(count: int) -> list[TokenTree]:
    """Return streams of two pairs, as long as a row."""
    rng = np.random.default_rng(count)
    return [stream(rng, 3, [8, 3]) for _ in range(count)]


def build_chunks(
    folder: str, layout: dict[str, Any], dtype: torch.dtype = torch.float32, load: bool = False
) -> list[PolicyModel]:
    """Build this rank's chunks of a model; groups stay. ``load``: with the folder's weights."""
    parallel = ParallelRecipe(**layout)
    start(parallel, seed=1)
    chunks = build_model(read_config(folder), parallel, dtype)
    if load:
        load_hf(chunks, folder)
    return chunks


def build_policy(folder: str, changes: dict[str, Any] | None = None) -> Policy:
    """Build a policy on a rank of a world; the groups stay until the process ends."""
    recipe = recipe_of(folder, changes or {})
    start(recipe.parallel, seed=1)
    return Policy(Job(recipe))


def save(folder: Path, step: int, policy: Policy, position: dict[str, Any], keep: int) -> None:
    """Write ``step``'s checkpoint and wait for it. Collective."""
    if saving := saved_state.begin(folder, step, policy, position, keep):
        saving.finish()


def numbers(policy: Policy) -> list[torch.Tensor]:
    """Return copies of this rank's weights, main weights and state of the optimizer."""
    read = policy.memory.weights.host
    found = [read(parameter) for chunk in policy.chunks for parameter in chunk.parameters()]
    for part in policy.optimizer.chained_optimizers:
        for group in part.param_groups:
            for main in group["params"]:
                found += [main, *(x for x in part.state[main].values() if isinstance(x, torch.Tensor))]
    return [tensor.detach().clone() for tensor in found]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Return True if both are equal bit for bit; one nan equals another."""
    pairs = zip(before, after, strict=True)
    return len(before) == len(after) and all(
        torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs
    )


def heard() -> list[str]:
    """Return a list that gets each message which the package logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron_eqlen").addHandler(handler)
    return messages


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def update(
    folder: str, minibatches: list[list[TokenTree]], changes: dict[str, Any] | None = None
) -> tuple[Metrics, dict[str, torch.Tensor]]:
    """Return metrics and weights after one ``Policy.update``."""
    policy = build_policy(folder, changes)
    return policy.update(minibatches).metrics, weights_of(policy)


def layout(processes: int, **parallel: Any) -> dict[str, Any]:
    return {"parallel": parallel, "cluster": {"processes_per_node": processes}}
