"""The advice on forks and baselines is right: for scripted policies, whose values are enumerated."""

import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.objectives.advice import advice
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling import profile as profile_module
from megatron_eqlen.sampling.comparison import part_rewards
from megatron_eqlen.sampling.harvester import Marker, Setting
from megatron_eqlen.sampling.profile import (
    RANKS,
    fork_gains,
    forks,
    gain_metrics,
    outcome_profile,
    profile_metrics,
)
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Delta, Grade, Part, Prompt, Rollout
from tests.kit.rollouts import build_trees
from tests.pure.test_forks import process, recipe

PROMPT = Prompt("q", [1, 2], "?", "math", "1")
LENGTH = 8


@pytest.mark.parametrize("keys", [
    {"rule": {"fork": "tokens", "step_tokens": 1, "forks": 1}, "group_size": 3},
    {"rule": {"fork": "tokens", "step_tokens": 1, "forks": 2}},
    {"sampling": "equal_length"},
], ids=str)  # fmt: skip
def test_forks_estimate_the_variance_that_a_prefix_leaves_undecided(keys):
    world = process()
    estimates, truth = np.zeros(world.limit), np.zeros(world.limit)
    for rollout, probability in world.streams(recipe(**keys)):
        for fork in forks(rollout):
            estimates[fork.length] += probability * fork.weight * fork.variance
            truth[fork.length] += probability * fork.weight * variance(world, (1,) * fork.length)
    np.testing.assert_allclose(estimates, truth, rtol=0, atol=1e-12)
    assert truth[:2].min() > 0.001


def variance(world, prefix):
    """Return the variance of the reward of responses that continue ``prefix``."""
    values = [(p, world.value((*prefix, *rest))) for rest, p in world.continuations(prefix)]
    mean = sum(p * value for p, value in values)
    return sum(p * (value - mean) ** 2 for p, value in values)


def test_the_gain_of_a_fork_is_that_of_the_best_number_of_lines():
    late = [[0.9, 1.0], [0.1, 0.9]]
    lines = np.arange(2, 33)
    means = (0.9 * (0.1 + 0.9 / lines) + 0.1 * 0.9 / (lines - 1)) * (0.9 + 0.1 * lines)
    perfect = (0.09 + 0.9 / lines) / 0.99 * (0.9 + 0.1 * lines)
    assert fork_gains(*late, np.inf).max() == pytest.approx(1 / np.maximum(means, perfect).min())
    assert fork_gains([0.5, 1.0], [1.0, 0.0], 100).max() < 1, "the baseline's gain is not the fork's"
    even = np.arange(1, 101) / 100
    most = fork_gains(even, np.full(100, 0.01), np.inf).max()
    assert most < 9 / 8, "which the best of all trees has over the baseline"
    places = fork_gains([0.2, 0.9, 1.0], [0.5, 0.0, 0.5], 100)
    assert places.argmax() // 31 == 1, "the place before what is late"


# ---- advice, and what the sampler measures ---------------------------------------------------------------

END, MARK = 0, 3


@dataclass(frozen=True)
class World:
    """A scripted policy."""

    reward: Callable[[tuple[int, ...]], float]
    chances: Callable[[tuple[int, ...]], dict[int, float]] = lambda path: COIN if len(path) < LENGTH else LAST
    """Probabilities of the token after a path."""
    limit: int = LENGTH + 1

    @cache  # noqa: B019 (a world is a constant of this file)
    def value(self, path):
        if path and path[-1] == END:
            return float(self.reward(path[:-1]))
        return sum(chance * self.value((*path, token)) for token, chance in self.chances(path).items())

    def signal(self, path=(), reach=1.0):
        """Return the squared length of the gradient by free logits of each path."""
        if path and path[-1] == END:
            return 0.0
        after = [((*path, token), chance) for token, chance in self.chances(path).items()]
        own = sum((reach * chance * (self.value(on) - self.value(path))) ** 2 for on, chance in after)
        return own + sum(self.signal(on, reach * chance) for on, chance in after)

    def drawn(self, settings, number):
        """Return the rollout of our own sampler with these draws."""
        draws, prompt = random.Random(number), Prompt(f"q{number}", [9], "?", "math", "1")
        setting = Setting(settings, frozenset({END}), number, Marker(lambda ids: MARK in ids, 1))
        harvester = KINDS[settings.sampling].harvesters([prompt], setting)[0]
        launched = harvester.start()
        while not harvester.complete:
            for track in launched:
                path = [*track.context[1:]]
                while not path or path[-1] != END:
                    path += draws.choices(*zip(*self.chances(tuple(path)).items(), strict=True))
                token_ids = path[len(track.context) - 1 :]
                track.extend(Delta(track.name, token_ids, {"logprobs": [0.0] * len(token_ids)}), 0)
            launched = harvester.advance()
        for part, response in harvester.rollout(0).ended():
            part.grade = Grade(float(self.reward(tuple(response[:-1].tolist()))), "")
        return harvester.rollout(0)

    def noise_times_tokens(self, settings, perfect, count):
        """Return the trace of the covariance of a step by free logits x its tokens. ``perfect``: tokens are
        compared with the enumerated value of their prefix, in place of the package's advantages."""
        squares = tokens = 0.0
        for number in range(count):
            rollout = self.drawn(settings, number + 10**6)
            nodes, rewards = build_trees([rollout], settings)[0][0].nodes, part_rewards(rollout)
            weights, step, above = rollout.weights(), defaultdict(float), {-1: ()}
            for part, node in zip(rollout.parts, nodes[1:], strict=True):
                path = above[part.parent]
                advantages = np.broadcast_to(node.advantage, len(part)).tolist()
                for token, advantage in zip(part.token_ids.tolist(), advantages, strict=True):
                    gap = rewards[part.number] - self.value(path) if perfect else advantage
                    for other, chance in self.chances(path).items():
                        step[path, other] += weights[part.number] * gap * ((other == token) - chance)
                    path = (*path, token)
                above[part.number] = path
            squares += sum(value * value for value in step.values()) / count
            tokens += sum(map(len, rollout.parts)) / count
        return max(squares - self.signal(), 1e-9) * tokens


COIN, LAST = {1: 0.5, 2: 0.5}, {END: 1.0}


def stops(path):
    return (COIN if not path else {1: 0.4, 2: 0.4, END: 0.2}) if len(path) < 9 else LAST


def marks(path):
    if MARK in path:
        return COIN if len(path) - path.index(MARK) < 3 else LAST
    return (COIN if not path else {1: 0.4, 2: 0.4, MARK: 0.2}) if len(path) < 7 else {MARK: 1.0}


def after(path):
    return path[path.index(MARK) + 1 :]


POLICIES = {
    "at the first token": World(lambda path: path[0] == 1),
    "at the last token": World(lambda path: path[-1] == 1),
    "in the middle": World(lambda path: path[4] == 1),
    "evenly": World(lambda path: path.count(1) / LENGTH),
    "at both ends": World(lambda path: (path[0] == 1) / 2 + (path[-1] == 1) / 2),
    "two tokens, and": World(lambda path: path[1] == path[6] == 1),
    "two tokens, xor": World(lambda path: path[1] != path[6]),
    "rare": World(lambda path: path[4:7] == (1, 1, 1)),
    "by length": World(lambda path: len(path) < 5, stops, 10),
    "half after a marker": World(lambda path: (path[0] == 1) / 2 + (after(path)[0] == 1) / 2, marks, 11),
}


def sampled(world, rule=None):
    sampling = "independent" if rule is None else "tree"
    return recipe(rule, sampling=sampling, group_size=4, limit=world.limit)


def at(*places):
    return {"fork": "tokens", "forks": len(places), "step_tokens": places[0]}


@pytest.mark.parametrize(("policy", "rule", "pays"), [
    ("at the first token", at(4), False),
    ("at the first token", at(2, 4, 6), False),
    ("at the last token", at(2, 4, 6), True),
    ("in the middle", at(6), False),
    ("evenly", at(6), False),
    ("at both ends", at(6), None),
    ("two tokens, and", at(4), None),
    ("two tokens, xor", at(6), True),
    ("rare", at(4), None),
    ("by length", at(3), None),
    ("half after a marker", {"fork": "marker", "marker": "m", "forks": 1}, None),
], ids=str)  # fmt: skip
def test_advice_has_the_sign_that_noise_times_tokens_of_our_sampler_has(policy, rule, pays):
    """With a perfect baseline on both sides, and with the siblings' mean (rloo) on both. None: nothing is
    expected but that no loss is advised."""
    world = POLICIES[policy]
    settings = sampled(world, rule)
    profile, sentence = advice([world.drawn(settings, n) for n in range(150)], settings)
    advised = rule | {"forks": 1, "branching": profile.lines}
    if rule["fork"] == "tokens":
        advised["step_tokens"] = round(profile.place * world.limit)
    gains = [
        world.noise_times_tokens(sampled(world), perfect, 60)
        / world.noise_times_tokens(sampled(world, advised), perfect, 60)
        for perfect in (False, True)
    ]
    found = profile.gain.low > 1
    assert ("are not seen to pay" not in sentence) == found, sentence
    assert profile.gain.low <= profile.gain.value <= profile.gain.high
    assert pays in (None, found), sentence
    assert pays is None or (min(gains) > 1) == pays, (gains, sentence)
    assert min(gains) > 1 or not found, (gains, sentence)


def test_where_half_of_the_responses_go_on_the_tokens_behind_a_fork_are_of_the_undecided():
    """Responses end by a coin after 1,000 tokens, or after as many again. Alone 1,500 tokens have the noise
    of a coin; two lines behind a fork halve what is undecided before it, and are compared with each other."""
    coin, tokens = 1 / 4, np.array([1500, 2000])
    alone = 1500 * coin
    forked = 1000 * (coin / 2 + coin / 4) + 500 * coin
    gain = alone * tokens[0] / (forked * tokens[1])
    assert fork_gains([2 / 3, 1], [1 / 2, 1 / 2], np.inf, [1 / 3])[0, 0] == pytest.approx(gain)
    # one of ten goes on, by a coin after 50 tokens; all that end after 10 have half a reward
    alone, forked = 10 * coin / 10 + 5 * coin, 10 * coin / 10 / 2 + 5 * coin
    of_few = fork_gains([2 / 3, 1], [0, 1], np.inf, [5 * coin / (15 * coin / 10)])[0, 0]
    assert of_few == pytest.approx(alone * 15 / (forked * 20))
    draws = np.random.default_rng(0)

    def tree(number):
        parts = [Part(Tokens.of([5] * 1000), number=root) for root in range(4)]
        for root in parts[:4]:
            forks = draws.random() < 1 / 2
            leaves = [Part(Tokens.of([5] * 1000), parent=root.number) for _ in range(2)] if forks else [root]
            for leaf in leaves:
                leaf.finish_reason, leaf.grade = "stop", Grade(float(draws.integers(2)), "")
            parts += [replace(leaf, number=len(parts) + n) for n, leaf in enumerate(leaves) if forks]
        return Rollout(Prompt(f"q{number}", [9], "?", "math", "1"), 0, "tree", 0, parts)

    trees = [tree(number) for number in range(1000)]
    profile, sentence = advice(trees, recipe("marker"))
    assert gain == pytest.approx(0.9)
    assert " are not seen to pay over " in sentence
    assert fork_gains(profile.ends, profile.decided[0], 1500).max() > 1.05, "as if all went on"
    metric = gain_metrics(profile_metrics(trees, recipe("marker")))["profile/fork_gain"]
    assert metric == pytest.approx(max(1, profile.gain.value), rel=0.01), "one rule"


def answers(prompt, right):
    """Return a tree of thoughts of 90 tokens, each closed by answers of 10; right: [thoughts, answers]."""
    parts, answered = [Part(Tokens.of([5] * 90), number=n) for n in range(len(right))], len(right)
    for thought, rewards in enumerate(right):
        for reward in rewards:
            grade = Grade(float(reward), "")
            parts.append(Part(Tokens.of([5] * 10), "stop", grade, number=answered, parent=thought))
            answered += 1
    return Rollout(Prompt(f"p{prompt}", [1], "?", "math", "1"), 0, "tree", 0, parts)


@pytest.mark.parametrize(("late", "decided", "gain"), [(True, 0.9, (2.2, 5.0)), (False, 0.1, (0.8, 1.1))])
def test_the_profile_says_where_the_outcome_is_decided_and_what_a_fork_there_gives(late, decided, gain):
    """An answer has its thought's luck with a probability whose square the thought decides, or its own."""
    settings, draws = recipe("marker", group_size=4, limit=128), np.random.default_rng(0)
    luck, own, shared = (draws.random((100, 4, n)) for n in (1, 4, 4))
    right = np.where(shared**2 < (1 - decided), luck < 0.5, own < 0.5)
    rollouts = [answers(n, of_prompt) for n, of_prompt in enumerate(right)]
    profile, sentence = advice(rollouts, settings)
    np.testing.assert_allclose(profile.ends, [0.9, 1.0])
    _, low, high = profile.decided[:, 1]
    assert low < decided < high
    assert high - low < 0.25
    assert gain[0] < profile.gain.low < profile.gain.value < profile.gain.high < gain[1]
    number = f": at 90% {profile.lines} lines give about {profile.gain} signal per token,"
    pays = number if late else " are not seen to pay"
    assert sentence.startswith(f"forks after 'm' at 90% of a response{pays} over the same baseline alone; a")
    assert sentence.endswith("(100 prompts)")
    metric = gain_metrics(profile_metrics(rollouts, settings))["profile/fork_gain"]
    assert metric == pytest.approx(max(1, fork_gains(profile.ends, profile.decided[0], 100).max()))
    assert advice(rollouts[:9], settings)[0] is None, "few rollouts say nothing"


def test_places_that_lie_close_are_one_and_rollouts_of_few_prompts_are_resampled_one_by_one(monkeypatch):
    """Forks 2 and 50 tokens of 100 after the prompt: the first two are one place."""
    ranks = np.zeros((RANKS + 1, 3))
    ranks[:3] = [(0.25, 100, 25), (0.2, 98, 20), (0.1, 50, 5)]
    monkeypatch.setattr(profile_module, "by_rank", lambda rollout: ranks)
    rollouts = [SimpleNamespace(prompt_id=f"q{n % 3}", key=(f"q{n % 3}", n)) for n in range(12)]
    profile = outcome_profile(rollouts)
    np.testing.assert_allclose(profile.ends, [0.5, 1.0])
    np.testing.assert_allclose(profile.decided[0], [0.6, 0.4])


def test_a_tail_alone_is_no_fork_unless_it_stands_for_two_that_were_truncated():
    tokens = Tokens.of([5, 6])
    right = Grade(1.0, "correct")
    pair = [Part(tokens, "stop", right, "a", 0), Part(tokens, None, None, "b", 1)]
    ended = Rollout(PROMPT, 0, "equal_length", 0, [*pair, Part(tokens, "stop", right, "tail", 2, 1)])
    tail = Part(tokens, "length", None, "tail", 2, 1)
    cut = Rollout(PROMPT, 0, "equal_length", 0, [*pair, tail], "truncated")
    assert [fork.length for fork in forks(ended)] == [0]
    assert sorted(fork.length for fork in forks(cut)) == [0, 2]


def test_a_fitted_baseline_pays_where_responses_that_go_on_have_failed():
    draws = np.random.default_rng(0)
    settings = recipe(sampling="independent", objective="dr_grpo", group_size=8, limit=128)

    def group(number):
        lengths = draws.choice([10, 100], 8).tolist()
        grades = [Grade(float(length == 10), "") for length in lengths]
        parts = [Part(Tokens.of([5] * lengths[n]), "stop", grades[n], number=n) for n in range(8)]
        return Rollout(Prompt(f"p{number}", [1], "?", "math", "1"), 0, "independent", 0, parts)

    profile, sentence = advice([group(number) for number in range(20)], settings)
    assert profile is None
    found = re.fullmatch(r"forks: not known, .*; a token baseline .*: x([.\d]+) .* \(20 prompts\)", sentence)
    assert float(found[1]) > 2


def test_the_profile_of_a_step_is_that_of_its_first_forks():
    """A response of 6 tokens is wrong; another forks after 4 into a right end of 2 and a wrong one of 4."""
    ends = [(4, None), (6, 0.0), (2, 1.0), (4, 0.0)]
    steps = [
        Part(Tokens.of([1] * length), *(("stop", Grade(reward, "")) if reward is not None else ()))
        for length, reward in ends
    ]
    tree = kit.tree(PROMPT, 0, steps, [-1, -1, 0, 0])
    metrics = profile_metrics([tree], recipe("marker"))
    expected = {"rollouts": 1, "variance": 1 / 4, "tokens": 6.5}
    expected |= {"undecided": 1 / 4, "tokens_after": 1.5, "noise_after": 1 / 2 * 1 / 2 * 3}
    assert metrics == {f"profile/{name}": pytest.approx(value) for name, value in expected.items()}
    gain = fork_gains([5 / 6.5, 1], [0, 1], 6.5, [0.75 / (1 / 4 * 6.5)]).max()
    assert gain_metrics(metrics)["profile/fork_gain"] == pytest.approx(gain)
    assert gain > 1
    assert profile_metrics([kit.tree(PROMPT, 0, steps[1:3], [-1, -1])], recipe("marker")) == {}, "no fork"


@pytest.mark.parametrize(("rule", "group_size", "profiled"), [
    ({"fork": "death", "forks": 2}, 2, True),
    ({"fork": "death", "forks": 2}, 4, False),
    ({"fork": "death", "forks": 2, "branching": 3}, 2, False),
])  # fmt: skip
def test_forks_of_one_line_of_several_give_no_profile(rule, group_size, profiled):
    """Whoever counts lines that did not fork as decided finds that a coin at the end is decided early."""
    settings = recipe(rule, group_size=group_size, limit=24)
    draws = np.random.default_rng(0)

    def tree(number):
        setting = Setting(settings, frozenset({0}), number)
        harvester = KINDS["tree"].harvesters([Prompt(f"q{number}", [9], "?", "math", "1")], setting)[0]
        launched = harvester.start()
        while not harvester.complete:
            for track in launched:
                token_ids = [*[1] * int(draws.integers(0, track.limit)), 0]
                track.extend(Delta(track.name, token_ids, {"logprobs": [0.0] * len(token_ids)}), 0)
            launched = harvester.advance()
        for part, _ in harvester.rollout(0).ended():
            part.grade = Grade(float(draws.integers(2)), "")
        return harvester.rollout(0)

    trees = [tree(number) for number in range(200)]
    profile, sentence = advice(trees, settings)
    assert (profile is not None) == profiled == bool(profile_metrics(trees, settings))
    if profiled:  # all that goes on is open: half of the lines after the first death
        assert profile.decided[1, 0] < 0.5 < profile.decided[2, 0]
    else:
        assert sentence.startswith("forks: not known, as at a death one of several lines forks")
    trees[0].outcome = "budget"
    assert "the budget cut 1 rollouts" in advice(trees, settings)[1] or not profiled
