"""Sweeps whose runs are written by the test instead of trained, as ``eqlen train`` would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_eqlen.evaluation.result import Answers, EvaluationResult, write_results
from megatron_eqlen.experiments.cells import Cell, Plan
from megatron_eqlen.experiments.schema import load_sweep
from megatron_eqlen.job import load
from megatron_eqlen.metrics import spent
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import dump

PROBLEMS, SAMPLES = 12, 4

SWEEP = """
name: small
folder: {folder}/runs
recipes: [tiny.yaml]
seeds: [0, 1, 2]
reference: eqlen
match: flops
methods:
  grpo: {{label: GRPO, set: {{sampling: independent}}}}
  eqlen: {{label: EqLen}}
  mean: {{label: Mean reward, set: {{equal_length.suffix_reward: mean}}}}
tables:
  - {{title: Main results, methods: [base, grpo, eqlen]}}
  - {{title: Differences, kind: difference, methods: [grpo, eqlen]}}
  - {{title: Efficiency, kind: efficiency, methods: [grpo, eqlen]}}
"""
RECIPE = """
name: tiny
steps: 4
group_size: 4
model: {{path: {folder}/Tiny-1B}}
data: {{max_prompt_length: 48, sources: [{{name: sums, path: {folder}}}]}}
rollout: {{max_response_length: 192}}
evaluation: {{benchmarks: [{{name: sums, path: {folder}}}]}}
cluster: {{device: cpu}}
"""


def write_sweep(folder: Path, text: str = SWEEP) -> Path:
    """Write a sweep file of 3 methods x 3 seeds, with its recipe."""
    (folder / "Tiny-1B").mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    (folder / "sweep.yaml").write_text(text.format(folder=folder))
    return folder / "sweep.yaml"


def result(right: float, seed: int, length: int = 9) -> EvaluationResult:
    """Return a result with about the share ``right`` of correct answers; seeds differ in which."""
    said = ["correct"] * SAMPLES, [length] * SAMPLES
    places = [
        [(problem * 7 + sample * 5 + seed * 3) % 24 for sample in range(SAMPLES)]
        for problem in range(PROBLEMS)
    ]
    rewards = [[float(place < 24 * right) for place in of_problem] for of_problem in places]
    answers = [Answers(f"q{problem}", row, *said) for problem, row in enumerate(rewards)]
    return EvaluationResult("sums", answers, {"question_ids": [answer.prompt_id for answer in answers]})


def cost_of_a_step(recipe: Recipe) -> float:
    """Return the FLOPs of a step: more for a stream than a group, and different for each seed."""
    return (500.0 if recipe.sampling == "equal_length" else 200.0) + 20 * recipe.seed


def leave_a_run(recipe: Recipe) -> None:
    """Write the folder of an ended run of ``recipe``: it took steps until a limit was reached."""
    folder = recipe.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(dump(recipe))
    records = []
    while not records or recipe.budget.ended_by(spent(len(records), records[-1])) is None:
        step = len(records) + 1
        records.append(
            {
                "step": step, "time": 0.0, "reward/mean": 0.5 + 0.1 * step, "train/grad_norm": 1.0 + step % 2,
                "objective/effective_samples": 30.0, "objective/skip_rate": 0.1 * step + 0.01 * recipe.seed,
                "harvest/pairs_per_stream": 5.0 - step, "harvest/generated_tokens": 1000.0,
                "time/gpu_hours": 0.5 * step, "total/generated_tokens": 1000.0 * step,
                "total/flops": cost_of_a_step(recipe) * step,
            }
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_results(folder / "evaluation/before.json", [result(0.3, recipe.seed, length=5 + recipe.seed)])
    right = 0.7 if recipe.sampling == "equal_length" else 0.5
    write_results(folder / "evaluation/after.json", [result(right, recipe.seed)])
    (folder / "export").mkdir(exist_ok=True)
    (folder / "report.html").touch()


def ended(file: Path) -> Plan:
    """Write the folder of each of the sweep's runs, as if all had ended."""
    plan = Plan(load_sweep(file))
    for cell in plan.cells:
        leave_a_run(cell.recipe(plan.limits(cell) or []))
    return plan


def cell_of(plan: Plan, name: str) -> Cell:
    return next(cell for cell in plan.cells if cell.name == name)


def rewards(folder: Path, label: str) -> list[list[float]]:
    """Return [problem][sample], read from the file itself."""
    (record,) = json.loads((folder / f"evaluation/{label}.json").read_text())
    return [answers["rewards"] for answers in record["answers"]]


class Scripted:
    """Stands in for processes: a run ends at the second poll, with its folder written."""

    def __init__(self, fails: Callable[[Recipe], bool] = lambda recipe: False, status: int = 7) -> None:
        self.fails, self.status = fails, status
        self.recipes: list[Recipe] = []
        """Recipes of the runs that were started."""
        self.arguments: list[Sequence[str]] = []
        self.environs: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0

    def __call__(self, arguments: Sequence[str], environ: dict[str, str], log: Path) -> ScriptedRun:
        assert arguments[0] == "train"
        recipe = load(arguments[1], list(arguments[2:]))
        self.recipes.append(recipe)
        self.arguments.append(arguments)
        self.environs.append(environ)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        log.write_text("one\ntwo\nthe last words\n")
        return ScriptedRun(self, recipe)

    @property
    def names(self) -> list[str]:
        return [recipe.run_folder.name for recipe in self.recipes]


class ScriptedRun:
    def __init__(self, all_runs: Scripted, recipe: Recipe) -> None:
        self.all, self.recipe, self.looks = all_runs, recipe, 0

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks < 2:
            return None
        self.all.at_once -= 1
        if self.all.fails(self.recipe):
            return self.all.status
        leave_a_run(self.recipe)
        return 0
