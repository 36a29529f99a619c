"""Helpers of the vLLM engines' tests: tiny models, engines, requests, and the reference."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_eqlen.engines import servers
from megatron_eqlen.engines.protocol import Request
from megatron_eqlen.engines.replica import UNTOUCHED
from megatron_eqlen.engines.servers import ServerEngine
from megatron_eqlen.recipe import Recipe, RolloutRecipe
from megatron_eqlen.recipe.load import parse
from tests.kit.tiny_models import save_tiny

if TYPE_CHECKING:
    from megatron_eqlen.engines.colocated import ColocatedEngine

EOS = [1, 2]
MAX_LEN = 256
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
CHANGES = {
    "llama": {"head_dim": 32, "num_hidden_layers": 2},  # tied, with a stretched rotation
    "qwen2": {
        "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 40, "rope_parameters": YARN,
    },
    "qwen3": {"head_dim": 32, "num_hidden_layers": 2},
    "qwen3_moe": {"head_dim": 32, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 64},
    "qwen3_next": {
        "head_dim": 32,
        "num_experts": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.25},
    },
    "qwen3_5_text": {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "glm4_moe": {"head_dim": 32, "num_hidden_layers": 2, "moe_intermediate_size": 64},
    "qwen3_5_moe": {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}  # fmt: skip

_models = tempfile.TemporaryDirectory(prefix="tiny-models-")


@functools.cache
def folder(kind: str, seed: int = 0) -> Path:
    """Return a folder with a tiny model, which exists until the process ends."""
    path = Path(_models.name) / f"{kind}-{seed}"
    save_tiny(path, kind, seed=seed, **CHANGES[kind])
    return path


def make_rollout(**over) -> RolloutRecipe:
    size = {"max_num_seqs": 64, "kv_cache_gib": 0.02, "max_response_length": 60}
    return RolloutRecipe(**size | {"top_k": 0, "top_p": 1.0} | over)


def open_engine(path: Path, dtype: str = "float32", eos=EOS, **over) -> ColocatedEngine:
    from megatron_eqlen.engines.colocated import ColocatedEngine  # many of the kit's users start none

    return ColocatedEngine(path, make_rollout(**over), dtype, eos, MAX_LEN)


def server_recipe(urls: list[str], **over) -> Recipe:
    """Return the recipe of a tiny model that is served at ``urls``."""
    rollout = {"max_response_length": 80, "max_num_seqs": 16, "kv_cache_gib": 0.02}
    rollout |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return parse(
        {
            "name": "t", "steps": 1, "group_size": 4, "loss": {"rollout_is": "token"},
            "model": {"path": str(folder("qwen3_moe")), "dtype": "float32"},
            "data": {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 50},
            "rollout": rollout | {"engine": "server", "servers": urls} | over,
        },
        "test",
    )  # fmt: skip


def sync_as_started(engine: ServerEngine) -> None:
    """Give servers the weights that they were started with, under the name that these had."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "name_of_sync", lambda version: UNTOUCHED)
        engine.update_weights(iter(load_file(folder("qwen3_moe") / "model.safetensors").items()), 0)


def generate(
    engine, requests: dict[str, tuple[list[int], int, int]], routes: dict[str, list] | None = None
) -> dict[str, tuple[list, list, str, int]]:
    """Run requests {id: (context, max_tokens, seed)}; return {id: (tokens, logprobs, finish_reason, cached)}.

    ``routes``: gets the rows of each request's tokens.
    """
    for name, (context, max_tokens, seed) in requests.items():
        engine.submit(Request(name, context, max_tokens, seed))
    out = {name: ([], [], None, 0) for name in requests}
    while engine.has_unfinished:
        for delta in engine.step():
            if routes is not None:
                routes.setdefault(delta.request_id, []).extend(delta.columns["routes"].tolist())
            tokens, logprobs, _, cached = out[delta.request_id]
            out[delta.request_id] = (
                tokens + delta.token_ids, logprobs + delta.columns["logprobs"], delta.finish_reason,
                cached + (delta.num_cached_tokens or 0),
            )  # fmt: skip
    return out


def take_logprobs(streams: list) -> np.ndarray:
    """Return the log-probs of all tokens, and remove them from ``streams``."""
    segments = [segment for stream in streams for segment in stream.parts]
    logprobs = np.concatenate([segment.tokens.columns["logprobs"] for segment in segments])
    for segment in segments:
        segment.tokens = segment.tokens.without(["logprobs"])
    return logprobs


def requests(count: int, max_tokens: int = 60) -> dict[str, tuple[list[int], int, int]]:
    return {f"r{i}": ([5 + i % 80, 6, 7, 8 + i % 9] * 12, max_tokens, 1000 + i) for i in range(count)}


def reference_logits(path: Path, context: list[int], tokens: list[int], dtype=torch.float32) -> torch.Tensor:
    """Return [tokens, vocabulary] float32 logits of Transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.no_grad():
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    return logits.float()
