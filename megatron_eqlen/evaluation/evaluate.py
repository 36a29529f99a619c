"""avg@k on benchmarks: k independent completions of every problem, graded as in training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from megatron_eqlen.engines.protocol import Engine
from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.evaluation.result import Answers, EvaluationResult, asked, file_hashes
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe
from megatron_eqlen.recipe.inputs import data_files, local_path
from megatron_eqlen.rewards.scoring import EarlyGrading, Scorer, UnscoredError
from megatron_eqlen.sampling.harvester import every_rollout
from megatron_eqlen.types import Part, Prompt, Rollout

log = logging.getLogger(__name__)

EVALUATION_SEED = 20_000_003
"""Added to the recipe's seed, before and after training: no evaluation repeats a training sample."""


def evaluate(
    engine: Engine,
    benchmark: BenchmarkRecipe,
    problems: list[Prompt],
    scorer: Scorer,
    recipe: Recipe,
    eos_token_ids: Collection[int],
    share: Callable[[list[Prompt]], list[Prompt]] = list,
    grades: Callable[[Prompt, int], bool] = every_rollout,
    gather: Callable[[list], list] = list,
    conversations: Conversations | None = None,
) -> EvaluationResult:
    """Evaluate the engine's weights on ``problems`` with ``recipe.evaluation.samples`` completions each,
    sampled as ``Recipe.of_benchmark`` says.

    Each of several engine replicas answers its ``share`` of the problems, each of its ranks ``grades`` some
    of them, and ``gather`` merges the results in any order. Responses are graded while others are generated.
    The same weights and recipe give the same result. A problem with a response without a reward is left out,
    also of the manifest's questions. Raises UnscoredError if all are.
    """
    sampling = recipe.of_benchmark(benchmark)
    plan = HarvestPlan(
        share(problems),
        sampling,
        eos_token_ids,
        recipe.seed + EVALUATION_SEED,
        keeps_columns=lambda prompt, index: False,  # no evaluation reads them
        conversations=conversations and replace(conversations, own_seeds=True),
    )
    # Benchmarks may have a temperature of their own; training's comes back whatever happens.
    engine.sample_as(sampling.rollout)
    try:
        harvested, _ = harvest(engine, plan, [EarlyGrading(scorer, grades)])
    finally:
        engine.sample_as(recipe.rollout)
    # Each rank scores the problems that it grades, and all ranks gather the answers.
    groups = [group for group in harvested if grades(group.prompt, group.index)]
    scorer.score(groups)
    # Completions without a reward, such as those whose grader failed, unless they count as 0.
    lost = [[part.grade for part in group.unscored() if recipe.reward.on_error != "zero"] for group in groups]
    # none of an environment's own grades, or of one that was lost
    graders = [{part.grade.grader for part in group.parts if part.grade} - {""} for group in groups]
    gathered = gather(list(zip(map(_answers, groups), graders, lost, strict=True)))
    # avg@k needs k rewards: a problem with a lost one is left out.
    answers = {answer.prompt_id: answer for answer, _, lost in gathered if not lost}
    if causes := [f"{lost[0].detail} ({answer.prompt_id})" for answer, _, lost in gathered if lost]:
        left = f"{benchmark.name}: {len(causes)} of {len(problems)} problems are left out: {causes[0]}"
        if not answers:
            raise UnscoredError(f"evaluation: {left}")
        log.warning("evaluation: %s", left)
        problems = [problem for problem in problems if problem.prompt_id in answers]
    return EvaluationResult(
        benchmark=benchmark.name,
        # In the order of the benchmark: replicas answer in any order.
        answers=[answers[problem.prompt_id] for problem in problems],
        manifest=subject(benchmark, recipe, engine.policy_version)
        | {
            "question_ids": [problem.prompt_id for problem in problems],
            "graders": sorted({name for _, names, _ in gathered for name in names}),
        },
    )


def subject(benchmark: BenchmarkRecipe, recipe: Recipe, version: int) -> dict[str, Any]:
    """Return what decides a result: the recipe, the benchmark's files and the policy's ``version``."""
    files = file_hashes(local_path(benchmark), data_files(benchmark))
    return asked(benchmark, recipe) | {"policy_version": version, "sha256": files}


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
