"""Declarations of every number that a run logs: its name, its unit, and how several values are merged.

Values are merged in two ways. *At once*: measured at the same time by rows, data-parallel ranks or engine
replicas. *In turn*: measured one after the other within a step, as by the batches of a harvest and the
optimizer steps of an update. Token counts add up in both; seconds add up in turn, while at once the slowest
counts.

    at_once([replica_0, replica_1]) -> one harvest        in_turn([batch_0, batch_1]) -> one step

To add a metric, add a line here; an undeclared name is an error, at the latest when the step is logged.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from megatron_eqlen.recipe.budget import Spent
from megatron_eqlen.types import Metrics


class MetricError(ValueError):
    """Metric that is not declared."""


@dataclass(frozen=True)
class Mean:
    """Weighted mean: the weight of a part's value is the sum of that part's metrics ``counts``. A part
    without the metric enters with the value 0."""

    counts: tuple[str, ...]


Way = Literal["sum", "max", "min", "last"] | Mean
"""Merging of several values. ``last``: the newest, which already covers the whole run or step."""


@dataclass(frozen=True)
class Metric:
    """Declaration of a name. A ``*`` in it stands for any text, the same in the names that ``merge``
    counts."""

    name: str
    unit: str
    merge: Way
    about: str
    in_turn: Way | None = None
    """Merging in turn, if it differs from ``merge``."""


def mean(*counts: str) -> Mean:
    return Mean(counts)


# Names that several places write or read; a name that only its writer uses is spelt out there.
HARVEST_GENERATED_TOKENS = "harvest/generated_tokens"
HARVEST_RESUMED_TOKENS = "harvest/resumed_tokens"
HARVEST_TOKENS_PER_SECOND = "harvest/tokens_per_second"
HARVEST_SLOT_OCCUPANCY = "harvest/slot_occupancy"
HARVEST_OVERHEAD_SECONDS_PER_STEP = "harvest/overhead_seconds_per_step"
HARVEST_FORKS = "harvest/forks"
HARVEST_RECOMPUTED_TOKENS_PER_FORK = "harvest/recomputed_tokens_per_fork"
HARVEST_ENDED_RESPONSE_LENGTH = "harvest/ended_response_length"
HARVEST_PAIRS_PER_STREAM = "harvest/pairs_per_stream"
HARVEST_SUPERVISED_TOKENS = "harvest/supervised_tokens"
HARVEST_TRUNCATED_FRACTION = "harvest/truncated_fraction"
HARVEST_SEGMENT_LENGTH = "harvest/segment_length"
HARVEST_RESPONSE_LENGTH = "harvest/response_length"
ENGINE_SYNC_SECONDS = "engine/sync_seconds"
ENGINE_SYNC_BYTES = "engine/sync_bytes"
REWARD_MEAN, REWARD_ENDED = "reward/mean", "reward/ended"
REWARD_UNSCORED, REWARD_DROPPED = "reward/unscored", "reward/dropped"
REWARD_DROPPED_LENGTH = "reward/dropped_length"
POLICY_ROLLOUTS = "policy/rollouts"
POLICY_REWARD, POLICY_RESPONSE_LENGTH = "policy/reward", "policy/response_length"
PROFILE_VARIANCE, PROFILE_UNDECIDED = "profile/variance", "profile/undecided"
PROFILE_TOKENS, PROFILE_TOKENS_AFTER = "profile/tokens", "profile/tokens_after"
PROFILE_NOISE_AFTER, PROFILE_FORK_GAIN = "profile/noise_after", "profile/fork_gain"
PROMPTS_DRAWN = "data/prompts_drawn"
OBJECTIVE_UNITS, OBJECTIVE_MEMBERS = "objective/units", "objective/members"
OBJECTIVE_ZERO_ADVANTAGE_FRACTION = "objective/zero_advantage_fraction"
OBJECTIVE_EFFECTIVE_SAMPLES = "objective/effective_samples"
OBJECTIVE_PAIRS_PER_STREAM = "objective/pairs_per_stream"
OBJECTIVE_SKIP_RATE = "objective/skip_rate"
OBJECTIVE_REWARD_GAP = "objective/reward_gap_max_mean"
OBJECTIVE_SEGMENT_LENGTH_MEAN = "objective/segment_length_mean"
STALENESS_MEAN, STALENESS_MAX = "staleness/mean", "staleness/max"
PACKING_TOKENS = "packing/tokens"
PACKING_UNIQUE_TOKENS = "packing/unique_tokens"
PACKING_EXPANDED_TOKENS = "packing/expanded_tokens"
LOSS_ENTROPY = "loss/entropy"
LOSS_NLL = "loss/nll"
LOSS_REF_KL = "loss/ref_kl"
LOSS_TEACHER_KL = "loss/teacher_kl"
LOSS_RATIO = "loss/ratio"
LOSS_CLIP_FRACTION_LOW = "loss/clip_fraction_low"
LOSS_CLIP_FRACTION_DUAL = "loss/clip_fraction_dual"
LOSS_CLIP_FRACTION_HIGH = "loss/clip_fraction_high"
MISMATCH_KL = "mismatch/kl"
EXCHANGE_ROUTES_SECONDS, EXCHANGE_ROUTES_BYTES = "exchange/routes_seconds", "exchange/routes_bytes"
EXPERT_AGREEMENT, ROUTER_AGREEMENT = "mismatch/expert_agreement", "mismatch/router_agreement"
TRAIN_SKIPPED_UPDATES = "train/skipped_updates"
TRAIN_GRAD_NORM = "train/grad_norm"
TRAIN_TOKENS_PER_SECOND = "train/tokens_per_second"
TRAIN_TOKENS_PER_GPU = "train/tokens_per_gpu_second"
TRAIN_EXPANDED_PER_GPU = "train/expanded_tokens_per_gpu_second"
HARVEST_TOKENS_PER_GPU = "harvest/tokens_per_gpu_second"
TRAIN_MFU, HARVEST_MFU = "train/mfu", "harvest/mfu"
CHECKPOINT_BYTES = "checkpoint/bytes"
CHECKPOINT_WRITE_SECONDS = "checkpoint/write_seconds"
TIME_CHECKPOINT = "time/checkpoint"
TIME_STEP, TIME_HARVEST, TIME_TRAIN = "time/step", "time/harvest", "time/train"
TIME_EVALUATE = "time/evaluate"
TIME_GPU_HOURS = "time/gpu_hours"
TOTAL_GENERATED_TOKENS, TOTAL_FLOPS = "total/generated_tokens", "total/flops"
HARVEST_PREFILLED, HARVEST_PREFILL_CONTEXT = "harvest/prefilled_tokens", "harvest/prefill_context"
HARVEST_CONTEXT = "harvest/context"
HARVEST_FLOPS, TRAIN_FLOPS = "harvest/flops", "train/flops"
PACKING_CONTEXT = "packing/context"
STAGES = (
    "harvest", "score", "wait", "trees", "unpark", "train", "park", "sync", "evaluate", "checkpoint",
)  # fmt: skip
"""Stages of a step, each measured as ``time/NAME``."""
MEMORY = ("memory/peak/", "memory/reserved/", "memory/device/", "memory/planned/")
"""Prefixes of per-stage memory metrics; the stage name is appended."""

TOKENS, UPDATES = "loss/tokens", "train/updates"
MISMATCH = "mismatch/logprob_abs_diff"
MISMATCH_OF_DRAWN = "mismatch/drawn_abs_diff"
COMPARED, MISMATCH_OF_COMPARED = "mismatch/compared_tokens", "mismatch/compared_abs_diff"
SEQUENCES = "mismatch/sequences"
LOSS, POLICY_LOSS, KL_PENALTY = "loss/total", "loss/policy", "loss/kl_penalty"
PER_TOKEN, PER_SEQUENCE, PER_UPDATE = mean(TOKENS), mean(SEQUENCES), mean(UPDATES)
PER_STREAM_OR_COMPLETION = mean("harvest/streams", "harvest/completions")
"""Each harvest has one of the two."""
PER_KEPT_TOKEN = mean(HARVEST_SUPERVISED_TOKENS, "harvest/tail_tokens")

DECLARED = (
    # ---- data: position of the data source after the step's prompts ---------------------------------------
    Metric(PROMPTS_DRAWN, "prompts", "last", "of the run so far"),
    Metric("data/source/*/epochs", "epochs", "last", "passes over this source's rows so far"),
    # ---- harvest: tokens and time of generation -----------------------------------------------------------
    Metric("harvest/seconds", "s", "max", "the harvest, all of its batches", in_turn="sum"),
    Metric(HARVEST_GENERATED_TOKENS, "tokens", "sum", "delivered by the engine"),
    Metric(HARVEST_RESUMED_TOKENS, "tokens", "sum", "generated by an attempt that was killed"),
    Metric("harvest/carried_rollouts", "rollouts", "sum", "rollouts resumed from an earlier step"),
    Metric("harvest/carried_tokens", "tokens", "sum", "generated for carried rollouts before this step"),
    Metric("harvest/suspended_rollouts", "rollouts", "sum", "rollouts that the next step resumes"),
    Metric(HARVEST_TOKENS_PER_SECOND, "tokens/s", "sum", "of all replicas", mean("harvest/seconds")),
    Metric("harvest/requests", "requests", "sum", "sent to the engine, by all attempts at the step"),
    Metric("harvest/retries", "requests", "sum", "sent again after a failure"),
    Metric("harvest/engine_steps", "steps", "sum", "decoding steps of all replicas"),
    Metric(HARVEST_SLOT_OCCUPANCY, "share", mean("harvest/engine_steps"), "max_num_seqs slots in use"),
    Metric(HARVEST_OVERHEAD_SECONDS_PER_STEP, "s", mean("harvest/engine_steps"), "outside the engine"),
    Metric("harvest/forks_prefilled", "tracks", "sum", "forks whose cache hits the engine reported"),
    Metric("harvest/fork_prefix_tokens", "tokens", "sum", "in the prefixes of these forks"),
    Metric("harvest/fork_cached_tokens", "tokens", "sum", "of these, found in the prefix cache"),
    Metric(HARVEST_RECOMPUTED_TOKENS_PER_FORK, "tokens", mean("harvest/forks_prefilled"), "not in the cache"),
    Metric("harvest/policy_version", "updates", "last", "optimizer steps behind the engine's weights"),
    Metric("harvest/rollouts", "rollouts", "sum", "streams, groups or sampled trees"),
    Metric("environment/turns", "turns", "sum", "turns that environments answered"),
    Metric("environment/seconds", "s", mean("environment/turns"), "a call takes"),
    Metric("environment/waited", "s", mean("environment/turns"), "a turn waits until no fork can precede it"),
    Metric("environment/cut", "turns", "sum", "ended by max_turns or max_given_tokens"),
    Metric("environment/copies", "environments", "sum", "copied for forks"),
    Metric("environment/replays", "environments", "sum", "rebuilt from recorded messages"),
    Metric("environment/changed", "turns", "sum", "answered otherwise in a replay: the record stands"),
    Metric("environment/refused", "requests", "sum", "of agents that went on, refused"),
    Metric("environment/folder_bytes", "bytes", "sum", "of workspaces, unpacked and packed for commands"),
    Metric("environment/folder_seconds", "s", "sum", "for that, in all threads"),
    Metric("environment/given_share", "share", mean(HARVEST_SUPERVISED_TOKENS), "given per generated token"),
    Metric(HARVEST_PREFILLED, "tokens", "sum", "prompts, given tokens, last blocks, resumed lines"),
    Metric(HARVEST_PREFILL_CONTEXT, "tokens", mean(HARVEST_PREFILLED), "earlier tokens that these see"),
    Metric(HARVEST_FORKS, "tracks", "sum", "forks in the finished rollouts"),
    Metric(HARVEST_CONTEXT, "tokens", PER_KEPT_TOKEN, "earlier tokens that a generated token sees"),
    Metric(HARVEST_FLOPS, "FLOPs", "last", "of generation, estimated"),
    Metric(HARVEST_MFU, "share", "last", "harvest/flops over time/harvest, of what the engine's GPUs can do"),
    Metric(HARVEST_TOKENS_PER_GPU, "tokens/s", "last", "generated over time/harvest, a GPU of the engine"),
    Metric("harvest/ended_responses", "responses", "sum", "responses that ended by themselves"),
    Metric(HARVEST_ENDED_RESPONSE_LENGTH, "tokens", mean("harvest/ended_responses"), "length of one"),
    Metric("harvest/masked_tokens", "tokens", "sum", "recorded with a sampling mask"),
    Metric("harvest/kept_per_token", "tokens", mean("harvest/masked_tokens"), "tokens in a sampling mask"),
    Metric("harvest/route_bytes", "bytes", "sum", "of recorded routes of prompts and generated tokens"),
    Metric("harvest/streams", "streams", "sum", "dual-track subgroups"),
    Metric("harvest/pairs", "pairs", "sum", "equal-length pairs"),
    Metric(HARVEST_PAIRS_PER_STREAM, "pairs", mean("harvest/streams"), "pairs of a stream (the paper's N_k)"),
    Metric(HARVEST_SUPERVISED_TOKENS, "tokens", "sum", "inside pairs or completions"),
    Metric("harvest/tail_tokens", "tokens", "sum", "after the last pair"),
    Metric("harvest/both_ended_fraction", "share", mean("harvest/streams"), "both tracks ended at once"),
    Metric("harvest/max_pairs_fraction", "share", mean("harvest/streams"), "stopped at max_pairs"),
    Metric(HARVEST_TRUNCATED_FRACTION, "share", PER_STREAM_OR_COMPLETION, "at the response limit"),
    Metric("harvest/budget_fraction", "share", PER_STREAM_OR_COMPLETION, "cut by the token budget"),
    Metric(HARVEST_SEGMENT_LENGTH, "tokens", mean("harvest/pairs"), "length of a pair's side"),
    Metric("harvest/segment_length_max", "tokens", "max", "longest side of a pair"),
    Metric("harvest/completions", "completions", "sum", "or steps of sampled trees"),
    Metric(HARVEST_RESPONSE_LENGTH, "tokens", mean("harvest/completions"), "length of a completion"),
    Metric("harvest/response_length_max", "tokens", "max", "longest completion"),
    Metric(ENGINE_SYNC_SECONDS, "s", "max", "of the last weight sync", in_turn="sum"),
    Metric(ENGINE_SYNC_BYTES, "bytes", "sum", "received in the last weight sync"),
    Metric("engine/preemptions", "requests", "sum", "preempted for lack of KV cache, by this attempt"),
    Metric("engine/live_replicas", "replicas", "sum", "replicas that answer", in_turn="min"),
    # ---- reward: of all responses of the step -------------------------------------------------------------
    Metric(REWARD_ENDED, "responses", "sum", "responses that were graded"),
    Metric(REWARD_MEAN, "reward", mean(REWARD_ENDED), "the verifier's, of a response"),
    Metric("reward/std", "reward", mean(REWARD_ENDED), "standard deviation within a batch"),
    Metric("reward/grader_seconds", "s", "sum", "in the graders, of all responses"),
    Metric("reward/named/*", "reward", mean(REWARD_ENDED), "of this name (reward.weights), unweighted"),
    Metric("reward/verdict/*", "share", mean(REWARD_ENDED), "responses with this verdict"),
    Metric("reward/source/*/ended", "responses", "sum", "to prompts of this source"),
    Metric("reward/source/*/mean", "reward", mean("reward/source/*/ended"), "of a response"),
    Metric("reward/calls", "responses", "sum", "responses graded in this step, by this attempt"),
    Metric("reward/seconds", "s", "max", "until all were graded", in_turn="sum"),
    Metric("reward/wait_seconds", "s", "max", "of these, waiting for grader processes", in_turn="sum"),
    Metric("reward/hidden_seconds", "s", "sum", "in the graders, over before the harvest was"),
    Metric(REWARD_UNSCORED, "responses", "sum", "whose grader or environment failed, or was late"),
    Metric(REWARD_DROPPED, "responses", "sum", "left out: unscored, or of one stream or tree with such"),
    Metric(REWARD_DROPPED_LENGTH, "tokens", mean(REWARD_DROPPED), "of one; kept: policy/response_length"),
    # ---- policy: over responses, for any kind of sampling ------------------------------------------------
    Metric(POLICY_ROLLOUTS, "rollouts", "sum", "complete rollouts, over which these means are taken"),
    Metric(POLICY_REWARD, "reward", mean(POLICY_ROLLOUTS), "the verifier's, 0 for unended responses"),
    Metric(POLICY_RESPONSE_LENGTH, "tokens", mean(POLICY_ROLLOUTS), "response length, ended or not"),
    # ---- outcome profile: what forks leave undecided (sampling/profile.py) --------------------------------
    Metric("profile/rollouts", "rollouts", "sum", "several lines of which start at the prompt"),
    Metric(PROFILE_VARIANCE, "reward²", mean("profile/rollouts"), "variance of the reward given the prompt"),
    Metric(PROFILE_TOKENS, "tokens", mean("profile/rollouts"), "of a response"),
    Metric(PROFILE_UNDECIDED, "reward²", mean("profile/rollouts"), "of this, undecided at first forks"),
    Metric(PROFILE_TOKENS_AFTER, "tokens", mean("profile/rollouts"), "of these, after first forks"),
    Metric(PROFILE_NOISE_AFTER, "reward²", mean("profile/rollouts"), "variance x tokens after first forks"),
    Metric(PROFILE_FORK_GAIN, "ratio", "last", "signal over noise (squared, a token) of a fork there, or 1"),
    # ---- objective: the step's comparison units -----------------------------------------------------------
    Metric(OBJECTIVE_UNITS, "units", "sum", "pairs, groups, or siblings of sampled trees"),
    Metric(OBJECTIVE_MEMBERS, "members", "sum", "sides, completions or steps in them"),
    Metric("objective/reward_mean", "reward", mean(OBJECTIVE_MEMBERS), "of a member, penalties included"),
    Metric("objective/reward_std", "reward", "last", "standard deviation over members"),
    Metric("objective/advantage_mean", "advantage", mean(OBJECTIVE_MEMBERS), "of a member"),
    Metric("objective/advantage_std", "advantage", "last", "standard deviation over members"),
    Metric("objective/advantage_max", "advantage", "max", "largest absolute advantage"),
    Metric(OBJECTIVE_ZERO_ADVANTAGE_FRACTION, "share", mean(OBJECTIVE_UNITS), "units without advantage"),
    Metric(OBJECTIVE_EFFECTIVE_SAMPLES, "members", "sum", "with non-zero advantage: the paper's count"),
    Metric("objective/effective_per_1k_tokens", "members", mean(HARVEST_GENERATED_TOKENS), "of them per 1k"),
    Metric("objective/effective_per_gpu_second", "members/s", "last", "effective samples a second and GPU"),
    Metric("objective/supervised_tokens", "tokens", "sum", "in trained units"),
    Metric("objective/pairs", "pairs", "sum", "pairs with rewards"),
    Metric(OBJECTIVE_PAIRS_PER_STREAM, "pairs", mean("harvest/streams"), "pairs with rewards"),
    Metric(OBJECTIVE_SKIP_RATE, "share", mean("objective/pairs"), "pairs with equal rewards"),
    Metric(OBJECTIVE_REWARD_GAP, "reward", mean("objective/pairs"), "max less mean suffix reward"),
    Metric(OBJECTIVE_SEGMENT_LENGTH_MEAN, "tokens", mean("objective/pairs"), "of a pair's side"),
    Metric("objective/segment_length_max", "tokens", "max", "of a pair's side"),
    Metric(STALENESS_MEAN, "updates", mean("objective/supervised_tokens"), "from a token's weights to these"),
    Metric(STALENESS_MAX, "updates", "max", "from a trained token's weights to these"),
    Metric("staleness/share/*", "share", mean("objective/supervised_tokens"), "tokens as old as this"),
    Metric("objective/filtered_prompts", "prompts", "sum", "left out by dynamic sampling"),
    # ---- packing: token trees in rows ---------------------------------------------------------------------
    Metric("packing/rows", "rows", "sum", "of all ranks"),
    Metric(PACKING_TOKENS, "tokens", "sum", "positions in use"),
    Metric("packing/computed_tokens", "tokens", "sum", "positions, padding included"),
    Metric(PACKING_UNIQUE_TOKENS, "tokens", "sum", "in trees, without what was pruned"),
    Metric("packing/repeated_tokens", "tokens", "sum", "context that cut trees repeat"),
    Metric("packing/pruned_tokens", "tokens", "sum", "not needed by any trained token"),
    Metric("packing/supervised_tokens", "tokens", "sum", "with a weight"),
    Metric(PACKING_CONTEXT, "tokens", mean(PACKING_TOKENS), "that a position sees"),
    Metric(PACKING_EXPANDED_TOKENS, "tokens", "sum", "if every side had its own prefix"),
    Metric("packing/fill", "share", mean("packing/computed_tokens"), "in use, of those computed"),
    Metric("packing/budget_fill", "share", mean("packing/rows"), "in use, of max_tokens_per_row"),
    Metric("packing/max_over_mean_cost", "ratio", "max", "the slowest rank's work"),
    Metric(EXCHANGE_ROUTES_SECONDS, "s", "max", "until routes were on the ranks that train them", "sum"),
    Metric(EXCHANGE_ROUTES_BYTES, "bytes", "sum", "of routes that ranks received"),
    # ---- loss: over supervised tokens ---------------------------------------------------------------------
    Metric(TOKENS, "tokens", "sum", "supervised"),
    Metric(POLICY_LOSS, "loss", "sum", "the surrogate's part", PER_UPDATE),
    Metric(KL_PENALTY, "loss", "sum", "the KL penalty's part", PER_UPDATE),
    Metric(LOSS, "loss", "sum", "both", PER_UPDATE),
    Metric(LOSS_ENTROPY, "nats", PER_TOKEN, "of the policy"),
    Metric(LOSS_NLL, "nats", PER_TOKEN, "-log pi of the data's responses (`objective: sft`)"),
    Metric(LOSS_REF_KL, "nats", PER_TOKEN, "the chosen estimate of KL(policy || reference)"),
    Metric(LOSS_TEACHER_KL, "nats", PER_TOKEN, "log policy less log teacher: KL(policy || teacher)"),
    Metric("loss/policy_kl", "nats", PER_TOKEN, "log-prob before less after the step's updates so far"),
    Metric(LOSS_RATIO, "ratio", PER_TOKEN, "importance ratio"),
    Metric("loss/ratio_deviation", "ratio", PER_TOKEN, "|ratio - 1|"),
    Metric("loss/ratio_max", "ratio", "max", "largest ratio"),
    Metric("loss/ratio_clamped_fraction", "share", PER_TOKEN, "log-ratio beyond +-20"),
    Metric("loss/kl_clamped_fraction", "share", PER_TOKEN, "exponent of k3 beyond +-20"),
    Metric(LOSS_CLIP_FRACTION_LOW, "share", PER_TOKEN, "clipped at the lower bound"),
    Metric(LOSS_CLIP_FRACTION_HIGH, "share", PER_TOKEN, "clipped at the upper bound"),
    Metric(LOSS_CLIP_FRACTION_DUAL, "share", PER_TOKEN, "stopped by the dual clip, or truncated (dppo)"),
    Metric("loss/vespo_kernel", "weight", PER_TOKEN, "phi(W)"),
    Metric("loss/own/*", "value", PER_TOKEN, "of a surrogate of your own"),
    # ---- mismatch: trainer against engine, over supervised tokens; names as verl's rollout_corr/... -------
    Metric(SEQUENCES, "segments", "sum", "supervised"),
    Metric(MISMATCH, "nats", PER_TOKEN, "|log trainer / engine| (slime: train_rollout_logprob_abs_diff)"),
    Metric(COMPARED, "tokens", "sum", "sampled by the trained weights, if older ones sampled some"),
    Metric(MISMATCH_OF_COMPARED, "nats", mean(COMPARED), "|log trainer / engine| of these"),
    Metric(MISMATCH_OF_DRAWN, "nats", "last", "the same of lines drawn among all generated, trained or not"),
    Metric("mismatch/logprob_abs_diff_max", "nats", "max", "largest of a token"),
    Metric("mismatch/equal_tokens", "share", PER_TOKEN, "trainer and engine agree bit for bit"),
    Metric(MISMATCH_KL, "nats", PER_TOKEN, "k1 estimate of KL(engine || trainer)"),
    Metric("mismatch/k3_kl", "nats", PER_TOKEN, "k3 estimate of it"),
    Metric("mismatch/chi2_token", "chi2", PER_TOKEN, "(trainer / engine)^2 - 1"),
    Metric("mismatch/chi2_seq", "chi2", PER_SEQUENCE, "the same of segments' products"),
    Metric("mismatch/log_ppl_abs_diff", "nats", PER_SEQUENCE, "|mean log trainer / engine| of a segment"),
    Metric("mismatch/rollout_is_mean", "weight", PER_TOKEN, "importance weight as used"),
    Metric("mismatch/rollout_is_truncated_fraction", "share", PER_TOKEN, "beyond rollout_is_threshold"),
    Metric("mismatch/rollout_rs_masked_fraction", "share", PER_TOKEN, "no gradient by rollout_rs"),
    Metric("mismatch/rollout_rs_seq_masked_fraction", "share", PER_SEQUENCE, "segments with such a token"),
    Metric(EXPERT_AGREEMENT, "share", PER_TOKEN, "of the engine's experts, those the trainer computed with"),
    Metric(ROUTER_AGREEMENT, "share", PER_TOKEN, "those that the trainer's own routers would choose"),
    # ---- train --------------------------------------------------------------------------------------------
    Metric(UPDATES, "updates", "sum", "optimizer steps taken"),
    Metric(TRAIN_SKIPPED_UPDATES, "updates", "sum", "not taken: not finite"),
    Metric(TRAIN_GRAD_NORM, "norm", "max", "before clipping", PER_UPDATE),
    Metric(f"{TRAIN_GRAD_NORM}/*", "norm", "max", "of this kind of weights: squares add up", PER_UPDATE),
    Metric("train/lr", "rate", "last", "learning rate"),
    Metric(TRAIN_FLOPS, "FLOPs", "last", "of training passes, estimated"),
    Metric(TRAIN_TOKENS_PER_SECOND, "tokens/s", "last", "positions trained, over time/train"),
    Metric(TRAIN_TOKENS_PER_GPU, "tokens/s", "last", "in trees, over time/train, a GPU of the trainer"),
    Metric(TRAIN_EXPANDED_PER_GPU, "tokens/s", "last", "the same, as if every side had its own prefix"),
    Metric(TRAIN_MFU, "share", "last", "train/flops over time/train, of what the trainer's GPUs can do"),
    # ---- checkpoint: logged with the step in which it was finished ----------------------------------------
    Metric(CHECKPOINT_BYTES, "bytes", "last", "of all its files"),
    Metric(CHECKPOINT_WRITE_SECONDS, "s", "last", "in the background, of the slowest rank"),
    # ---- memory: per GPU, or per process on CPUs ----------------------------------------------------------
    Metric("memory/peak/*", "bytes", "max", "peak of this stage, over ranks"),
    Metric("memory/reserved/*", "bytes", "max", "peak that PyTorch's allocator reserved in this stage"),
    Metric("memory/device/*", "bytes", "max", "in use on the GPU after this stage, NCCL and CUDA included"),
    Metric("memory/planned/*", "bytes", "max", "what the plan counts for this stage"),
    Metric("memory/parked_bytes", "bytes", "max", "freed on rank 0's GPU while the engine is awake"),
    # ---- time: of a step's stages, and evaluation ---------------------------------------------------------
    Metric(TIME_STEP, "s", "max", "the whole step", in_turn="sum"),
    Metric("time/engine_idle", "s", "max", "without harvest or evaluation", in_turn="sum"),
    Metric("time/trainer_idle", "s", "max", "without trees, training, sync, checkpoint", in_turn="sum"),
    Metric(TIME_GPU_HOURS, "h", "last", "of the run so far, evaluations not counted"),
    Metric(TOTAL_GENERATED_TOKENS, "tokens", "last", "of the run so far, evaluations not counted"),
    Metric(TOTAL_FLOPS, "FLOPs", "last", "of the run so far, evaluations not counted"),
    *(
        Metric(f"time/{stage}", "s", "max", f"the stage {stage}", in_turn="sum")
        for stage in STAGES
    ),
    Metric("time/slowest/*", "s", "max", "the stage on the rank where it took longest", in_turn="sum"),
    Metric("time/slowest_rank/*", "rank", "last", "that rank"),
    Metric("evaluation/*", "share", "last", "BENCHMARK/avg@k, pass@k and others"),
)  # fmt: skip

EXACT = {declared.name: declared for declared in DECLARED if "*" not in declared.name}
FAMILIES = {tuple(declared.name.split("*")): declared for declared in DECLARED if "*" in declared.name}


def metric(name: str) -> Metric:
    """Return the declaration of ``name``. Raises MetricError for a name that is not declared."""
    if name in EXACT:
        return EXACT[name]
    for (begin, end), family in FAMILIES.items():
        if name.startswith(begin) and name.endswith(end) and len(name) > len(begin + end):
            variable, way = name[len(begin) : len(name) - len(end)], family.merge
            if isinstance(way, Mean):
                way = Mean(tuple(count.replace("*", variable) for count in way.counts))
            return replace(family, name=name, merge=way)
    near = difflib.get_close_matches(name, EXACT, n=1, cutoff=0.0)[0]
    raise MetricError(f"metric {name!r} is not declared in {__name__} (nearest: {near!r})")


def check(metrics: Metrics) -> Metrics:
    """Return ``metrics`` if all of them are declared. Raises MetricError."""
    for name in metrics:
        metric(name)
    return metrics


def at_once(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of rows, ranks or replicas that worked at the same time."""
    return {name: _merged(name, metric(name).merge, parts) for name in _names(parts)}


def in_turn(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of batches or updates that came one after the other."""
    return {name: _merged(name, metric(name).in_turn or metric(name).merge, parts) for name in _names(parts)}


def over_ranks(ranks: Sequence[Metrics]) -> Metrics:
    """Merge each rank's own metrics of a step: the peak memory of each stage and, with several ranks, the
    slowest rank in each."""
    memory = [
        {name: value for name, value in metrics.items() if name.startswith(MEMORY)} for metrics in ranks
    ]
    combined = at_once(memory)
    for stage in STAGES if len(ranks) > 1 else ():
        times = [
            (metrics[f"time/{stage}"], -rank)
            for rank, metrics in enumerate(ranks)
            if f"time/{stage}" in metrics
        ]
        if times:
            seconds, rank = max(times)
            combined |= {f"time/slowest/{stage}": seconds, f"time/slowest_rank/{stage}": float(-rank)}
    return combined


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


COST_METRICS = {
    "gpu_hours": TIME_GPU_HOURS, "generated_tokens": TOTAL_GENERATED_TOKENS, "flops": TOTAL_FLOPS,
}  # fmt: skip
"""Metrics that hold a run's costs so far, by the recipe's key that limits them."""


def spent(steps: int, metrics: Mapping[str, float | None]) -> Spent:
    """Return the costs of a run up to step ``steps``, from its metrics; missing metrics count as 0."""
    return Spent(steps, **{cost: metrics.get(name) or 0.0 for cost, name in COST_METRICS.items()})
