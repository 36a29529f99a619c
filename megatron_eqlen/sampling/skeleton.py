"""A rollout without its arrays: what is decided of it needs lengths, grades and finish reasons only."""

from __future__ import annotations

import dataclasses

from megatron_eqlen.sampling import kind_of
from megatron_eqlen.sampling.harvester import header_of
from megatron_eqlen.types import Elsewhere, Prompt, Rollout, Routes, Segment


def skeleton(rollout: Rollout) -> Rollout:
    """What other ranks than its home know of a rollout: a few hundred bytes a segment, whatever its length.

    Of the prompt only the id is left; ``with_prompt`` gives it back.
    """
    kind = kind_of(rollout)
    prompt = Prompt(rollout.prompt_id, [], "", "", "")
    head = header_of(rollout)
    head = dataclasses.replace(head, prompt=prompt, prompt_routes=_elsewhere(head.prompt_routes))
    return kind.join(
        head, [dataclasses.replace(part, segment=_bare(part.segment)) for part in kind.parts(rollout)]
    )


def with_prompt(bare: Rollout, prompts: dict[str, Prompt]) -> Rollout:
    """The skeleton with its whole prompt: every rank has the step's prompts, whose golds may be megabytes."""
    return dataclasses.replace(bare, prompt=prompts[bare.prompt_id])


def _bare(segment: Segment) -> Segment:
    mask = segment.sampling_mask
    return dataclasses.replace(
        segment,
        token_ids=Elsewhere.of(segment.token_ids),
        logprobs=Elsewhere.of(segment.logprobs),
        sampling_mask=None if mask is None else mask.bare(),
        routes=_elsewhere(segment.routes),
    )


def _elsewhere(routes: Routes | None) -> Routes | None:
    return None if routes is None else Elsewhere.of(routes)
