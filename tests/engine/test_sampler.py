"""``PathSampler`` alone, on made-up logits: the tokens that it keeps, draws and records."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler as V2Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from megatron_eqlen.plan.engine import SAMPLER_BYTES
from megatron_eqlen.rollout.engine import SEED, EngineError
from megatron_eqlen.rollout.vllm.engine import sampler
from megatron_eqlen.rollout.vllm.engine.draws import DrawSettings
from megatron_eqlen.rollout.vllm.engine.sampler import PathSampler
from tests.kit.allocations import peak_bytes
from tests.kit.sampler_batches import batch


def draw(logits: torch.Tensor, requests: dict[str, SamplingParams], **options: Any) -> list[torch.Tensor]:
    """Return [drawn and recorded tokens, their log-probs, the mass that was removed]."""
    runner, metadata = batch(requests, logits.shape[1], str(logits.device))
    path_sampler = PathSampler(runner, DrawSettings(**options))
    out = path_sampler.forward(logits.clone(), metadata)
    assert out.logprobs_tensors is not None
    return [out.logprobs_tensors.logprob_token_ids, out.logprobs_tensors.logprobs, path_sampler.removed]


def requests(rows: int, **sampling: Any) -> dict[str, SamplingParams]:
    return {str(row): SamplingParams(extra_args={SEED: row}, **sampling) for row in range(rows)}


def both_ways(logits: torch.Tensor, asked: dict[str, SamplingParams], **options: Any) -> list[tuple]:
    """Return tokens, log-probs and removed mass, once with top-k first and once over the whole vocabulary."""
    ours = draw(logits, asked, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "TIES", logits.shape[1])  # then every token is a candidate
        whole = draw(logits, asked, **options)
    return [*zip(ours, whole, strict=True)]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rounded=st.booleans(),
    top_k=st.integers(1, 60),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-3]),
    min_p=st.sampled_from([0.0, 0.02, 0.9]),
    processed=st.booleans(),
    record=st.booleans(),
)
def test_top_k_first_draws_what_the_whole_vocabulary_draws(
    seed, rounded, top_k, top_p, min_p, processed, record
):
    """Results are equal bit for bit: tokens, log-probs, masks and removed mass. Rounded logits tie, which
    top-k keeps; the order in which top-p removes ties depends on vLLM's sort, so there it is off."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(16, 700, generator=generator)
    logits = logits.bfloat16() if rounded else logits
    asked = requests(16, top_k=top_k, top_p=1.0 if rounded else top_p, min_p=min_p, temperature=0.7)
    options = {"processed": processed, "mask_width": top_k if record else 0}
    assert all(torch.equal(mine, theirs) for mine, theirs in both_ways(logits, asked, **options))


def test_of_ties_at_the_border_of_top_p_as_many_are_kept():
    logits = 3 * torch.randn(64, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    asked = requests(64, top_k=20, top_p=0.9)
    tokens, _, removed = both_ways(logits, asked, processed=False, mask_width=20)
    kept = [
        [sorted(row[[*set(ids)]].tolist()) for row, ids in zip(logits, columns.tolist(), strict=True)]
        for columns in tokens
    ]
    assert kept[0] == kept[1]
    torch.testing.assert_close(*removed)


def test_another_runner_or_sampler_than_the_one_replaced_is_refused():
    runner = object.__new__(GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.sampler = Sampler()
    sampler.install(runner, DrawSettings(processed=True))
    ours = runner.sampler
    assert isinstance(ours, PathSampler)
    sampler.install(runner, DrawSettings(processed=True))
    assert runner.sampler is ours
    runner.sampler = type("GreedySampler", (Sampler,), {})()
    with pytest.raises(EngineError, match=r"expected vLLM's vllm.*\.Sampler, .* found .*\.GreedySampler"):
        sampler.install(runner, DrawSettings(processed=True))
    with pytest.raises(EngineError, match=r"V1 or V2 model runner, found .*\.Namespace"):
        sampler.install(Namespace(sampler=Sampler()), DrawSettings(processed=True))
    runner = object.__new__(V2ModelRunner)
    runner.sampler = object.__new__(GPUWatermarkSampler)
    with pytest.raises(EngineError, match=r"vllm.*\.gpu\..*\.Sampler, .* found .*\.GPUWatermarkSampler"):
        sampler.install(runner, DrawSettings(processed=True))
    runner.sampler = object.__new__(V2Sampler)
    runner.rejection_sampler = object.__new__(RejectionSampler)
    with pytest.raises(EngineError, match=r"without drafts, found .*\.RejectionSampler"):
        sampler.install(runner, DrawSettings(processed=True))


def test_the_removed_mass_is_counted_without_waiting_for_the_gpu():
    """Fake tensors of a GPU have no values: an operation that waits for one fails."""
    runner, _ = batch(requests(3), 10, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        path_sampler = PathSampler(
            Namespace(**vars(runner) | {"device": "cuda"}), DrawSettings(processed=False)
        )
        mass = torch.ones(3, dtype=torch.float64, device="cuda")
        path_sampler.count_removed(mass, np.array([True, False, True]))
    assert path_sampler.sampled == 2


def test_rows_in_their_prefill_have_no_removed_mass():
    runner, _ = batch(requests(3), 10, "cpu")
    path_sampler = PathSampler(runner, DrawSettings(processed=False))
    mass = torch.tensor([0.75, 0.5, 1.0], dtype=torch.float64)
    path_sampler.count_removed(mass, np.array([True, False, True]))
    assert path_sampler.take_removed_mass() == (0.25, 2)


@pytest.mark.parametrize(("kind", "numbers"), [("vocabulary", ()), ("columns", ("entropy",))])
def test_without_top_k_the_sampler_takes_the_memory_that_is_planned(kind, numbers):
    logits = torch.randn(8, 40_000).bfloat16()
    runner, metadata = batch(requests(8, top_p=0.95, min_p=0.02), 40_000)
    path_sampler = PathSampler(runner, DrawSettings(processed=True, numbers=numbers))
    peak = peak_bytes(lambda: path_sampler.forward(logits, metadata))
    assert peak / logits.numel() == pytest.approx(SAMPLER_BYTES[kind], rel=0.02)


@pytest.mark.parametrize("top_k", [-1, 5])
def test_without_top_k_any_token_can_be_drawn(top_k):
    asked = requests(400) | {"last": SamplingParams(extra_args={SEED: 400}, top_k=top_k)}
    tokens = draw(torch.zeros(401, 100), asked, processed=False)[0][:, 0]
    assert len(set(tokens[:400].tolist())) > 90


def test_of_equal_logits_at_the_border_the_mask_holds_top_k_and_no_more():
    """vLLM's top-k keeps all ties; the record must hold the tokens that were drawn from."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0]]).repeat(64, 1)
    columns, logprobs, _ = draw(logits, requests(64, top_k=3), processed=True, mask_width=3)
    mass = torch.tensor([2.0, 1.0, 1.0]).log_softmax(0)
    for (drawn, *kept), logprob in zip(columns.tolist(), logprobs, strict=True):
        assert sorted(kept) == [0, 1, 2]
        assert drawn in kept
        assert logprob[0].item() == pytest.approx(mass[0 if drawn == 0 else 1].item(), abs=1e-6)
    assert len({drawn for drawn, *_ in columns.tolist()}) == 3


def test_more_ties_than_are_kept_leave_a_distribution():
    """All of 500 tokens tie: the drawn token is among the kept ones, at its log-prob."""
    tokens, logprobs, removed = draw(torch.zeros(300, 500), requests(300, top_k=20), processed=True)
    assert len(set(tokens[:, 0].tolist())) <= 20 + sampler.TIES
    np.testing.assert_allclose(logprobs[:, 0].exp().numpy(), 1 / (20 + sampler.TIES), rtol=1e-5)
    assert removed.item() == pytest.approx(300 * (1 - (20 + sampler.TIES) / 500))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_the_cpu_draws():
    """Draws may differ only by round-off: a GPU sums in another order."""
    logits = 3 * torch.randn(2000, 5000, generator=torch.Generator().manual_seed(0))
    asked = requests(2000, top_k=20, top_p=0.95, temperature=0.6)
    ours, cpu = (draw(logits.to(device), asked, processed=False) for device in ("cuda", "cpu"))
    assert (ours[0].cpu() == cpu[0]).float().mean() >= 0.999
    same = (ours[0].cpu() == cpu[0])[:, 0]
    torch.testing.assert_close(ours[1].cpu()[same], cpu[1][same], atol=1e-5, rtol=0)
