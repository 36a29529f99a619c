"""What a Hugging Face model folder holds: configuration, tensors, and their names in Megatron."""
