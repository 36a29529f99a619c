"""Python, packages, the sandbox for code, and the recipe's own inputs."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_eqlen.check.finding import Check, Finding, Place
from megatron_eqlen.data.first_rewards import READ, first_rewards, refuse_unfit
from megatron_eqlen.data.overlap import read_overlaps
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.data.sources import open_source, read_problems
from megatron_eqlen.environments.conversation import Turn, closed, forked
from megatron_eqlen.environments.environment import Environment
from megatron_eqlen.environments.load import conversations, environment_class
from megatron_eqlen.environments.workspace import require_templates
from megatron_eqlen.graders.sandbox.probe import NO_COMMANDS, commands_refused, find_python, offered_isolation
from megatron_eqlen.hf.folder import HFFolder, check_folder
from megatron_eqlen.megatron_cpu import packages
from megatron_eqlen.megatron_cpu.packages import APEX, FLA, NEEDED, TRANSFORMER_ENGINE, Package
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.recipe.inputs import revisions
from megatron_eqlen.recipe.plugins import is_import_path
from megatron_eqlen.rewards.functions import own_code, referred
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.sampling.harvester import Marker

TRIED = 200
"""Rows of each source that are made prompts."""
SETUP = "tools/setup (gpu)"
SAID = "Hello."
"""Turn that an environment is asked to answer."""
CODE = {"code", "livecodebench"}
"""Graders and readers whose answers are programs."""
ANY = {"jsonl", "prepared"}
"""Readers whose rows name their graders."""


def python(place: Place) -> Finding:
    return Finding("ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def package(wanted: Package, place: Place) -> Finding | None:
    """Import the package; where seconds matter, only look whether it is installed."""
    # Its kernels are for gated delta nets alone.
    if wanted is FLA and place.job and place.job.model.delta_net is None:
        return None
    state = packages.look(wanted) if place.short else packages.find(wanted)
    name = f"{state.version}: {wanted.purpose}".removeprefix(": ")
    if not state.fault:
        return Finding("ok", name)
    if not state.installed:
        return Finding("missing", name, wanted.without or SETUP)
    return Finding("failed", f"{name}. {state.fault}", wanted.without or f"{SETUP} installs what fits")


def inputs(place: Place) -> Finding | None:
    """Check the model, data and benchmarks that the recipe reads; download those that it names on the hub.
    Where seconds do not matter, look for every tensor of the model."""
    if (job := place.job) is None:
        return None
    job.fetch()
    commits = "".join(f", {key} {commit}" for key, commit in revisions(job.recipe).items())
    summary = f"{job.recipe.model.path} and the data are there{commits}"
    if place.short:
        return Finding("ok", summary)
    # Names and shapes from the files' headers; no tensor is read.
    check_folder(HFFolder(job.folder), job.model)
    if (marker := job.recipe.tree_sampling.marker) is not None:
        Marker.of(marker, job.tokenizer)
    conversations(job.recipe, job.tokenizer)
    return Finding("ok", summary)


def prompts(place: Place) -> Finding | None:
    """Make prompts of some rows of each source."""
    return Finding("ok", "; ".join(place.prompts.describe(TRIED))) if place.recipe else None


def rewards(place: Place) -> Finding | None:
    """Grade a right, a wrong and a missing answer to a row of each source and benchmark."""
    if place.job is None or not place.has_prompts:
        return None
    recipe, tokenizer = place.job.recipe, place.job.tokenizer
    with closing(Scorer(recipe.reward, tokenizer)) as scorer:
        first = first_rewards(recipe, place.prompts, scorer, tokenizer)
    refuse_unfit(first)
    if not first:
        return None
    text = "; ".join(map(str, first))
    # the check "environment" shows what that gives
    if recipe.environment.name and environment_class(recipe).grade is not Environment.grade:
        return Finding("ok", f"asked where {recipe.environment.name} leaves the grade to them: {text}")
    if any(each.cause for each in first):
        ours = any(each.cause and each.grader in READ for each in first)
        return Finding("failed" if ours else "doubt", text)
    if any(each.lowest < 0 for each in first):
        return Finding("doubt", f"{text}; a truncated response gets 0, more than the lowest of these")
    return Finding("slow" if any(each.is_slow for each in first) else "ok", text)


def environment(place: Place) -> Finding | None:
    """Let a workspace or the user's own environment answer and grade a turn, for a prompt of each source."""
    name = (place.recipe and place.recipe.environment.name) or ""
    if place.job is None or not place.has_prompts or not (is_import_path(name) or name == "workspace"):
        return None
    recipe, tokenizer = place.job.recipe, place.job.tokenizer
    talks = conversations(recipe, tokenizer)
    assert talks is not None
    # With one turn allowed the response ends here, so that the environment grades it.
    once = replace(talks, limits=recipe.environment.model_copy(update={"max_turns": 1}))
    turn = Turn(np.array(tokenizer.encode(SAID)), np.array([], int))
    graded: list[str] = []
    with closing(talks), own_code(name):
        for prompt in (prompt for prompts in place.prompts.samples(1) for prompt in prompts):
            played = once.answer(None, prompt, recipe.seed, [turn])
            # Sampling forks it by a copy: an error in that shows here, not in a step.
            if played.environment.copies:
                closed(forked(played.environment))
            closed(played.environment)
            detail = f" ({played.grade.detail[-200:]!r})" if played.grade and played.grade.detail else ""
            graded.append(f"{played.grade.reward:g}{detail}" if played.grade else f"left to {prompt.grader}")
    return Finding("ok", f"{name} answers {SAID!r}; rewards: {', '.join(graded)}")


def templates(place: Place) -> Finding | None:
    """Look for the templates of a workspace that rows of the data name (``{gold}``)."""
    recipe = place.recipe
    if recipe is None or recipe.environment.name != "workspace" or not place.has_prompts:
        return None
    # Templates that golds name, each with a row that names it, of training data and benchmarks.
    read = [(source.name, open_source(source, Tally())) for source in recipe.data.sources]
    read += [(bench.name, read_problems(bench, Tally())) for bench in recipe.evaluation.benchmarks]
    golds = {str(referred(row.gold)[0]): f"{name}/{row.row_id}" for name, rows in read for row in rows}
    count = require_templates(golds, recipe.environment.options)
    return Finding("ok", f"the {count} templates that rows name are there") if count else None


def overlap(place: Place) -> Finding | None:
    """Look for benchmark questions in the training data, which is read for this."""
    if place.recipe is None or not (benchmarks := place.recipe.evaluation.benchmarks):
        return None
    if overlaps := read_overlaps(place.recipe.data, benchmarks):
        return Finding("failed", "; ".join(overlaps))
    names = ", ".join(benchmark.name for benchmark in benchmarks)
    return Finding("ok", f"the training data holds no question of {names}")


def programs(place: Place) -> Finding | None:
    """Look for the Python that generated programs run in."""
    if not _runs_programs(place):
        return None
    wanted = _reward(place).code_python
    return Finding("ok", f"{wanted}: {find_python(wanted)}")


def sandbox(place: Place) -> Finding | None:
    """Report the isolation that generated programs get, tested with programs that attempt to escape."""
    if not _runs_programs(place):
        return None
    isolation = offered_isolation(find_python(_reward(place).code_python))
    if isolation.strict:
        return Finding("ok", str(isolation))
    advice = "a kernel with Landlock (5.13); reward.code_sandbox: best_effort accepts less"
    return Finding("missing", f"{isolation}, expected landlock + seccomp", advice)


def commands(place: Place) -> Finding | None:
    """Report whether a workspace's commands can be isolated, tested with one that attempts to escape."""
    if not _has_workspace(place):
        return None
    if (refused := commands_refused()) is None:
        return Finding("ok", "namespaces + seccomp")
    return Finding("missing", refused, NO_COMMANDS)


def _has_workspace(place: Place) -> bool:
    section = place.recipe.environment if place.recipe else None
    return section is not None and section.name == "workspace" and not section.options.get("command")


def _reward(place: Place) -> RewardRecipe:
    return place.recipe.reward if place.recipe else RewardRecipe()


def _runs_programs(place: Place) -> bool:
    return place.recipe is None or bool(_graders(place) & (CODE | ANY))


def _grades_code(place: Place) -> bool:
    return bool(_graders(place) & CODE)


def _graders(place: Place) -> set[str]:
    if place.recipe is None:
        return set()
    # Demonstrations are imitated, not graded.
    sampled = [] if place.recipe.supervised else place.recipe.data.sources
    return {source.grader or source.reader for source in [*sampled, *place.recipe.evaluation.benchmarks]}


def _on_gpus(wanted: Package) -> Check:
    return Check(wanted.name, partial(package, wanted), needed=lambda place: False)


CHECKS = [
    Check("python", python),
    *(Check(wanted.name, partial(package, wanted)) for wanted in NEEDED),
    Check("inputs", inputs),
    replace(
        _on_gpus(TRANSFORMER_ENGINE),
        needed=lambda place: place.recipe is not None and place.recipe.optimizer.precision == "bfloat16",
    ),
    replace(_on_gpus(FLA), of_inputs=True),
    _on_gpus(APEX),
    Check("prompts", prompts, in_short=False, of_inputs=True),
    Check("first rewards", rewards, in_short=False),
    Check("environment", environment, in_short=False),
    Check("templates", templates, in_short=False),
    Check("benchmarks apart", overlap, lambda place: False, in_short=False, of_inputs=True),
    Check("code python", programs, needed=_grades_code),
    Check(
        "code sandbox",
        sandbox,
        needed=lambda place: _grades_code(place) and _reward(place).code_sandbox == "strict",
        in_short=False,
    ),
    Check("command sandbox", commands, needed=_has_workspace, in_short=False),
]
