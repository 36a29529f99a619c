"""A group's parts: its completions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.sampling.record import Head, Part, in_order
from megatron_eqlen.types import Group


def parts(group: Group) -> list[Part]:
    return [Part("completion", number, completion) for number, completion in enumerate(group.completions)]


def join(head: Head, parts: Sequence[Part]) -> Group:
    """The inverse of ``parts``, which may come in any order."""
    completions = [one.segment for one in in_order(parts)]
    return Group(head.prompt, head.policy_version, completions, head.index, head.prompt_routes)
