"""Reinforcement learning of reasoning models on equal-length pairs, with Megatron-Core and vLLM."""
