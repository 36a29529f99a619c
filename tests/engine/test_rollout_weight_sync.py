"""Weight syncs against a freshly loaded engine, for every family and across ranks."""

from __future__ import annotations

import contextlib
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from vllm.device_allocator import alloc_conf

from megatron_eqlen.engines import lifecycle
from megatron_eqlen.engines.protocol import EngineError, Request
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.job import parse
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.types import Prompt, tokens_along
from tests.kit import jobs
from tests.kit.delta_net import in_float32
from tests.kit.marks import weekly
from tests.kit.rollout_kit import CHANGES, folder, generate, open_engine, requests

EOS = range(1, 7)
"""Enough end tokens that streams have pairs."""


no_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM loads Qwen3.5 with torchvision"
)
KINDS = [weekly("llama"), weekly("qwen2"), "qwen3_moe", "qwen3_next", "qwen3_next bfloat16", "glm4_moe"]
KINDS += [pytest.param(kind, marks=no_torchvision) for kind in CHANGES if "qwen3_5" in kind]


@pytest.fixture(scope="module", params=KINDS)
def fresh(request):
    """(kind, dtype, an engine that has loaded ``folder(kind, 1)``)"""
    kind, _, dtype = request.param.partition(" ")
    dtype = dtype or "float32"
    with in_float32() if dtype == "float32" else contextlib.nullcontext():
        engine = open_engine(folder(kind, 1), dtype, EOS, temperature=1.0)
        yield kind, dtype, engine
        engine.close()


def test_after_a_sync_the_engine_is_a_freshly_loaded_one(fresh):
    kind, dtype, loaded = fresh
    engine = open_engine(folder(kind, 0), dtype, EOS, temperature=1.0, vllm={"load_format": "dummy"})
    before = generate(engine, requests(4, 24))
    weights = load_file(folder(kind, 1) / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if ".visual." not in name}
    engine.sleep()
    with pytest.raises(EngineError, match="update_weights must come first"):
        engine.submit(Request("x", [5], 1, 0))
    engine.wake()
    engine.update_weights(iter(weights.items()), policy_version=4)
    assert engine.policy_version == 4
    after = generate(engine, requests(4, 24))
    metrics = engine.metrics()
    assert metrics["engine/sync_bytes"] == sum(w.numel() * w.element_size() for w in weights.values())
    assert metrics["engine/sync_seconds"] > 0
    engine.close()
    loaded.reset_cache()
    assert after == generate(loaded, requests(4, 24)), "log-probs, tokens, and cached prefixes"
    assert after != before


def test_a_sync_to_an_fp8_engine_quantizes_the_new_weights():
    """The engine, which has read no weights, equals a fresh one. Its log-probs are farther from float32 than
    those of bfloat16 (0.06 and 0.006 here) and nearer than a guess (0.6)."""
    settings = {"dtype": "bfloat16", "eos": EOS, "temperature": 1.0}
    engine = open_engine(folder("qwen3", 0), quantization="fp8", vllm={"load_format": "dummy"}, **settings)
    weights = load_file(folder("qwen3", 1) / "model.safetensors")
    for version in (1, 2):
        engine.update_weights(((n, w.bfloat16()) for n, w in weights.items()), version)
    after = generate(engine, requests(4))
    engine.close()
    fresh = open_engine(folder("qwen3", 1), quantization="fp8", **settings)
    assert generate(fresh, requests(4)) == after
    held = dict(fresh.core.model_executor.driver_worker.worker.model_runner.get_model().named_parameters())
    assert held["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert held["model.embed_tokens.weight"].dtype == held["lm_head.weight"].dtype == torch.bfloat16
    fresh.close()
    paths = [torch.tensor([*context, *after[name][0]]) for name, (context, _, _) in requests(4).items()]
    engines = torch.tensor([logprob for tokens in after.values() for logprob in tokens[1]])
    lengths = [len(tokens[0]) for tokens in after.values()]
    exact, near = (logprobs_of("qwen3", paths, lengths, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (exact - near).abs().mean() < (exact - engines).abs().mean() < exact.std()


def logprobs_of(kind: str, paths: list[torch.Tensor], lengths: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return Transformers' log-probs of the last tokens of each path (``lengths``), one path after the
    other."""
    model = AutoModelForCausalLM.from_pretrained(folder(kind, 1), dtype=dtype)
    tokens = pad_sequence(paths, batch_first=True)
    with torch.no_grad():
        predicted = model(tokens).logits[:, :-1].float().log_softmax(-1)
    found = predicted.gather(-1, tokens[:, 1:, None])[..., 0]
    ends = [len(path) - 1 for path in paths]
    return torch.cat([row[end - n : end] for row, end, n in zip(found, ends, lengths, strict=True)])


def test_every_family_is_harvested_and_its_logprobs_are_transformers(fresh):
    """Tolerance: ten times the error in float32 (1.2e-5). In bfloat16, which kernels round differently on
    each processor, ten times what Transformers' own kernels are apart from float32."""
    kind, dtype, engine = fresh
    engine.reset_cache()
    prompts = [Prompt(f"p{i}", [5 + i, 6, 7] * 14, "", "math", "") for i in range(2)]
    recipe = parse(
        {
            "name": "t", "steps": 1, "group_size": 4, "model": {"path": "none"},
            "data": {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 50},
            "rollout": {"max_response_length": 40, "temperature": 1.0, "max_num_seqs": 64},
        },
        "test",
    )  # fmt: skip
    streams, metrics = harvest(engine, HarvestPlan(prompts, recipe, EOS, seed=3))
    assert len(streams) == 4
    assert sum(len(pairs_of(stream)) for stream in streams) > 8
    assert all(tokens[-1] in EOS and len(tokens) <= 40 for s in streams for _, tokens in s.ended())
    context = {prompt.prompt_id: prompt.token_ids for prompt in prompts}
    paths, ours = [], []
    for stream in streams:
        for pair in pairs_of(stream):
            line = stream.line(pair.a.number)
            paths.append(torch.tensor([*context[stream.prompt_id], *tokens_along(line)]))
            ours.append(torch.tensor(pair.a.tokens["logprobs"]))
        if pairs_of(stream):  # the whole trunk
            line = stream.line(pairs_of(stream)[-1].b.number)
            paths.append(torch.tensor([*context[stream.prompt_id], *tokens_along(line)]))
            ours.append(torch.tensor(np.concatenate([part.tokens["logprobs"] for part in line])))
    paths, ours = paths[::3], ours[::3]
    lengths = [len(tokens) for tokens in ours]
    exact, near = (logprobs_of(kind, paths, lengths, dtype) for dtype in (torch.float32, torch.bfloat16))
    errors, noise = (exact - torch.cat(ours)).abs(), (exact - near).abs()
    if dtype == "float32":
        assert errors.max() < 1e-4
    else:
        assert errors.mean() < 10 * noise.mean()
    # The state of a Gated DeltaNet is cached at the ends of large blocks only.
    blocks = metrics["harvest/recomputed_tokens_per_fork"] / 32
    assert (blocks > 1) == ("qwen3_next" in kind or "qwen3_5" in kind)


def test_wrong_weights_are_named_and_the_engine_refuses_to_continue():
    engine = open_engine(folder("qwen3"))
    good = load_file(folder("qwen3", 1) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for weights, message in (
        (good | {name: good[name][:-1]}, rf"weight '{name}': expected shape \[96, 64\], found \[95, 64\]"),
        (good | {"model.layers.0.mlp.upproj.weight": good[name]}, rf"nearest: '{name}'"),
        ({k: v for k, v in good.items() if k != name}, rf"1 of 25 missing, for example '{name}'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(iter(weights.items()), 1)
        assert engine.policy_version == 0
        with pytest.raises(EngineError, match="failed half way"):
            engine.submit(Request("x", [5], 1, 0))
    engine.update_weights(iter(good.items()), 1)
    assert generate(engine, requests(2))
    engine.close()


def test_two_ranks_are_two_replicas_or_one_split_engine():
    """The process group exists before; both layouts equal one process on its own."""
    old, new = folder("qwen3_moe", 0), folder("qwen3_moe", 1)
    rank0 = jobs.run("-m", "tests.kit.vllm_ranks", old, new, ranks=2)
    single = open_engine(new, temperature=1.0, keep_routes=True)
    routes: dict[str, list] = {}
    expected = generate(single, requests(8), routes)
    single.close()
    for found, rows in map(json.loads, rank0.stdout.splitlines()[-2:]):
        assert rows == routes
        for name, (tokens, logprobs, reason, _) in expected.items():
            assert found[name][0] == tokens
            assert found[name][2] == reason
            assert np.abs(np.array(found[name][1]) - np.array(logprobs)).max() < 2e-5


def test_a_parked_trainers_weights_stay_until_the_engine_has_read_them_all():
    """vLLM pads 96 tokens to 128, and copies layers that it pads after the last weight has come."""
    done = jobs.run("-m", "tests.kit.parked_sync", folder("qwen3", 0), folder("qwen3", 1))
    fresh = open_engine(folder("qwen3", 1), temperature=1.0)
    expected = json.loads(json.dumps(generate(fresh, requests(4))))
    fresh.close()
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_an_engine_is_built_without_expandable_segments_and_other_settings_stay(monkeypatch, expandable):
    was = f"max_split_size_mb:512,expandable_segments:{expandable}"
    monkeypatch.setattr(alloc_conf, "live_alloc_conf", lambda: was)
    written = []
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", written.append)
    with lifecycle.whole_segments():
        inside = [*written]
    assert inside == (["max_split_size_mb:512,expandable_segments:False"] if expandable == "True" else [])
    assert written[1:] == ([was] if inside else [])
