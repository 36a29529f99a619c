"""Gradients of a scripted policy through the real harvester, rewards and token trees, beside the true one.

The policy has two parameters: eta is added to the logit of stopping at each position, theta is the logit of a
good token against a bad one. Length law and tokens are independent, a right answer gets likelier with the
share of good tokens, and a truncated response has reward 0. So the true gradient (d/d eta, d/d theta) of the
expected reward is a sum over lengths and numbers of good tokens. A method without bias has the same ratio
eta / theta; scale does not count, since Adam divides it out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.metrics import OBJECTIVE_EFFECTIVE_SAMPLES
from megatron_eqlen.objectives.build import build_trees
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.types import Delta, Grade, Prompt, Rollout, Stream, TokenTree
from tools.benchmarks.table import show

EOS, BAD, GOOD = 1, 2, 3
DIFFICULTIES = (-1.0, 0.0, 1.0)
"""Logits of a right answer with half of the tokens good, equally likely among prompts."""
GROUP, PROMPTS = 16, 8
"""Responses (tracks) of a prompt, and prompts of a step."""
DRAWS = 2000
"""Bootstrap resamples of the steps."""

Gradient = np.ndarray
"""[2]: d/d eta, d/d theta."""
Hazard = np.ndarray
"""[limit]: probability of stopping at each position, given that the response got there."""


def independent(objective: str) -> dict[str, Any]:
    return {"sampling": "independent", "objective": objective}


def pairs(objective: str = "grpo", **equal_length: Any) -> dict[str, Any]:
    return {"sampling": "equal_length", "objective": objective, "equal_length": equal_length}


METHODS = {
    "GRPO": independent("grpo"),
    "Dr. GRPO": independent("dr_grpo"),
    "LUSPO": independent("luspo"),
    "RLOO": independent("rloo"),
    "EqLen, max": pairs(),
    "EqLen, mean": pairs("rloo", suffix_reward="mean"),
    "EqLen, drop": pairs(unfinished="drop"),
    "EqLen, single pair": pairs(single_pair=True),
    "EqLen, on_policy": pairs(pair_weight="on_policy"),
    "EqLen, on_policy, streams": pairs(pair_weight="on_policy", baseline="streams"),
}
BY_PAIRS = ("EqLen, max", "EqLen, mean", "EqLen, on_policy", "EqLen, on_policy, streams")


@dataclass(frozen=True)
class Case:
    """Length law, response limit, and how much rewards depend on good tokens (0: coin flips)."""

    shape: str
    mean: float
    limit: int
    strength: float

    @property
    def hazard(self) -> Hazard:
        return np.clip(SHAPES[self.shape](np.arange(self.limit + 1.0), self.mean), 1e-9, 0.5)


def _from_survival(survival: np.ndarray) -> Hazard:
    return 1 - survival[1:] / np.maximum(survival[:-1], 1e-300)


def _lognormal(t: np.ndarray, mean: float, cv: float) -> Hazard:
    variance = math.log(1 + cv * cv)
    z = (np.log(np.maximum(t, 1e-9)) - math.log(mean) + variance / 2) / math.sqrt(2 * variance)
    return _from_survival(np.array([0.5 * math.erfc(value) for value in z]))


SHAPES: dict[str, Callable[[np.ndarray, float], Hazard]] = {
    "exponential": lambda t, mean: np.full(len(t) - 1, 1 / mean),
    "lognormal": lambda t, mean: _lognormal(t, mean, cv=0.6),
    "heavy tail": lambda t, mean: _from_survival((1 + t / (1.2 * mean)) ** -2.2),
}
"""Name -> hazard at positions 1, 2, ... for a mean length (of the Lomax distribution for the heavy tail)."""


class World:
    """Draws tokens and rewards of one case."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.hazard = case.hazard
        self.cumulative = np.concatenate([[0.0], np.cumsum(self.hazard)])
        self.random = np.random.default_rng(seed)

    def tokens(self, start: int) -> list[int]:
        """Return a continuation of ``start`` tokens up to its end or the limit."""
        stops = np.nonzero(self.random.random(self.case.limit - start) < self.hazard[start:])[0]
        length = stops[0] + 1 if len(stops) else self.case.limit - start
        tokens = np.where(self.random.random(length) < 0.5, GOOD, BAD)
        if len(stops):
            tokens[-1] = EOS
        return tokens.tolist()

    def right(self, good: np.ndarray, length: np.ndarray, difficulty: float) -> np.ndarray:
        """Return the probability that responses with so many good tokens are right."""
        share = np.where(length > 1, good / np.maximum(length - 1, 1) - 0.5, 0.0)
        return 1 / (1 + np.exp(-difficulty - self.case.strength * 2 * math.sqrt(self.case.mean) * share))

    def step(self, recipe: Recipe, number: int) -> tuple[list[Rollout], int, int]:
        """Return graded rollouts of a step, their tokens, and the decode steps that they take if all run in
        lockstep."""
        prompts = [Prompt(f"{number}.{i}", [0], "?", "math", "1") for i in range(PROMPTS)]
        difficulty = {p.prompt_id: float(self.random.choice(DIFFICULTIES)) for p in prompts}
        rollouts, tokens, longest = [], 0, 0
        for harvester in KINDS[recipe.sampling].harvesters(prompts, recipe, frozenset([EOS]), number):
            launched = list(harvester.start())
            while launched or not harvester.complete:
                for track in launched:
                    ids = self.tokens(len(track.context) - 1)
                    track.extend(Delta(track.name, ids, [0.0] * len(ids)), 0)
                    tokens += len(ids)
                    longest = max(longest, len(track.context) - 1 + len(ids))
                launched = list(harvester.advance())
            rollout = harvester.rollout(0)
            for segment, response in rollout.ended():
                good = np.count_nonzero(np.asarray(response) == GOOD)
                right = self.right(np.array(good), np.array(len(response)), difficulty[rollout.prompt_id])
                segment.grade = Grade(float(self.random.random() < right), "")
            rollouts.append(rollout)
        return rollouts, tokens, longest

    def gradient(self, trees: Sequence[TokenTree]) -> Gradient:
        """Return what an on-policy step on ``trees`` ascends."""
        total = np.zeros(2)
        for tree in trees:
            ends = [0]
            for node in tree.nodes[1:]:
                start = ends[node.parent]
                ends.append(start + len(node))
                if node.weight and node.advantage:
                    ids = np.asarray(node.token_ids)
                    ended = ids[-1] == EOS
                    stopping = ended - (self.cumulative[ends[-1]] - self.cumulative[start])
                    quality = np.count_nonzero(ids == GOOD) - 0.5 * (len(ids) - ended)
                    total += node.weight * node.advantage * np.array([stopping, quality])
        return total

    def truth(self) -> Gradient:
        """Return the gradient of the expected reward, by summation (for long responses, quadrature over the
        normal distribution of good tokens)."""
        lengths = np.arange(1, self.case.limit + 1)
        alive = np.concatenate([[1.0], np.cumprod(1 - self.hazard[:-1])])
        probability = alive * self.hazard
        stopping = 1 - self.cumulative[1:]
        nodes, weights = np.polynomial.hermite_e.hermegauss(60)
        total = np.zeros(2)
        for length, p, score in zip(lengths, probability, stopping, strict=True):
            if length <= 200:
                good = np.arange(length)
                chance = np.exp(_log_binomial(int(length) - 1) - (length - 1) * math.log(2))
            else:
                good = (length - 1) / 2 + nodes * math.sqrt((length - 1) / 4)
                chance = weights / weights.sum()
            for difficulty in DIFFICULTIES:
                expected = p * chance * self.right(good, np.array(length), difficulty) / len(DIFFICULTIES)
                total += [score * expected.sum(), (expected * (good - (length - 1) / 2)).sum()]
        return total


def _log_binomial(n: int) -> np.ndarray:
    logs = np.array([math.lgamma(k + 1) for k in range(n + 1)])
    return logs[n] - logs - logs[::-1]


def recipe_of(case: Case, method: dict[str, Any], max_pairs: int | None = None) -> Recipe:
    raw = {
        "name": "mechanism",
        "steps": 1,
        "group_size": GROUP,
        "model": {"path": "-"},
        "data": {
            "sources": [{"name": "-", "path": "-"}],
            "max_prompt_length": 1,
            "prompts_per_step": PROMPTS,
        },
        "rollout": {"max_response_length": case.limit},
        "packing": {"max_tokens_per_row": case.limit + 1},
        "loss": {"kl_coef": 0.0},
        **method,
    }
    if max_pairs is not None and raw["sampling"] == "equal_length":
        pairs_of = raw["equal_length"]
        raw["equal_length"] = pairs_of if pairs_of.get("single_pair") else pairs_of | {"max_pairs": max_pairs}
    return parse(raw, "mechanism")


def measure(case: Case, names: Sequence[str], args: argparse.Namespace, max_pairs: int | None = None) -> list:
    """Return a row for each method. Methods whose rollouts are alike share them."""
    world = World(case, seed=args.seed)
    truth = world.truth()
    recipes = {name: recipe_of(case, METHODS[name], max_pairs) for name in names}
    rows = []
    for alike in _alike(recipes):
        gradients: dict[str, list[Gradient]] = {name: [] for name in alike}
        effective = dict.fromkeys(alike, 0.0)
        tokens = decode_steps = made = streams = 0
        for number in range(args.steps):
            rollouts, count, longest = world.step(recipes[alike[0]], number)
            tokens, decode_steps, streams = tokens + count, decode_steps + longest, streams + len(rollouts)
            made += sum(len(rollout.pairs) for rollout in rollouts if isinstance(rollout, Stream))
            for name in alike:
                trees, metrics = build_trees(rollouts, recipes[name])
                gradients[name].append(world.gradient(trees))
                effective[name] += metrics[OBJECTIVE_EFFECTIVE_SAMPLES]
        for name in alike:
            rows.append(
                {
                    "lengths": case.shape,
                    "rewards": "coin" if case.strength == 0 else "real",
                    "max_pairs": max_pairs,
                    "method": name,
                    "pairs": made / streams if made else None,
                    **_statistics(np.array(gradients[name]), truth, tokens / args.steps),
                    "samples/ktoken": 1000 * effective[name] / tokens,
                    "samples/decode step": effective[name] / decode_steps,
                }
            )
    return rows


def _alike(recipes: dict[str, Recipe]) -> Iterator[list[str]]:
    groups: dict[Any, list[str]] = {}
    for name, recipe in recipes.items():
        groups.setdefault((recipe.sampling, recipe.equal_length.single_pair), []).append(name)
    yield from groups.values()


def _statistics(gradients: np.ndarray, truth: Gradient, tokens: float) -> dict[str, Any]:
    """Return eta / theta (with coin flips, where theta is 0: the mean of eta over its standard deviation in a
    step) with its 95% interval over steps, and squared signal over noise of a step per million tokens."""
    draws = np.random.default_rng(0).integers(len(gradients), size=(DRAWS, len(gradients)))
    means, deviation = gradients[draws].mean(1), gradients.std(0, ddof=1)
    mean, coin = gradients.mean(0), abs(truth[1]) < 1e-9
    values = means[:, 0] / (deviation[0] if coin else means[:, 1])
    low, high = np.quantile(values, [0.025, 0.975])
    signal = (mean / deviation) ** 2 - 1 / len(gradients)
    return {
        "truth": 0.0 if coin else float(truth[0] / truth[1]),
        "found": float(mean[0] / (deviation[0] if coin else mean[1])),
        "low": float(low),
        "high": float(high),
        "snr eta": None if coin else float(signal[0] / tokens * 1e6),
        "snr theta": None if coin else float(signal[1] / tokens * 1e6),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mean", type=float, default=100, help="mean length before the limit cuts it")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--pairs", type=int, nargs="*", default=[1, 2, 3, 6, 12], help="of streams, at most")
    parser.add_argument("--strength", type=float, default=1.0, help="of the influence of good tokens")
    parser.add_argument(
        "--steps", type=int, default=100, help=f"of {PROMPTS} prompts and {GROUP} tracks each"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="bias by number of pairs, as PNG, PDF or SVG")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    rows = []
    for shape in args.shapes:
        rows += measure(Case(shape, args.mean, args.limit, args.strength), args.methods, args)
    for shape in args.shapes:  # a limit that no response reaches: truncation would make stopping right
        rows += measure(Case(shape, args.mean, 20 * args.limit, 0.0), args.methods, args, max_pairs=6)
    by_pairs = []
    for most in args.pairs:
        case = Case(args.shapes[0], args.mean, args.limit, args.strength)
        by_pairs += measure(case, BY_PAIRS, args, most)
    title = (
        f"mean {args.mean:g}, limit {args.limit}, {args.steps} steps of {PROMPTS} prompts x {GROUP} tracks"
    )
    show(rows + by_pairs, title, args.json)
    if args.figure is not None:
        draw(by_pairs, args.figure)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(rows[0]["truth"], color="black", linewidth=1, label="policy gradient")
    for name, colour in zip(BY_PAIRS, ("#cc3311", "#ee7733", "#0077bb", "#009988"), strict=True):
        mine = [row for row in rows if row["method"] == name]
        middle = [row["found"] for row in mine]
        spread = [
            [row["found"] - row["low"] for row in mine],
            [row["high"] - row["found"] for row in mine],
        ]
        axes.errorbar(
            [r["pairs"] for r in mine], middle, spread, color=colour, marker="o", capsize=2, label=name
        )
    axes.set(xlabel="pairs a stream", ylabel="stopping ÷ good tokens")
    axes.legend(frameon=False)
    figure.savefig(file)
