"""What the tests of `eqlen train` share: a run by command, and what its folder says."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.rollout import recorder
from megatron_eqlen.rollout.recorder import read_dump
from tests.kit.jobs import run
from tests.kit.processes import within

STEPS = 3


def train(home: Path, name: str, *arguments: str, ranks: int = 1) -> Path:
    processes = f"cluster.processes_per_node={ranks}"
    run(*command(home, name, processes, *arguments), ranks=ranks)
    return home / name


def command(home: Path, name: str, *arguments: str) -> list:
    return ["-m", "megatron_eqlen.cli", "train", home / "recipe.yaml", f"run_dir={home / name}", *arguments]


def metrics(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def column(run_folder: Path, name: str) -> list[float]:
    return [record[name] for record in metrics(run_folder)]


def streams_that_teach_little(trained: Path, folder: Path, spoil_of: dict[int, Callable]) -> Path:
    """The run's record with the rollouts of some steps, counted from 0, spoiled."""
    shutil.copytree(trained / "streams", folder)
    for step, spoil in spoil_of.items():
        path = folder / f"step-{step:08d}/rank-0.arrow"
        rollouts = read_dump(path)
        path.unlink()
        path.with_name("grades-rank-0.arrow").unlink()
        for rollout in rollouts:
            spoil(rollout)
        recorder.record(path, rollouts)
    return folder


def no_reward(rollout) -> None:
    for segment, _ in rollout.ended():
        segment.grade.reward = 0.0


def nan_logprob(rollout) -> None:
    for segment in rollout.segments():
        segment.logprobs = np.where(np.arange(len(segment)) == 0, np.float32(math.nan), segment.logprobs)


def checkpoints(run_folder: Path) -> list[str]:
    return [path.name[-1] for path in sorted((run_folder / "checkpoints").glob("step-*"))]


def wait_for_steps(folder: Path, count: int, *processes: Any) -> None:
    """Until that many steps are in the metrics."""

    def there() -> bool:
        assert all(process.poll() is None for process in processes), "it ended before its time"
        return (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= count

    assert within(300, there)
