"""Megatron-Core models of ``hf``'s families: configuration, layers, weights."""

from megatron_eqlen.megatron_cpu import install

install()
