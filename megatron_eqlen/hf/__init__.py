"""Hugging Face model folders: configuration, tensors, and their names in Megatron."""
