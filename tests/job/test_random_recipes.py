"""Recipes of random keys, each week: combinations of keys that have tests of their own."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eqlen.job import load
from megatron_eqlen.objectives.registry import OBJECTIVES
from tests.kit.jobs import start
from tests.kit.marks import EACH_WEEK, MORE
from tests.kit.processes import within
from tests.kit.talking import ANSWERED
from tests.kit.train_runs import NO_EVALUATION, command, metrics, same_weights, train

ALWAYS = {
    "sampling": ["equal_length", "independent", "tree"], "objective": [*OBJECTIVES],
    # Adam's step has the size of its rate whatever the gradient's: epsilon keeps round-off small
    "model.megatron": ["{adam_eps: 1e-2}"],
}  # fmt: skip
SOMETIMES = {
    "group_size": [2, 6], "data.shuffle": ["false"],
    "equal_length.pair_weight": ["on_policy"], "equal_length.baseline": ["streams"],
    "equal_length.suffix_reward": ["mean"], "equal_length.unfinished": ["drop"],
    "equal_length.pair_count": ["effective"], "equal_length.max_pairs": [1, 2],
    "equal_length.prefix_in_gradient": ["true"],
    "tree_sampling.fork": ["marker", "death", "profile"], "tree_sampling.branching": [3],
    "tree_sampling.forks": [1, 3], "tree_sampling.step_tokens": [3, 12], "tree_sampling.marker": ["1", "+"],
    "rollout.temperature": [0.7, 1.3], "rollout.top_k": [5, 20], "rollout.keep_sampling_mask": ["true"],
    "rollout.center_scores": ["true"], "rollout.max_num_seqs": [3, 8],
    "loss.minibatches": [2, 3], "loss.epochs": [2], "loss.kl_coef": [0, 0.05],
    "loss.kl_estimator": ["k1", "k2"], "loss.old_logprobs": ["rollout"], "loss.baseline": ["alive", "fitted"],
    "loss.rollout_is": ["token", "sequence"], "loss.rollout_rs": ["{binary_kl: 0.1}", "{seq_sum_k1: 2}"],
    "loss.dynamic_sampling": ["true", "false"], "loss.overlong_buffer": [5, 20],
    "loss.loss_agg_mode": ["token-mean", "seq-mean-token-sum", "balanced-token-mean"],
    "packing.layout": ["expanded"], "packing.max_tokens_per_row": [256, 333], "packing.logits_chunk": [64],
    "parallel.recompute": ["mlp", "full"], "optimizer.lr_schedule": ["linear"], "lora.rank": [2],
    "checkpoint.every": [2],
}  # fmt: skip
LAYOUTS = [
    (2, ()), (2, ("parallel.tensor=2",)), (2, ("parallel.pipeline=2",)), (1, ("packing.layout=expanded",)),
    (1, ("packing.max_tokens_per_row=1024",)), (1, ("parallel.recompute=full",)),
]  # fmt: skip
"""Ranks and keys of a layout that trains the recorded rollouts again."""
RECORDS_EACH_TOKEN = """
import sys
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.record import recorder
recorder.INTERVAL = 0.0
sys.exit(main())
"""


def some_keys(draw: random.Random, home: Path) -> list[str]:
    """Return random keys that fit together."""
    while True:
        chosen = {key: draw.choice(values) for key, values in ALWAYS.items()}
        chosen |= {key: draw.choice(values) for key, values in SOMETIMES.items() if draw.random() < 0.2}
        keys = [f"{key}={value}" for key, value in chosen.items()]
        keys += ANSWERED * draw.choice([0, 0, 1]) + [f"teacher.path={home / 'base'}"] * draw.choice([0, 0, 1])
        try:
            load(home / "recipe.yaml", keys)
        except ValueError:  # refused
            continue
        return [*keys, f"seed={draw.randrange(1000)}", NO_EVALUATION]


def losses(folder: Path, name: str) -> dict[int, float]:
    """Return a metric by step, of the steps that trained."""
    return {record["step"]: record[name] for record in metrics(folder) if name in record}


@EACH_WEEK
@settings(max_examples=5 * MORE or 1)
@given(seed=st.integers(0, 2**32 - 1))
def test_killed_at_any_moment_it_ends_with_the_same_bits_and_trains_alike_in_another_layout(seed, home):
    draw = random.Random(seed)
    keys, name = some_keys(draw, home), f"random-{seed}"
    print(*keys)
    began = time.monotonic()
    whole = train(home, name, *keys)
    seconds = time.monotonic() - began
    for _ in range(2):
        job = start("-c", RECORDS_EACH_TOKEN, *command(home, f"{name}-killed", *keys)[2:])
        within(draw.uniform(0.2, 0.8) * seconds, lambda job=job: job.poll() is not None)
        assert not job.poll(), job.stderr
        job.kill()
    killed = train(home, f"{name}-killed", *keys)
    assert same_weights(killed, whole)
    assert losses(killed, "loss/total") == losses(whole, "loss/total")
    ranks, layout = draw.choice(LAYOUTS)
    replay = train(home, f"{name}-again", *keys, *layout, "--replay", str(whole / "streams"), ranks=ranks)
    for metric in ("loss/total", "loss/tokens", "loss/entropy"):
        assert losses(replay, metric) == pytest.approx(losses(whole, metric), rel=1e-3, abs=1e-5)
