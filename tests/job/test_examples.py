"""The examples train a step: what each shows works as its recipe names it."""

import random
from importlib import import_module

import pytest

from tests.kit import ROOT
from tests.kit.jobs import run
from tests.kit.train_runs import NO_EVALUATION, metrics
from tools.make_search import write_rows

SMALL = [
    "steps=1", "data.prompts_per_step=2", "rollout.max_response_length=32", "rollout.max_num_seqs=16",
    "rollout.kv_cache_gib=0.02", "packing.max_tokens_per_row=256", "cluster.processes_per_node=1",
    "reward.workers=1", NO_EVALUATION,
]  # fmt: skip


NAMES = sorted(path.parent.name for path in ROOT.glob("recipes/examples/*/recipe.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_a_step(home, tmp_path, name):
    data = home / "sums.parquet"
    if name in ("shop", "wordle"):
        maker = import_module(f"recipes.examples.{name}.{name}")
        write_rows(data := tmp_path / "rows.parquet", maker.make_rows(8, random.Random(0)))
    inputs = [f"model.path={home}/base", f"data.sources.0.path={data}", "data.max_prompt_length=90"]
    inputs += [f"teacher.path={home}/base"] * (name == "distillation")
    recipe = ROOT / "recipes/examples" / name / "recipe.yaml"
    run("-m", "megatron_eqlen.cli", "train", recipe, *SMALL, *inputs, f"run_dir={tmp_path}/run")
    (record,) = metrics(tmp_path / "run")
    assert record["harvest/generated_tokens"] > 0
    assert (tmp_path / "run" / ("adapter" if name == "lora" else "export")).is_dir()
