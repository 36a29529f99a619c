"""Number of tokens of a step whose responses are all as long as the recipe allows."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.tree import step_tokens


@dataclass(frozen=True)
class Workload:
    """Largest token counts of one step."""

    tracks: int
    """Sequences that are decoded at once."""
    generated: float
    """Tokens of all rollouts that the policy generates."""
    trained: float
    """Positions of all rows; each token of a rollout is trained once."""
    context: float
    """Mean number of tokens that a token sees."""
    given: float = 0.0
    """Tokens of all rollouts that environments give."""
    share: float = 1.0
    """Part of the tokens of whole rollouts that ``rollout.tokens_per_step`` leaves a step."""


def workload(recipe: Recipe) -> Workload:
    """Count the tokens of full rollouts, or of rows of demonstrations. Prompts are taken to be half of
    ``data.max_prompt_length``, and an environment's tokens to be spread evenly over a response."""
    prompts, prompt = recipe.data.prompts_per_step, recipe.data.max_prompt_length / 2
    # Each demonstration may fill a row; a token sees half of it on average.
    if recipe.supervised:
        longest = recipe.packing.max_tokens_per_row
        return Workload(tracks=0, generated=0.0, trained=prompts * longest, context=longest / 2)
    # ``stretch``: tokens of a response, given ones included, for each generated one.
    spans, stretch = _spans(recipe), recipe.longest_response / recipe.rollout.max_response_length
    generated = sum(tracks * (end - start) for tracks, start, end in spans)
    share = min(1.0, (recipe.rollout.tokens_per_step or prompts * generated) / (prompts * generated))
    # A token in the middle of its span sees the prompt and what comes before, given tokens included.
    seen = sum(n * (end - start) * (prompt + stretch * (start + end) / 2) for n, start, end in spans)
    return Workload(
        tracks=prompts * max(tracks for tracks, _, _ in spans),
        generated=share * prompts * generated,
        trained=share * prompts * (stretch * generated + recipe.rollouts_per_prompt * prompt),
        context=seen / generated,
        given=share * prompts * (stretch - 1) * generated,
        share=share,
    )


def _spans(recipe: Recipe) -> list[tuple[int, int, int]]:
    """Return (tracks, start, end): so many tracks of a prompt generate the tokens from ``start`` to ``end``.
    A stream's two tracks generate pairs to the limit. Markers are taken to divide a response evenly."""
    limit, tree, lines = recipe.rollout.max_response_length, recipe.tree_sampling, recipe.group_size
    if recipe.sampling != "tree":
        return [(lines, 0, limit)]
    if tree.fork == "death":
        # A fork at a death adds ``branching - 1`` lines, and the dead one leaves: 2 keep the number.
        return [(lines + tree.forks * (tree.branching - 2), 0, limit)]
    step, forks = step_tokens(recipe), 1 if tree.fork == "profile" else tree.forks
    # After each fork there are ``branching`` times as many tracks, up to the next.
    starts = [start for start in range(0, (forks + 1) * step, step) if start < limit]
    return [
        (lines * tree.branching**level, start, end)
        for level, (start, end) in enumerate(zip(starts, [*starts[1:], limit], strict=True))
    ]
