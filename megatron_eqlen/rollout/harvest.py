"""Generation of one step: prompts in, rollouts out, at the engine's own speed (``driver``).

A harvester (``sampling.kind``) sees only token sequences and makes one rollout. What is harvested does not
depend on the order in which tokens arrive (unless the budget cuts it off). So a harvest that was killed goes
on from the tokens that were recorded: its tracks start with them. So does a rollout that the budget
suspended, in the next step (``carried``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.driver import Driver
from megatron_eqlen.rollout.engine import Decoder, StalePolicyError
from megatron_eqlen.rollout.left import Carried, Left
from megatron_eqlen.rollout.meter import Meter
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.kind import Harvester
from megatron_eqlen.sampling.record import Part
from megatron_eqlen.types import (
    Metrics,
    Prompt,
    Rollout,
    RolloutKey,
    rollout_key,
    sampled_by,
)

if TYPE_CHECKING:
    from megatron_eqlen.rollout.recorder import Recorder  # pyarrow takes long to import


def harvest_seed(recipe: Recipe, step: int) -> int:
    """Of the rollouts that begin in a step, whose number is counted from 0."""
    return zlib.crc32(f"{recipe.seed}/{step}".encode())


def harvest(
    engine: Decoder,
    prompts: list[Prompt],
    recipe: Recipe,
    eos_token_ids: Collection[int],
    seed: int,
    left: Left | None = None,
    carried: Sequence[Carried] = (),
    recorder: Recorder | None = None,
    on_part: Callable[[Harvester, Part], None] | None = None,
    whole: Callable[[Prompt, int], bool] | None = None,
    together: Callable[[bool], bool] = bool,
    oldest_version: int | None = None,
) -> tuple[list[Rollout], Metrics]:
    """Harvest ``recipe.group_size`` tracks or completions for every prompt.

    ``seed`` differs from step to step; a track's own seed is a stable hash of it, the prompt's id and the
    track's number. ``recorder`` records rollouts, and the tokens of those that are not complete. ``on_part``
    is called with each part of a rollout as it becomes final: in this thread, between two decode steps, so it
    must return at once.

    ``left``: what earlier attempts at this harvest have recorded. ``carried``: rollouts that an earlier step
    suspended; their prompts may be among ``prompts``, which then name no other rollouts.

    ``whole``: of which rollouts (prompt and number) log-probs, masks and routes are kept, by default of all.
    Of the others the rank holds token ids, which forks need. ``together``: what one of the ranks that drive
    this engine in step says of the time, for all of them.

    ``oldest_version``: of the weights that may have sampled a token of what is returned, in earlier attempts
    too; what is ``carried`` says it for itself. None: the engine's weights do not change before the harvest
    ends.

    Returns the rollouts, those that were carried first, then in the order of ``prompts`` (and of stream
    numbers), and the metrics of the whole harvest, except for requests and speeds, which are this attempt's.
    When the budget (``rollout.tokens_per_step``, ``seconds_per_step``) is spent, those that are not complete
    are cut; those that did not start are not in the list. With ``rollout.carry_over`` both are suspended and
    in the list. Raises ValueError for prompts that do not fit, EngineError for an engine that died or
    hangs, and StalePolicyError for tokens of other weights.
    """
    check_prompts(prompts, recipe, engine.max_model_len)
    left = left or Left()
    goes_on = {rollout_key(one.rollout): one for one in carried}
    harvesters = _harvesters(prompts, goes_on, recipe, frozenset(eos_token_ids), seed)
    for key, routes in left.prompt_routes.items():
        if key in harvesters:
            harvesters[key].prompt_routes = routes
    meter = Meter(engine, left.generated_tokens, carried if recipe.rollout.carry_over else None)
    finished: dict[RolloutKey, Rollout] = {}
    version = engine.policy_version

    def collect(rollout: Rollout) -> None:
        key = rollout_key(rollout)
        own = oldest_version is None or key not in goes_on
        _check_version(rollout, version, oldest_version if own else goes_on[key].oldest_version)
        finished[key] = rollout
        meter.count(rollout)

    for rollout in left.rollouts:
        collect(rollout)
    driver = Driver(
        engine,
        recipe,
        meter,
        on_part or _nothing,
        collect,
        recorder,
        left.tracks,
        whole or _all,
        goes_on,
        together,
    )
    driver.run({key: one for key, one in harvesters.items() if key not in finished})
    return [finished[key] for key in harvesters if key in finished], meter.metrics()


def _harvesters(
    prompts: list[Prompt],
    carried: Mapping[RolloutKey, Carried],
    recipe: Recipe,
    eos: frozenset[int],
    seed: int,
) -> dict[RolloutKey, Harvester]:
    """Of all rollouts, those that were carried first."""
    old = {prompt_id for prompt_id, _ in carried}
    new = [prompt for prompt in prompts if prompt.prompt_id not in old]
    begun = {key: _harvester(one, recipe, eos) for key, one in carried.items()}
    return begun | {
        (one.prompt.prompt_id, one.index): one
        for one in KINDS[recipe.sampling].harvesters(new, recipe, eos, seed)
    }


def _harvester(carried: Carried, recipe: Recipe, eos: frozenset[int]) -> Harvester:
    prompt = carried.rollout.prompt
    of_prompt = KINDS[recipe.sampling].harvesters([prompt], recipe, eos, carried.seed)
    found = next(one for one in of_prompt if one.index == carried.rollout.index)
    found.prompt_routes = carried.prompt_routes
    return found


def _nothing(harvester: Harvester, part: Part) -> None: ...


def _all(prompt: Prompt, index: int) -> bool:
    return True


def _check_version(rollout: Rollout, version: int, oldest: int | None) -> None:
    if oldest is None and rollout.policy_version != version:
        found, expected = rollout.policy_version, f"the engine's {version}"
    elif oldest is not None and min(sampled_by(rollout)) < oldest:
        found, expected = min(sampled_by(rollout)), f"{oldest} or newer"
    else:
        return
    raise StalePolicyError(f"{rollout.prompt_id}: generated by policy_version {found}, expected {expected}")


def check_prompts(prompts: list[Prompt], recipe: Recipe, max_model_len: int) -> None:
    """Raise ValueError for a prompt that is empty, twice there, or too long for the engine."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ValueError(f"prompt {prompt.prompt_id}: expected once in a step, found twice")
        seen.add(prompt.prompt_id)
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.prompt_id}: expected at least one token, found none")
        path = len(prompt.token_ids) + recipe.rollout.max_response_length
        if path > max_model_len:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} tokens + rollout.max_response_length "
                f"{recipe.rollout.max_response_length} = {path} exceed the engine's {max_model_len}"
            )
