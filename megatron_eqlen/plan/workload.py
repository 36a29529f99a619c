"""Number of tokens of a step whose responses are all as long as the recipe allows."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_eqlen.recipe import Recipe


@dataclass(frozen=True)
class Workload:
    """Largest token counts of one step."""

    tracks: int
    """Sequences that are decoded at once."""
    generated: float
    """Tokens of all rollouts."""
    trained: float
    """Positions of all rows; each token of a rollout is trained once."""
    context: float
    """Mean number of tokens that a token sees."""


def workload(recipe: Recipe) -> Workload:
    """Count the tokens of full rollouts. Prompts are taken to be half of ``data.max_prompt_length``."""
    prompts, prompt = recipe.data.prompts_per_step, recipe.data.max_prompt_length / 2
    spans = _spans(recipe)
    generated = sum(tracks * (end - start) for tracks, start, end in spans)
    seen = sum(tracks * (end - start) * (prompt + (start + end) / 2) for tracks, start, end in spans)
    return Workload(
        tracks=prompts * max(tracks for tracks, _, _ in spans),
        generated=prompts * generated,
        trained=prompts * (generated + recipe.rollouts_per_prompt * prompt),
        context=seen / generated,
    )


def _spans(recipe: Recipe) -> list[tuple[int, int, int]]:
    """Return (tracks, start, end): so many tracks of a prompt generate the tokens from ``start`` to ``end``
    of their responses. The two tracks of a stream generate pairs until the limit ends both."""
    limit, shape = recipe.rollout.max_response_length, recipe.tree_sampling
    if recipe.sampling != "tree":
        return [(recipe.group_size, 0, limit)]
    step = shape.step_tokens or max(1, limit // shape.depth)
    starts = range(0, min(limit, shape.depth * step), step)
    return [
        (shape.branching**level, start, start + step if level < len(starts) else limit)
        for level, start in enumerate(starts, start=1)
    ]
