"""Gradients of a scripted policy through the real harvester, rewards and token trees, beside the true one.

The policy has two parameters: eta is added to the logit of stopping at each position, theta is the logit of a
good token against a bad one. Length law and tokens are independent, and a truncated response has reward 0.
A right answer gets likelier with the share of good tokens or, where errors are irreversible, needs a response
without a bad token. So the true gradient (d/d eta, d/d theta) of the expected reward is a sum over lengths
and numbers of good tokens. A method without bias has the same ratio eta / theta; scale does not count, since
Adam divides it out.

    python -m tools.research.mechanism --figure length_bias.svg
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from megatron_eqlen.experiments.figures import svg
from megatron_eqlen.files import write_text
from megatron_eqlen.metrics import OBJECTIVE_EFFECTIVE_SAMPLES
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.format import Rows, markdown_rows
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.kind import Setting
from megatron_eqlen.types import Delta, Grade, Prompt, Rollout, TokenTree
from tools.research.samples import LAWS

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


TOKEN_MEAN = {"loss": {"kl_coef": 0.0, "overlong_buffer": 0, "dynamic_sampling": False}}
"""DAPO without its length penalty, which is another reward, and without dynamic sampling."""
METHODS = {
    "GRPO": independent("grpo"),
    "Dr. GRPO": independent("dr_grpo"),
    "DAPO, token mean": independent("dapo") | TOKEN_MEAN,
    "LUSPO": independent("luspo"),
    "RLOO": independent("rloo"),
    "MaxRL": independent("maxrl"),
    "Delta L": independent("delta_l"),
    "EqLen, max": pairs(),
    "EqLen, mean": pairs(suffix_reward="mean"),
    "EqLen, mean, RLOO": pairs("rloo", suffix_reward="mean"),
    "EqLen, drop": pairs(unfinished="drop"),
    "EqLen, single pair": pairs(single_pair=True),
    "EqLen-Dr. GRPO": pairs("dr_grpo"),
    "EqLen-DAPO, token mean": pairs("dapo") | TOKEN_MEAN,
    "EqLen, on_policy": pairs(pair_weight="on_policy"),
    "EqLen, on_policy, streams": pairs(pair_weight="on_policy", baseline="streams"),
}
"""Method -> recipe keys. All importance ratios are 1, so that GSPO equals GRPO, and EqLen-LUSPO equals
EqLen-Dr. GRPO up to a constant."""
DRAWN = {
    "EqLen, max": "#cc3311", "EqLen, mean, RLOO": "#ee7733", "EqLen, on_policy": "#0077bb",
    "EqLen, on_policy, streams": "#009988",
}  # fmt: skip
"""Methods in the figure, with their colours."""
MAX_PAIRS = (1, 2, 3, 4, 6, 8, 10, 12)
"""Limits of the pairs of a stream, by which the figure goes."""


@dataclass(frozen=True)
class Case:
    """Length law, response limit, and how rewards depend on tokens."""

    shape: str
    """A law of ``LAWS``."""
    mean: float
    limit: int
    strength: float
    """Influence of good tokens on rewards; 0: coin flips."""
    irreversible: bool = False
    """True: a single bad token makes a response wrong (mostly). Half of the responses of mean length have
    none."""
    length_pays: float = 0.0
    """Added to the logit of a right answer for each e-fold of its length; below 0, short responses win."""
    eta: float = 0.0
    """Parameter of the policy: added to the logit of stopping."""
    theta: float = 0.0
    """Parameter of the policy: added to the logit of a good token."""

    @property
    def hazard(self) -> Hazard:
        log_survival = LAWS[self.shape].logsf(np.arange(self.limit + 1) / self.mean)
        hazard = np.clip(-np.expm1(np.diff(log_survival)), 1e-9, 0.5)
        return _shifted(hazard, self.eta) if self.eta else hazard

    @property
    def good(self) -> float:
        """Probability that a token is good."""
        good = 0.5 ** (1 / self.mean) if self.irreversible else 0.5
        return float(_shifted(good, self.theta)) if self.theta else good


def _shifted(probability: Any, shift: float) -> Any:
    """Return probabilities whose logits are greater by ``shift``."""
    odds = np.exp(shift) * probability / (1 - probability)
    return odds / (1 + odds)


class World:
    """Draws tokens and rewards of one case."""

    def __init__(self, case: Case, seed: int | Sequence[int]) -> None:
        self.case = case
        self.hazard = case.hazard
        self.cumulative = np.concatenate([[0.0], np.cumsum(self.hazard)])
        self.survival = np.concatenate([[0.0], np.cumsum(-np.log1p(-self.hazard))])
        """[limit + 1]: minus the log of the probability of reaching a position."""
        self.random = np.random.default_rng(seed)

    def tokens(self, start: int) -> list[int]:
        """Return a continuation of ``start`` tokens up to its end or the limit."""
        end = self.survival[start] + self.random.exponential()
        length = int(np.searchsorted(self.survival, end)) - start
        ended = start + length <= self.case.limit
        length = min(length, self.case.limit - start)
        tokens = np.where(self.random.random(length) < self.case.good, GOOD, BAD)
        if ended:
            tokens[-1] = EOS
        return tokens.tolist()

    def right(self, good: np.ndarray, length: np.ndarray, difficulty: float) -> np.ndarray:
        """Return the probability that responses of ``length`` with so many good tokens are right."""
        case = self.case
        if case.irreversible:
            effect = np.where(good > length - 1.5, 1.5, -1.5)
        else:
            share = np.where(length > 1, good / np.maximum(length - 1, 1) - 0.5, 0.0)
            effect = 2 * math.sqrt(case.mean) * share
        effect = case.strength * effect + case.length_pays * np.log(length / case.mean)
        return 1 / (1 + np.exp(-difficulty - effect))

    def step(self, recipe: Recipe, number: int) -> tuple[list[Rollout], int, int]:
        """Return graded rollouts of a step, their tokens, and the decode steps that they take if all run in
        lockstep."""
        count = recipe.data.prompts_per_step
        prompts = [Prompt(f"{number}.{i}", [0], "?", "math", "1") for i in range(count)]
        difficulty = {p.prompt_id: float(self.random.choice(DIFFICULTIES)) for p in prompts}
        rollouts, tokens, longest = [], 0, 0
        setting = Setting(recipe, frozenset([EOS]), number)
        for harvester in KINDS[recipe.sampling].harvesters(prompts, setting):
            launched = list(harvester.start())
            while launched or not harvester.complete:
                for track in launched:
                    ids = self.tokens(len(track.context) - 1)
                    track.extend(Delta(track.name, ids, {"logprobs": [0.0] * len(ids)}), 0)
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
                    quality = np.count_nonzero(ids == GOOD) - self.case.good * (len(ids) - ended)
                    total += node.weight * node.advantage * np.array([stopping, quality])
        return total

    def truth(self) -> Gradient:
        """Return the gradient of the expected reward."""
        return self._reward_and_gradient()[1:]

    def accuracy(self) -> float:
        """Return the expected reward of the policy."""
        return float(self._reward_and_gradient()[0])

    def mean_length(self) -> float:
        """Return the expected length of the policy's responses, cut ones included."""
        return float(np.exp(-self.survival[:-1]).sum())

    def _reward_and_gradient(self) -> np.ndarray:
        """Return [3]: the expected reward and its gradient, by summation (for long responses, quadrature over
        the normal distribution of good tokens)."""
        lengths = np.arange(1, self.case.limit + 1)
        probability = np.exp(-self.survival[:-1]) * self.hazard
        stopping = 1 - self.cumulative[1:]
        total = np.zeros(3)
        for length, p, score in zip(lengths, probability, stopping, strict=True):
            good, chance = self._good_tokens(int(length) - 1)
            quality = good - self.case.good * (length - 1)
            for difficulty in DIFFICULTIES:
                expected = p * chance * self.right(good, np.array(length), difficulty) / len(DIFFICULTIES)
                total += [expected.sum(), score * expected.sum(), (expected * quality).sum()]
        return total

    def _good_tokens(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers of good tokens among ``count``, and their probabilities. Irreversible errors: all of
        them, and the mean of the other numbers."""
        if self.case.irreversible:
            every = self.case.good**count
            others = count * (self.case.good - every) / max(1 - every, 1e-300)
            return np.array([count, others]), np.array([every, 1 - every])
        good = self.case.good
        if count < 200:
            numbers = np.arange(count + 1)
            return numbers, stats.binom.pmf(numbers, count, good)
        return count * good + NODES * math.sqrt(count * good * (1 - good)), NODE_WEIGHTS


NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


def recipe_of(
    case: Case, method: dict[str, Any], max_pairs: int | None, prompts: int = PROMPTS, group: int = GROUP
) -> Recipe:
    data = {"sources": [{"name": "-", "path": "-"}], "max_prompt_length": 1, "prompts_per_step": prompts}
    raw = {
        "name": "mechanism", "steps": 1, "group_size": group, "model": {"path": "-"}, "data": data,
        "rollout": {"max_response_length": case.limit},
        "loss": {"kl_coef": 0.0},
        "packing": {"max_tokens_per_row": case.limit + 1},
        **method,
    }  # fmt: skip
    options = method.get("equal_length")
    if max_pairs is not None and options is not None and not options.get("single_pair"):
        raw["equal_length"] = options | {"max_pairs": max_pairs}
    return parse(raw, "mechanism")


def measure(case: Case, names: Sequence[str], steps: int, max_pairs: int | None = None) -> Rows:
    """Return a row for each method. Methods whose rollouts are alike share them."""
    world = World(case, seed=0)
    truth = world.truth()
    recipes = {name: recipe_of(case, METHODS[name], max_pairs) for name in names}
    alike: dict[Any, list[str]] = {}
    for name, recipe in recipes.items():
        alike.setdefault((recipe.sampling, recipe.equal_length.single_pair), []).append(name)
    rows = []
    for sharing in alike.values():
        gradients: dict[str, list[Gradient]] = {name: [] for name in sharing}
        effective = dict.fromkeys(sharing, 0.0)
        tokens = decode_steps = made = streams = 0
        for number in range(steps):
            rollouts, count, longest = world.step(recipes[sharing[0]], number)
            tokens, decode_steps, streams = tokens + count, decode_steps + longest, streams + len(rollouts)
            made += sum(len(rollout.with_role("a")) for rollout in rollouts)
            for name in sharing:
                (trees,), metrics = build_minibatches(rollouts, recipes[name])
                gradients[name].append(world.gradient(trees))
                effective[name] += metrics[OBJECTIVE_EFFECTIVE_SAMPLES]
        for name in sharing:
            direction, signal = _statistics(np.array(gradients[name]), truth)
            rows.append(
                {
                    "method": name,
                    "pairs": f"{made / streams:.1f}",
                    "direction": direction,
                    SIGNAL_PER_TOKEN: f"{1e6 * signal / tokens:,.0f}",
                    SIGNAL_PER_STEP: f"{1e3 * signal / decode_steps:.1f}",
                    SAMPLES_PER_TOKEN: f"{1e3 * effective[name] / tokens:.1f}",
                }
            )
    return rows


SIGNAL_PER_TOKEN = "Squared signal over noise of theta, per million tokens"
SIGNAL_PER_STEP = "Squared signal over noise of theta, per 1,000 lockstep decode steps"
SAMPLES_PER_TOKEN = "Effective samples per 1,000 tokens"


@dataclass(frozen=True)
class Direction:
    """Measured eta / theta with its 95% interval over steps, and that of the policy gradient. Under coin
    flips, where theta is 0: the mean of eta over its standard deviation in a step."""

    value: float
    low: float
    high: float
    truth: float

    def __str__(self) -> str:
        text = f"{self.value:.2g} [{self.low:.2g}, {self.high:.2g}]"
        return text if self.low <= self.truth <= self.high else f"**{text}**"


def _statistics(gradients: np.ndarray, truth: Gradient) -> tuple[Direction, float]:
    """Return the direction of [steps, 2] gradients, and the squared signal over noise of theta, summed over
    the steps (decode steps run in lockstep: a step takes as many as its longest response)."""
    draws = np.random.default_rng(0).integers(len(gradients), size=(DRAWS, len(gradients)))
    means, deviation = gradients[draws].mean(1), gradients.std(0, ddof=1)
    mean, coin = gradients.mean(0), abs(truth[1]) < 1e-9
    low, high = np.quantile(means[:, 0] / (deviation[0] if coin else means[:, 1]), [0.025, 0.975])
    value = mean[0] / (deviation[0] if coin else mean[1])
    direction = Direction(value, low, high, 0.0 if coin else truth[0] / truth[1])
    return direction, len(gradients) * (mean[1] / deviation[1]) ** 2 - 1


WORLDS: dict[str, dict[str, Any]] = {
    "share": {"strength": 1.0},
    "irreversible": {"strength": 1.0, "irreversible": True},
    "coin": {"strength": 0.0},
    "longer": {"strength": 0.0, "length_pays": 1.0},
    "shorter": {"strength": 0.0, "length_pays": -1.0},
}
TITLES = {
    "share": "Rewards by the share of good tokens, eta / theta",
    "irreversible": "Irreversible errors, eta / theta",
    "coin": "Coin flips, mean of eta over its deviation",
}


def show_by_law(case: Case, rewards: str, shapes: Sequence[str], steps: int) -> None:
    """Print Markdown: the direction of each method by length law, then what it costs."""
    found = {}
    for shape in shapes:
        law = replace(case, shape=shape, **WORLDS[rewards])
        # A limit that no response reaches under coin flips: truncation would make stopping right.
        coin = rewards == "coin"
        law, most = (replace(law, limit=20 * law.limit), 6) if coin else (law, None)
        found[shape] = {row["method"]: row for row in measure(law, list(METHODS), steps, most)}
    truth = {shape: f"{next(iter(rows.values()))['direction'].truth:.2g}" for shape, rows in found.items()}
    costs = (SIGNAL_PER_TOKEN, SIGNAL_PER_STEP, SAMPLES_PER_TOKEN) if rewards == "share" else ()
    for key in ("direction", *costs):
        cells = [{"": name} | {shape: rows[name][key] for shape, rows in found.items()} for name in METHODS]
        head = [{"": "truth"} | truth] if key == "direction" else []
        print(f"\n**{TITLES[rewards] if key == 'direction' else key}**:\n\n{markdown_rows(head + cells)}")


def draw_by_pairs(case: Case, steps: int, file: Path) -> None:
    """Print the direction by number of pairs as Markdown, and draw it as SVG."""
    from matplotlib.figure import Figure  # slow to import

    many = [name for name, keys in METHODS.items() if "equal_length" in keys and name != "EqLen, single pair"]
    found = [{row["method"]: row for row in measure(case, many, steps, most)} for most in MAX_PAIRS]
    cells = [{"": name} | {rows[name]["pairs"]: rows[name]["direction"] for rows in found} for name in many]
    truth = found[0][many[0]]["direction"].truth
    print(f"\n**By pairs a stream**, truth {truth:.2g}:\n\n{markdown_rows(cells)}")
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(truth, color="black", linewidth=1, label="policy gradient")
    for name, colour in DRAWN.items():
        drawn = [rows[name]["direction"] for rows in found]
        spread = [[each.value - each.low for each in drawn], [each.high - each.value for each in drawn]]
        counts = [float(rows[name]["pairs"]) for rows in found]
        style = {"color": colour, "marker": "o", "capsize": 2, "label": name}
        axes.errorbar(counts, [each.value for each in drawn], spread, **style)
    axes.set(xlabel="pairs a stream", ylabel="stopping ÷ good tokens")
    axes.legend(frameon=False)
    write_text(file, svg(figure))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--paper", action="store_true", help="the paper's lengths, one kind of rewards")
    parser.add_argument("--steps", type=int, default=40, help=f"of {PROMPTS} prompts and {GROUP} tracks each")
    parser.add_argument("--figure", type=Path, help="bias by number of pairs, as SVG")
    args = parser.parse_args()
    if args.paper:
        case = Case("exponential", 10_000, 32_768, strength=1.0)
        show_by_law(case, "share", ["exponential", "lognormal, CV 0.6"], args.steps)
        return
    case = Case("exponential", 100, 300, strength=1.0)
    for rewards in TITLES:
        show_by_law(case, rewards, list(LAWS), args.steps)
    if args.figure is not None:
        draw_by_pairs(replace(case, limit=2 * case.limit), args.steps, args.figure)


if __name__ == "__main__":
    main()
