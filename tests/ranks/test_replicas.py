"""Ranks as engine replicas: their shares of generation and grading, and that all end with the same
rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import tests.kit.rollouts as kit
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.processes.distributed import at_homes
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.rewards.measured import scored
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.run.replicas import Replicas, rollouts_of_all_ranks
from megatron_eqlen.sampling.harvester import every_rollout
from megatron_eqlen.sampling.profile import profile_metrics
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout
from tests.kit.distributed import run_ranks
from tests.pure.test_objectives_build import at_random, recipe
from tools.benchmarks.scale import make_prompts, make_recipe
from tools.benchmarks.scripted import EOS, ScriptedEngine

PROMPTS = [Prompt(f"q{number}", [1], "?", "math", f"{number}", number=number) for number in range(7)]
END = 0


class Letters:
    """A tokenizer whose token ids are code points; it records its calls."""

    def __init__(self) -> None:
        self.decoded: list[str] = []

    def decode(self, token_ids):
        self.decoded.append("".join(chr(token) for token in token_ids if token != END))
        return self.decoded[-1]


def generated(prompt: Prompt, index: int) -> Rollout:
    tokens = [*map(ord, rf"{prompt.prompt_id}/{index}: \boxed{{{prompt.number + index}}}"), END]
    return kit.group(prompt, 0, [Part(Tokens.of(tokens, [0.0] * len(tokens)), "stop")], index)


def harvest_and_grade(engine_size: int, in_step: bool, rollouts: int) -> tuple[list, list, list]:
    """Return (rollouts harvested by this rank, rollouts graded by it, everyone's with the verdict)."""
    replicas, letters = Replicas(engine_size, in_step), Letters()
    scorer = Scorer(RewardRecipe(workers=1), letters)
    harvested = []
    for group in (generated(prompt, n) for prompt in replicas.share(PROMPTS) for n in range(rollouts)):
        harvested.append(group)
        if replicas.grades(group.prompt, group.index):  # as it ends; the last are left to the end
            scorer.begin_ended([group] if group.prompt.number < 5 else [])
    part = replicas.part(harvested)
    scorer.score(part)
    scorer.close()
    everyone = rollouts_of_all_ranks(part, PROMPTS)
    return (
        [(group.prompt_id, group.index) for group in harvested],
        [text.partition(":")[0] for text in letters.decoded],
        [(group.prompt_id, group.index, group.parts[0].grade.verdict) for group in everyone],
    )


@pytest.mark.parametrize("rollouts", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "engine_size", "in_step"),
    [(2, 2, True), (2, 1, True), (4, 2, True), (2, 2, False)],
    ids=["one replica of two", "two replicas", "two replicas of two", "servers, driven by the first rank"],
)
def test_every_response_is_graded_once_and_reaches_every_rank(ranks, engine_size, in_step, rollouts):
    answers = run_ranks(ranks, harvest_and_grade, engine_size, in_step, rollouts)
    all_of_them = [(prompt.prompt_id, n) for prompt in PROMPTS for n in range(rollouts)]
    assert sorted(name for _, graded, _ in answers for name in graded) == sorted(
        f"{prompt_id}/{n}" for prompt_id, n in all_of_them
    )
    verdicts = [(*pair, "wrong" if pair[1] else "correct") for pair in all_of_them]
    assert [everyone for _, _, everyone in answers] == [verdicts] * ranks
    if in_step and engine_size == 2:
        assert answers[0][0] == answers[1][0], "both ranks of a replica hold all that it harvested"
        assert abs(len(answers[0][1]) - len(answers[1][1])) <= 1, "and share the grading"


def harvest_in_step(model: Path) -> tuple[list[bool], list[bool]]:
    """Return for each rollout after scoring whether it is complete on this rank, and whether it equals the
    sampled one."""
    prompts, recipe, replicas = make_prompts(2), make_recipe(model, 64, kept=3), Replicas(2)

    def harvested(keeps_columns: Callable[[Prompt, int], bool]) -> list[Rollout]:
        engine = ScriptedEngine(20, len(prompts[0].token_ids), kept=3)
        mine = replicas.share(prompts)
        return harvest(engine, HarvestPlan(mine, recipe, [EOS], seed=0, keeps_columns=keeps_columns))[0]

    part = replicas.part(harvested(replicas.keeps))
    for segment in (segment for rollout in part for segment in rollout.parts):
        segment.grade = Grade(1.0, "scored") if segment.finish_reason == "stop" else None
    everyone = rollouts_of_all_ranks(part, prompts)
    mine = [all(s.home == dist.get_rank() for s in graded.parts) for graded in everyone]
    same = [
        plain(found) == plain(wanted) if whole else len(found) == len(wanted)
        for graded, full, whole in zip(everyone, harvested(every_rollout), mine, strict=True)
        for found, wanted in zip(graded.parts, full.parts, strict=True)
    ]
    return mine, same


def measured(kind: str, world: int) -> list[dict]:
    """Return metrics of random rollouts, those of other ranks as skeletons."""
    rank = dist.get_rank() if dist.is_initialized() else None
    steps = [at_random(kind, seed, world) for seed in range(20)]
    for part in (part for step in steps for rollout in step for part in rollout.parts if rank is not None):
        part.tokens = part.tokens if part.home == rank else part.tokens.bare()
    settings = recipe(sampling=kind)
    return [scored(step, settings.reward)[1] | profile_metrics(step, settings) for step in steps]


@pytest.mark.parametrize("kind", ["equal_length", "independent", "tree"])
def test_ranks_that_measure_their_own_rollouts_find_what_one_finds_that_measures_all(kind):
    expected = measured(kind, 3)
    assert len({metrics["policy/response_length"] for metrics in expected}) > 10
    assert run_ranks(3, measured, kind, 3) == [expected] * 3


def test_each_rollout_is_measured_once():
    expected = [f"{number % 2}: q{number}" for number in range(7)]
    assert run_ranks(2, looked_at) == [expected] * 2


def looked_at() -> list[str]:
    rollouts = [generated(prompt, 0) for prompt in PROMPTS]
    for number, rollout in enumerate(rollouts):
        rollout.parts[0].home = number % 2
    return at_homes(rollouts, lambda rollout: f"{dist.get_rank()}: {rollout.prompt_id}")


def plain(segment: Part) -> Part:
    return replace(segment, grade=None, home=None)


def test_ranks_of_a_replica_that_keep_parts_of_a_harvest_have_it_all_together(tmp_path):
    """The rollouts have sampling masks; the first rank records, so it keeps everything until then."""
    (first, same), (second, also) = run_ranks(2, harvest_in_step, tmp_path)
    assert first == [not whole for whole in second]
    assert sum(first) == sum(second) > 0
    assert all(same)
    assert all(also)
