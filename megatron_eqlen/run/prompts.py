"""Start of a run's prompts, and a trial of its benchmarks and graders on real rows."""

from __future__ import annotations

from contextlib import closing

from megatron_eqlen.data.demonstrations import training_prompts
from megatron_eqlen.data.first_rewards import first_rewards, refuse_unfit
from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.environments.load import tools
from megatron_eqlen.hf.turns import require_end
from megatron_eqlen.processes import distributed
from megatron_eqlen.recipe.plugins import is_import_path
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.run.session import Session


def start_prompts(session: Session) -> PromptSource | None:
    """Return the prompts of rank 0, None on others."""
    if not distributed.is_rank0():
        return None
    recipe = session.recipe
    longest = session.job.model.context_length if recipe.supervised else 0
    source = training_prompts(recipe, longest, session.tokenizer, tools(recipe))
    session.ends_with(source.close)
    return source


def try_rewards(session: Session, source: PromptSource) -> None:
    """Say how data files are read, read all benchmarks, and call each grader of the user's own on real rows.
    Raises ValueError for an error of one, and for a template whose turns do not end responses."""
    require_end(session.tokenizer, session.recipe.data.enable_thinking)
    for text in source.notes():
        session.progress.say(text)
    recipe = session.recipe
    graders = [read.grader or "" for read in recipe.data_sets.values()]
    # built-in graders need no trial: read the benchmarks alone, whose faults would come hours later
    if not any(map(is_import_path, graders)):
        for benchmark in recipe.evaluation.benchmarks:
            source.benchmark(benchmark)
        return
    with closing(Scorer(recipe.reward, session.tokenizer, seed=recipe.seed)) as scorer:  # the run's is fresh
        rewards = first_rewards(recipe, source, scorer, session.tokenizer)
    refuse_unfit(rewards)
    for first in rewards:
        (session.progress.warn if first.cause else session.progress.say)(f"first rewards of {first}")
        try:  # some advantages refuse rewards below 0, which a harvest would find after hours
            session.objective.advantage([1.0, first.lowest], [1, 1])
        except (ArithmeticError, ValueError) as error:
            raise ValueError(f"first rewards of {first}: loss.advantage: {error}") from error
