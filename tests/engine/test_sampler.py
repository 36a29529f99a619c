"""``draw`` on made-up logits: the tokens that it keeps, draws and records; rows that are not ours; norms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import ir
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler

from megatron_eqlen.engines.cpu.runner import PROVIDER, choose_kernels
from megatron_eqlen.engines.cpu.sampler import NEVER, PathSampler, Rows, draw, keep, mix, uniform
from megatron_eqlen.engines.protocol import SEED
from megatron_eqlen.sampling.track import track_seed


def drawn(logits: torch.Tensor, **limits: Any) -> tuple[list, torch.Tensor, list]:
    """Return each row's token, its log-prob and the tokens that were kept."""
    params = [SamplingParams(extra_args={SEED: place}, **limits) for place in range(len(logits))]
    rows = Rows.of(params, np.arange(len(logits)), logits.shape[1])
    made = draw(logits, rows, uniform(rows.seeds, np.zeros_like(rows.seeds)))
    tokens, logprobs = (column.squeeze(1) for column in made.with_likeliest(0))
    return tokens.tolist(), logprobs, [row.nonzero()[0].tolist() for row in made.kept]


def test_without_limits_any_token_can_be_drawn():
    tokens, logprobs, kept = drawn(torch.zeros(400, 100))
    assert len(set(tokens)) > 90
    assert kept == [[*range(100)]] * 400
    torch.testing.assert_close(logprobs, torch.full((400,), 0.01).log())


def test_tied_tokens_at_the_border_of_top_k_are_kept_drawn_and_recorded():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).repeat(64, 1)
    tokens, logprobs, kept = drawn(logits, top_k=3)
    mass = torch.tensor([2.0, 1.0, 1.0, 1.0]).log_softmax(0)
    assert kept == [[0, 1, 2, 3]] * 64
    assert {*tokens} == {0, 1, 2, 3}
    torch.testing.assert_close(logprobs, mass[tokens])


def test_top_k_may_exceed_the_vocabulary():
    assert drawn(torch.zeros(2, 5), top_k=9)[2] == [[*range(5)]] * 2
    rows = Rows.of([SamplingParams(extra_args={SEED: 0}, top_k=9)] * 2, np.arange(2), 5)
    ids, _ = draw(torch.zeros(2, 5), rows, np.array([0.1, 0.9])).with_likeliest(9)
    assert [sorted(row) for row in ids.tolist()] == [[*range(5)]] * 2


LIMITS = [
    {"top_p": 0.9},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.5, "top_k": 7},
    {"top_p": 1e-6},
    {"top_p": 1e-9},
    {"top_p": 0.99, "top_k": 400},
]


def test_limits_keep_what_vllms_own_function_keeps():
    """No two logits of a row are equal. Each row has limits of its own."""
    logits = torch.randn(len(LIMITS), 300, generator=torch.Generator().manual_seed(0)) * 3
    params = [SamplingParams(extra_args={SEED: 0}, **limits) for limits in LIMITS]
    rows = Rows.of(params, np.arange(len(LIMITS)), 300)
    top_k = torch.tensor([min(limits.get("top_k", 300), 300) for limits in LIMITS])
    top_p = torch.tensor([limits.get("top_p", 1.0) for limits in LIMITS])
    theirs = apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p) > -torch.inf
    assert np.array_equal(keep(logits, rows), theirs.numpy())


def reference(logits: np.ndarray, params: SamplingParams, draw: float) -> tuple[list[int], np.ndarray, int]:
    """Return, in float64 from the limits' definitions, the kept tokens, the distribution and the draw."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = weights >= params.min_p
    if params.top_k > 0:
        kept &= weights >= np.sort(weights * kept)[-params.top_k]
    share = weights * kept / (weights * kept).sum()
    # the least go, as long as they have at most 1 - p together
    order = np.argsort(share)
    kept[order[np.cumsum(share[order]) <= 1 - params.top_p]] = False
    share = weights * kept / (weights * kept).sum()
    return np.flatnonzero(kept).tolist(), share, int((np.cumsum(share) <= draw).sum())


def test_tokens_masks_and_log_probs_are_those_of_the_limits_definitions():
    """240 rows in one batch, with any limits together: off, alone, and all."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (240, 40)).astype(np.float32))
    params = [
        SamplingParams(
            extra_args={SEED: row}, temperature=rng.choice([0.6, 1, 1.5]), top_p=rng.choice([1, 1, 0.5, 0.9]),
            top_k=int(rng.choice([0, 0, 1, 4, 12])), min_p=rng.choice([0, 0, 0.05, 0.2, 1]),
        )
        for row in range(240)
    ]  # fmt: skip
    rows = Rows.of(params, np.arange(240), 40)
    draws = uniform(rows.seeds, np.arange(240, dtype=np.uint64))
    made = draw(logits, rows, draws)
    ids, logprobs = made.with_likeliest(5)
    for row in range(240):
        kept, share, token = reference(logits[row].double().numpy(), params[row], draws[row])
        assert (made.kept[row].nonzero()[0].tolist(), ids[row, 0]) == (kept, token)
        others = [other for other in np.argsort(-share) if other != token and share[other] > 0][:5]
        expected = [token, *others]
        assert ids[row, : len(expected)].tolist() == expected
        near = torch.from_numpy(np.log(share[expected])).float()
        torch.testing.assert_close(logprobs[row, : len(expected)], near, rtol=0, atol=1e-5)
        assert (logprobs[row, len(expected) :] == NEVER).all()


def test_a_draw_takes_the_token_in_whose_share_it_falls():
    """A bound belongs to the token above it, so one that cannot be drawn is not, not even by 0. A share of
    2^-30 is drawn by the last of 2^32 draws, though float32 does not tell 1 from 1 less that share."""
    rows = Rows.of([SamplingParams(extra_args={SEED: 0})] * 4, np.arange(4), 4)
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]]).repeat(4, 1)
    draws = np.array([0, 0.5 - 2**-32, 0.5, 1 - 2**-32])
    assert draw(logits, rows, draws).tokens.ravel().tolist() == [1, 1, 3, 3]
    rare = torch.tensor([[0.0, -30 * np.log(2), -torch.inf, -torch.inf]], dtype=torch.float32).repeat(4, 1)
    assert draw(rare, rows, draws).tokens.ravel().tolist() == [0, 0, 0, 1]


def test_of_tokens_tied_at_the_border_of_top_p_the_first_are_removed():
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]]).repeat(64, 1)  # a 1 has 0.26 of the mass, a 0 0.10
    tokens, logprobs, kept = drawn(logits, top_p=0.5)
    assert kept == [[2, 3]] * 64
    assert {*tokens} == {2, 3}
    torch.testing.assert_close(logprobs, torch.full((64,), 0.5).log())


def test_a_row_is_drawn_alike_in_any_batch(monkeypatch):
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)) * 3
    names = [str(place) for place in range(9)]
    params = [
        SamplingParams(
            extra_args={SEED: place}, top_p=0.9 if place % 2 else 1.0, temperature=0.7 if place % 3 else 1.0
        )
        for place in range(9)
    ]
    requests = {name: SimpleNamespace(sampling_params=p) for name, p in zip(names, params, strict=True)}

    def forward(places: list[int]) -> list[tuple]:
        batch = SimpleNamespace(
            req_ids=[names[p] for p in places], num_tokens_no_spec=np.full(len(places), 5)
        )
        sampler = PathSampler(SimpleNamespace(input_batch=batch, requests=requests), keep_masks=True)
        metadata: Any = SimpleNamespace(max_num_logprobs=2)
        output, masks = sampler.forward(logits[places], metadata), sampler.masks
        assert masks is not None
        columns = output.logprobs_tensors
        kept = np.split(masks[0], masks[1][1:-1])
        return [
            (ids.tolist(), values.tolist(), row.tolist())
            for ids, values, row in zip(columns.logprob_token_ids, columns.logprobs, kept, strict=True)
        ]

    whole = forward([*range(9)])
    monkeypatch.setattr("megatron_eqlen.engines.cpu.sampler.BLOCK", 100)
    assert forward([*range(9)]) == whole
    for places in ([6, 1, 3], [6, 0], [2, 4], [7, 1]):  # mixed, without limits, and all with a temperature
        assert forward(places) == [whole[place] for place in places]


def test_a_row_without_a_limit_keeps_its_log_probs_bit_for_bit():
    """Its mass is 1 but for round-off, which is not taken for a limit's."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    tokens, logprobs, _ = drawn(logits)
    assert torch.equal(logprobs, logits.log_softmax(-1)[range(50), tokens])


def test_vllms_dummy_run_has_no_rows_of_ours():
    """It has a batch of logits and no requests."""
    batch = SimpleNamespace(req_ids=[], num_tokens_no_spec=np.zeros(8, np.int64))
    sampler = PathSampler(SimpleNamespace(input_batch=batch, requests={}), keep_masks=True)
    assert sampler._blocks(8, 100) == []


def test_a_row_beside_anothers_is_drawn_where_nobody_asks_for_log_probs(monkeypatch):
    requests = {"theirs": SamplingParams(), "ours": SamplingParams(extra_args={SEED: 1})}
    requests = {name: SimpleNamespace(sampling_params=params) for name, params in requests.items()}
    batch = SimpleNamespace(req_ids=[*requests], num_tokens_no_spec=np.full(2, 5))
    sampler = PathSampler(SimpleNamespace(input_batch=batch, requests=requests), keep_masks=False)
    theirs = SamplerOutput(torch.tensor([[7], [7]], dtype=torch.int32), None)
    monkeypatch.setattr(Sampler, "forward", lambda *_: theirs)
    logits = torch.full((2, 9), -100.0).index_fill(1, torch.tensor([4]), 0.0)
    metadata: Any = SimpleNamespace(max_num_logprobs=None)
    assert sampler.forward(logits, metadata).sampled_token_ids.tolist() == [[7], [4]]


def test_the_draws_of_paths_and_positions_are_independent_uniforms():
    """Over 1,000 paths x 1,000 positions: mean, variance, and correlation of neighbours either way."""
    seeds = np.array(
        [track_seed(0, f"p#{i // 16}", i % 16 // 2, i % 2) for i in range(1000)], dtype=np.uint64
    )
    grid = np.broadcast_arrays(seeds[:, None], np.arange(1000, dtype=np.uint64))
    draws = uniform(mix(grid[0]), grid[1])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 1 / 2) < 5 / np.sqrt(12 * draws.size)
    assert abs(draws.var() - 1 / 12) < 5 / np.sqrt(180 * draws.size)
    for later, earlier in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(np.corrcoef(later.ravel(), earlier.ravel())[0, 1]) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [576, 24])
def test_norms_are_vllms_kernels_where_these_are_as_near_to_float64_as_its_native_form(width, dtype):
    """Without AVX-512 the kernels truncate to bfloat16: errors are twice the native form's. They read whole
    vectors of a row."""
    choose_kernels()
    rounds = dtype == torch.float32 or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 64, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    part = torch.cat([x, residual], dim=1)[:, :width]  # queries are a part of a row
    for op, inputs in (
        (ir.ops.rms_norm, (x,)),
        (ir.ops.rms_norm, (part,)),
        (ir.ops.fused_add_rms_norm, (x, residual)),
    ):
        chosen = op.dispatch(*inputs, weight, 1e-5).provider
        assert chosen == (PROVIDER if rounds and width % 16 == 0 else "native")
        exact = torch.rms_norm(sum(i.double() for i in inputs), (width,), weight.double(), 1e-5)
        results = [
            op.impls[name].impl_fn(*(i.clone() if i is not part else i for i in inputs), weight, 1e-5)
            for name in (chosen, "native")
        ]
        ours, native = ((result[0] if len(inputs) == 2 else result).double() - exact for result in results)
        assert ours.abs().mean() < 1.5 * native.abs().mean()
