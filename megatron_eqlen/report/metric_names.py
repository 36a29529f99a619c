"""Other frameworks' names of our metrics, if both measure the same; for ``report.metric_names``.

verl: ``trainer/ppo/metric_utils.py`` and its workers; slime: ``utils/training/train_metric_utils.py``, its
rollout and actor. Units differ where ``SCALE`` says so.
"""

from __future__ import annotations

from typing import Literal

from megatron_eqlen.types import Metrics

Convention = Literal["eqlen", "verl", "slime"]

NAMES: dict[str, tuple[str, str]] = {
    "reward/mean": ("critic/score/mean", "rollout/raw_reward"),
    "objective/reward_mean": ("critic/rewards/mean", ""),
    "objective/advantage_mean": ("critic/advantages/mean", ""),
    "harvest/response_length": ("response_length/mean", "rollout/response_len/mean"),
    "harvest/response_length_max": ("response_length/max", "rollout/response_len/max"),
    "harvest/truncated_fraction": ("response_length/clip_ratio", "rollout/truncated_ratio"),
    "loss/total": ("actor/loss", "train/loss"),
    "loss/policy": ("actor/pg_loss", "train/pg_loss"),
    "loss/entropy": ("actor/entropy", "train/entropy_loss"),
    "loss/ref_kl": ("actor/kl_loss", "train/kl_loss"),
    "loss/policy_kl": ("actor/ppo_kl", "train/ppo_kl"),
    "loss/clip_fraction_high": ("actor/pg_clipfrac", "train/pg_clipfrac"),
    "loss/clip_fraction_dual": ("actor/pg_clipfrac_lower", ""),
    "train/grad_norm": ("actor/grad_norm", "train/grad_norm"),
    "train/lr": ("actor/lr", ""),
    "train/mfu": ("perf/mfu/actor", ""),
    "mismatch/kl": ("rollout_corr/kl", ""),
    "mismatch/k3_kl": ("rollout_corr/k3_kl", ""),
    "mismatch/chi2_token": ("rollout_corr/chi2_token", ""),
    "mismatch/chi2_seq": ("rollout_corr/chi2_seq", ""),
    "mismatch/log_ppl_abs_diff": ("rollout_corr/log_ppl_abs_diff", ""),
    "mismatch/rollout_is_mean": ("rollout_corr/rollout_is_mean", ""),
    "mismatch/rollout_rs_masked_fraction": ("rollout_corr/rollout_rs_masked_fraction", ""),
    "mismatch/logprob_abs_diff": ("", "train/train_rollout_logprob_abs_diff"),
    "time/harvest": ("timing_s/gen", "perf/rollout_time"),
    "time/score": ("timing_s/reward", ""),
    "time/trees": ("timing_s/adv", ""),
    "time/train": ("timing_s/update_actor", "perf/actor_train_time"),
    "time/sync": ("timing_s/update_weights", "perf/update_weights_time"),
    "time/evaluate": ("timing_s/testing", ""),
    "time/checkpoint": ("timing_s/save_checkpoint", "perf/save_model_time"),
    "time/step": ("timing_s/step", "perf/step_time"),
    "memory/peak/train": ("perf/max_memory_allocated_gb", ""),
    "memory/reserved/train": ("perf/max_memory_reserved_gb", ""),
    "packing/expanded_tokens": ("perf/total_num_tokens", ""),
}
"""Our name -> (verl's, slime's); empty if it has none."""

SCALE = {"perf/max_memory_allocated_gb": 2**-30, "perf/max_memory_reserved_gb": 2**-30}
"""Factor from our value to theirs, by their name."""


def renamed(metrics: Metrics, convention: Convention) -> Metrics:
    """Return ``metrics`` by the names of ``convention``; metrics without such a name keep ours."""
    if convention == "eqlen":
        return metrics
    place = ("verl", "slime").index(convention)
    names = {ours: theirs[place] or ours for ours, theirs in NAMES.items()}
    found = ((names.get(name, name), value) for name, value in metrics.items())
    return {name: value * SCALE.get(name, 1.0) for name, value in found}
