"""How much of its path a generated token sees: what generating it costs depends on that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_eqlen.metrics import HARVEST_BRANCHES, HARVEST_CONTEXT, HARVEST_PROMPT_TOKENS
from megatron_eqlen.types import Metrics, Rollout


def seen(rollouts: Sequence[Rollout], starts: Callable[..., Iterable[int]], branches: int = 0) -> Metrics:
    """Mean number of tokens that a token sees, of whole rollouts; their prompts' tokens; their forks.

    ``starts(rollout)``: the tokens between the prompt and each of ``rollout.segments()``.
    """
    prompts = {one.prompt_id: len(one.prompt.token_ids) for one in rollouts}
    tokens = pairs = 0
    for rollout in rollouts:
        prompt = prompts[rollout.prompt_id]
        for start, segment in zip(starts(rollout), rollout.segments(), strict=True):
            length = len(segment)
            tokens += length
            pairs += length * (prompt + start) + length * (length - 1) // 2
    return {
        HARVEST_CONTEXT: pairs / max(tokens, 1),
        HARVEST_PROMPT_TOKENS: sum(prompts.values()),
        HARVEST_BRANCHES: branches,
    }
