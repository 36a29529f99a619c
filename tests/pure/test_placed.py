"""Forks that earlier steps place (``tree_sampling.fork: profile``) leave the policy gradient as it is, and
come to lie where they pay."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megatron_eqlen.job import parse
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.sampling import KINDS, placed, profile
from megatron_eqlen.sampling.placed import PlacedTrees
from megatron_eqlen.sampling.profile import by_rank
from megatron_eqlen.types import Prompt
from tests.kit import length_bias
from tests.kit.length_bias import Process
from tests.pure.test_advice import variance
from tests.pure.test_forks import process, recipe

RULE = {"fork": "profile", "step_tokens": 1, "forks": 2, "branching": 3}


@pytest.fixture
def trees(monkeypatch):
    """Kind of the harvested trees."""
    kind = PlacedTrees(recipe(RULE))
    monkeypatch.setitem(KINDS, "tree", kind)
    return kind


def test_the_step_after_one_that_placed_its_forks_has_the_policy_gradient(trees, monkeypatch):
    """All trees of a step, and all of the next, whose forks depend on them; a tree says enough."""
    world, settings, truth = process(), recipe(RULE), process().gradient()
    for module in (placed, profile):
        monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(profile, "fork_gains", lambda ends, *_: np.add.outer(-ends[:-1], [5.0, 4.0]))
    reached, checked = Counter(), set()
    for place in range(2):  # that the first step tries
        known = {"": placed.Rule([0, 0], (place, 2))}
        trees.rules = known
        for tree, probability in list(world.streams(settings)):
            trees.seen, trees.rules = {}, known
            trees.learn([tree], seed=0)
            trees.decide()
            decided = trees.rules[""].fork
            reached[decided] += probability / 2
            if decided not in checked:
                trees.rules = {"": placed.Rule([0, 0], decided)}
                expected = world.expected_estimate(settings)
                np.testing.assert_allclose(expected, truth, rtol=0, atol=1e-12)
                checked.add(decided)
    assert len(reached) == 3, "no forks, and two lines at either place"
    assert min(reached.values()) > 0.01


def test_until_something_is_known_a_quarter_of_the_trees_try_each_place_alike_and_no_other_one_forks(trees):
    tried = Counter(trees._fork(Prompt(f"q{n}", [1], "?", "math", "1"), 0, 7) for n in range(4000))
    assert tried[0, 1] == pytest.approx(3000, abs=100)
    assert tried[0, 2] == pytest.approx(500, abs=80)
    assert tried[1, 2] == pytest.approx(500, abs=80)
    assert len(tried) == 3


@dataclass(frozen=True)
class Drawn(Process):
    """Process of responses of 8 tokens, which are drawn in place of listed."""

    draws: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def continuations(self, trunk):
        path = trunk
        while len(path) < self.limit and not self.ended(path):
            row = self.probabilities[self.contexts[path]]
            path += (int(self.draws.choice(len(row), p=row)),)
        return [(path[len(trunk) :], 1.0)]


SOURCES = {
    "late": lambda path: float(path[-1] == 1),
    "early": lambda path: float(path[0] == 2),
    "never": lambda path: 1.0,
}


@pytest.fixture
def worlds():
    logits = np.zeros((255, 4))
    logits[:127, :2], logits[127:, 2:] = -np.inf, -np.inf
    return {name: Drawn(logits, 8, reward, ends=2) for name, reward in SOURCES.items()}


TWO_PLACES = RULE | {"step_tokens": 3}


def step(trees, number, worlds, monkeypatch):
    """Harvest a step of each source, learn from it and place the next one's forks; return what moved, and by
    source the forks of the trees."""
    grown, forked = [], defaultdict(Counter)
    settings = recipe(TWO_PLACES, limit=8, group_size=4)
    for source, world in worlds.items():
        for n in range(24):
            prompt = replace(length_bias.QUESTION, prompt_id=f"{source}{number}/{n}", source=source)
            monkeypatch.setattr(length_bias, "QUESTION", prompt)
            tree = world._stream(settings, lambda name, shares: 0)
            grown.append(replace(tree, prompt=prompt))
            ends = tree.ends()
            inner = Counter(part.parent for part in tree.parts if part.parent >= 0)
            forked[source].update((ends[part], lines) for part, lines in inner.items())
    trees.learn(grown, 0)
    return trees.decide(), forked


def test_forks_come_to_lie_where_they_pay_for_each_source_and_end_when_they_pay_no_more(monkeypatch, worlds):
    trees = PlacedTrees(recipe(TWO_PLACES, limit=8))
    monkeypatch.setitem(KINDS, "tree", trees)
    moved = [line for number in range(8) for line in step(trees, number, worlds, monkeypatch)[0]]
    assert {line.split(":")[0] for line in moved} == {"forks of late"}
    assert "3 lines at 75% of a response, which give about x1." in moved[-1]
    _, forked = step(trees, 9, worlds, monkeypatch)
    assert forked["late"].most_common(1)[0][0] == (6, 3)
    for source in ("early", "never"):
        assert {lines for _, lines in forked[source]} <= {2}
        assert sum(forked[source].values()) < 24 * 4 / 2
    again = PlacedTrees(recipe(TWO_PLACES, limit=8))
    again.seen = json.loads(json.dumps(trees.seen))  # as a checkpoint holds it
    again.decide()
    assert {s: rule.fork for s, rule in again.rules.items()} == {
        s: rule.fork for s, rule in trees.rules.items()
    }
    worlds["late"] = replace(worlds["early"])
    moved = [line for number in range(10, 15) for line in step(trees, number, worlds, monkeypatch)[0]]
    assert moved[-1:] == ["forks of late: none, as they are not seen to pay any more"]


def test_what_a_place_leaves_undecided_is_known_without_bias_though_lines_may_end_before_it(trees):
    world, settings = process(), recipe(RULE)
    for place, tokens in enumerate(trees.places):
        trees.rules = {"": placed.Rule([0, 0], (place, 2))}
        mean = sum(p * by_rank(tree)[1] for tree, p in world.streams(settings))
        reaching = [(p, len(path) - tokens) for path, p in world.continuations(()) if len(path) > tokens]
        undecided = sum(p for p, _ in reaching) * variance(world, (1,) * tokens)
        assert mean[:2] == pytest.approx([undecided, sum(p * after for p, after in reaching)], abs=1e-12)


def test_a_budget_that_leaves_out_long_trees_is_refused():
    raw = recipe(RULE).model_dump(exclude_unset=True)
    raw["rollout"]["tokens_per_step"] = 64
    with pytest.raises(RecipeError, match=r"fork: profile with rollout\.tokens_per_step: 64: a budget cuts"):
        parse(raw, "test")
