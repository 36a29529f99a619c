"""Reinforcement learning of reasoning models on equal-length pairs, with Megatron-Core and vLLM.

The names of ``STABLE`` keep their meaning from version to version; docs/run_folder.md shows them in use.
"""

from importlib import import_module
from typing import Any

STABLE = {
    "load": "job",
    "main": "cli.__main__",
    "read_results": "evaluation.result",
    "read_step": "record.reader",
}
"""Names of this package, and where they are: a recipe with all checks, the command ``eqlen`` with its
arguments, the results of an evaluation, and the rollouts of a step."""


def __getattr__(name: str) -> Any:
    if name not in STABLE:
        raise AttributeError(f"megatron_eqlen has no {name!r}; its names are {', '.join(STABLE)}")
    return getattr(import_module(f"megatron_eqlen.{STABLE[name]}"), name)
