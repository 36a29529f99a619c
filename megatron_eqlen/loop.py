"""The main loop.

prompts ─► harvest ─► score ─► build_trees ─► update ─► sync ─► (evaluate, checkpoint, log)
   ▲                                                                        │
   └────────────────────────────── next step ◄──────────────────────────────┘
"""

from __future__ import annotations

from pathlib import Path

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run import Run


def train(recipe: Recipe, replay: Path | None = None) -> None:
    """Train as ``recipe`` says, from the newest checkpoint of its run folder if there is one.

    With ``replay``, rollouts come from a run's recorded streams and no engine is started.
    """
    with Run(recipe, replay) as run:
        run.resume()
        run.sync()
        run.evaluate("before")
        while run.goes_on():
            with run.step():
                for prompts in run.batches():
                    rollouts = run.harvest(prompts)
                    run.score(rollouts, prompts)
                minibatches = run.build_trees()
                run.update(minibatches)
                run.sync()
                run.evaluate_if_due()
            run.checkpoint_if_due()
        if run.complete:
            run.evaluate("after")
            run.export()
        run.report()


def harvest_only(recipe: Recipe, out: Path) -> None:
    """One step's rollouts with the weights that the recipe starts from, scored, under ``out``."""
    with Run(recipe, trains=False, streams=out) as run, run.step():
        for prompts in run.batches():
            rollouts = run.harvest(prompts)
            run.score(rollouts, prompts)


def evaluate_only(recipe: Recipe, out: Path) -> None:
    """The recipe's benchmarks on the model at ``recipe.model.path``; the result goes to ``out``."""
    with Run(recipe, trains=False) as run:
        run.evaluate("model", out)
