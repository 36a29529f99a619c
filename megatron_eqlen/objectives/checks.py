"""Checks that the objective fits the rest of a recipe, and remarks where it does."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

from megatron_eqlen.objectives.advantages import dr_grpo, none, rloo
from megatron_eqlen.objectives.aggregation import AGGREGATIONS
from megatron_eqlen.objectives.objective import Objective, ResolvedRecipe
from megatron_eqlen.objectives.parts import PARTS, described, name_of, options, try_parts
from megatron_eqlen.objectives.registry import clip_keys, is_on_policy, with_defaults
from megatron_eqlen.objectives.surrogates import Ppo
from megatron_eqlen.objectives.token_baseline import alive, fitted, of_unit
from megatron_eqlen.recipe import Recipe, shown
from megatron_eqlen.recipe.checks import idle_problems
from megatron_eqlen.recipe.engine_options import check_options
from megatron_eqlen.rewards.functions import is_reward_function
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.tree import step_tokens


def check_combination(job: ResolvedRecipe, known: Container[str] = ()) -> None:
    """Raise ValueError for options that an engine lacks, and for ``problems`` that are not ``known``."""
    check_options("model.megatron", job.recipe.model.megatron)
    check_options("rollout.vllm", job.recipe.rollout.vllm)
    for problem in problems(job):
        if problem not in known:
            raise ValueError(problem)


def problems(job: ResolvedRecipe) -> Iterator[str]:
    """Yield why the objective and the rest of the recipe do not fit. Raises ValueError for a part that fails.
    Not among the checks of every recipe: a run that began with a problem is read, and goes on."""
    _ = KINDS[job.recipe.sampling]  # one of the user's own can be imported
    recipe, objective = job.recipe, job.objective
    yield from idle_problems(recipe, with_defaults(job))
    try_parts({field: getattr(objective, field) for field in PARTS})
    rules = (
        _refusals, _sampling_problems, _baseline_problems, _clip_problems, _ratio_problems, _logprob_problems,
        _reward_problems, _length_problems, _dynamic_sampling_problems,
    )  # fmt: skip
    for each in rules:
        yield from each(recipe, objective)


def settings(recipe: Recipe, objective: Objective) -> dict[str, str]:
    """Return the recipe's settings that a part or a method may refuse, in the words of a message."""
    found = {recipe.sampling: f"sampling: {recipe.sampling}"}
    if is_on_policy(recipe, objective):
        tree = recipe.sampling == "tree"
        found["on_policy"] = "sampling: tree" if tree else "equal_length.pair_weight: on_policy"
    if objective.overlong_buffer:
        found["overlong_buffer"] = f"loss.overlong_buffer: {objective.overlong_buffer}"
    if recipe.loss.rollout_is != "none":
        found["rollout_is"] = f"loss.rollout_is: {recipe.loss.rollout_is}"
    return found


def _refusals(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield the reasons that the method or a part declares against a setting."""
    parts: dict[str, object] = {f"objective: {objective.name}": objective}
    for field, (key, _) in PARTS.items():
        parts[f"loss.{key}: {described(getattr(objective, field))}"] = getattr(objective, field)
    for setting, words in settings(recipe, objective).items():
        for what, part in parts.items():
            if reason := getattr(part, "refuses", {}).get(setting):
                yield f"{what} with {words}: {reason}"


SUMS = ("seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Averages over sequences that sum a sequence's tokens."""
LARGEST_NUMBER = 2**31 - 1
"""Largest number of a part in a record."""


def _sampling_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    tree, name = recipe.tree_sampling, f"objective: {objective.name}"
    # methods that weigh a tree's forks
    if objective.forks != "apart" and recipe.sampling != "tree":
        yield f"{name} with sampling: {recipe.sampling}: it weighs a tree's forks; expected sampling: tree"
    if objective.forks == "pooled" and (tree.fork in ("death", "profile") or tree.forks != 1):
        expected = "tree_sampling.fork: marker or tokens and tree_sampling.forks: 1"
        pools = f"{name} pools the answers to a prompt's thoughts"
        yield f"{pools}: expected {expected}, found {tree.fork} and {tree.forks}"
    if recipe.sampling == "tree" and tree.fork == "marker" and not tree.marker:
        yield f"tree_sampling.fork: marker: expected tree_sampling.marker, found {tree.marker!r}"
    if recipe.sampling == "tree" and tree.fork == "profile" and recipe.rollout.tokens_per_step is not None:
        why = "a budget cuts or suspends the long trees, which the others do not stand for"
        key = f"rollout.tokens_per_step: {recipe.rollout.tokens_per_step}"
        yield f"tree_sampling.fork: profile with {key}: {why}"
    last, limit = tree.forks * step_tokens(recipe), recipe.rollout.max_response_length
    by_length = tree.step_tokens or not tree.marker
    if tree.fork == "profile" and by_length and last >= limit:
        yield f"tree_sampling: no line forks after {last} tokens, with rollout.max_response_length: {limit}"
    if tree.fork == "profile" and not by_length and tree.forks != type(tree)().forks:
        yield f"tree_sampling.forks: {tree.forks} places by tokens need tree_sampling.step_tokens, found none"
    # parts are numbered as in a heap, up to the last leaf of a full tree, and records hold 32 bits
    leaves = 0 if tree.fork in ("death", "profile") else recipe.group_size * tree.branching**tree.forks
    if recipe.sampling == "tree" and leaves > LARGEST_NUMBER:
        lines = f"{recipe.group_size} lines x {tree.branching} ** {tree.forks}"
        yield f"tree_sampling.forks: {lines} are more than {LARGEST_NUMBER} leaves"
    pairs = recipe.equal_length
    if pairs.suffix_reward == "mean" and pairs.max_pairs == 1:
        yield "equal_length.suffix_reward: mean of one response, with equal_length.max_pairs: 1: no effect"
    if pairs.pair_count == "effective" and recipe.teacher:
        yield "equal_length.pair_count: effective has no effect with a teacher, which trains all pairs"
    if pairs.baseline == "streams" and recipe.streams_per_prompt < 2:
        expected = f"expected group_size of at least 4, found {recipe.group_size}"
        yield f"equal_length.baseline: streams compares the streams of a prompt: {expected}"
    # with shares of units only sums over tokens leave the gradient unbiased
    average = name_of(objective.aggregation, AGGREGATIONS)
    if is_on_policy(recipe, objective) and average is not None and average not in SUMS:
        wrong = f"divides by numbers of tokens, which biases the gradient; expected one of {', '.join(SUMS)}"
        yield f"loss.loss_agg_mode: {average} with {settings(recipe, objective)['on_policy']} {wrong}"


def _baseline_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield token baselines beside another baseline, and baselines over other prompts selected by length."""
    of_batch = objective.whitened == "standardize"
    key = f"loss.baseline: {described(objective.baseline)}"
    if recipe.rollout.carry_over and (of_batch or objective.baseline is fitted):
        what = f"objective: {objective.name}" if of_batch else key
        why = "prompts that are complete in the same step have similar lengths"
        so = "so that the baseline of a response depends on its own length"
        remedy = f"use {'reinforce_pp_baseline or rloo' if of_batch else 'alive'}"
        yield f"{what} with rollout.carry_over: true: {why}, {so}; {remedy}"
    if objective.baseline is of_unit:
        return
    if recipe.sampling == "equal_length":
        why = "of two truncated tracks only one is trained, so some lines that are alive are missing"
        remedy = "use sampling: tree with tree_sampling.fork: death"
        yield f"{key} with sampling: equal_length: {why}; {remedy}"
    # a token baseline is compared once: no std, batch mean, names or weights of forks after it
    has_other = objective.forks != "apart" or objective.whitened or objective.rewards == "apart"
    if has_other or objective.advantage not in (rloo, dr_grpo):
        advantage = f"advantage {described(objective.advantage)} and rewards: {objective.rewards}"
        expected = "expected objective: dr_grpo or rloo, rewards: together"
        found = f"found objective: {objective.name}, {advantage}"
        yield f"{key} is the advantage itself, reward less baseline: {expected}, {found}"


def _clip_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield bounds that the surrogate does not take, or that bound nothing."""
    surrogate, clip = objective.surrogate, options(objective.surrogate)
    for key, value in clip_keys(recipe.loss).items():
        if key not in clip:
            reason = getattr(surrogate, "refuses", {}).get("clip_ratio", "it has no such option")
            yield f"loss.{key}: {value} with surrogate {described(surrogate)}: {reason}"
    # of the resolved surrogate: the recipe's keys, or the method's own
    low, high, dual = (clip.get(f"clip_ratio_{end}") for end in ("low", "high", "c"))
    if isinstance(surrogate, Ppo) and (low is None) != (high is None):
        both = f"set both loss.clip_ratio_low and loss.clip_ratio_high, found {low} and {high}"
        yield f"objective: {objective.name} does not clip by itself: {both}"
    logs = getattr(surrogate, "bounds_are_logs", False)
    if low is not None and low > 1 and not logs:
        yield f"loss.clip_ratio_low: {low}: 1 - {low} is below zero, where no ratio lies; expected at most 1"
    if dual is not None and dual <= 1 and not logs:
        yield f"loss.clip_ratio_c: {dual}: expected a bound above 1, which no clip reaches before"
    if isinstance(surrogate, Ppo) and dual is not None and low is None:
        remedy = "set loss.clip_ratio_low and loss.clip_ratio_high too"
        yield f"loss.clip_ratio_c: {dual} bounds a clipped ratio, and {objective.name} has none: {remedy}"


def _ratio_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield updates without a ratio, empty minibatches, ratios corrected twice, and senseless bounds."""
    loss, updates = recipe.loss, recipe.loss.minibatches * recipe.loss.epochs
    if not objective.has_ratio and updates > 1 and not recipe.supervised:
        method = f"objective: {objective.name} without clipping has no importance ratio"
        product = f"loss.minibatches {loss.minibatches} x loss.epochs {loss.epochs} = {updates} updates"
        remedy = "need loss.clip_ratio_low and loss.clip_ratio_high"
        yield f"{method}, so only a harvest's first update is on-policy: {product} {remedy}"
    if loss.minibatches > recipe.data.prompts_per_step:
        more = f"more than data.prompts_per_step {recipe.data.prompts_per_step}"
        yield f"loss.minibatches: {loss.minibatches} is {more}; a minibatch holds whole prompts"
    if loss.old_logprobs == "rollout" and loss.rollout_is != "none":
        why = "with loss.old_logprobs: rollout the ratio already starts from the engine's"
        yield f"loss.rollout_is: {loss.rollout_is} corrects old log-probs that the trainer recomputed; {why}"
    yield from _ratio_bound("loss.rollout_is_threshold", loss.rollout_is_threshold, least=1.0)
    # k1 bounds a ratio, from both sides; the others are divergences, from 0 up
    for name, bound in (loss.rollout_rs or {}).items():
        key = f"loss.rollout_rs.{name}"
        if name.endswith("k1"):
            yield from _ratio_bound(key, bound, least=math.nextafter(1.0, 2.0))
        elif isinstance(bound, tuple):
            yield f"{key}: expected one number, an upper bound in nats, found {list(bound)}"


def _ratio_bound(key: str, bound: float | tuple[float, float], least: float) -> Iterator[str]:
    """Yield a bound that excludes the ratio 1. ``least``: lowest single number, an upper bound."""
    if isinstance(bound, tuple):
        # a pair bounds the ratio from both sides
        if not bound[0] <= 1 <= bound[1] or bound[0] == bound[1]:
            expected = "expected [low, high] with low <= 1 <= high and low < high"
            yield f"{key}: {list(bound)} leaves out a ratio of 1, where trainer and engine agree: {expected}"
    elif bound < least:
        relation = "at least 1" if least == 1 else "more than 1"
        yield f"{key}: {bound:g} bounds ratios, which are 1 if trainer and engine agree: expected {relation}"


def _logprob_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield comparisons of log-probs of different distributions, and tokens of older weights, uncorrected."""
    rollout, loss = recipe.rollout, recipe.loss
    older = "rollout.carry_over: true" if rollout.carry_over else f"rollout.staleness: {rollout.staleness}"
    comparisons = {
        f"rollout.mismatch.then: {rollout.mismatch.then}": rollout.mismatch.then != "warn",
        f"rollout.mismatch.tolerance: {rollout.mismatch.tolerance}": rollout.mismatch.tolerance is not None,
        "loss.old_logprobs: rollout": loss.old_logprobs == "rollout",
        f"loss.rollout_is: {loss.rollout_is}": loss.rollout_is != "none",
        "loss.rollout_rs": bool(loss.rollout_rs),
        older: rollout.trains_older,  # every correction for staleness compares
    }
    asked = [key for key, used in comparisons.items() if used]
    if asked and not rollout.comparable:
        needs = "rollout.keep_sampling_mask: true, or top_k: 0, top_p: 1 and min_p: 0"
        keep = f"top_k: {rollout.top_k}, top_p: {rollout.top_p:g} and min_p: {rollout.min_p:g} keep"
        found = f"found log-probs over the tokens that {keep}"
        yield f"{asked[0]} compares the engine's log-probs with the trainer's: it needs {needs}, {found}"
    if loss.old_logprobs == "rollout" and not objective.has_ratio:
        method = f"objective: {objective.name} has none"
        remedy = "leave it out (loss.rollout_is and loss.rollout_rs correct without a ratio)"
        yield f"loss.old_logprobs: rollout acts only in an importance ratio, and {method}: {remedy}"
    if rollout.center_scores and (objective.has_ratio or loss.kl_coef):
        other = f"the ratio of objective: {objective.name}" if objective.has_ratio else "loss.kl_coef"
        why = "only -A log pi has a score to center; use rloo without clipping, and loss.kl_coef: 0"
        yield f"rollout.center_scores: true with {other}: {why}"
    # tokens that another distribution sampled than the one that is trained
    corrected = loss.old_logprobs == "rollout" or loss.rollout_is != "none" or loss.rollout_rs
    corrected = corrected or rollout.center_scores
    rounded, cached = rollout.quantization, rollout.vllm.get("kv_cache_dtype") or "auto"
    causes = {
        f"{older} trains tokens that older weights sampled": rollout.trains_older,
        f"rollout.quantization: {rounded} trains tokens that rounded weights sampled": rounded,
        f"rollout.vllm.kv_cache_dtype: {cached} samples by rounded keys": cached not in ("auto", "bfloat16"),
    }
    for cause in (cause for cause, acts in causes.items() if acts and not corrected):
        ways = "loss.rollout_rs, loss.old_logprobs: rollout or rollout.center_scores (see docs/objectives.md)"
        remedy = f"set loss.rollout_is: token or sequence (decoupled PPO), {ways}"
        yield f"{cause}, and nothing corrects for it: {remedy}"


LIMITED = {"math", "code"}
"""Graders that keys of ``reward`` limit."""


def _reward_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield rewards that the objective cannot use, none, and limits of graders that grade nothing."""
    longest, buffer = recipe.rollout.max_response_length, objective.overlong_buffer
    if objective.rewards == "apart" and not recipe.reward.weights:
        yield f"objective: {objective.name} compares named rewards apart: expected reward.weights, found none"
    if objective.rewards == "apart" and buffer:
        why = "the penalty has no name; set it to 0, and return a named reward for the length"
        yield f"loss.overlong_buffer: {buffer} with loss.rewards: apart: {why}"
    if buffer >= longest:
        yield f"loss.overlong_buffer: {buffer} is not below rollout.max_response_length {longest}"
    if objective.advantage is none and not recipe.teacher:
        yield "loss.advantage: none trains nothing without a teacher: expected teacher.path or .url"
    graders = {each.grader or "": f"{key}.grader" for key, each in recipe.data_sets.items()}
    # without a name the rows say theirs, and a factory of one's own gets all limits
    named = all(name in LIMITED or (name and is_reward_function(name, key)) for name, key in graders.items())
    for key, value in recipe.reward.model_dump(exclude_defaults=True).items() if named else ():
        if (grader := "math" if key == "timeout" else key.partition("_")[0]) in LIMITED - graders.keys():
            found = ", ".join(sorted(graders))
            yield f"reward.{key}: {shown(value)} acts only with the grader {grader}, found {found}"


def _length_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield quantiles of lengths where a prompt has no mean response length to compare."""
    if (quantiles := objective.length_quantiles) is None:
        return
    key = f"loss.length_quantiles: {[*quantiles]}"
    if [*quantiles] != sorted(quantiles):
        yield f"{key}: expected [low, high, max] with low <= high <= max"
    if not objective.dynamic_sampling:
        yield f"{key}: prompts are replaced by dynamic sampling: set loss.dynamic_sampling: true"
    if recipe.sampling != "independent":
        why = "its responses share prefixes, so their mean length is not that of independent responses"
        yield f"{key} with sampling: {recipe.sampling}: {why}; use sampling: independent"
    if recipe.rollout.carry_over:
        why = "groups that are complete in the same step are of like lengths"
        so = "so that their quantiles are not those of the prompts drawn together"
        yield f"{key} with rollout.carry_over: true: {why}, {so}"


def _dynamic_sampling_problems(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """Yield why prompts that dynamic sampling leaves out have a gradient."""
    if not objective.dynamic_sampling:
        return
    baseline, advantage = described(objective.baseline), described(objective.advantage)
    causes = {
        f"teacher: {recipe.teacher.path or recipe.teacher.url}": bool(recipe.teacher),
        f"objective: {objective.name}, which compares each reward with those of the whole batch": (
            objective.whitened == "standardize"
        ),
        f"loss.baseline: {baseline}, which need not be these rewards (unit and alive are)": (
            objective.baseline not in (of_unit, alive)
        ),
        # tried, as it may be a user's own: equal rewards, but lengths that differ
        f"loss.advantage: {advantage}, which is not 0 for equal rewards": any(
            objective.advantage([1.0, 1.0], [1, 2])
        ),
    }
    for cause in (cause for cause, acts in causes.items() if acts):
        yield f"loss.dynamic_sampling: true with {cause}: equal rewards have a gradient, too: set it to false"


def remarks(job: ResolvedRecipe) -> Iterator[str]:
    """Yield remarks on a valid recipe: corrections that do little."""
    recipe = job.recipe
    # a run that ends by another budget may take any number of updates
    updates = (recipe.steps or math.inf) * recipe.loss.minibatches * recipe.loss.epochs
    if recipe.optimizer.warmup_steps > updates:
        more = f"is more than the run's {updates} updates: the learning rate does not reach optimizer.lr"
        yield f"optimizer.warmup_steps: {recipe.optimizer.warmup_steps} {more}"
    one = recipe.loss.minibatches * recipe.loss.epochs == 1 and recipe.loss.old_logprobs == "recompute"
    if one and (clips := clip_keys(recipe.loss)):
        why = "with one update a step (loss.minibatches x loss.epochs) all ratios are 1"
        yield f"{', '.join(f'loss.{key}' for key in clips)}: nothing is clipped: {why}"
    uncorrected = recipe.loss.rollout_is == "none" and recipe.loss.old_logprobs == "recompute"
    if recipe.rollout.trains_older and uncorrected:
        older = "tokens of older weights within its bounds train as if the policy had sampled them"
        corrects = "loss.rollout_is or loss.old_logprobs: rollout corrects"
        yield f"loss.rollout_rs alone leaves out what is too far off: {older} ({corrects})"
    on_policy = recipe.sampling == "independent" or is_on_policy(recipe, job.objective)
    if on_policy and recipe.rollout.tokens_per_step and not recipe.rollout.carry_over:
        pairs = recipe.sampling == "equal_length"
        kind = "equal_length.pair_weight: on_policy" if pairs else f"sampling: {recipe.sampling}"
        cuts = "cuts the longest rollouts, whose ends count as 0 or are left out"
        only = "is unbiased only with rollout.carry_over: true and rollout.max_staleness that cuts none"
        yield f"rollout.tokens_per_step {cuts}: {kind} {only}"
    if not recipe.supervised and not recipe.rollout.comparable:
        why = "the engine's log-probs are of the sampled distribution"
        ways = "the trainer's only with rollout.keep_sampling_mask: true, or with top_k, top_p and min_p off"
        yield f"rollout.mismatch compares nothing: {why}, {ways}"
