"""Generation of one step: prompts in, rollouts out, at the engine's own speed (``driver``). Unless the budget
cuts rollouts off, the result does not depend on the order in which tokens arrive. So a killed harvest resumes
from its recorded tokens, and the next step resumes rollouts that the budget suspended."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from megatron_eqlen.engines.protocol import Decoder
from megatron_eqlen.harvest.dialogues import Dialogues, grade_again
from megatron_eqlen.harvest.driver import Driver
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.harvest.meter import Meter
from megatron_eqlen.processes.collector import young_collected
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver, Setting
from megatron_eqlen.types import Metrics, Prompt, Rollout, RolloutKey


def harvest_seed(seed: int, step: int) -> int:
    """Return the seed of the rollouts that begin in ``step``, counted from 0."""
    return zlib.crc32(f"{seed}/{step}".encode())


@young_collected()
def harvest(
    engine: Decoder, plan: HarvestPlan, observers: Sequence[HarvestObserver] = ()
) -> tuple[list[Rollout], Metrics]:
    """Harvest all rollouts of the prompts of ``plan``.

    Returns the rollouts (resumed ones first, then by prompt and number), and the metrics of all attempts at
    the step; seconds are those of this attempt. When the budget (``rollout.tokens_per_step``) is used up,
    unfinished rollouts are cut, and those that have not begun left out; with ``rollout.carry_over`` both are
    suspended. Raises ValueError for prompts that do not fit, EngineError for an engine that died or hangs.
    """
    check_prompts(plan.prompts, plan.recipe, engine)
    dialogues = Dialogues(plan.conversations)
    meter = Meter(engine, plan, dialogues)
    driver = Driver(engine, plan, meter, dialogues, observers)
    harvesters = _harvesters(plan)
    # a recorded rollout is a result as it is; one whose environment cannot repeat its grades is made again
    talks = plan.conversations
    for rollout in plan.progress.rollouts:
        if talks is None or grade_again(talks, rollout, harvesters[rollout.key].seed):
            driver.finish(rollout)
    driver.run({key: harvester for key, harvester in harvesters.items() if key not in driver.finished})
    return [driver.finished[key] for key in harvesters if key in driver.finished], meter.metrics()


def _harvesters(plan: HarvestPlan) -> dict[RolloutKey, Harvester]:
    """Return the harvesters of all rollouts, resumed ones first."""
    kind = plan.kind or KINDS[plan.recipe.sampling]
    takes_turns = plan.conversations is not None
    setting = Setting(plan.recipe, frozenset(plan.eos_token_ids), plan.seed, plan.marker, takes_turns)
    harvesters: dict[RolloutKey, Harvester] = {}
    # rollouts of earlier steps, with the seeds that they had
    for partial in plan.progress.partial:
        if partial.origin is not None:
            seed = harvest_seed(plan.recipe.seed, partial.origin.step)
            of_prompt = kind.harvesters([partial.prompt], setting._replace(seed=seed))
            harvesters[partial.key] = next(found for found in of_prompt if found.index == partial.index)
    # new ones
    resumed_prompts = {prompt_id for prompt_id, _ in harvesters}
    new = [prompt for prompt in plan.prompts if prompt.prompt_id not in resumed_prompts]
    for harvester in kind.harvesters(new, setting):
        harvesters[harvester.key] = harvester
    for partial in plan.progress.partial:
        if partial.key in harvesters:
            harvesters[partial.key].prompt_columns = partial.prompt_columns
    return harvesters


def check_prompts(prompts: Sequence[Prompt], recipe: Recipe, engine: Decoder) -> None:
    """Raise ValueError for a prompt that is empty, occurs twice, or does not fit the engine."""
    # ids name tracks, requests and records
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ValueError(f"prompt {prompt.prompt_id}: expected once in a step, found twice")
        seen.add(prompt.prompt_id)
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.prompt_id}: expected at least one token, found none")
        path = len(prompt.token_ids) + recipe.longest_response
        if path > engine.max_model_len:
            asked = f"{len(prompt.token_ids)} tokens + {recipe.longest_response_text} = {path}"
            raise ValueError(f"prompt {prompt.prompt_id}: {asked} exceed the engine's {engine.max_model_len}")
        if max(prompt.token_ids) >= engine.vocab_size or min(prompt.token_ids) < 0:
            found = f"{min(prompt.token_ids)} to {max(prompt.token_ids)}"
            expected = f"expected token ids in 0..{engine.vocab_size - 1}"
            raise ValueError(f"prompt {prompt.prompt_id}: {expected}, found {found}")
