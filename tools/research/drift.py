"""Training of the scripted policy of ``mechanism``: what each method makes of its length and accuracy.

Each step harvests from the present policy and Adam takes its two parameters along the method's gradient.
Under coin flips nothing is to be learnt, so that what changes is the method's doing. Length and accuracy of a
policy are computed exactly; seeds differ in rollouts and rewards.

    python -m tools.research.drift --figure drift.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_eqlen.evaluation.statistics import Interval, seed_difference
from megatron_eqlen.files import write_text
from megatron_eqlen.objectives.build import build_trees
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.compare import Rows, markdown_rows
from megatron_eqlen.report.figures import svg
from tools.research.mechanism import METHODS, WORLDS, Case, World, recipe_of

SHAPE = "lognormal 0.6"
PROMPTS, GROUP = 4, 8
"""Prompts of a step, and responses (tracks) of a prompt."""
TRAINED = (
    "GRPO", "Dr. GRPO", "DAPO, token mean", "LUSPO", "RLOO", "EqLen, max", "EqLen, mean", "EqLen, drop",
    "EqLen, single pair", "EqLen, on_policy", "EqLen, on_policy, streams",
)  # fmt: skip
DRAWN = {
    "GRPO": "#bbbbbb", "Dr. GRPO": "#555555", "EqLen, max": "#cc3311", "EqLen, mean": "#ee7733",
    "EqLen, on_policy": "#0077bb",
}  # fmt: skip
"""Methods in the figure, with their colours."""
PANELS = ("coin", "shorter")
"""Rewards in the figure."""
REWARDS = {
    "coin": "Coin flips, no response is cut",
    "cut": "Coin flips, and truncated responses are wrong",
    "longer": "Longer responses win",
    "shorter": "Shorter responses win",
    "share": "Good tokens win, length says nothing",
    "irreversible": "A bad token makes a response wrong",
}
"""Kinds of rewards, with the titles of their tables."""
TRUTH = "policy gradient, exact"

Curve = np.ndarray
"""[steps + 1]: mean length of the policy in tokens, before each step and at the end."""


@dataclass(frozen=True)
class Training:
    """One run of a method. ``seed`` None: along the exact policy gradient."""

    rewards: str
    method: str
    seed: int | None
    mean: float
    steps: int
    lr: float

    @property
    def case(self) -> Case:
        """Return the start. The limit is three times the mean length, as in the paper; without cuts it is so
        far away that responses may grow several times."""
        limit = int(self.mean) * (30 if self.rewards == "coin" else 3)
        return Case(SHAPE, self.mean, limit, **WORLDS["coin" if self.rewards == "cut" else self.rewards])

    @property
    def recipe(self) -> Recipe | None:
        """Return the recipe of the method, None along the exact gradient; streams that no limit ends have at
        most 6 pairs, as in the paper."""
        if self.seed is None:
            return None
        most = 6 if self.rewards == "coin" else None
        return recipe_of(self.case, METHODS[self.method], most, PROMPTS, GROUP)

    def run(self) -> tuple[Curve, float]:
        """Return the curve and the change of accuracy."""
        parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([parameters], lr=self.lr, eps=1e-6)
        recipe, curve = self.recipe, []
        for step in range(self.steps + 1):
            eta, theta = parameters.tolist()
            world = World(replace(self.case, eta=eta, theta=theta), [self.seed or 0, step])
            curve.append(world.mean_length())
            if step == self.steps:
                break
            if recipe is None:
                gradient = world.truth()
            else:
                rollouts, _, _ = world.step(recipe, step)
                gradient = world.gradient(build_trees(rollouts, recipe)[0])
            parameters.grad = -torch.from_numpy(gradient)
            optimizer.step()
        return np.array(curve), world.accuracy() - _accuracy(self.case)


@cache
def _accuracy(case: Case) -> float:
    """Return the accuracy of the start, which all methods and seeds share."""
    return World(case, 0).accuracy()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mean", type=float, default=50, help="mean length at the start")
    parser.add_argument("--steps", type=int, default=40, help=f"of {PROMPTS} prompts and {GROUP} tracks each")
    parser.add_argument("--lr", type=float, default=0.03, help="of Adam, for the two logits")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--rewards", nargs="+", choices=REWARDS, default=["coin", "longer", "shorter", "share"]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(TRAINED))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--figure", type=Path, help="lengths during training, as SVG")


def run(args: argparse.Namespace) -> None:
    methods = [(TRUTH, [None]), *((method, range(args.seeds)) for method in args.methods)]
    runs = [
        [Training(rewards, method, seed, args.mean, args.steps, args.lr) for seed in seeds]
        for rewards, (method, seeds) in product(args.rewards, methods)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        ended = iter(list(pool.map(Training.run, chain(*runs), chunksize=4)))
    rows = [_row(seeds, [next(ended) for _ in seeds]) for seeds in runs]
    for line in _tables(rows, args.rewards):
        print(line)
    if args.figure is not None:
        draw([row for row in rows if row["rewards"] in PANELS], args.figure)


def _row(seeds: Sequence[Training], ended: Sequence[tuple[Curve, float]]) -> dict[str, Any]:
    curves = np.array([curve for curve, _ in ended])
    return {
        "rewards": seeds[0].rewards,
        "method": seeds[0].method,
        "length, %": _change(100 * (curves[:, -1] / curves[:, 0] - 1)),
        "accuracy, points": _change(100 * np.array([accuracy for _, accuracy in ended])),
        "curves": curves,
    }


def _tables(rows: Rows, rewards: Sequence[str]) -> Iterator[str]:
    """Yield Markdown: change of length in percent and of accuracy in points, with 95% t intervals over
    seeds."""
    for name in rewards:
        yield f"\n**{REWARDS[name]}**:\n"
        columns = ("method", "length, %") if name == "coin" else ("method", "length, %", "accuracy, points")
        yield markdown_rows([{key: row[key] for key in columns} for row in rows if row["rewards"] == name])


def _change(changes: np.ndarray) -> str:
    """Return the mean over seeds with its interval, in bold where that excludes 0."""
    if len(changes) == 1:
        return f"{changes[0]:+.1f}"
    interval: Interval = seed_difference(np.zeros(len(changes)), changes)
    text = f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"
    return text if interval.low <= 0 <= interval.high else f"**{text}**"


def draw(rows: Rows, file: Path) -> None:
    """Draw the length of the policy relative to the start, a panel for each kind of rewards: geometric mean
    and range over seeds."""
    from matplotlib.figure import Figure  # slow to import

    panels = {row["rewards"]: REWARDS[row["rewards"]].partition(",")[0] for row in rows}
    figure = Figure(figsize=(4 * len(panels), 3.4), layout="constrained")
    axes = dict(zip(panels, figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], strict=True))
    for row in rows:
        lengths = row["curves"] / row["curves"][:, :1]
        mean, place = np.exp(np.log(lengths).mean(0)), axes[row["rewards"]]
        if row["method"] == TRUTH:
            place.plot(mean, color="black", linewidth=1, linestyle="--", label=TRUTH)
        elif (colour := DRAWN.get(row["method"])) is not None:
            place.plot(mean, color=colour, linewidth=2, label=row["method"])
            band = lengths.min(0), lengths.max(0)
            place.fill_between(range(lengths.shape[1]), *band, color=colour, alpha=0.15, linewidth=0)
    for name, place in axes.items():
        place.set(title=panels[name], xlabel="steps of training")
    first = next(iter(axes.values()))
    first.set(ylabel="length ÷ length at the start")
    first.legend(frameon=False, fontsize=8)
    write_text(file, svg(figure))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args())
