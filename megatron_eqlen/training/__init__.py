"""Distributed set-up, policy loss, optimizer steps, checkpoints and weight sync on Megatron-Core."""

from megatron_eqlen.megatron_cpu import install

install()
