"""avg@k on benchmarks: k independent completions of every problem, graded as in training."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from megatron_eqlen.evaluation.result import Answers, EvaluationResult, asked, file_hashes
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe
from megatron_eqlen.recipe.contents import weights
from megatron_eqlen.recipe.inputs import data_files, local_path
from megatron_eqlen.rewards.scoring import UnscoredError
from megatron_eqlen.types import Gather, Part, Prompt, Rollout

log = logging.getLogger(__name__)

EVALUATION_SEED = 20_000_003
"""Added to the recipe's seed, before and after training: no evaluation repeats a training sample."""


def result_of(
    manifest: dict[str, Any],
    problems: list[Prompt],
    groups: Sequence[Rollout],
    recipe: Recipe,
    gather: Gather,
) -> EvaluationResult:
    """Return the result of ``manifest`` (``subject``) from this rank's scored ``groups``; ``gather`` merges
    all ranks' in any order. A problem with a response without a reward is left out, also of the manifest's
    questions. Raises UnscoredError if all are."""
    # Completions without a reward, such as those whose grader failed, unless they count as 0.
    lost = [[part.grade for part in group.unscored() if recipe.reward.on_error != "zero"] for group in groups]
    # none of an environment's own grades, or of one that was lost
    graders = [{part.grade.grader for part in group.parts if part.grade} - {""} for group in groups]
    gathered = gather(list(zip(map(_answers, groups), graders, lost, strict=True)))
    # avg@k needs k rewards: a problem with a lost one is left out.
    answers = {answer.prompt_id: answer for answer, _, lost in gathered if not lost}
    name = manifest["benchmark"]["name"]
    if causes := [f"{lost[0].detail} ({answer.prompt_id})" for answer, _, lost in gathered if lost]:
        left = f"{name}: {len(causes)} of {len(problems)} problems are left out: {causes[0]}"
        if not answers:
            raise UnscoredError(f"evaluation: {left}")
        log.warning("evaluation: %s", left)
        problems = [problem for problem in problems if problem.prompt_id in answers]
    return EvaluationResult(
        benchmark=name,
        # In the order of the benchmark: replicas answer in any order.
        answers=[answers[problem.prompt_id] for problem in problems],
        manifest=manifest
        | {
            "question_ids": [problem.prompt_id for problem in problems],
            "graders": sorted({name for _, names, _ in gathered for name in names}),
        },
    )


def subject(benchmark: BenchmarkRecipe, recipe: Recipe, version: int) -> dict[str, Any]:
    """Return what decides a result: the recipe, the benchmark's files and the policy's ``version``."""
    files = file_hashes(local_path(benchmark), data_files(benchmark))
    return asked(benchmark, recipe) | {"policy_version": version, "sha256": files}


def folder_name(manifest: dict[str, Any], problems: Sequence[Prompt], recipe: Recipe) -> str:
    """Return the name of the folder of responses for ``manifest`` (``subject``): another one for other
    prompts, weights, sampling or environments, the same one for other graders and gold answers."""
    kept = {key: value for key, value in manifest.items() if key not in ("benchmark", "sha256")}
    prompts = [(problem.prompt_id, [*problem.token_ids]) for problem in problems]
    decides = kept, prompts, weights(local_path(recipe.model)), recipe.rollout.quantization
    text = json.dumps([*decides, recipe.environment.model_dump(mode="json", exclude={"workers", "timeout"})])
    return f"{manifest['benchmark']['name']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _answers(group: Rollout) -> Answers:
    """Return the group's answers. Raises ValueError for a reward outside [0, 1], which is no accuracy."""
    for part in group.parts:
        if part.grade and not 0 <= part.grade.reward <= 1:
            where = f"evaluation.benchmarks: {group.prompt.source}: avg@k and pass@k are of rewards in [0, 1]"
            ways = "give the benchmark a grader of its own, or let the environment grade in [0, 1]"
            raise ValueError(f"{where}, {part.grade.grader} gave {part.grade.reward:g}: {ways}")
    return Answers(
        prompt_id=group.prompt_id,
        rewards=[part.grade.reward if part.grade else 0.0 for part in group.parts],
        verdicts=list(map(_verdict, group.parts)),
        lengths=list(map(len, group.parts)),
    )


def _verdict(completion: Part) -> str:
    if completion.finish_reason != "stop":
        return "truncated"
    assert completion.grade is not None, "an ended completion was not scored"
    return completion.grade.verdict
