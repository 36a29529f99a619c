"""Routes for tests: arbitrary routes for trees, the routes of a path, and Transformers models with given
experts."""

from __future__ import annotations

from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from megatron_eqlen.types import TokenTree
from tests.kit.tiny_models import EXPERTS

NUM_EXPERTS, TOP_K = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]


def any_routes(rng: np.random.Generator, tokens: int, layers: int) -> np.ndarray:
    """Return different experts for each token, in no order."""
    drawn = rng.random((tokens, layers, NUM_EXPERTS)).argsort(axis=-1)
    return drawn[..., :TOP_K].astype(np.uint8)


def routed(trees: list[TokenTree], layers: int, seed: int = 0) -> list[TokenTree]:
    """Return the same trees with routes that no model would choose."""
    rng = np.random.default_rng(seed)
    for tree in trees:
        for node in tree.nodes:
            node.tokens = node.tokens.with_column("routes", any_routes(rng, len(node), layers))
    return trees


def path_routes(tree: TokenTree, node: int) -> np.ndarray:
    """Return routes of every token of the path to the end of a node, except the prompt's first: int64, -1 for
    those of an environment."""
    parts = []
    while node >= 0:
        tokens = tree.nodes[node].tokens
        routes = np.where(tokens.is_generated[:, None, None], tokens["routes"].astype(np.int64), -1)
        parts.append(routes[node == 0 :])
        node = tree.nodes[node].parent
    return np.concatenate(parts[::-1])


def force(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Make the model's routers take given experts. Returns a dict to be filled with them before each forward
    pass: layer -> [tokens, top_k] int64, -1 for the router's own choice. The rest is
    Transformers' own code and, in the router, its formula: softmax over all experts, then the chosen ones
    divided by their sum."""
    given: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = MethodType(_forced(number, given), layer.mlp.gate)
    return given


def _forced(number: int, given: dict[int, torch.Tensor]) -> Any:
    def forward(gate: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight)
        scores = logits.softmax(-1, dtype=torch.float)
        experts = torch.where(given[number] < 0, scores.topk(TOP_K).indices, given[number])
        scores = scores.gather(1, experts)
        if gate.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.to(logits.dtype), experts

    return forward
