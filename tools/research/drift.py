"""Training of the scripted policy of ``mechanism``: what each method makes of its length and accuracy.

Each step harvests from the present policy and Adam takes its two parameters along the method's gradient.
Under coin flips nothing is to be learnt, so that what changes is the method's doing. Length and accuracy of a
policy are computed exactly; seeds differ in rollouts and rewards.

    python -m tools.research.drift --figure drift.svg
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from megatron_eqlen.evaluation.statistics import seed_difference
from megatron_eqlen.experiments.figures import svg
from megatron_eqlen.files import write_text
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.format import markdown_rows
from tools.research.mechanism import METHODS, WORLDS, Case, World, recipe_of

SHAPE = "lognormal, CV 0.6"
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
    "longer": "Longer responses win",
    "shorter": "Shorter responses win",
    "share": "Good tokens win, length says nothing",
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
    mean: float = 50
    """Mean length at the start."""
    steps: int = 40
    lr: float = 0.03
    """Learning rate of Adam for the two logits."""

    @property
    def case(self) -> Case:
        """Return the start. The limit is three times the mean length, as in the paper; without cuts it is so
        far away that responses may grow several times."""
        limit = int(self.mean) * (30 if self.rewards == "coin" else 3)
        return Case(SHAPE, self.mean, limit, **WORLDS[self.rewards])

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
                gradient = world.gradient(build_minibatches(rollouts, recipe)[0][0])
            parameters.grad = -torch.from_numpy(gradient)
            optimizer.step()
        return np.array(curve), world.accuracy() - _accuracy(self.case)


@cache
def _accuracy(case: Case) -> float:
    """Return the accuracy of the start, which all methods and seeds share."""
    return World(case, 0).accuracy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40, help=f"of {PROMPTS} prompts and {GROUP} tracks each")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--figure", type=Path, help="lengths during training, as SVG")
    args = parser.parse_args()
    methods = [(TRUTH, [None]), *((method, range(args.seeds)) for method in TRAINED)]
    curves: dict[str, dict[str, np.ndarray]] = {rewards: {} for rewards in REWARDS}
    with ProcessPoolExecutor(args.jobs) as pool:
        for rewards, title in REWARDS.items():
            rows = []
            for method, seeds in methods:
                runs = [Training(rewards, method, seed, steps=args.steps) for seed in seeds]
                ended = list(pool.map(Training.run, runs))
                lengths = curves[rewards][method] = np.array([curve for curve, _ in ended])
                row = {"method": method, "length, %": _change(100 * (lengths[:, -1] / lengths[:, 0] - 1))}
                if rewards != "coin":
                    row["accuracy, points"] = _change(100 * np.array([gain for _, gain in ended]))
                rows.append(row)
            print(f"\n**{title}**:\n\n{markdown_rows(rows)}")
    if args.figure is not None:
        write_text(args.figure, draw({rewards: curves[rewards] for rewards in PANELS}))


def _change(changes: np.ndarray) -> str:
    """Return the mean over seeds with its 95% t interval, in bold where that excludes 0."""
    if len(changes) == 1:
        return f"{changes[0]:+.1f}"
    interval = seed_difference(np.zeros(len(changes)), changes)
    text = f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"
    return text if interval.low <= 0 <= interval.high else f"**{text}**"


def draw(curves: dict[str, dict[str, np.ndarray]]) -> str:
    """Return, as SVG, the length of the policy relative to the start, a panel for each kind of rewards:
    geometric mean and range over seeds. ``curves``: rewards -> method -> [seeds, steps + 1]."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(4 * len(curves), 3.4), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for panel, (rewards, methods) in zip(panels, curves.items(), strict=True):
        panel.set(title=REWARDS[rewards].partition(",")[0], xlabel="steps of training")
        for method in (TRUTH, *DRAWN):
            lengths = methods[method] / methods[method][:, :1]
            style = "--" if method == TRUTH else "-"
            colour = DRAWN.get(method, "black")
            panel.plot(np.exp(np.log(lengths).mean(0)), style, color=colour, label=method)
            band = lengths.min(0), lengths.max(0)
            panel.fill_between(range(lengths.shape[1]), *band, color=colour, alpha=0.15, linewidth=0)
    panels[0].set(ylabel="length ÷ length at the start")
    panels[0].legend(frameon=False, fontsize=8)
    return svg(figure)


if __name__ == "__main__":
    main()
