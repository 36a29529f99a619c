"""The model's head is computed at supervised positions alone."""

import pytest
import torch
from torch import Tensor

from megatron_eqlen.models.weights import export_hf
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import build_chunks

LENGTH = 24
SUPERVISED = [3, 4, 5, 11, 17, 22]


def tokens() -> Tensor:
    return torch.randint(0, 96, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def head_at(folder: str, layout: dict, positions: list[int] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (logits at SUPERVISED, gradients of a loss there): with the head everywhere or at
    ``positions``."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    chunks = build_chunks(folder, layout, torch.float64, load=True)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    model = DistributedDataParallel(chunks[0].config, ddp_config, chunks[0])
    supervised = None if positions is None else torch.tensor(positions)
    logits = model(tokens(), torch.arange(LENGTH)[None], None, supervised=supervised)
    logits = gather_from_tensor_model_parallel_region(logits)[0]
    logits = logits[SUPERVISED] if positions is None else logits
    (logits.log_softmax(-1)[:, 7].sum() / parallel_state.get_data_parallel_world_size()).backward()
    finalize_model_grads([model])
    for parameter in model.parameters():
        parameter.data = parameter.main_grad
    return logits.detach(), {name: tensor.clone() for name, tensor in export_hf([model])}


@pytest.mark.parametrize(("family", "layout"), [
    ("qwen3", {}), ("qwen3", {"tensor": 2}), ("qwen3_next", {"tensor": 2, "expert": 2}),
])  # fmt: skip
def test_the_head_at_supervised_positions_changes_no_logit_and_no_gradient(tmp_path, family, layout):
    save_tiny(tmp_path, family, tie_word_embeddings=family == "qwen3")
    world_size = layout.get("tensor", 1)
    everywhere = run_ranks(world_size, head_at, str(tmp_path), layout, None)
    supervised = run_ranks(world_size, head_at, str(tmp_path), layout, SUPERVISED)
    for (logits, gradients), (ours, our_gradients) in zip(everywhere, supervised, strict=True):
        torch.testing.assert_close(ours, logits, atol=1e-12, rtol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(our_gradients[name], gradient, atol=1e-10, rtol=1e-6, msg=name)
