"""A group's parts: its completions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.sampling.record import Head, Part
from megatron_eqlen.types import Group


def parts(group: Group) -> list[Part]:
    return [Part("completion", completion) for completion in group.completions]


def join(head: Head, parts: Sequence[Part]) -> Group:
    """The inverse of ``parts``."""
    return Group(head.prompt, head.policy_version, [part.segment for part in parts], head.index)
