"""Tiny random models of every family, made by Transformers itself: the reference of the model tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig

if find_spec("fla") and not torch.cuda.is_available():
    # Transformers takes fla's kernels where fla is installed, though only a GPU can run them
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            import_module(f"transformers.models.{family}.modeling_{family}")

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe",
)  # fmt: skip

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,  # a pad token would silence one embedding row's gradient
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
NEXT: dict[str, Any] = LINEAR | {"shared_expert_intermediate_size": 32}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "qwen2": {key: value for key, value in COMMON.items() if key != "head_dim"}, "qwen3": COMMON,
    "qwen3_moe": COMMON | EXPERTS, "qwen3_next": COMMON | EXPERTS | NEXT, "qwen3_5_text": COMMON | LINEAR,
    "qwen3_5_moe_text": {
        key: value
        for key, value in (COMMON | EXPERTS | NEXT).items()
        if key not in ("intermediate_size", "norm_topk_prob")
    },
}  # fmt: skip
OWN["glm4_moe"] = COMMON | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
WITH_IMAGES: dict[str, tuple[Any, str]] = {"qwen3_5_moe": (Qwen3_5MoeConfig, "qwen3_5_moe_text")}
"""Models of texts and images, and the family of their text model."""
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig, "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig, "glm4_moe": Glm4MoeConfig,
}  # fmt: skip
SHORT: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen2": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3_5_text": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3_5_moe": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "glm4_moe": {"num_hidden_layers": 2},
}
"""Changes that halve the number of layers; Qwen3-Next keeps one of each kind."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    if family not in WITH_IMAGES:
        return CONFIGS[family](**OWN[family] | changes)
    kind, text = WITH_IMAGES[family]
    size = dict.fromkeys(("hidden_size", "intermediate_size", "num_position_embeddings"), 16)
    vision = size | {"depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
    return kind(text_config=OWN[text] | changes, vision_config=vision)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that loads a whole folder."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a float32 model in which every weight, norms too, changes the result."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    model = auto_class(config).from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("_proj.bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


def save_tiny(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    """Write a tiny model to ``folder`` as Transformers does, and return it."""
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return model


def save_models(root: Path, models: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Path]:
    """Write tiny models, families and changes by name, to folders of these names; return the folders."""
    for name, (family, changes) in models.items():
        save_tiny(root / name, family, **changes)
    return {name: root / name for name in models}


def gradients_by_name(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return gradients by the names of files, not images; experts, which Transformers fuses, one by one."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".visual." in name:
            continue
        assert parameter.grad is not None, name
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                prefix = name.removesuffix("gate_up_proj") + f"{expert}."
                gradients[prefix + "gate_proj.weight"], gradients[prefix + "up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(parameter.grad):
                gradients[name.removesuffix("down_proj") + f"{expert}.down_proj.weight"] = down
        else:
            gradients[name] = parameter.grad
    return gradients
