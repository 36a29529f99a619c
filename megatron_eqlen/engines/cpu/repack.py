"""Repacks weights that vLLM's CPU backend leaves stale after loading into a running model (vLLM 0.32)."""

from __future__ import annotations

from torch import nn
from vllm.platforms import current_platform


def repack(model: nn.Module) -> None:
    """Prepack what a reload leaves stale on CPUs: kernels of experts, and a tied output layer."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
    text = getattr(model, "language_model", model)  # of a model that also reads images
    head = getattr(text, "lm_head", None)
    embedding = getattr(getattr(text, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or head.weight is not embedding.weight:
        return
    head.quant_method.process_weights_after_loading(head)
