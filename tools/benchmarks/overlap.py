"""Real runs at ``rollout.staleness`` 0, 1, 2, ..., server and trainer on a core each: speed and reward.

Every run of a seed trains the same model on the same prompts; what differs is how far ahead the server
generates (``--staleness``) and the keys of ``--variants``. A run's time is from the end of its first step to
the end of its last. With several ``--seeds``, means have 95% intervals over the seeds (Student's t), and
differences to the first kind are paired by seed.

``--task even`` is a random model with a reward for responses of even length: for speeds. ``--task
arithmetic`` is a model of chains of sums, which a warm-up has brought half the way, so that rewards can rise:
accuracy on held-out questions, too. ``--recipe`` runs another one, whose inputs must be there. ``--set``
changes keys of any: ``loss.epochs=2`` makes training longer against generation, say.

With ``--out`` the runs are kept there, and those that are complete are not repeated; one that was cut short
starts anew, since its time would be wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import read_results
from megatron_eqlen.evaluation.statistics import t_interval
from megatron_eqlen.files import write_text
from megatron_eqlen.metrics import (
    OBJECTIVE_EFFECTIVE_SAMPLES,
    REWARD_MEAN,
    STALENESS_MEAN,
    TIME_ENGINE_IDLE,
    TIME_STEP,
    TIME_TRAINER_IDLE,
)
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.report.metrics import Records, read_metrics
from tools.benchmarks.servers import running
from tools.benchmarks.table import show
from tools.benchmarks.tiny_tasks import TASKS

ROOT = Path(__file__).parents[2]
PARTS = 4
"""Number of equal parts of the shortest run's time in which rewards are compared. The final reward is of the
same share of the steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--variants", nargs="+", default=[""], metavar="KEYS", help="comma-separated keys of runs"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind")
    parser.add_argument("--task", choices=TASKS, default="even")
    parser.add_argument("--recipe", type=Path, help="in place of a task")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="changes of every run's recipe"
    )
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of trainer and server")
    parser.add_argument("--out", type=Path, help="keep the run folders here, and go on from them")
    parser.add_argument("--json", type=Path)


@dataclass(frozen=True)
class Kind:
    """Difference between runs of one seed."""

    staleness: int
    keys: str

    @property
    def names(self) -> dict[str, Any]:
        return {"staleness": self.staleness, "keys": self.keys or "-"}


@dataclass(frozen=True)
class Trained:
    """A complete run."""

    records: Records
    accuracy: dict[str, float]
    """Means over the benchmarks, ``before`` and ``after``; none without benchmarks."""

    @property
    def seconds(self) -> float:
        """Seconds from the end of the first step to that of the last."""
        return self.ended(len(self.records) - 1)

    def ended(self, step: int) -> float:
        """Return the seconds from the end of the first step to that of ``step``."""
        return self.records[step]["time"] - self.records[0]["time"]

    def an_hour(self, name: str | None = None) -> float:
        """Return steps per hour, or the total of metric ``name`` per hour."""
        return (
            3600 * sum(record.get(name) or 0.0 if name else 1.0 for record in self.records[1:]) / self.seconds
        )

    def mean(self, name: str) -> float:
        return fmean(record.get(name) or 0.0 for record in self.records[1:])

    def reward(self, since: float, until: float) -> float:
        """Return the mean reward of the steps that ended after ``since`` and by ``until``, or of the newest
        one by then."""
        ended = [n for n in range(len(self.records)) if self.ended(n) <= until]
        return fmean(
            self.records[n][REWARD_MEAN] for n in [n for n in ended if self.ended(n) > since] or ended[-1:]
        )

    @property
    def final_reward(self) -> float:
        newest = self.records[-max(1, len(self.records) // PARTS) :]
        return fmean(record[REWARD_MEAN] for record in newest)


Runs = dict[Kind, list[Trained]]
"""Runs of each kind, one for each seed."""


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = (args.out or Path(folder)).resolve()
        recipe = args.recipe or TASKS[args.task](home)
        trainer, server = ({core} for core in args.cores)
        os.sched_setaffinity(0, server)  # processes inherit it
        fixed = [f"steps={args.steps}", "evaluation.every=0", *args.set]
        home /= f"{zlib.crc32((recipe.read_text() + str(fixed)).encode()):08x}"  # other settings, other runs
        kinds = [Kind(staleness, keys) for keys in args.variants for staleness in args.staleness]
        with running(load(recipe, fixed), 1, OMP_NUM_THREADS="1") as servers:
            os.sched_setaffinity(0, trainer)
            fixed += ["rollout.engine=server", f"rollout.servers=[{','.join(servers)}]"]
            fixed += ["cluster.processes_per_node=1"]
            runs: Runs = {kind: [] for kind in kinds}
            for seed in range(args.seeds):
                for kind in kinds:  # in turns: what changes on the machine changes for all
                    runs[kind].append(train(recipe, home, kind, seed, fixed, args.steps))
    tables = {"speed": speeds(runs)}
    show(
        tables["speed"], f"{args.steps} steps, {args.seeds} seed(s), a core each for server and trainer", None
    )
    if args.seeds > 1:
        tables |= {"final": finals(runs), "reward over time": rewards(runs)}
        show(tables["final"], f"at the end (reward: of the last {1 / PARTS:.0%} of the steps)", None)
        show(tables["reward over time"], "mean reward in parts of the time of the shortest run", None)
    if args.json is not None:
        write_text(args.json, json.dumps(tables | {"runs": raw(runs)}, indent=1) + "\n")


def train(recipe: Path, home: Path, kind: Kind, seed: int, fixed: Sequence[str], steps: int) -> Trained:
    """Return a run, trained unless it is complete."""
    folder = home / f"staleness={kind.staleness},{kind.keys},seed={seed}".replace("/", "_")
    if len(read_metrics(folder)) < steps or not (folder / "export").exists():
        shutil.rmtree(folder, ignore_errors=True)
        own = [f"run_dir={folder}", f"rollout.staleness={kind.staleness}", f"seed={seed}"]
        own += filter(None, kind.keys.split(","))
        command = [sys.executable, "-m", "megatron_eqlen.cli", "train", recipe, *fixed, *own]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = {label: folder / f"evaluation/{label}.json" for label in ("before", "after")}
    accuracy = {
        label: fmean(result.accuracy.mean for result in read_results(path))
        for label, path in results.items()
        if path.exists()
    }
    return Trained(read_metrics(folder), accuracy)


def speeds(runs: Runs) -> list[dict[str, Any]]:
    means = {
        "step s": TIME_STEP,
        "harvest s": "time/harvest",
        "train s": "time/train",
        "sync s": "time/sync",
        "engine idle s": TIME_ENGINE_IDLE,
        "trainer idle s": TIME_TRAINER_IDLE,
        "age": STALENESS_MEAN,
    }
    return [
        kind.names
        | {
            "steps/h": interval(of_kind, Trained.an_hour),
            "ratio": ratio(runs, kind, Trained.an_hour),
            "effective/h": interval(of_kind, effective),
            "its ratio": ratio(runs, kind, effective),
        }
        | {name: fmean(trained.mean(metric) for trained in of_kind) for name, metric in means.items()}
        for kind, of_kind in runs.items()
    ]


def effective(trained: Trained) -> float:
    """Return effective samples per hour."""
    return trained.an_hour(OBJECTIVE_EFFECTIVE_SAMPLES)


def finals(runs: Runs) -> list[dict[str, Any]]:
    """Return reward and accuracy, and their differences to the first kind."""
    measures: dict[str, Callable[[Trained], float]] = {"reward": lambda trained: trained.final_reward}
    if all(trained.accuracy for of_kind in runs.values() for trained in of_kind):
        measures["accuracy before"] = lambda trained: trained.accuracy["before"]
        measures["accuracy"] = lambda trained: trained.accuracy["after"]
    return [kind.names | with_difference(runs, kind, measures) for kind in runs]


def rewards(runs: Runs) -> list[dict[str, Any]]:
    """Return rewards at the same wall time."""
    until = min(trained.seconds for of_kind in runs.values() for trained in of_kind)
    ends = [until * part / PARTS for part in range(PARTS + 1)]
    measures: dict[str, Callable[[Trained], float]] = {
        f"to {end:.0f} s": partial(Trained.reward, since=since, until=end) for since, end in pairwise(ends)
    }
    return [kind.names | with_difference(runs, kind, measures) for kind in runs]


def with_difference(
    runs: Runs, kind: Kind, measures: dict[str, Callable[[Trained], float]]
) -> dict[str, str]:
    """Return each measure over the seeds, and its difference to the first kind, paired by seed."""
    first = next(iter(runs.values()))
    row = {}
    for name, measure in measures.items():
        pairs = zip(runs[kind], first, strict=True)
        row[name] = interval(runs[kind], measure)
        row[f"{name}, difference"] = of_values(
            [measure(trained) - measure(other) for trained, other in pairs]
        )
    return row


def ratio(runs: Runs, kind: Kind, measure: Callable[[Trained], float]) -> str:
    """Return the ratio to the first kind, paired by seed."""
    first = next(iter(runs.values()))
    return of_values(
        [measure(trained) / measure(other) for trained, other in zip(runs[kind], first, strict=True)]
    )


def interval(runs: Sequence[Trained], measure: Callable[[Trained], float]) -> str:
    return of_values([measure(trained) for trained in runs])


def of_values(values: Sequence[float]) -> str:
    """Return the mean, with its 95% interval if there are several values."""
    found = t_interval(np.array(values)[:, None])
    return f"{found.mean:.4g}" if len(values) == 1 else f"{found.mean:.4g} ±{found.high - found.mean:.2g}"


def raw(runs: Runs) -> list[dict[str, Any]]:
    """Return every run's numbers, for any further computation."""
    return [
        kind.names
        | {
            "seed": seed,
            "steps/h": trained.an_hour(),
            "effective/h": effective(trained),
            "final reward": trained.final_reward,
            "accuracy": trained.accuracy,
            "seconds": [trained.ended(n) for n in range(len(trained.records))],
            "rewards": [record[REWARD_MEAN] for record in trained.records],
        }
        for kind, of_kind in runs.items()
        for seed, trained in enumerate(of_kind)
    ]
