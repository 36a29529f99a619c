"""Results of evaluations: rewards, lengths, what was evaluated; and a run's, from the files in its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat, TypeAdapter

from megatron_eqlen.evaluation import statistics
from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.files import expecting, read_json, step_number, write_json
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe
from megatron_eqlen.types import Metrics

SHARED = 0.9
"""Least share of a result's questions that all results must have to be compared on these."""

RESPONSES = "-responses"
"""Suffix of the name of a folder of evaluated responses, which has a folder for each benchmark."""


@dataclass(frozen=True)
class Answers:
    """Samples of one problem, in order."""

    prompt_id: str
    rewards: list[FiniteFloat]
    """0 for a truncated response."""
    verdicts: list[str]
    """The grader's verdict, or ``truncated``."""
    lengths: list[int]
    """Tokens of each response, the end token included."""


@dataclass(frozen=True)
class EvaluationResult:
    """One benchmark: P problems with k samples each."""

    benchmark: str
    answers: list[Answers]
    manifest: dict[str, Any]
    """The subject of the evaluation: files, questions, grader, sampling, model."""
    file: Path | None = field(default=None, compare=False)
    """The file it was read from."""

    @property
    def scores(self) -> np.ndarray:
        """[k, P] float64 rewards: samples are the replicates."""
        return np.array([answers.rewards for answers in self.answers]).T

    @property
    def samples(self) -> int:
        return len(self.answers[0].rewards)

    @cached_property
    def accuracy(self) -> Interval:
        """avg@k; of a result that was read, as it was computed when it was written."""
        return statistics.crossed_bootstrap(self.scores)

    @property
    def sampling(self) -> str:
        """``temperature 0.6, top-p 0.95, top-k 20, at most 4,096 tokens``, without settings that are off."""
        with expecting("a result with the settings of its sampling", self.file or Path(self.benchmark)):
            used = self.manifest["rollout"]
            limit = f"at most {used['max_response_length']:,} tokens"
            if not used["temperature"]:
                return f"greedy, {limit}"
            # 0 for a setting that is off: top-p 1, top-k 0 or -1, min-p 0.
            cut = {"top-p": used["top_p"] % 1, "top-k": max(used["top_k"], 0), "min-p": used["min_p"]}
            named = [f"{name} {value:g}" for name, value in cut.items() if value]
            return ", ".join([f"temperature {used['temperature']:g}", *named, limit])

    def is_like(self, other: EvaluationResult) -> bool:
        """Return True if both answered and graded the same questions alike: only weights may differ."""
        ours, theirs = ({*each.manifest.get("graders", ())} for each in (self, other))
        # a grader that got no response, since all were truncated, is not named
        same = all(self.manifest.get(key) == other.manifest.get(key) for key in ("question_ids", "rollout"))
        return same and (ours <= theirs or theirs <= ours)

    def is_of(self, manifest: Mapping[str, Any]) -> bool:
        """Return True if this was measured as ``manifest`` says, without keys of other versions."""
        found = _settings(self.manifest)
        return all(found.get(key, value) == value for key, value in _settings(manifest).items())

    def verdict_fraction(self, verdict: str) -> float:
        verdicts = [given for answers in self.answers for given in answers.verdicts]
        return verdicts.count(verdict) / len(verdicts)

    @property
    def mean_tokens(self) -> float:
        return float(np.mean([answers.lengths for answers in self.answers]))

    def pass_at(self) -> dict[int, float]:
        """pass@k for the powers of two up to the number of samples, and for that number."""
        powers = [1 << n for n in range(self.samples.bit_length())]
        return {k: statistics.pass_at_k(self.scores, k) for k in sorted({*powers, self.samples})}

    def metrics(self) -> Metrics:
        """Flat names ``evaluation/BENCHMARK/...``."""
        accuracy, name = self.accuracy, f"evaluation/{self.benchmark}"
        return {
            f"{name}/avg@{self.samples}": accuracy.mean,
            f"{name}/avg@{self.samples}_low": accuracy.low,
            f"{name}/avg@{self.samples}_high": accuracy.high,
            **{f"{name}/pass@{k}": value for k, value in self.pass_at().items() if k > 1},
            f"{name}/truncated_fraction": self.verdict_fraction("truncated"),
            f"{name}/no_answer_fraction": self.verdict_fraction("no_answer"),
            f"{name}/mean_tokens": self.mean_tokens,
        }


def _settings(manifest: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    sections = {name: of if name in ("benchmark", "rollout") else {"": of} for name, of in manifest.items()}
    return {(name, key): value for name, section in sections.items() for key, value in section.items()}


def asked(benchmark: BenchmarkRecipe, recipe: Recipe) -> dict[str, Any]:
    """Return what a result's manifest takes from the recipe."""
    sampling = recipe.of_benchmark(benchmark)
    # a run's own commit of the hub, where the recipe names none
    without = {"revision"} if benchmark.revision is None else set[str]()
    # settings that change which responses are sampled
    kept = {"temperature", "top_p", "top_k", "min_p", "max_response_length"}
    return {
        "benchmark": benchmark.model_dump(mode="json", exclude=without),
        "model": recipe.model.path,
        "seed": recipe.seed,
        "samples": sampling.group_size,
        "rollout": sampling.rollout.model_dump(mode="json", include=kept),
    }


def has_all(path: Path, recipe: Recipe) -> bool:
    """Return True if ``path``, of ``write_results``, has the results that the recipe asks for by now."""
    benchmarks = recipe.evaluation.benchmarks
    found = by_benchmark(path) if benchmarks else {}
    return all(each.name in found and found[each.name].is_of(asked(each, recipe)) for each in benchmarks)


def compare(before: list[EvaluationResult], after: list[EvaluationResult]) -> Interval:
    """Return how much better ``after`` is, paired by problem; several results are of training runs that
    differ in their seed. Raises ValueError for different questions."""
    shared, count = shared_questions([*before, *after]), len(before)
    return statistics.paired_difference(_replicates(shared[:count]), _replicates(shared[count:]))


def over_seeds(results: list[EvaluationResult]) -> tuple[Interval, Interval]:
    """Return the accuracy over runs with different seeds: headline, and the paper's interval. Replicates are
    the runs' means, or the samples of a single run. Raises ValueError for different questions."""
    scores = _replicates(shared_questions(results))
    return statistics.crossed_bootstrap(scores), statistics.replicate_bootstrap(scores)


def _replicates(results: list[EvaluationResult]) -> np.ndarray:
    """Return [R, P]: each run's mean over its samples, or the samples of the only run."""
    if len(results) == 1:
        return results[0].scores
    return np.stack([result.scores.mean(axis=0) for result in results])


def shared_questions(results: list[EvaluationResult]) -> list[EvaluationResult]:
    """Return the results on the questions that all have: one without a reward is left out of an evaluation.
    Raises ValueError if a result has less than nine tenths of another result's questions."""
    by_id = [{answers.prompt_id: answers for answers in result.answers} for result in results]
    shared = [name for name in by_id[0] if all(name in of for of in by_id)]
    same_files = all(each.manifest.get("sha256") == results[0].manifest.get("sha256") for each in results)
    if len(shared) < (SHARED if same_files else 1) * max(map(len, by_id)):
        alone = next(name for of in by_id for name in of if name not in shared)
        files = {alone in of: result.file for result, of in zip(results, by_id, strict=True)}
        where = f"{alone} is in {files[True]} and not in {files[False]}"
        raise ValueError(f"{results[0].benchmark}: the results are of different questions: {where}")
    return [replace(r, answers=[of[name] for name in shared]) for r, of in zip(results, by_id, strict=True)]


def responses_of(path: Path) -> Path:
    """Return the folder of the responses that the results in ``path`` are about."""
    return path.with_name(path.stem + RESPONSES)


def write_results(path: Path, results: list[EvaluationResult]) -> None:
    """Write one evaluation's benchmarks as JSON; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The interval is written, too: a reader need not draw 10,000 bootstrap samples again.
    summaries = [{"intervals": [asdict(result.accuracy)]} | result.metrics() for result in results]
    records = [asdict(result) | {"summary": s} for result, s in zip(results, summaries, strict=True)]
    write_json(path, [{key: of[key] for key in of if key != "file"} for of in records])


def read_results(path: Path) -> list[EvaluationResult]:
    """Read a file of ``write_results``. Raises ValueError naming the file for any other content."""
    results = []
    with expecting("an evaluation result", path):
        first, *others = read_json(path)
        for record in (first, *others):
            answers = TypeAdapter(list[Answers]).validate_python(record["answers"])
            result = EvaluationResult(record["benchmark"], answers, record["manifest"], path)
            # Fills the cached property.
            interval = TypeAdapter(Interval).validate_python(record["summary"]["intervals"][0])
            vars(result)["accuracy"] = interval
            # What readers ask of a result fails here, where its file is named.
            _ = result.metrics(), _settings(result.manifest), result.is_like(result)
            results.append(result)
    return results


def by_benchmark(path: Path) -> dict[str, EvaluationResult]:
    """Read a file of ``write_results`` by benchmark. Raises ValueError as ``read_results``."""
    return {result.benchmark: result for result in read_results(path)}


def file_hashes(path: Path, chosen: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the sha256 of a benchmark's file, of all but hidden files of its folder, or of ``chosen``."""
    # hidden: ``.cache`` of ``hf download``, which holds the time
    every = path.rglob("*") if path.is_dir() else [path]
    files = {str(file.relative_to(path.parent)): file for file in sorted(chosen or every) if file.is_file()}
    return {n: hashlib.sha256(f.read_bytes()).hexdigest() for n, f in files.items() if "/." not in n}


# ---- a run's evaluations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One benchmark of one evaluation."""

    label: str
    step: int
    result: EvaluationResult
    first: EvaluationResult
    """The run's first result on this benchmark."""

    @property
    def when(self) -> str:
        return self.label if self.label in ("before", "after") else f"step {self.step}"

    @cached_property
    def gain(self) -> Interval | None:
        """Change since the run's first evaluation of the benchmark, paired by problem; None without one."""
        comparable = self.first is not self.result and self.result.is_like(self.first)
        return compare([self.first], [self.result]) if comparable else None


def evaluation_files(folder: Path, steps: int) -> list[tuple[int, Path]]:
    """Return (step, file) of a run's evaluations, in order: ``before`` is step 0, ``after`` comes last."""
    # ``before``, ``step-00000012``, or else ``after``
    files = [(0 if f.stem == "before" else step_number(f.stem) or steps, f) for f in folder.glob("*.json")]
    return sorted(files, key=lambda file: (file[0], file[1].stem == "after", file[1].name))


def read_evaluations(files: Iterable[tuple[int, Path]]) -> list[Evaluation]:
    """Return the evaluations in ``evaluation_files``. Raises ValueError naming a file with other content."""
    first: dict[str, EvaluationResult] = {}
    return [
        Evaluation(path.stem, step, result, first.setdefault(result.benchmark, result))
        for step, path in files
        for result in read_results(path)
    ]


def histories(evaluations: Iterable[Evaluation]) -> dict[str, list[Evaluation]]:
    """Return the evaluations of each benchmark, in order."""
    groups: dict[str, list[Evaluation]] = {}
    for row in evaluations:
        groups.setdefault(row.result.benchmark, []).append(row)
    return groups
