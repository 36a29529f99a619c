"""An evaluation as one rank makes it, with an engine and graders of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.run import generation
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.sampling.harvester import every_rollout
from megatron_eqlen.types import Prompt


def evaluated(
    recipe: Recipe,
    engine: Any,
    problems: Sequence[Prompt],
    tokenizer: Any,
    responses: Path | None = None,
    scorer: Scorer | None = None,
    share: Callable[[list], list] = list,
    gather: Callable[[list], list] = list,
    conversations: Any = None,
    say: Callable[[str], Any] = str,
) -> EvaluationResult:
    """Evaluate ``problems`` as the recipe's first benchmark. ``responses``: None for a folder that is removed
    afterwards; ``scorer``: None for one of the recipe; ``say`` gets what the screen shows. Needs a process
    group of one."""
    graders, generator = scorer or Scorer(recipe.reward, tokenizer), Generator.__new__(Generator)
    generator.recipe, generator.engine, generator.conversations = recipe, engine, conversations
    generator.session = SimpleNamespace(
        scorer=graders,
        replicas=SimpleNamespace(share=share, grades=every_rollout, part=list, leads=True),
        tokenizer=tokenizer,
        progress=SimpleNamespace(say=say),
    )
    with TemporaryDirectory() as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "problems", lambda session, benchmark: [*problems])
        patch.setattr(generation, "gather", gather)
        try:
            return generator.evaluate(recipe.evaluation.benchmarks[0], responses or Path(own), None)
        finally:
            if scorer is None:
                graders.close()
