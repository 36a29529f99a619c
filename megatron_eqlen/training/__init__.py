"""Training on Megatron-Core: policy loss, optimizer steps, checkpoints and weight sync."""

from megatron_eqlen.megatron_cpu import install

install()
