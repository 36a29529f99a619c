"""The examples train a step: reward, objective, coins, adapters and forks work as their recipes name them."""

import pytest

from tests.kit import ROOT
from tests.kit.jobs import run
from tests.kit.train_runs import NO_EVALUATION, metrics

SMALL = [
    "steps=1", "data.prompts_per_step=2", "rollout.max_response_length=32", "rollout.max_num_seqs=16",
    "rollout.kv_cache_gib=0.02", "packing.max_tokens_per_row=256", "cluster.processes_per_node=1",
    "reward.workers=1", NO_EVALUATION,
]  # fmt: skip


@pytest.mark.parametrize("name", ["own_reward", "own_objective", "coin", "lora", "answer_forks"])
def test_an_example_trains_a_step(home, tmp_path, name):
    inputs = [f"model.path={home}/base", f"data.sources.0.path={home}/sums.parquet"]
    recipe = ROOT / "recipes/examples" / name / "recipe.yaml"
    run("-m", "megatron_eqlen.cli", "train", recipe, *SMALL, *inputs, f"run_dir={tmp_path}/run")
    (record,) = metrics(tmp_path / "run")
    assert record["harvest/generated_tokens"] > 0
    assert (tmp_path / "run" / ("adapter" if name == "lora" else "export")).is_dir()
