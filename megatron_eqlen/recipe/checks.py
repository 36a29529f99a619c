"""Checks between the keys of a recipe; ``objectives/checks.py`` checks those of objectives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import HttpUrl, ValidationError

from megatron_eqlen.recipe import ANY_COLUMNS, Recipe, Section, When, is_under, layout, leaves, shown
from megatron_eqlen.recipe.budget import COSTS
from megatron_eqlen.recipe.engine_options import OF_OPTIMIZER, UNREAD
from megatron_eqlen.recipe.plugins import is_import_path, load_object
from megatron_eqlen.tokens import MOST_PER_TOKEN

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu")
"""vLLM's methods of speculation whose drafts need no weights."""
LARGEST = {int: 10**12, float: 1e30}
"""Largest numbers of a type: beyond them arrays and a GPU's floats overflow in the middle of a run."""
LARGEST_OF = {
    "group_size": 2**20, "data.prompts_per_step": 2**20, "evaluation.samples": 2**20,
    "lora.rank": 2**20, "rollout.kv_cache_gib": 2**20, "rollout.vllm.max_num_batched_tokens": 2**20,
    "reward.timeout": 10**5, "reward.code_timeout": 10**5, "environment.timeout": 10**5,
    "reward.step_timeout": 10**9, "rollout.request_timeout": 10**9,
}  # fmt: skip
"""Largest numbers of what memory holds, and of seconds that the kernel waits for an answer."""


def check(recipe: Recipe) -> None:
    """Raise ValueError, with the arithmetic, for keys that contradict each other."""
    for rules in (_run_problems, _engine_problems, _evaluation_problems, _teacher_problems, _reward_problems):
        for problem in rules(recipe):
            raise ValueError(problem)
    layout.check(recipe)
    for problem in _supervised_problems(recipe) if recipe.supervised else ():
        raise ValueError(problem)


def idle_problems(recipe: Recipe, resolved: Recipe) -> Iterator[str]:
    """Yield keys that cannot act (``When``), and numbers beyond bounds. ``resolved``: with the objective's
    defaults."""
    yield from (*_unread_problems(recipe), *_number_problems(recipe))
    for key, value, default, conditions in _set_keys(recipe):
        for condition in conditions:
            found = value_of(resolved, condition.key)
            if not condition.is_met(found):
                remedy = "leave it out" if value == default else f"leave it at {shown(default)}"
                acts = f"{shown(value)} acts only with {condition}"
                yield f"{key}: {acts}, found {shown(found)}: {remedy}"


def _unread_problems(recipe: Recipe) -> Iterator[str]:
    """Yield keys of data sets, engines' options and supervised training that nothing reads."""
    for key, each in recipe.data_sets.items():
        bounds = {getattr(each, f"{bound}_difficulty", None) for bound in ("min", "max")}
        useless = {
            "instruction": recipe.data.instruction_role == "none" and "data.instruction_role is none",
            "difficulty": bounds == {None} and "neither min_ nor max_difficulty is set",
        }
        for ours in each.columns:
            if why := useless.get(ours):
                yield f"{key}.columns: {ours}: {each.columns[ours]} has no effect: {why}"
        if each.reader == "livecodebench" and (chosen := each.config or each.split):
            yield f"{key}: config and split have no effect: since and until choose problems, found {chosen}"
    for name in filter(UNREAD.fullmatch, recipe.model.megatron):
        yield f"model.megatron.{name}: {recipe.model.megatron[name]} has no effect: nothing reads it"
    for key, value, _, _ in _set_keys(recipe):
        if recipe.supervised and key in OF_RECORDS:
            yield f"{key}: {shown(value)} {NOT_SUPERVISED}"
        # A recipe that lists benchmarks, even none, may carry how another samples for them.
        if key.startswith("evaluation.") and "benchmarks" not in recipe.evaluation.model_fields_set:
            yield f"{key}: {shown(value)} acts only with evaluation.benchmarks, found none: leave it out"
    if recipe.supervised and recipe.loss.loss_agg_mode in ("seq-mean-token-sum-norm", "delta-l"):
        divides = "divides by rollout.max_response_length: without samples use seq-mean-token-sum"
        yield f"loss.loss_agg_mode: {recipe.loss.loss_agg_mode} {divides}"


def _number_problems(recipe: Recipe) -> Iterator[str]:
    """Yield numbers that would end a run in its middle, or keep it from ever ending a step."""
    numbers = [leaves(value, key) for key, value, _, _ in _set_keys(recipe) if key != "environment.options"]
    for key, value in (item for each in numbers for item in each.items()):
        most = LARGEST_OF.get(key, LARGEST.get(type(value)))
        if most is not None and abs(value) > most:
            yield f"{key}: expected {'at most ' if value > 0 else 'at least -'}{most}, found {value}"
    for name, (default, least, most) in OF_OPTIMIZER.items():
        value: Any = recipe.model.megatron.get(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            yield f"model.megatron.{name}: expected {least} to {most}, found {value}"


def _set_keys(
    section: Section, prefix: str = "", inherited: tuple[When, ...] = ()
) -> Iterator[tuple[str, Any, Any, tuple[When, ...]]]:
    """Yield (name, value, default, conditions) of keys that differ from their default or are switched on."""
    fields, given = type(section).model_fields, section.model_fields_set
    for name, field in fields.items():
        key, value, default = prefix + name, getattr(section, name), field.get_default()
        own = (condition.within(prefix) for condition in field.metadata if isinstance(condition, When))
        # A section's conditions hold for all that is in it.
        conditions = (*inherited, *own)
        below = {key: value} if isinstance(value, Section) else {}
        if isinstance(value, list):
            below = {f"{key}.{n}": item for n, item in enumerate(value) if isinstance(item, Section)}
        for at, item in below.items():
            yield from _set_keys(item, f"{at}.", conditions)
        # A written ``router_replay: true`` asks for something, though it is the default.
        switched_on = value is True and name in given and len(given) < len(fields)
        if not isinstance(value, Section) and (value != default or switched_on):
            yield key, value, default, conditions


def value_of(recipe: Recipe, key: str) -> Any:
    at: Any = recipe
    for part in key.split("."):
        at = at[int(part)] if part.isdecimal() else getattr(at, part)
    return at


def _run_problems(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions of the run's name, place, data, end, learning rate and rows."""
    cluster, optimizer, targets = recipe.cluster, recipe.optimizer, recipe.lora.targets or ()
    if recipe.name in (".", "..") or not re.fullmatch(r"[\w.,=+@ -]{1,100}", recipe.name):
        expected = "1 to 100 letters, digits or any of ' _-.,=+@' (it names a folder under runs/)"
        yield f"name: expected {expected}, found {recipe.name!r}"
    # ``90``, ``24:00:00``, ``7-00:00:00``
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", cluster.time):
        expected = "SLURM's MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS or UNLIMITED"
        yield f"cluster.time: expected {expected}, found {cluster.time!r}"
    if not (recipe.run_dir or "").isprintable():
        yield f"run_dir: expected a path in one line, found {recipe.run_dir!r}"
    if not [*recipe.budget.limits()]:
        yield f"steps: expected this, or one of {', '.join(COSTS)}, to end a run, found none"
    if recipe.steps and (last := max(recipe.profile.steps, default=0)) > recipe.steps:
        yield f"profile.steps: expected steps from 1 to steps, {recipe.steps}, found {last}"
    if len({*targets}) < len(targets):
        yield f"lora.targets: expected each target once, found {', '.join(targets)}"
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr: expected at most optimizer.lr, {optimizer.lr:g}, found {optimizer.min_lr:g}"
    if not recipe.supervised and (row := recipe.packing.max_tokens_per_row) < recipe.longest_path:
        yield f"packing.max_tokens_per_row: {row} is less than the longest path, {recipe.longest_path_text}"
    if recipe.sampling == "equal_length" and recipe.group_size % 2:
        yield f"group_size: {recipe.group_size} is odd; equal_length sampling splits it into pairs of tracks"
    if recipe.report.keep_streams == "evaluations" and not recipe.evaluation.every:
        yield "report.keep_streams: evaluations needs evaluation.every >= 1, found 0"


def _engine_problems(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions of the engine's keys, what vLLM lacks on GPUs, and kernels without token trees."""
    rollout, device, addresses = recipe.rollout, recipe.cluster.device, set[str]()
    if rollout.engine == "server" and not rollout.servers:
        yield "rollout.servers: expected at least one URL with rollout.engine: server, found none"
    for number, text in enumerate(rollout.servers):
        try:
            url = HttpUrl(text)
        except ValidationError:
            url = None
        if url is None or url.port == 0 or url.username or url.password or url.query or url.fragment:
            yield f"rollout.servers.{number}: expected http://HOST:PORT, found {text!r}"
        # Normal forms: ``http://HOST:80`` and ``http://host/`` are the same server.
        if (address := str(url).rstrip("/")) in addresses:
            yield f"rollout.servers.{number}: expected each server once, found {text!r} again"
        addresses.add(address)
    # Benchmarks may have a top-k of their own.
    evaluated = [recipe.of_benchmark(benchmark).rollout for benchmark in recipe.evaluation.benchmarks]
    for each in (rollout, *evaluated) if rollout.keep_sampling_mask else ():
        if each.temperature and not 1 <= each.top_k <= MOST_PER_TOKEN:
            needs = f"rollout.top_k from 1 to {MOST_PER_TOKEN}, also in evaluations"
            why = "(it bounds what is recorded of each token)"
            yield f"rollout.keep_sampling_mask: true needs {needs} {why}, found {each.top_k}"
    backend = recipe.model.megatron.get("attention_backend")
    if backend and (backend, device) != ("flash", "gpu"):
        found = f"{backend} with {device}: token trees have no other kernels"
        yield f"model.megatron.attention_backend: expected flash, with cluster.device: gpu, found {found}"
    routed = device == "gpu" and rollout.keep_routes and rollout.engine == "colocated"
    if routed and rollout.tensor_parallel > 1:
        found = f"a colocated engine of {rollout.tensor_parallel} GPUs, of which vLLM gives one the routes"
        needs = "rollout.engine: server or rollout.tensor_parallel: 1"
        yield f"rollout.keep_routes: true needs {needs}, found {found}"
    drafts, key = rollout.vllm.get("speculative_config"), "rollout.vllm.speculative_config"
    if drafts and rollout.min_p > 0:
        yield f"{key} needs rollout.min_p: 0, found {rollout.min_p:g}: vLLM has no min-p then"
    if drafts and device == "cpu":
        yield f"{key}: our sampler for CPUs takes no drafts"
    method = drafts.get("method") if isinstance(drafts, dict) else None
    if drafts and rollout.engine == "colocated" and method not in WITHOUT_WEIGHTS:
        expected = f"one of {', '.join(WITHOUT_WEIGHTS)} with rollout.engine: colocated"
        lost = "the engine drops weights to sleep, and a sync brings those of the model alone"
        yield f"{key}.method: expected {expected}, found {shown(method)}: {lost}"


def _evaluation_problems(recipe: Recipe) -> Iterator[str]:
    """Yield sources or benchmarks of one name, and what has no effect where evaluations are greedy."""
    evaluation, benchmarks = recipe.evaluation, recipe.evaluation.benchmarks
    named = {f"evaluation.benchmarks.{n}": benchmark for n, benchmark in enumerate(benchmarks)}
    for key, sections in (("data.sources", recipe.data.sources), ("evaluation.benchmarks", benchmarks)):
        names = [each.name for each in sections]
        if twice := [name for name in names if names.count(name) > 1]:
            yield f"{key}: {twice[0]} is the name of {len(twice)}, whose results would be mixed"
    for name, section in {"evaluation": evaluation, **named}.items():
        for key in ("top_p", "top_k") if section.temperature == 0 else ():
            if (value := getattr(section, key)) is not None:
                yield f"{name}.{key}: {value:g} has no effect with temperature: 0 (greedy): leave it out"
    if benchmarks and evaluation.samples > max(recipe.of_benchmark(each).group_size for each in benchmarks):
        alike = "with temperature: 0 (greedy) all responses to a problem are the same"
        yield f"evaluation.samples: {evaluation.samples}: {alike}: expected 1"


def _teacher_problems(recipe: Recipe) -> Iterator[str]:
    """Yield two teachers, and a server whose log-probs the trainer's cannot be compared with."""
    rollout, teacher = recipe.rollout, recipe.teacher
    if recipe.loss.teacher_coef != 1 and not teacher:
        yield f"loss.teacher_coef: {recipe.loss.teacher_coef:g}: expected teacher.path or teacher.url"
    if teacher.url and teacher.path:
        yield f"teacher.url: {teacher.url} with teacher.path: set one of them"
    if teacher.url and (rollout.temperature != 1 or rollout.keep_sampling_mask):
        why = "a server gives log-probs at temperature 1 over the whole vocabulary"
        expected = "expected rollout.temperature: 1 and keep_sampling_mask: false"
        found = f"found {rollout.temperature:g} and {shown(rollout.keep_sampling_mask)}"
        yield f"teacher.url: {why}: {expected}, {found}; with teacher.path the trainer computes them"


SUPERVISED = ("kl_coef", "kl_estimator", "minibatches", "epochs", "loss_agg_mode")
"""Keys of ``loss`` that act with ``objective: sft``."""
OF_SAMPLES = (
    "group_size", "generated_tokens", "teacher", "environment", "reward.weights",
    *(f"rollout.{key}" for key in ("tokens_per_step", "staleness", "keep_sampling_mask", "keep_routes")),
    "rollout.mismatch",
)  # fmt: skip
"""Keys and sections without effect where no response is sampled for training."""
OF_RECORDS = "packing.layout", "report.keep_streams"
"""More keys without effect there, which a run's recipe may hold."""
OF_ENGINE = ("rollout", "reward", "data.max_prompt_length")
"""Sections and keys without effect without ``evaluation.benchmarks``, be they none, either."""
NOT_SUPERVISED = "has no effect with objective: sft: leave it out"


def _supervised_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.sampling != "independent":
        yield f"sampling: {recipe.sampling} {NOT_SUPERVISED}"
    # A recipe that lists benchmarks, even none, may carry keys of the engine.
    useless = OF_SAMPLES + (() if "benchmarks" in recipe.evaluation.model_fields_set else OF_ENGINE)
    for key, value, _, _ in _set_keys(recipe):
        section, _, name = key.partition(".")
        unused = is_under(key, useless) or (section == "data" and name.endswith(".grader"))
        if unused or (section == "loss" and name not in SUPERVISED):
            yield f"{key}: {shown(value)} {NOT_SUPERVISED}"
    for number, source in enumerate(recipe.data.sources):
        if source.reader not in ANY_COLUMNS and not is_import_path(source.reader):
            key = f"data.sources.{number}.reader: objective: sft trains responses"
            expected = f"one of {', '.join(ANY_COLUMNS)} or package.module:name"
            yield f"{key}: expected {expected}, found {source.reader}"


def check_imports(recipe: Recipe) -> None:
    """Raise ValueError unless every object that the recipe names by import path can be imported."""
    paths = {"environment.name": recipe.environment.name}
    for section, item in recipe.data_sets.items():
        paths |= {f"{section}.{key}": getattr(item, key) for key in ("reader", "grader")}
    # All others are names, which the schema has checked.
    for key, path in paths.items():
        if is_import_path(path or ""):
            load_object(path or "", key)


def _reward_problems(recipe: Recipe) -> Iterator[str]:
    """Yield weights of named rewards beside graders that name none."""
    for number, source in enumerate(recipe.data.sources):
        if recipe.reward.weights and not recipe.environment.name and not is_import_path(source.grader or ""):
            weighs = f"{shown(recipe.reward.weights)} weighs named rewards"
            expected = f"a grader of your own at data.sources.{number}.grader"
            yield f"reward.weights: {weighs}: expected {expected}, found {source.grader or 'none'}"
