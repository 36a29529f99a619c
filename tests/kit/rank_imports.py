"""Imported by the server that ranks are forked from: what each of them would else import again."""

import gc
import importlib

for name in (
    "megatron_eqlen.models.build",  # before anything else of Megatron
    "megatron_eqlen.training.checkpoint",
    "megatron_eqlen.training.policy",
    "pytest",
    "tests.kit.tiny_models",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3_next.modeling_qwen3_next",
):
    importlib.import_module(name)
gc.freeze()  # else each rank would sort through all of it
