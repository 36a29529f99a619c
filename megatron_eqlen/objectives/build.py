"""Builds token trees with one advantage and one weight a token from scored rollouts.

    rollouts ─comparison_units─► units ─estimate─► advantages ─► trained units ─► weights ─► token trees

A weight holds every factor of the objective's averages. For a sequence of L tokens, one of M members of one
of the N units of one of the K rollouts of one of the batch's P prompts, ``seq-mean-token-mean`` gives

    weight = 1/P x 1/K x 1/N x 1/M x 1/L

An equal-length stream has K = G/2, N = N_k, M = 2 (Eq. 5 and 6 of the paper); a group K = N = 1, M = G. With
``equal_length.pair_weight: on_policy`` and in trees a unit's share of the rollout replaces 1/N: 2^-(i-1) for
pair i. P and K are the batch's, but the recipe's where units name shares and with ``rollout.carry_over``:
lengths decide how many rollouts are complete in a step, and would decide the weight of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean
from typing import Any

import numpy as np

from megatron_eqlen.metrics import at_once
from megatron_eqlen.objectives.advantages import dr_grpo, whiten
from megatron_eqlen.objectives.aggregation import BatchSize, Member
from megatron_eqlen.objectives.objective import Objective, ResolvedRecipe
from megatron_eqlen.objectives.parts import checked_advantages, checked_weight, described
from megatron_eqlen.objectives.registry import is_on_policy
from megatron_eqlen.objectives.token_baseline import of_unit, token_baselines
from megatron_eqlen.objectives.units import comparison_units
from megatron_eqlen.processes.collector import collector_paused
from megatron_eqlen.processes.failures import fault_of
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import EQUAL_REWARDS, ComparisonUnit
from megatron_eqlen.tokens import VERSIONS
from megatron_eqlen.types import Gather, Metrics, Node, Rollout, TokenTree


@collector_paused()
def build_minibatches(
    rollouts: Sequence[Rollout],
    job: ResolvedRecipe,
    policy_version: int | None = None,
    gather: Gather = list,
    rank: int | None = None,
) -> tuple[list[list[TokenTree]], Metrics]:
    """Return a forest for each of the harvest's ``loss.minibatches`` optimizer steps, in order, and metrics.

    A minibatch holds whole prompts, and its weights average over its own prompts and tokens only, so that
    every optimizer step has a gradient of the same scale; advantages are those of the whole batch.
    Minibatches without a prompt are left out. ``policy_version``: of the trained weights; with it the metrics
    say how stale tokens are. ``gather`` joins the lists of all ranks. ``rank``: this one, which compares the
    rollouts whose arrays it has and gets the trees of others; None: it compares all. Raises ValueError for an
    ungraded response.
    """
    objective, homes = job.objective, {rollout.home for rollout in rollouts if rollout.parts}
    together = objective.whitened or job.recipe.equal_length.baseline == "streams"
    gather_units = gather
    if rank is not None and (len(homes) < 2 or together or objective.baseline is not of_unit):
        # all ranks would wait for the only home, or need the units of the whole batch: each compares all
        rank, gather_units = None, list
    parts = _split(rollouts, job.recipe)
    minibatches = _weigh(parts, job, gather_units, rank)
    units = [unit for minibatch in minibatches for unit in minibatch.units]
    own = [rollout for rollout in rollouts if rollout.is_at(rank)]
    metrics = unit_metrics(units, own, job.recipe, gather_units)
    if policy_version is not None:
        metrics |= staleness_metrics(units, policy_version, gather)
    if gather_units is not list:
        trees = [tree for minibatch in minibatches for tree in minibatch.trees]
        _fill(trees, [rollout for part in parts for rollout in part], gather_units)
    return [minibatch.trees for minibatch in minibatches], metrics


def weighted_units(rollouts: Sequence[Rollout], job: ResolvedRecipe) -> list[ComparisonUnit]:
    """Return the comparison units of ``build_minibatches``, with advantages and weights."""
    return [unit for minibatch in _weigh(_split(rollouts, job.recipe), job) for unit in minibatch.units]


def has_gradient(rollouts: Sequence[Rollout], job: ResolvedRecipe) -> dict[str, bool]:
    """Return, by prompt, True if rewards differ within one of its units; length penalties do not count."""
    found = {rollout.prompt_id: False for rollout in rollouts}
    for unit in _compare(rollouts, job.recipe, replace(job.objective, overlong_buffer=0)).units:
        found[unit.prompt_id] |= unit.differs
    return found


def _split(rollouts: Sequence[Rollout], recipe: Recipe) -> list[list[Rollout]]:
    """Return the rollouts of each minibatch."""
    order = list(dict.fromkeys(rollout.prompt_id for rollout in rollouts))
    count = min(recipe.loss.minibatches, max(len(order), 1))
    # consecutive prompts, nearly equally many in each part
    number = {prompt_id: i * count // len(order) for i, prompt_id in enumerate(order)}
    return [[r for r in rollouts if number[r.prompt_id] == part] for part in range(count)]


@dataclass
class _Minibatch:
    """Trees and units of the rollouts that one optimizer step averages over."""

    rollouts_of_prompt: Counter[str]
    trees: list[TokenTree] = field(default_factory=list)
    units: list[ComparisonUnit] = field(default_factory=list)


def _fill(trees: Sequence[TokenTree], rollouts: Sequence[Rollout], gather: Gather) -> None:
    """Fill in the trees of other ranks: bare tables, except the ids of prompts."""
    sent = [
        (number, tree.name, [(n.parent, n.tokens.bare(), n.advantage, n.weight, n.home) for n in tree.nodes])
        for number, tree in enumerate(trees)
        if tree.nodes
    ]
    prompts = {rollout.prompt_id: rollout.prompt.token_ids for rollout in rollouts}
    token_ids = {prompt_id: np.array(ids, np.int32) for prompt_id, ids in prompts.items()}
    known: list[tuple[int, str, list[tuple[Any, ...]]]] = gather(sent)
    for number, name, nodes in known:
        if not trees[number].nodes:
            trees[number].name, trees[number].nodes = name, [Node(*fields) for fields in nodes]
            root, prompt = trees[number].nodes[0], token_ids[rollouts[number].prompt_id]
            root.tokens = root.tokens.with_column("token_ids", prompt)


def _weigh(
    parts: Sequence[Sequence[Rollout]], job: ResolvedRecipe, gather: Gather = list, rank: int | None = None
) -> list[_Minibatch]:
    recipe, objective = job.recipe, job.objective
    first = [0, *accumulate(map(len, parts))]
    batches = [_compare(part, recipe, objective, at, rank) for part, at in zip(parts, first, strict=False)]
    units = [unit for batch in batches for unit in batch.units]
    _set_advantages(units, recipe, objective)
    if objective.baseline is not of_unit:
        rollouts = [rollout for part in parts for rollout in part]
        _set_token_advantages(units, rollouts, recipe, objective)
    _mark_trained(units, recipe)
    # of all ranks' counted units
    tokens = Counter[str]()
    for prompt_id, count in gather([(unit.prompt_id, sum(unit.lengths) * unit.counted) for unit in units]):
        tokens[prompt_id] += count
    for batch in batches:
        _set_weights(batch, recipe, objective, tokens)
    return batches


def _compare(
    rollouts: Sequence[Rollout], recipe: Recipe, objective: Objective, first: int = 0, rank: int | None = None
) -> _Minibatch:
    """Return the units of ``rollouts``, which are numbered from ``first`` on. Others' trees are empty."""
    batch = _Minibatch(Counter(rollout.prompt_id for rollout in rollouts))
    for number, rollout in enumerate(rollouts, first):
        if not rollout.is_at(rank):
            batch.trees.append(TokenTree("", []))
            continue
        tree, units = comparison_units(rollout, recipe, objective)
        for unit in units:
            # units of named rewards are numbered like their unit
            for named in (unit, *(named for _, named in unit.apart)):
                named.rollout = number
            if objective.forks == "equal":
                unit.share = None
        batch.trees.append(tree)
        batch.units += units
    if recipe.equal_length.baseline == "streams":
        # all units, then those of each name: streams are compared under one name
        for units in zip(*([unit, *(named for _, named in unit.apart)] for unit in batch.units), strict=True):
            _set_baselines(units)
    return batch


def _set_advantages(units: list[ComparisonUnit], recipe: Recipe, objective: Objective) -> None:
    advantages = [_advantages(unit, objective) for unit in units]
    if objective.advantage is dr_grpo and recipe.sampling == "tree" and is_on_policy(recipe, objective):
        # r - mean is (M - 1) / M of r - mean of the others: the factor of the prompt's lines, at every fork
        roots = 1 - 1 / recipe.group_size
        factors = [roots / (1 - 1 / len(unit.members)) if len(unit.members) > 1 else 1.0 for unit in units]
        advantages = [[v * factor for v in own] for own, factor in zip(advantages, factors, strict=True)]
    if objective.whitened is not None:
        advantages = whiten(advantages, centre=objective.whitened == "standardize")
    for unit, values in zip(units, advantages, strict=True):
        unit.advantages = values
        for node, value in zip(unit.nodes, values, strict=True):
            node.advantage = value


def _set_token_advantages(
    units: list[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe, objective: Objective
) -> None:
    """Compare each token with its own baseline; a unit's advantages become means."""
    found = token_baselines(units, rollouts, objective.baseline, recipe.rollout.max_response_length)
    for unit, baselines in zip(units, found, strict=True):
        for number, (node, baseline) in enumerate(zip(unit.nodes, baselines, strict=True)):
            if baseline is not None:
                values = unit.rewards[number] - baseline
                # round-off is no difference: such a node has no gradient, and the packer may drop it
                node.advantage = values if np.abs(values).max(initial=0.0) > EQUAL_REWARDS else 0.0
                unit.advantages[number] = float(np.mean(node.advantage))


def _advantages(unit: ComparisonUnit, objective: Objective) -> list[float]:
    if unit.apart:
        # [names][members], each with its weight
        of_names = [[weight * v for v in _advantages(named, objective)] for weight, named in unit.apart]
        return [sum(values) for values in zip(*of_names, strict=True)]

    def where() -> str:
        part = described(objective.advantage)
        return f"prompt {unit.prompt_id}: advantage {part} of rewards {unit.rewards}"

    try:
        if unit.baseline is None:
            # copies: an estimator of a user's own may sort what it gets
            advantages = objective.advantage([*unit.rewards], [*unit.lengths])
        else:
            # a member against its baseline alone: the estimator sees a pair of the two rewards
            members = zip(unit.rewards, unit.lengths, strict=True)
            advantages = [objective.advantage([r, unit.baseline], [length] * 2)[0] for r, length in members]
    except Exception as error:  # a user's code
        raise ValueError(f"{where()}: {fault_of(error)}") from error
    return checked_advantages(advantages, len(unit.nodes), where)


def _set_baselines(units: Sequence[ComparisonUnit]) -> None:
    """Compare each member with the mean value of the prompt in its other rollouts. A rollout's first unit
    estimates the value: the mean of a first pair, or the reward of a tail that no pair precedes."""
    values: dict[str, dict[int, float]] = {}
    for unit in units:
        values.setdefault(unit.prompt_id, {}).setdefault(unit.rollout, fmean(unit.rewards))
    for unit in units:
        others = [value for rollout, value in values[unit.prompt_id].items() if rollout != unit.rollout]
        unit.baseline = fmean(others) if others else unit.baseline


def _mark_trained(units: list[ComparisonUnit], recipe: Recipe) -> None:
    """Mark units that have a gradient. Without teacher and KL penalty a unit with no advantage has none:
    weight 0 lets the packer drop it. A teacher says something about the tokens of equal pairs, too."""
    taught = bool(recipe.teacher)
    for unit in units:
        skipped = unit.skip_equal and not unit.differs and not taught
        values = [node.advantage for node in unit.nodes]
        has_advantage = any(v.any() if isinstance(v, np.ndarray) else v for v in values)
        unit.trained = not skipped and (taught or has_advantage or recipe.loss.kl_coef > 0)
        unit.counted = unit.trained or not (unit.skip_equal and recipe.equal_length.pair_count == "effective")


def _set_weights(batch: _Minibatch, recipe: Recipe, objective: Objective, tokens: Mapping[str, int]) -> None:
    counted = Counter(unit.rollout for unit in batch.units if unit.counted)
    size = _batch_size(batch, recipe, tokens)
    where = f"aggregation {described(objective.aggregation)}"
    for unit in batch.units:
        if not unit.trained:
            continue
        # prompts x rollouts of a prompt, among which the loss is averaged
        averaged: float = len(batch.rollouts_of_prompt) * batch.rollouts_of_prompt[unit.prompt_id]
        if unit.share is not None or recipe.rollout.carry_over:
            averaged = recipe.data.prompts_per_step * recipe.rollouts_per_prompt / recipe.loss.minibatches
        # 1 / (prompts x rollouts x units x members), or the unit's own share of its rollout
        if unit.share is None:
            sequence = 1 / (averaged * counted[unit.rollout] * len(unit.nodes))
        else:
            sequence = unit.share / (averaged * len(unit.nodes))
        lengths, signs = unit.lengths, [(value > 0) - (value < 0) for value in unit.advantages]
        # members of each sign and their tokens, for averages that balance them
        alike, alike_tokens = Counter(signs), Counter[int]()
        for sign, length in zip(signs, lengths, strict=True):
            alike_tokens[sign] += length
        for node, length, sign in zip(unit.nodes, lengths, signs, strict=True):
            if length:
                member = Member(sequence, length, unit.prompt_id, alike[sign], alike_tokens[sign], lengths)
                weight = objective.aggregation(member, size)
                node.weight = checked_weight(weight, f"prompt {unit.prompt_id}: {where}")


def _batch_size(batch: _Minibatch, recipe: Recipe, tokens: Mapping[str, int]) -> BatchSize:
    rollouts = batch.rollouts_of_prompt
    counted = {prompt_id: tokens[prompt_id] for prompt_id in rollouts if prompt_id in tokens}
    of_prompt: dict[str, float] = {**counted}
    prompts: float = len(rollouts)
    if recipe.rollout.carry_over:
        prompts = recipe.data.prompts_per_step / recipe.loss.minibatches
        for prompt_id in of_prompt:  # as if its rollouts in other steps were like these
            of_prompt[prompt_id] *= recipe.rollouts_per_prompt / rollouts[prompt_id]
    return BatchSize(sum(counted.values()), of_prompt, prompts, recipe.rollout.max_response_length)


# ---- metrics ---------------------------------------------------------------------------------------------


def unit_metrics(
    units: list[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe, gather: Gather
) -> Metrics:
    """Return metrics of advantages, effective samples and supervised tokens, and those of the sampling kind.
    ``objective/effective_samples`` is the paper's count: members with a non-zero advantage. ``gather`` joins
    the lists of all ranks, each with its own units and rollouts."""
    known: list[tuple[list[float], list[float], int]] = gather(
        [(unit.rewards, unit.advantages, sum(unit.lengths) * unit.trained) for unit in units]
    )
    # [members of all units]
    rewards = [reward for own, _, _ in known for reward in own]
    advantages = [value for _, own, _ in known for value in own]
    compared = {
        **_moments("reward", rewards),
        **_moments("advantage", advantages),
        "objective/advantage_max": max(map(abs, advantages), default=0.0),
    }
    metrics = {
        **({} if recipe.supervised else compared),
        "objective/units": float(len(known)),
        "objective/members": float(len(rewards)),
        "objective/zero_advantage_fraction": fmean([not any(own) for _, own, _ in known] or [0]),
        "objective/effective_samples": float(sum(value != 0 for value in advantages)),
        "objective/supervised_tokens": float(sum(tokens for _, _, tokens in known)),
    }
    of_kind = KINDS[recipe.sampling].objective_metrics(units, rollouts, recipe)
    # means over streams are weighed by each rank's
    parts = gather([of_kind | {"harvest/streams": float(len(rollouts))}])
    merged = at_once(parts) if len(parts) > 1 else of_kind
    return metrics | {name: merged[name] for name in merged if name != "harvest/streams"}


def staleness_metrics(units: Iterable[ComparisonUnit], policy_version: int, gather: Gather) -> Metrics:
    """Return how many versions older than ``policy_version`` the weights were that sampled the trained
    tokens; empty for no tokens. ``gather`` joins the lists of all ranks, each with a share of the tokens."""
    tokens: Counter[int] = Counter()
    for member in (each for unit in units if unit.trained for each in unit.members):
        if VERSIONS.name in member.tokens and not member.tokens.is_bare:
            numbers, counts = np.unique(member.tokens[VERSIONS.name], return_counts=True)
            tokens.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    ages: Counter[int] = Counter()
    for version, count in gather(list(tokens.items())):
        if version != VERSIONS.unknown:
            ages[max(policy_version - version, 0)] += count  # a run that went back may reach a version again
    if not ages:
        return {}
    total = ages.total()
    return {
        "staleness/mean": sum(age * count for age, count in ages.items()) / total,
        "staleness/max": float(max(ages)),
    } | {f"staleness/share/{age}": count / total for age, count in sorted(ages.items())}


def _moments(name: str, values: Sequence[float]) -> Metrics:
    mean = fmean(values) if values else 0.0
    # exact moments, of fractions, take a hundred times as long
    spread = math.fsum((value - mean) ** 2 for value in values) if len(set(values)) > 1 else 0.0
    return {f"objective/{name}_mean": mean, f"objective/{name}_std": math.sqrt(spread / max(len(values), 1))}
