"""Megatron-Core models of ``hf``'s families: configuration, layers, weights. See README.md here."""

from megatron_eqlen.megatron_cpu import install

install()
