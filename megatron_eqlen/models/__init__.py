"""Megatron-Core models of the Qwen3 families: configuration, layers, weights. See README.md here."""

from megatron_eqlen.megatron_cpu import install

install()
