"""Counters of one harvest: the ``harvest/...`` metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

import numpy as np

from megatron_eqlen.engines.protocol import Decoder
from megatron_eqlen.harvest.dialogues import Dialogues
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.tokens import GIVEN, KEPT, ROUTES
from megatron_eqlen.types import Metrics, Rollout

COUNTED = "requests", "retries", "engine_steps", "forks_prefilled", "fork_prefix_tokens", "fork_cached_tokens"


class Meter:
    """Counts while the driver runs; ``metrics()`` at the end.

    ``generated_tokens`` are all tokens that the engine delivered, in all attempts at the harvest, without
    tokens of earlier steps. ``counts`` are this attempt's: the recorder writes them, and the next adds them.
    """

    def __init__(self, engine: Decoder, plan: HarvestPlan, dialogues: Dialogues) -> None:
        progress, rollout = plan.progress, plan.recipe.rollout
        self.engine, self.dialogues, self.block_size = engine, dialogues, rollout.block_size
        # one counter for both: it is recorded as one note
        self.counts = dialogues.counts
        self.earlier_counts = progress.counts
        self.generated_tokens = self.resumed_tokens = progress.generated_tokens
        self.forks: dict[str, int] = {}
        """Tokens of the paths of forks' first requests, by request id: servers report their prefill last."""
        self.engine_seconds = 0.0
        self.started = time.perf_counter()
        self.rollouts: list[Rollout] = []
        """Complete rollouts."""
        carried = [partial for partial in progress.partial if partial.origin]
        self.carried = carried if rollout.carry_over else None
        """Rollouts that earlier steps began; None where nothing is carried over."""
        self.suspended = 0

    def stepped(self, deltas: int, tokens: int) -> None:
        self.counts["engine_steps"] += 1
        self.counts["deltas"] += deltas
        self.generated_tokens += tokens

    def prefilled(self, request_id: str, cached_tokens: int) -> None:
        """Count a request's prefill, ``cached_tokens`` of which were in the KV cache before, if it forks."""
        if (prefix := self.forks.pop(request_id, None)) is not None:
            self.counts["forks_prefilled"] += 1
            self.counts["fork_prefix_tokens"] += prefix
            self.counts["fork_cached_tokens"] += cached_tokens

    def computed(self, before: int, after: int) -> None:
        """Count the prefill of a request of ``after`` tokens, the first ``before`` of which were computed:
        full blocks of them are cached. The pass of the last token is that of the first new one."""
        cached = min(before, after - 1) // self.block_size * self.block_size
        new = after - 1 - cached
        self.counts.update(prefilled_tokens=new, prefill_context=new * (after + cached) // 2)

    def count(self, rollout: Rollout) -> None:
        if rollout.suspended:
            self.suspended += 1
        else:
            self.rollouts.append(rollout)

    def metrics(self) -> Metrics:
        seconds = time.perf_counter() - self.started
        counts = self.counts + self.earlier_counts
        steps, forks = counts["engine_steps"], counts["forks_prefilled"]
        recomputed = counts["fork_prefix_tokens"] - counts["fork_cached_tokens"]
        # of this attempt alone: its seconds and its decode steps
        overhead = (seconds - self.engine_seconds) / max(self.counts["engine_steps"], 1)
        metrics: Metrics = {
            **{f"harvest/{name}": counts[name] for name in COUNTED},
            "harvest/seconds": seconds,
            "harvest/generated_tokens": self.generated_tokens,
            "harvest/resumed_tokens": self.resumed_tokens,
            "harvest/tokens_per_second": (self.generated_tokens - self.resumed_tokens) / seconds,
            "harvest/slot_occupancy": counts["deltas"] / (max(steps, 1) * self.engine.max_num_seqs),
            "harvest/overhead_seconds_per_step": overhead,
            "harvest/recomputed_tokens_per_fork": recomputed / max(forks, 1),
            "harvest/prefilled_tokens": counts["prefilled_tokens"],
            "harvest/prefill_context": counts["prefill_context"] / max(counts["prefilled_tokens"], 1),
            "harvest/policy_version": self.engine.policy_version,
        }
        if self.carried is not None:
            metrics |= {
                "harvest/carried_rollouts": len(self.carried),
                "harvest/carried_tokens": sum(partial.earlier_tokens for partial in self.carried),
                "harvest/suspended_rollouts": self.suspended,
            }
        metrics |= self.dialogues.metrics(counts)
        return metrics | rollout_metrics(self.rollouts) | self.engine.metrics()


def rollout_metrics(rollouts: list[Rollout]) -> Metrics:
    """Return counts of pairs, lengths and outcomes, and what generated tokens see; empty for no rollouts."""
    if not rollouts:
        return {}
    ends = [(rollout, rollout.ends()) for rollout in rollouts]
    ended = [end[part.number] for r, end in ends for part in r.parts if part.finish_reason == "stop"]
    metrics: Metrics = {"harvest/rollouts": len(rollouts), "harvest/ended_responses": len(ended)}
    if ended:
        metrics["harvest/ended_response_length"] = fmean(ended)
    tables = [part.tokens for rollout in rollouts for part in rollout.parts]
    if any(GIVEN.name in table for table in tables):
        given = sum(len(table) - table.generated for table in tables)
        metrics["environment/given_share"] = given / max(sum(table.generated for table in tables), 1)
    masks = [table[KEPT.name] for table in tables if KEPT.name in table]
    if masked := sum(map(len, masks)):
        metrics["harvest/masked_tokens"] = masked
        metrics["harvest/kept_per_token"] = sum(len(mask.values) for mask in masks) / masked
    # prompts have routes, too, but neither masks nor given tokens
    tables += [rollout.prompt_columns for rollout in rollouts if rollout.prompt_columns is not None]
    if routes := [table[ROUTES.name] for table in tables if ROUTES.name in table]:
        metrics["harvest/route_bytes"] = sum(values.nbytes for values in routes)
    for kind in dict.fromkeys(rollout.kind for rollout in rollouts):
        metrics |= KINDS[kind].harvest_metrics([rollout for rollout in rollouts if rollout.kind == kind])
    return metrics | _sizes(rollouts)


def _sizes(rollouts: Iterable[Rollout]) -> Metrics:
    """Return the number of forks, and how many tokens the pass of a generated token sees on average."""
    seen, generated, forks = 0, 0, 0
    for rollout in rollouts:
        ends = rollout.along(len(rollout.prompt.token_ids), lambda end, part: end + len(part.tokens))
        lines = Counter(part.parent for part in rollout.parts)
        # of two tracks that are truncated a stream keeps one
        lines.update(part.parent for part in rollout.with_role("tail") if rollout.outcome == "truncated")
        forks += sum(count - 1 for parent, count in lines.items() if parent >= 0)
        for part in rollout.parts:
            seen += int(np.flatnonzero(part.tokens.is_generated).sum()) + ends[part.parent] * len(part)
            generated += len(part)
    return {"harvest/context": seen / max(generated, 1), "harvest/forks": forks}
