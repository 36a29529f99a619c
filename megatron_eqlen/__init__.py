"""Reinforcement learning of reasoning models on equal-length pairs, with Megatron-Core and vLLM.

For notebooks: ``megatron_eqlen.read_streams(path)``.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "read_streams":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_eqlen.rollout.record.reader import read_streams  # pyarrow takes long to import

    return read_streams
