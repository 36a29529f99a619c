"""Logits and gradients of our models against Transformers' own implementation, in every layout.

Both compute in float64, so that no verdict depends on the processor's order of sums.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from megatron_eqlen.models.weights import export_hf
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow, weekly
from tests.kit.tiny_models import FAMILIES, WITH_IMAGES, auto_class, gradients_by_name, save_tiny
from tests.kit.updates import build_chunks

ROWS, LENGTH = 2, 24
# Ten times what is seen, and more: rope's angles are in float32, and processors' cosines differ.
MAX_LOGIT_ERROR = 2e-5
MAX_GRADIENT_ERROR = 5e-5  # of the tensor's largest gradient

LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "tp2-sp": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp3": (3, {"pipeline": 3}),
    "pp2, uneven": (2, {"pipeline": 2, "layers_per_stage": [3, 1]}),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2-ep2-etp2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2-ep2-dp2": (4, {"tensor": 2, "expert": 2, "recompute": "full"}),
}
CASES = [slow("qwen3", "pp3"), ("qwen2", "tp2-sp"), ("llama", "tp2"), weekly("qwen3_5_text", "tp2-pp2")]
CASES += [
    slow("qwen3_moe", "pp2, uneven"),
    *(weekly("qwen3_moe", x) for x in ("tp2-ep2-etp2", "tp2-ep2-dp2")),
]
CASES += [("qwen3_next", "tp2-ep2"), weekly("qwen3_next", "pp2"), ("qwen3_5_moe", "tp2-ep2")]
CASES += [("glm4_moe", "tp2-ep2"), weekly("glm4_moe", "pp2")]
"""One case for each mechanism of a family."""


def make_rows(vocab: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """Return (input_ids, labels, weights), each [ROWS, LENGTH]: the loss is -sum(weight * log p(label))."""
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, vocab, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return ids, labels, torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return -(logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] * weights).sum()


class _Doubles:
    """torch with float64 where code asks for float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_doubles() -> Iterator[None]:
    """Let Transformers compute in float64 where it names float32."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("transformers.") and vars(module).get("torch") is torch
    ]
    with contextlib.ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "torch", _Doubles()))
        patches.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def reference(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (logits, gradients by name) of Transformers' model, fused experts taken apart. Its code must
    have been imported."""
    config = AutoConfig.from_pretrained(folder)
    ids, labels, weights = make_rows()
    with in_doubles():
        model = auto_class(config).from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager", attn_implementation="sdpa"
        )
        logits = model(ids).logits
        weighted_loss(logits, labels, weights).backward()
    return logits.detach(), gradients_by_name(model)


def our_pass(folder: str, layout: dict) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Return on each rank (row -> logits if this rank has them, all gradients under Hugging Face names)."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    chunks = build_chunks(folder, layout, torch.float64, load=True)
    config = chunks[0].config
    config.finalize_model_grads_func = lambda model, tokens, **kwargs: finalize_model_grads(model, **kwargs)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    chunks = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]

    ids, labels, weights = make_rows()
    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = range(dp_rank, ROWS, dp)
    kept = {}

    def step(data, model):
        row = next(data)
        output = model(ids[row : row + 1], torch.arange(LENGTH)[None], None)

        def loss(logits):
            whole = gather_from_tensor_model_parallel_region(logits)
            kept[row] = whole.detach()
            return weighted_loss(whole[0], labels[row], weights[row]), torch.tensor(1), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(rows),
        seq_length=LENGTH,
        micro_batch_size=1,
    )
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad.to(parameter.dtype)
    gradients = {name: tensor.clone() for name, tensor in export_hf(chunks) if "correction" not in name}
    parallel_state.destroy_model_parallel()
    return kept, gradients if dist.get_rank() == 0 else {}


def our_passes(folders: list[str]) -> list[tuple[dict[int, Tensor], dict[str, Tensor]]]:
    return [our_pass(folder, {}) for folder in folders]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return family -> (folder, logits, gradients)."""
    made = {}
    for family in (*FAMILIES, *WITH_IMAGES):
        folder = tmp_path_factory.mktemp(family)
        save_tiny(folder, family)
        made[family] = (str(folder), *reference(folder))
    return made


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_computes_what_transformers_computes(references, family, layout):
    folder, logits, gradients = references[family]
    world_size, keys = LAYOUTS[layout]
    ranks = run_ranks(world_size, our_pass, folder, keys)
    rows = {row: ours for kept, _ in ranks for row, ours in kept.items()}
    assert sorted(rows) == list(range(ROWS))
    for row, ours in rows.items():
        torch.testing.assert_close(ours[0], logits[row], atol=MAX_LOGIT_ERROR, rtol=0)
    assert_same_gradients(ranks[0][1], gradients)


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = expected.abs().max()
        assert scale > 0, f"{name}: no gradient to compare"
        error = (ours[name] - expected).abs().max() / scale
        assert error < MAX_GRADIENT_ERROR, f"{name}: relative gradient error {error:.1e}"


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
SHAPES = {
    "three heads, one key-value head": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "five heads, no sharing": ("qwen3", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}),
    "four heads a group": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "short rope": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "long rope, odd vocabulary": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "vocab_size": 101},
    ),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn with a factor of its own": ("qwen3_moe", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    "yarn of a quarter of each head": (
        "qwen3_next",
        {"head_dim": 32, "rope_parameters": YARN | {"partial_rotary_factor": 0.25, "beta_fast": 4.0}},
    ),
    "router weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "no biases and norms of attention": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
    "no dense layer": ("glm4_moe", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "some layers dense": ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "tied experts model": ("qwen3_moe", {"tie_word_embeddings": True, "num_experts_per_tok": 3}),
    "five heads in next": ("qwen3_next", {"num_attention_heads": 5, "num_key_value_heads": 1}),
    "equal key and value heads": ("qwen3_next", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
    "half rotary": (
        "qwen3_next",
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        },
    ),
    "attention first": (
        "qwen3_next",
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Return shape -> (its folder, our pass)."""
    folders = [tmp_path_factory.mktemp("shape") for _ in SHAPES]
    for folder, (family, changes) in zip(folders, SHAPES.values(), strict=True):
        save_tiny(folder, family, **changes | {"num_hidden_layers": 4 if "next" in family else 2})
    (passes,) = run_ranks(1, our_passes, [str(folder) for folder in folders])
    return dict(zip(SHAPES, zip(folders, passes, strict=True), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_computes_what_transformers_computes(shapes, shape):
    folder, (kept, ours) = shapes[shape]
    logits, gradients = reference(folder)
    for row in range(ROWS):
        torch.testing.assert_close(kept[row][0], logits[row], atol=MAX_LOGIT_ERROR, rtol=0)
    assert_same_gradients(ours, gradients)


def test_interleaved_stages_of_unequal_length(tmp_path):
    """Six layers are on two ranks of two stages: 1 + 2 + 2 + 1."""
    save_tiny(tmp_path, "qwen3", num_hidden_layers=6)
    logits, gradients = reference(tmp_path)
    ranks = run_ranks(2, our_pass, str(tmp_path), {"pipeline": 2, "virtual_pipeline": 2})
    torch.testing.assert_close(ranks[1][0][0][0], logits[0], atol=MAX_LOGIT_ERROR, rtol=0)
    assert_same_gradients(ranks[0][1], gradients)


def logits_at(folder: str, positions: list[int]) -> Tensor:
    (chunk,) = build_chunks(folder, {}, load=True)
    with torch.no_grad():
        return chunk(make_rows()[0][:1], torch.tensor([positions]))


def test_the_last_positions_of_the_documented_long_context(tmp_path):
    """The setting is Qwen3's own, with tokens 5,000 positions apart up to the last: an angle's rounding would
    show."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    model = save_tiny(tmp_path, "qwen3", rope_parameters=yarn, max_position_embeddings=40960, head_dim=128)
    positions = [131071 - 5000 * i for i in reversed(range(LENGTH))]
    with torch.no_grad():
        expected = model(make_rows()[0][:1], position_ids=torch.tensor([positions])).logits
    (ours,) = run_ranks(1, logits_at, str(tmp_path), positions)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
