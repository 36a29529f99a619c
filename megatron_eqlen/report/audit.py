"""Advantages of every objective on the same tokens, beside what these changed (``report.probe``). Least
squares scale advantages to the truth first, as a learning rate does: bias and noise are what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_eqlen.job import Job, parse, untrained
from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.objectives.checks import problems
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.objectives.registry import OBJECTIVES
from megatron_eqlen.objectives.token_baseline import BASELINES
from megatron_eqlen.types import Part, Rollout


class Change(NamedTuple):
    """Change of the value across some tokens of a response."""

    line: Sequence[Part]
    """The response's parts, of the rollouts that are audited."""
    begin: int
    """Generated tokens of the response before the first."""
    end: int
    value: tuple[float, float, float]
    """The change, and its 95% interval."""

    @property
    def sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.value[1] > 0 or self.value[2] < 0


@dataclass(frozen=True)
class Agreement:
    """Agreement of an objective's advantages with changes; NaN where it is undefined."""

    objectives: tuple[str, ...]
    """Objectives whose advantages differ in size alone, or that are refused for the same reason."""
    sign: float = float("nan")
    """Share of the sure changes whose sign the advantage has; one of 0 counts half."""
    rank: float = float("nan")
    """Spearman's correlation with all changes, whose own noise lowers it for all objectives alike."""
    bias_early: float = float("nan")
    """Mean of (scaled advantage - change) in the first halves of responses."""
    bias_late: float = float("nan")
    noise: float = float("nan")
    """Standard deviation of (scaled advantage - change) over that of the changes."""
    refused: str = ""
    """Why the objective does not fit the run's sampling, or its rewards."""

    @property
    def row(self) -> str:
        biases = f"{self.bias_early:+.2f}, {self.bias_late:+.2f}"
        numbers = f"{self.sign:>6.0%}{self.rank:>8.2f}{biases:>16}{self.noise:>8.2f}"
        return f"{self.refused or numbers}  {', '.join(self.objectives)}"


def audit(changes: Sequence[Change], rollouts: Sequence[Rollout], job: Job) -> list[Agreement]:
    """Return the agreement of each objective of the registry, of Dr. GRPO's with each other baseline, and of
    the run's own with its ``loss``, on scored ``rollouts`` of the job's sampling."""
    variants: list[tuple[str, str, dict[str, Any]]] = [(name, name, {}) for name in OBJECTIVES]
    variants += [(f"dr_grpo, {name}", "dr_grpo", {"baseline": name}) for name in BASELINES if name != "unit"]
    recipe, raw = job.recipe, untrained(job.recipe)
    # nothing is trained, so no mismatch has to be corrected
    raw["rollout"].pop("quantization", None)
    variants.append(("the run's", recipe.objective, raw.get("loss", {})))
    # draws of dynamic sampling may leave more than a step trains; other steps are whole
    many = job.objective.dynamic_sampling and not recipe.rollout.carry_over
    room = recipe.data.prompts_per_step if many else len(rollouts)
    alike: dict[tuple[float, ...], tuple[list[str], np.ndarray]] = {}
    refused, known = list[Agreement](), {*problems(job)}
    for title, objective, loss in variants:
        try:
            variant = Job(parse(raw | {"objective": objective, "loss": loss}, "", known))
            units = weighted_units(trained(rollouts, variant, room), variant)
        except ValueError as error:  # of the recipe, or of the rewards
            refused.append(Agreement((title,), refused=str(error).removeprefix(": ")))
            continue
        advantages = {
            id(part): node.advantage if unit.trained else 0.0
            for unit in units
            for part, node in zip(unit.members, unit.nodes, strict=True)
        }
        given = np.array([_mean(change, advantages) for change in changes])
        # a learning rate makes up for a factor: objectives that differ by one alone share a row
        direction = given / (np.abs(given).max(initial=0.0) or 1.0)
        alike.setdefault(tuple(direction.round(9).tolist()), ([], given))[0].append(title)
    return [_agreement(tuple(titles), changes, given) for titles, given in alike.values()] + refused


def _agreement(titles: tuple[str, ...], changes: Sequence[Change], given: np.ndarray) -> Agreement:
    from scipy.stats import rankdata  # slow to import

    # [changes] each
    truth = np.array([change.value[0] for change in changes])
    late = np.array([change.begin + change.end > sum(map(len, change.line)) for change in changes])
    sure = np.array([change.sure for change in changes])
    agrees = np.where(given[sure] == 0, 0.5, np.sign(given[sure]) == np.sign(truth[sure]))
    # least squares
    scale = float(given @ truth / (given @ given)) if given.any() else 0.0
    wrong = scale * given - truth
    with np.errstate(invalid="ignore", divide="ignore"):  # where all are equal
        # equal values share the mean of their ranks
        ranks = np.corrcoef(rankdata([given, truth], axis=1))[0, 1] if len(changes) > 1 else float("nan")
        noise = float(wrong.std() / truth.std())
    return Agreement(titles, _of(agrees), float(ranks), _of(wrong[~late]), _of(wrong[late]), noise)


def _mean(change: Change, advantages: dict[int, float | np.ndarray]) -> float:
    """Return the mean advantage of a change's tokens. ``advantages``: by the id of a part."""
    along = [np.broadcast_to(advantages.get(id(part), 0.0), len(part)) for part in change.line]
    return float(np.concatenate(along)[change.begin : change.end].mean())


def _of(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
