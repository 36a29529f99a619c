"""Every number that a run logs: its name, its unit, and how several values of it become one.

Values are merged in two ways. *At once*: measured at the same time by rows, data-parallel ranks or engine
replicas. *In turn*: measured one after the other within a step, as by the batches of a harvest and the
optimizer steps of an update. Token counts add up in both; seconds add up in turn, while at once the slowest
counts.

    at_once([replica_0, replica_1]) -> one harvest        in_turn([batch_0, batch_1]) -> one step

A new metric is a line here; a name without one is an error, at the latest when the step is logged.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from megatron_eqlen.types import Metrics


class MetricError(ValueError):
    """A metric that nothing declares."""


@dataclass(frozen=True)
class Mean:
    """A weighted mean: the weight of a part's value is the sum of that part's metrics ``counts``. A part
    without the metric enters with the value 0."""

    counts: tuple[str, ...]


Way = Literal["sum", "max", "min", "last"] | Mean
"""How several values become one. ``last``: the newest, which already covers the whole run or step."""


@dataclass(frozen=True)
class Metric:
    """What one name means. A ``*`` in it stands for any text, the same in the names that ``merge`` counts."""

    name: str
    unit: str
    merge: Way
    about: str
    in_turn: Way | None = None
    """How values are merged in turn, if not by ``merge``."""


def mean(*counts: str) -> Mean:
    return Mean(counts)


TOKENS, UPDATES = "loss/tokens", "train/updates"
MISMATCH = "loss/mismatch_mean"
LOSS, POLICY_LOSS, KL_PENALTY = "loss/total", "loss/policy", "loss/kl_penalty"
PER_TOKEN, PER_UPDATE = mean(TOKENS), mean(UPDATES)
PER_STREAM_OR_COMPLETION = mean("harvest/streams", "harvest/completions")
"""A harvest has one of the two."""

DECLARED = (
    # ---- harvest: what one harvest generated --------------------------------------------------------------
    Metric("harvest/seconds", "s", "max", "how long it took", in_turn="sum"),
    Metric("harvest/generated_tokens", "tokens", "sum", "all that the engine delivered"),
    Metric("harvest/tokens_per_second", "tokens/s", "sum", "of all replicas", mean("harvest/seconds")),
    Metric("harvest/requests", "requests", "sum", "sent to the engine"),
    Metric("harvest/retries", "requests", "sum", "sent again after a failure"),
    Metric("harvest/engine_steps", "steps", "sum", "decoding steps of all replicas"),
    Metric("harvest/slot_occupancy", "share", mean("harvest/engine_steps"), "busy ones of max_num_seqs"),
    Metric("harvest/overhead_seconds_per_step", "s", mean("harvest/engine_steps"), "outside the engine"),
    Metric("harvest/forks", "tracks", "sum", "tracks that start from an inherited prefix"),
    Metric("harvest/forks_prefilled", "tracks", "sum", "those whose cache hits the engine reported"),
    Metric("harvest/fork_prefix_tokens", "tokens", "sum", "prefixes of those"),
    Metric("harvest/fork_cached_tokens", "tokens", "sum", "found in the cache"),
    Metric("harvest/recomputed_tokens_per_fork", "tokens", mean("harvest/forks_prefilled"), "not found"),
    Metric("harvest/policy_version", "updates", "last", "optimizer steps behind the engine's weights"),
    Metric("harvest/rollouts", "rollouts", "sum", "streams, groups or sampled trees"),
    Metric("harvest/ended_responses", "responses", "sum", "that ended by themselves"),
    Metric("harvest/ended_response_length", "tokens", mean("harvest/ended_responses"), "of those"),
    Metric("harvest/masked_tokens", "tokens", "sum", "recorded with a sampling mask"),
    Metric("harvest/kept_per_token", "tokens", mean("harvest/masked_tokens"), "in a token's mask"),
    Metric("harvest/streams", "streams", "sum", "dual-track subgroups"),
    Metric("harvest/pairs", "pairs", "sum", "equal-length pairs"),
    Metric("harvest/pairs_per_stream", "pairs", mean("harvest/streams"), "N_k"),
    Metric("harvest/supervised_tokens", "tokens", "sum", "inside pairs or completions"),
    Metric("harvest/tail_tokens", "tokens", "sum", "after the last pair, never trained"),
    Metric("harvest/both_ended_fraction", "share", mean("harvest/streams"), "streams that ended so"),
    Metric("harvest/max_pairs_fraction", "share", mean("harvest/streams"), "streams that ended so"),
    Metric("harvest/truncated_fraction", "share", PER_STREAM_OR_COMPLETION, "at the response limit"),
    Metric("harvest/budget_fraction", "share", PER_STREAM_OR_COMPLETION, "cut by the token budget"),
    Metric("harvest/segment_length", "tokens", mean("harvest/pairs"), "of a pair's side"),
    Metric("harvest/segment_length_max", "tokens", "max", "of a pair's side"),
    Metric("harvest/completions", "completions", "sum", "or steps of sampled trees"),
    Metric("harvest/response_length", "tokens", mean("harvest/completions"), "of a completion"),
    Metric("harvest/response_length_max", "tokens", "max", "of a completion"),
    Metric("engine/sync_seconds", "s", "max", "the last weight sync", in_turn="sum"),
    Metric("engine/sync_bytes", "bytes", "sum", "received in it"),
    Metric("engine/preemptions", "requests", "sum", "put back for lack of KV cache"),
    Metric("engine/removed_probability", "share", mean("harvest/generated_tokens"), "by top-k, top-p, min-p"),
    Metric("engine/live_replicas", "replicas", "sum", "that answer", in_turn="min"),
    # ---- reward: of all responses of the step -------------------------------------------------------------
    Metric("reward/ended", "responses", "sum", "that were graded"),
    Metric("reward/mean", "reward", mean("reward/ended"), "the verifier's, of a response"),
    Metric("reward/std", "reward", mean("reward/ended"), "its spread within a batch"),
    Metric("reward/grader_seconds", "s", "sum", "in the graders, of all responses"),
    Metric("reward/verdict/*", "share", mean("reward/ended"), "responses with this verdict"),
    Metric("reward/source/*/ended", "responses", "sum", "to prompts of this source"),
    Metric("reward/source/*/mean", "reward", mean("reward/source/*/ended"), "of those"),
    Metric("reward/calls", "responses", "sum", "graded anew"),
    Metric("reward/seconds", "s", "max", "until all were graded", in_turn="sum"),
    # ---- objective: the step's comparison units -----------------------------------------------------------
    Metric("objective/units", "units", "sum", "pairs, groups, or siblings of sampled trees"),
    Metric("objective/members", "members", "sum", "sides, completions or steps in them"),
    Metric("objective/reward_mean", "reward", mean("objective/members"), "of a member, penalties included"),
    Metric("objective/reward_std", "reward", "last", "of a member"),
    Metric("objective/advantage_mean", "advantage", mean("objective/members"), "of a member"),
    Metric("objective/advantage_std", "advantage", "last", "of a member"),
    Metric("objective/advantage_max", "advantage", "max", "largest absolute one"),
    Metric("objective/zero_advantage_fraction", "share", mean("objective/units"), "units that teach nothing"),
    Metric("objective/effective_samples", "members", "sum", "with an advantage: the paper's count"),
    Metric("objective/effective_per_1k_tokens", "members", mean("harvest/generated_tokens"), "of those"),
    Metric("objective/supervised_tokens", "tokens", "sum", "in trained units"),
    Metric("objective/pairs", "pairs", "sum", "with rewards"),
    Metric("objective/pairs_per_stream", "pairs", mean("harvest/streams"), "the same over streams"),
    Metric("objective/skip_rate", "share", mean("objective/pairs"), "pairs with equal rewards"),
    Metric("objective/reward_gap_max_mean", "reward", mean("objective/pairs"), "max less mean suffix reward"),
    Metric("objective/segment_length_mean", "tokens", mean("objective/pairs"), "of a pair's side"),
    Metric("objective/segment_length_max", "tokens", "max", "of a pair's side"),
    Metric("objective/filtered_prompts", "prompts", "sum", "that dynamic sampling replaced"),
    # ---- packing: token trees in rows ---------------------------------------------------------------------
    Metric("packing/rows", "rows", "sum", "of all ranks"),
    Metric("packing/tokens", "tokens", "sum", "positions in use"),
    Metric("packing/computed_tokens", "tokens", "sum", "positions, padding included"),
    Metric("packing/unique_tokens", "tokens", "sum", "in trees, without what was pruned"),
    Metric("packing/repeated_tokens", "tokens", "sum", "context that cut trees repeat"),
    Metric("packing/pruned_tokens", "tokens", "sum", "that nothing trained sees"),
    Metric("packing/supervised_tokens", "tokens", "sum", "with a weight"),
    Metric("packing/expanded_tokens", "tokens", "sum", "if every side had its own prefix"),
    Metric("packing/fill", "share", mean("packing/computed_tokens"), "in use, of those computed"),
    Metric("packing/budget_fill", "share", mean("packing/rows"), "in use, of max_tokens_per_row"),
    Metric("packing/max_over_mean_cost", "ratio", "max", "the slowest rank's work"),
    # ---- loss: over supervised tokens ---------------------------------------------------------------------
    Metric(TOKENS, "tokens", "sum", "supervised"),
    Metric(POLICY_LOSS, "loss", "sum", "the surrogate's part", PER_UPDATE),
    Metric(KL_PENALTY, "loss", "sum", "the KL penalty's part", PER_UPDATE),
    Metric(LOSS, "loss", "sum", "both", PER_UPDATE),
    Metric("loss/entropy", "nats", PER_TOKEN, "of the policy"),
    Metric("loss/ref_kl", "nats", PER_TOKEN, "the chosen estimate of KL(policy || reference)"),
    Metric("loss/policy_kl", "nats", PER_TOKEN, "log-prob before less after the step's updates so far"),
    Metric("loss/ratio", "ratio", PER_TOKEN, "importance ratio"),
    Metric("loss/ratio_deviation", "ratio", PER_TOKEN, "|ratio - 1|"),
    Metric("loss/ratio_max", "ratio", "max", "largest ratio"),
    Metric("loss/ratio_clamped_fraction", "share", PER_TOKEN, "log-ratio beyond +-20"),
    Metric("loss/kl_clamped_fraction", "share", PER_TOKEN, "exponent of k3 beyond +-20"),
    Metric("loss/clip_fraction_low", "share", PER_TOKEN, "clipped at the lower bound"),
    Metric("loss/clip_fraction_high", "share", PER_TOKEN, "clipped at the upper bound"),
    Metric("loss/clip_fraction_dual", "share", PER_TOKEN, "stopped by the dual clip"),
    Metric("loss/vespo_kernel", "weight", PER_TOKEN, "phi(W)"),
    Metric("loss/mismatch_kl", "nats", PER_TOKEN, "log-prob of the engine less the trainer's"),
    Metric(MISMATCH, "nats", PER_TOKEN, "|trainer - engine|"),
    Metric("loss/mismatch_max", "nats", "max", "largest |trainer - engine|"),
    Metric("loss/is_weight", "weight", PER_TOKEN, "truncated importance weight"),
    Metric("loss/is_truncated_fraction", "share", PER_TOKEN, "weights that were truncated"),
    Metric("router/aux_loss", "loss", "sum", "mean over layers; 1: experts share evenly", PER_UPDATE),
    # ---- train --------------------------------------------------------------------------------------------
    Metric(UPDATES, "updates", "sum", "optimizer steps taken"),
    Metric("train/skipped_updates", "updates", "sum", "not taken: a number was not finite"),
    Metric("train/grad_norm", "norm", "max", "before clipping", PER_UPDATE),
    Metric("train/lr", "rate", "last", "learning rate"),
    Metric("train/tokens_per_second", "tokens/s", "last", "positions trained, over time/train"),
    # ---- time: of a step's stages, and evaluation ---------------------------------------------------------
    Metric("time/step", "s", "max", "the whole step", in_turn="sum"),
    Metric("time/gpu_hours", "h", "last", "of the run so far, evaluations not counted"),
    *(
        Metric(f"time/{stage}", "s", "max", f"the stage {stage}", in_turn="sum")
        for stage in ("harvest", "score", "trees", "train", "sync", "evaluate", "checkpoint", "export")
    ),
    Metric("evaluation/*", "share", "last", "BENCHMARK/avg@k, pass@k and others"),
)  # fmt: skip

EXACT = {one.name: one for one in DECLARED if "*" not in one.name}
FAMILIES = {tuple(one.name.split("*")): one for one in DECLARED if "*" in one.name}


def metric(name: str) -> Metric:
    """What ``name`` means. Raises MetricError for a name that is not declared."""
    if name in EXACT:
        return EXACT[name]
    for (begin, end), family in FAMILIES.items():
        if name.startswith(begin) and name.endswith(end) and len(name) > len(begin + end):
            return _member(family, name, name[len(begin) : len(name) - len(end)])
    near = difflib.get_close_matches(name, EXACT, n=1, cutoff=0.0)[0]
    raise MetricError(f"metric {name!r} is not declared in {__name__} (nearest: {near!r})")


def _member(family: Metric, name: str, variable: str) -> Metric:
    way = family.merge
    if isinstance(way, Mean):
        way = Mean(tuple(count.replace("*", variable) for count in way.counts))
    return replace(family, name=name, merge=way)


def check(metrics: Metrics) -> Metrics:
    """``metrics``, all of them declared. Raises MetricError."""
    for name in metrics:
        metric(name)
    return metrics


def at_once(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of rows, ranks or replicas that worked at the same time."""
    return {name: _merged(name, metric(name).merge, parts) for name in _names(parts)}


def in_turn(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of batches or updates that came one after the other."""
    return {name: _merged(name, metric(name).in_turn or metric(name).merge, parts) for name in _names(parts)}


def _names(parts: Sequence[Metrics]) -> Iterable[str]:
    return dict.fromkeys(name for part in parts for name in part)


def _merged(name: str, way: Way, parts: Sequence[Metrics]) -> float:
    values = [part[name] for part in parts if name in part]
    if isinstance(way, Mean):
        return _weighted(name, way.counts, parts)
    if any(math.isnan(value) for value in values):  # max and min may drop a NaN
        return math.nan
    return {"sum": sum, "max": max, "min": min, "last": lambda them: them[-1]}[way](values)


def _weighted(name: str, counts: tuple[str, ...], parts: Sequence[Metrics]) -> float:
    weights = [sum(part.get(count, 0.0) for count in counts) for part in parts]
    if not sum(weights):  # nothing was counted in any part
        return fmean(part[name] for part in parts if name in part)
    return sum(w * part.get(name, 0.0) for w, part in zip(weights, parts, strict=True)) / sum(weights)
