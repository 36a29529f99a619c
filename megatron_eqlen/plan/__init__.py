"""What a recipe needs, worked out without a GPU: memory phase by phase, host, disk, time (see README.md)."""

from megatron_eqlen.plan.text import describe

__all__ = ["describe"]
