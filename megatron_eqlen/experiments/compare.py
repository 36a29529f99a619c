"""Methods side by side, for ``eqlen compare`` and ``eqlen sweep``: accuracy, difference, efficiency.

run folders ──► groups (model, method) of seeds ──► rows ──► Markdown, JSON, and curves as SVG (``figures``)

Accuracies are over seeds, of each the mean of its samples; of a single seed the samples are the replicates. A
row is a dict from a column's name to its value.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megatron_eqlen.evaluation.result import compare, over_seeds, shared_questions
from megatron_eqlen.evaluation.statistics import Interval, detectable_difference, seed_difference
from megatron_eqlen.experiments.figures import curves, sheet
from megatron_eqlen.experiments.run_groups import BASE, Group, RunResult, group_runs, read_run, run_folders
from megatron_eqlen.files import write_text
from megatron_eqlen.recipe.budget import COSTS, UNITS
from megatron_eqlen.recipe.contents import FILE, recorded
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.report.format import Rows, compact, markdown_rows
from megatron_eqlen.report.status import has_ended

UNEQUAL = 1.1
"""Ratio of costs from which budgets count as unequal. Not 1, because a run completes its last step."""
METHOD, SEEDS, PER_HOUR, PER_TOKEN = "Method", "Seeds", "Samples/GPU-h", "Samples/1k tokens"
ABOUT_ACCURACY = (
    "± is half the 95% bootstrap interval over seeds with the problems held fixed, as in the paper; brackets "
    "are the 95% bootstrap interval over seeds and problems. Of a single seed the samples are the replicates."
)
ABOUT_DIFFERENCE = (
    "Points above {}: mean [95% t interval, paired over seeds, problems held fixed] / the smallest "
    "difference that as many seeds would have shown in 80% of experiments. Of a single seed: [95% bootstrap "
    "interval over samples and problems]."
)
ALIKE = ("sha256", "graders", "rollout")
"""Values of evaluations that should be equal in a table: files, graders, sampling."""
Kind = Literal["accuracy", "difference", "efficiency"]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a method over its seeds."""

    paper: Interval
    """Bootstrap over seeds, problems held fixed."""
    headline: Interval
    """Bootstrap over seeds and problems."""
    seeds: int

    def __str__(self) -> str:
        """Format in percent: ``84.2±1.0 [80.3, 88.0]``; without ± for a single seed."""
        if self.seeds == 1:
            return str(self.headline)
        half = 50 * (self.paper.high - self.paper.low)
        low, high = 100 * self.headline.low, 100 * self.headline.high
        return f"{100 * self.paper.mean:.1f}±{half:.1f} [{low:.1f}, {high:.1f}]"


@dataclass(frozen=True)
class Difference:
    """Difference of two methods' accuracies."""

    interval: Interval
    detectable: float | None
    """Smallest difference that as many seeds would have shown in 80% of all experiments; None for one."""
    seeds: int

    def __str__(self) -> str:
        """Format in points: ``+2.0 [-0.9, +4.9] / 4.1``."""
        mean, low, high = (100 * v for v in (self.interval.mean, self.interval.low, self.interval.high))
        detectable = "" if self.detectable is None else f" / {100 * self.detectable:.1f}"
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]{detectable}"


@dataclass(frozen=True)
class Table:
    title: str
    rows: Rows
    notes: Sequence[str] = ()


def compare_runs(
    folders: Sequence[Path],
    baseline: str | None,
    out: Path | None,
    over: str | None,
    charts: Sequence[str] | None,
) -> None:
    """Print the tables of ``folders`` (run folders, or folders that hold some), and ``write`` them to
    ``out``. ``baseline``: the method whose difference to every other is shown, by default the table's first
    one. Runs that have not ended are named and left out. Raises ValueError if none has ended, for two runs of
    one seed, and for evaluations on different questions."""
    runs = run_folders(folders)
    ended = [folder for folder in runs if has_ended(folder, load_run(folder))]
    for folder in (folder for folder in runs if folder not in ended):
        print(f"{folder}: left out, it has not ended (`eqlen status` says how far it is)\n")
    if not ended:
        raise ValueError(f"{', '.join(map(str, folders))}: expected a run that has ended, found none")
    groups = group_runs([read_run(folder) for folder in ended])
    known = list(dict.fromkeys(group.method for group in groups))
    # The base is the model before training: no method unless nothing else is there.
    baseline = baseline or next((name for name in known if name != BASE), BASE)
    if baseline not in known:
        raise ValueError(f"--baseline: expected one of {', '.join(known)}, found {baseline!r}")
    tables = [make_table(kind.capitalize(), kind, groups, baseline) for kind in get_args(Kind)]
    # Leave out tables without a column beside method and seeds: runs without benchmarks have no accuracy.
    tables = [table for table in tables if table.rows and len(table.rows[0]) > 1 + (SEEDS in table.rows[0])]
    notes = budget_notes(groups)
    if out is not None:
        write(out, tables, notes, groups, over, charts)  # which refuses charts that are none
    print(markdown(tables, notes))


def write(
    folder: Path,
    tables: Sequence[Table],
    notes: Sequence[str],
    groups: Sequence[Group],
    axis: str | None = None,
    charts: Sequence[str] | None = None,
) -> list[Path]:
    """Write ``tables.md``, ``tables.json`` and, for each model, ``figures-MODEL.svg``; return their paths.
    ``groups``: those whose curves are drawn, over ``axis`` (a key of ``UNITS``; default: the cost at which
    they are compared); ``charts``: titles of the charts, default all."""
    record = {"tables": [asdict(table) for table in tables], "notes": list(notes)}
    texts = {
        "tables.md": markdown(tables, notes) + "\n",
        "tables.json": json.dumps(record, indent=1, ensure_ascii=False) + "\n",
    }
    axis = axis or compared_cost(groups)
    for model in dict.fromkeys(group.model for group in groups):
        methods = {g.method: [run.folder for run in g.runs] for g in groups if g.model == model}
        # Before training there is no curve.
        methods.pop(BASE, None)
        texts[f"figures-{model}.svg"] = sheet(f"{model}, over {UNITS[axis]}", *curves(methods, axis, charts))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


# ---- rows -------------------------------------------------------------------------------------------------


def make_table(
    title: str, kind: Kind, groups: Sequence[Group], baseline: str, benchmarks: Sequence[str] | None = None
) -> Table:
    """Return a table. ``baseline``: of differences; ``benchmarks``: those to show, in order; default: all."""
    if kind == "accuracy":
        return Table(title, accuracies(groups, benchmarks), [ABOUT_ACCURACY])
    if kind == "difference":
        return Table(title, differences(groups, baseline, benchmarks), [ABOUT_DIFFERENCE.format(baseline)])
    return Table(title, efficiency(groups))


def accuracies(groups: Sequence[Group], benchmarks: Sequence[str] | None = None) -> Rows:
    """Return the paper's tables 1 and 3: a row for each method, a column for each model and benchmark."""

    def accuracy(group: Group, benchmark: str) -> Accuracy | None:
        if not (results := [*group.by_seed(benchmark).values()]):
            return None
        headline, paper = over_seeds(results)
        return Accuracy(paper, headline, len(results))

    rows = by_benchmark(groups, benchmarks, accuracy)
    seeds = [(group.method, len({run.recipe.seed for run in group.runs})) for group in groups]
    # The largest number: a method may have fewer seeds on one model than on another.
    most = {method: max(count for of, count in seeds if of == method) for method, _ in seeds}
    return [{METHOD: row[METHOD], SEEDS: most[row[METHOD]]} | row for row in rows]


def differences(groups: Sequence[Group], baseline: str, benchmarks: Sequence[str] | None = None) -> Rows:
    """Return how much better each method is than ``baseline``, in the same columns."""
    base = {group.model: group for group in groups if group.method == baseline}

    def above(group: Group, benchmark: str) -> Difference | None:
        return difference(base[group.model], group, benchmark) if group.model in base else None

    return by_benchmark([g for g in groups if g.method not in (baseline, BASE)], benchmarks, above)


def by_benchmark(
    groups: Sequence[Group],
    benchmarks: Sequence[str] | None,
    value: Callable[[Group, str], Accuracy | Difference | None],
) -> Rows:
    """Return a row for each method, with ``value(group, benchmark)`` for each model and benchmark."""
    models = list(dict.fromkeys(group.model for group in groups))
    known = dict.fromkeys(name for group in groups for run in group.runs for name in run.after)
    rows = []
    # A method's groups, one for each model, make one row.
    for method in dict.fromkeys(group.method for group in groups):
        mine = {group.model: group for group in groups if group.method == method}
        row: dict[str, Any] = {METHOD: method}
        for model in models:
            for benchmark in benchmarks or known:
                column = benchmark if len(models) == 1 else f"{model} {benchmark}"
                row[column] = value(mine[model], benchmark) if model in mine else None
        rows.append(row)
    return rows


def difference(before: Group, after: Group, benchmark: str) -> Difference | None:
    """Return the difference, paired by seed, or by problem for fewer than two; None without evaluations."""
    theirs, ours = before.by_seed(benchmark), after.by_seed(benchmark)
    seeds = sorted(theirs.keys() & ours.keys())
    if not (theirs and ours):
        return None
    if len(seeds) < 2:
        return Difference(compare([*theirs.values()], [*ours.values()]), None, len(seeds))
    # [R] means of each side for the seeds that both have, in the same order, on the questions that all have
    results = shared_questions([side[seed] for side in (theirs, ours) for seed in seeds])
    pair = np.array([result.scores.mean() for result in results]).reshape(2, len(seeds))
    return Difference(seed_difference(*pair), detectable_difference(*pair), len(seeds))


def efficiency(groups: Sequence[Group]) -> Rows:
    """Return the paper's table 2: means over each method's runs, with effective samples per generated token
    too, rewards and lengths over the last tenth of the steps, and ratios to the model's first method's."""
    rows, firsts = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for group in (group for group in groups if group.method != BASE):
        row: dict[str, Any] = {
            METHOD: _label(group, groups),
            "Parallel Tracks": group.runs[0].recipe.group_size,
            "Eff. Samples": _mean(group, lambda run: run.effective_samples),
            "GPU Time (h)": _mean(group, lambda run: run.spent.gpu_hours),
            PER_HOUR: _mean(group, lambda run: _ratio(run.effective_samples, run.spent.gpu_hours)),
            PER_TOKEN: _mean(group, lambda run: 1000 * _ratio(run.effective_samples, run.generated_tokens)),
            "Equal-Len.": group.runs[0].recipe.sampling == "equal_length",
            "Reward": _mean(group, lambda run: run.reward),
            "Length": _mean(group, lambda run: run.length),
        }
        # Ratios to the row of the model's first method; its own are 1.
        first = firsts.setdefault(group.model, row)
        for name, short in ((PER_HOUR, "GPU-h"), (PER_TOKEN, "tokens")):
            row[f"x first, {short}"] = row[name] / first[name] if first[name] else None
        rows.append({name: None if value != value else value for name, value in row.items()})  # not measured
    return rows


# ---- text -------------------------------------------------------------------------------------------------


def markdown(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Format tables for GitHub, with their notes and those on all of them."""
    parts = ["\n\n".join([f"### {t.title}", markdown_rows(t.rows), *t.notes]) for t in tables]
    return "\n\n".join([*parts, *notes])


def budget_notes(groups: Sequence[Group]) -> list[str]:
    """Return what readers should know: runs that ended early, unequal budgets, evaluations or inputs."""
    methods = [group for group in groups if group.method != BASE]
    # Runs that ended before their limits.
    notes = [note for group in methods for run in group.runs if (note := _short(_label(group, groups), run))]
    # Then methods whose runs cost unequally much on one model.
    cost = compared_cost(methods)
    for model in dict.fromkeys(group.model for group in methods):
        mine = [group for group in methods if group.model == model]
        costs = [_mean(group, lambda run: getattr(run.spent, cost)) for group in mine]
        if max(costs) > UNEQUAL * min(costs):
            spent = [
                f"{_label(group, groups)} {spent:.3g} {UNITS[cost]} in "
                f"{compact(_mean(group, lambda run: run.spent.steps))} steps"
                for group, spent in zip(mine, costs, strict=True)
            ]
            notes.append(f"Unequal budgets (means over runs): {'; '.join(spent)}")
        # Then benchmarks that were not evaluated alike.
        runs = [run for group in mine for run in group.runs]
        for name in dict.fromkeys(name for run in runs for name in run.after):
            asked = [of[name].manifest for run in runs for of in (run.before, run.after) if name in of]
            # without a response that ended no grader is known
            differ = [key for key in ALIKE if len({str(each[key]) for each in asked if each.get(key)}) > 1]
            notes += [f"Unequal evaluations of {name}: they differ in {', '.join(differ)}"] if differ else []
    # then model, data and own code whose content is not that of other runs
    folders = [run.folder for group in methods for run in group.runs]
    inputs = {(path, str(files)) for folder in folders for path, files in recorded(folder).items()}
    contents = Counter(path for path, _ in sorted(inputs))
    if changed := [path for path in contents if contents[path] > 1 and not path.startswith("RUN/")]:
        notes.append(f"Unequal inputs: {', '.join(changed)} changed between runs ({FILE} has each one's)")
    return notes


def compared_cost(groups: Sequence[Group]) -> str:
    """Return the key of the cost at which runs are compared: the most frequent limit, or GPU hours."""
    limited = [key for group in groups for run in group.runs for key, _ in run.recipe.budget.limits()]
    return max(COSTS, key=limited.count)


def _short(label: str, run: RunResult) -> str | None:
    """Return how a run ended before its limits; None if it reached them."""
    budget, outcome = run.recipe.budget, run.recipe.budget.outcome(run.spent)
    if (by := budget.ended_by(run.spent)) is None:
        return f"{label} seed {run.recipe.seed} is not at its end: {outcome}"
    # A cap of steps beside a budget: the run may have spent less than others.
    others = [UNITS[key] for key, _ in budget.limits() if key in COSTS]
    if by == "steps" and others:
        return f"{label} seed {run.recipe.seed} was cut short of its {' and '.join(others)}: {outcome}"
    return None


def _label(group: Group, groups: Sequence[Group]) -> str:
    several = len({other.model for other in groups}) > 1
    return f"{group.model} {group.method}" if several else group.method


def _mean(group: Group, of: Callable[[RunResult], float]) -> float:
    return float(np.mean([of(run) for run in group.runs]))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
