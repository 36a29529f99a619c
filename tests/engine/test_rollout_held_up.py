"""A weight sync while requests are in flight (``rollout.staleness``): the weights of every token are known,
and its log-prob is from these weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_eqlen.engines.protocol import Request
from megatron_eqlen.engines.servers import ServerEngine
from megatron_eqlen.types import Delta
from tests.kit.rollout_kit import folder, requests, server_recipe, sync_as_started

LIMIT = 150


@functools.cache
def model(version: int) -> torch.nn.Module:
    """Return the Transformers model with a version's weights."""
    return AutoModelForCausalLM.from_pretrained(folder("qwen3_moe", version), dtype=torch.float32)


def sync(engine: ServerEngine, version: int) -> None:
    engine.update_weights(
        iter(load_file(folder("qwen3_moe", version) / "model.safetensors").items()), version
    )


@pytest.fixture(params=["continue", "recompute"])
def engine(servers, request) -> Iterator[ServerEngine]:
    with opened(servers, on_sync=request.param) as engine:
        yield engine


@contextlib.contextmanager
def opened(servers, **rollout) -> Iterator[ServerEngine]:
    """Yield an engine over servers that have the weights of version 0, before and after."""
    recipe = server_recipe(list(servers), staleness=1, **rollout)
    server_engine = ServerEngine(recipe.model.path, recipe.rollout, [], 200, syncs_first=True)
    sync(server_engine, 0)
    yield server_engine
    sync_as_started(server_engine)
    server_engine.close()


Path = tuple[list[int], list[int], list[float], list[int]]
"""(context, tokens, log-probs, versions)."""


def run(engine: ServerEngine, sync_after: int) -> dict[str, Path]:
    """Run six requests that a sync interrupts when one has ``sync_after`` tokens, then a fork of one of
    them."""
    paths: dict[str, Path] = {}

    def submit(name: str, context: list[int], seed: int) -> None:
        paths[name] = context, [], [], []
        engine.submit(Request(name, context, 48 + LIMIT - len(context), seed))

    for name, (context, _, seed) in requests(6).items():
        submit(f"{name}/0", context, seed)
    while engine.has_unfinished:
        for delta in engine.step():
            take(paths, delta)
        if engine.policy_version == 0 and max(len(path[1]) for path in paths.values()) >= sync_after:
            sync(engine, 1)
            submit("r0/1", paths["r0/0"][0] + paths["r0/0"][1], seed=5)
    return paths


def take(paths: dict[str, Path], delta: Delta) -> None:
    _, tokens, logprobs, versions = paths[delta.request_id]
    assert delta.finish_reason in (None, "length")
    tokens += delta.token_ids
    logprobs += delta.columns["logprobs"]
    versions += delta.policy_version


def test_every_token_is_labelled_with_the_weights_that_sampled_it(engine):
    paths = run(engine, sync_after=20)
    held_up = 0
    for name, (context, tokens, logprobs, versions) in paths.items():
        assert len(context) + len(tokens) == 48 + LIMIT
        assert versions == sorted(versions)
        before = versions.count(0)
        held_up += 0 < before < len(tokens)
        expected = reference(context, tokens, before, recomputed=engine.rollout.on_sync == "recompute")
        found = torch.tensor(logprobs)
        assert (found - expected).abs().max() < 1e-4, name
    assert held_up > 0
    assert set(paths["r0/1"][3]) == {1}, "the fork begins from nothing that older weights computed"


def reference(context: list[int], tokens: list[int], before: int, recomputed: bool) -> torch.Tensor:
    """[tokens] log-probs of tokens of which ``before`` were sampled by version 0, the rest by version 1."""
    path = torch.tensor([context + tokens])
    held_up_at = len(context) + before - 1
    """Number of tokens whose KV the old weights have computed: all but the last one sampled."""
    parts = []
    with torch.no_grad():
        if before:
            old = model(0)(path[:, :held_up_at], use_cache=True)
            parts.append(old.logits[0, len(context) - 1 :])
        if not before or recomputed:
            parts.append(model(1)(path).logits[0, (held_up_at if before else len(context) - 1) : -1])
        else:
            parts.append(model(1)(path[:, held_up_at:], past_key_values=old.past_key_values).logits[0, :-1])
    logprobs = torch.cat(parts).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


def test_tokens_have_the_routes_of_the_weights_that_sampled_them_also_after_a_recomputing_sync(servers):
    with opened(servers, on_sync="recompute", keep_routes=True) as engine:
        path, versions, rows = [5, 6, 7, 8] * 10, [], []
        start = len(path)
        engine.submit(Request("r/0", list(path), 40, seed=3))
        while engine.has_unfinished:
            for delta in engine.step():
                path += delta.token_ids
                versions += delta.policy_version
                rows += [torch.from_numpy(row.astype("int64")) for row in delta.columns.get("routes", ())]
            if engine.policy_version == 0 and len(versions) >= 15:
                sync(engine, 1)
    assert set(versions) == {0, 1}
    for version in (0, 1):
        with torch.no_grad():
            logits = model(version)(torch.tensor([path]), output_router_logits=True).router_logits
        own = torch.tensor(versions) == version
        found = torch.stack(rows)[own]
        chosen = torch.stack(logits, 1)[start - 1 : -1][own].topk(found.shape[-1]).indices
        same = (chosen[..., None] == found[..., None, :]).any(-1)
        assert same.double().mean() > 0.97
