"""Modules of the layers of HybridModel's pattern: plain torch (any machine), or Transformer Engine's (GPU).

    *, G   input_layernorm
           self_attention   attention (optional q/k norms, output gate) around TreeAttention,
                            or TreeGatedDeltaNet
    -, E   pre_mlp_layernorm
           mlp              dense, or a router with experts and an optional gated shared expert

Transformer Engine fuses a norm into the linear layer after it; the norm's parameter is then that layer's
``layer_norm_weight``, and the separate norm is an ``IdentityOp``.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_layer import MlpBuilder, TransformerLayerSubmodules

from megatron_eqlen.models.gated_delta_net import TreeGatedDeltaNet
from megatron_eqlen.models.norm import RMSNorm
from megatron_eqlen.models.router_replay import ReplayLayer, ReplayRouter
from megatron_eqlen.models.tree_attention import TreeAttention

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of a layer's norms: fused into the next linear layer (checkpoints) -> separate (weight maps)."""


class TorchModules(LocalSpecProvider):
    """Plain torch modules that work on every device, with sequence-parallel and zero-centred norms."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm


class PolicyStack(HybridStack):
    """HybridStack with a final norm like the others (Megatron's is always TE's: hybrid_block.py:215)."""

    def __init__(self, *args: Any, final_norm: type, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        # the parent makes no norm of its own, but its forward pass applies ours
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = final_norm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)


def stack_spec(config: TransformerConfig, separate_norms: bool = False) -> ModuleSpec:
    """Return the modules of all layers, and the final norm. ``separate_norms``: fuse none into a layer."""
    modules = _modules(config, separate_norms)
    norm, add = modules.layer_norm(rms_norm=True), get_bias_dropout_add

    def layer(norms: dict[str, Any], **parts: Any) -> ModuleSpec:
        return ModuleSpec(module=ReplayLayer, submodules=TransformerLayerSubmodules(**norms, **parts))

    def before(linear: str) -> dict[str, Any]:
        """Return the norm before a linear layer, and its name in checkpoints, unless the layer has it."""
        alone = FUSED_NORMS[fused := f"{linear}.layer_norm_"]
        separate = {alone[:-1]: norm, "sharded_state_dict_keys_map": {alone: fused}}
        return {} if modules.fuse_layernorm_and_linear() else separate

    qkv, in_proj, fc1 = map(before, ("self_attention.linear_qkv", "self_attention.in_proj", "mlp.linear_fc1"))
    layers = HybridStackSubmodules(
        attention_layer=layer(qkv, self_attention=_attention(config, modules), self_attn_bda=add),
        gdn_layer=layer(in_proj, self_attention=_delta_net(modules), self_attn_bda=add),
        mlp_layer=layer(fc1, mlp=get_mlp_module_spec_for_backend(modules), mlp_bda=add),
    )
    if config.num_moe_experts:  # the router is not fused with the norm before it
        layers.moe_layer = layer({"pre_mlp_layernorm": norm}, mlp=_experts(config, modules), mlp_bda=add)
    return ModuleSpec(module=PolicyStack, submodules=layers, params={"final_norm": norm})


def _modules(config: TransformerConfig, separate_norms: bool) -> BackendSpecProvider:
    if config.transformer_impl == "local":
        return TorchModules()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class SeparateNorms(TESpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return False

        def column_parallel_layer_norm_linear(self) -> None:
            return None

    return SeparateNorms() if separate_norms else TESpecProvider()


def _after_norm(modules: BackendSpecProvider) -> type:
    """Return the linear layer that follows the input norm, with the norm inside if the backend fuses them."""
    return modules.column_parallel_layer_norm_linear() or modules.column_parallel_linear()


def _attention(config: TransformerConfig, modules: BackendSpecProvider) -> ModuleSpec:
    # None is accepted by Megatron, but not declared
    norm: Any = modules.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else None
    submodules = SelfAttentionSubmodules(
        linear_qkv=_after_norm(modules),
        core_attention=TreeAttention,
        linear_proj=modules.row_parallel_linear(),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=SelfAttention, params=causal, submodules=submodules)


def _delta_net(modules: BackendSpecProvider) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(
        in_proj=_after_norm(modules),
        # Qwen3-Next's only norm that is centred on one; to shift its weights in conversion would be inexact
        out_norm=ModuleSpec(module=RMSNorm, params={"zero_centered": False}),
        out_proj=modules.row_parallel_linear(),
    )
    return ModuleSpec(module=TreeGatedDeltaNet, submodules=submodules)


def _experts(config: TransformerConfig, modules: BackendSpecProvider) -> MlpBuilder:
    spec = get_moe_module_spec_for_backend(
        backend=modules, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    assert isinstance(spec, functools.partial)
    submodules = spec.keywords["submodules"]
    assert isinstance(submodules, MoESubmodules)
    submodules.router = ReplayRouter
    return spec
