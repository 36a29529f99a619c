"""Tree sampling grows the tree that its recipe describes, whatever order tokens arrive in."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.dynamic_sampling import filter_groups
from megatron_eqlen.sampling.comparison import part_rewards
from megatron_eqlen.sampling.harvester import Setting
from megatron_eqlen.sampling.tree import TREE as KIND
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Delta, Grade, Part, Prompt, tokens_along
from tests.kit.marks import examples
from tests.pure.test_objectives_build import recipe

EOS = 0
PROMPT = Prompt("q", [1, 2], "?", "math", "1")


def sampled(branching, forks, step_tokens, limit, seed, order):
    """Drive the unit as the harvest does; tokens depend on a track's seed, arrival on ``order``."""
    settings = recipe(
        sampling="tree", objective="treerpo", rollout__max_response_length=limit, group_size=branching,
        tree_sampling={"branching": branching, "forks": forks, "step_tokens": step_tokens},
    )  # fmt: skip
    (unit,) = KIND.harvesters([PROMPT], Setting(settings, frozenset({EOS}), seed))
    arrival = np.random.default_rng(order)
    running = [(track, np.random.default_rng(track.seed)) for track in unit.start()]
    while not unit.complete:
        track, tokens = running[arrival.integers(len(running))]
        chunk = tokens.integers(0, 6, size=int(tokens.integers(1, 4))).tolist()
        track.extend(Delta(track.request_id, chunk, {"logprobs": [-1.0] * len(chunk)}), 3)
        running = [(t, r) for t, r in running if t.finish_reason is None]
        running += [(t, np.random.default_rng(t.seed)) for t in unit.advance()]
    return unit.rollout(policy_version=3)


@given(
    branching=st.integers(2, 3), forks=st.integers(1, 2), step_tokens=st.integers(1, 6),
    limit=st.integers(3, 14), seed=st.integers(0, 9),
)  # fmt: skip
@examples(30)
def test_the_tree_has_its_recipes_shape(branching, forks, step_tokens, limit, seed):
    tree = sampled(branching, forks, step_tokens, limit, seed, order=0)
    assert tree == sampled(branching, forks, step_tokens, limit, seed, order=1)
    children = Counter(step.parent for step in tree.parts)
    assert children.pop(-1) == branching
    for step, response in tree.ended():
        assert response.tolist() == tokens_along(tree.line(step.number)).tolist()
    for step in tree.parts:
        line = tree.line(step.number)
        level, response = len(line), tokens_along(line).tolist()
        assert step.parent < step.number
        assert len(response) <= limit
        assert (step.finish_reason is None) == bool(children[step.number])
        if children[step.number]:
            assert children[step.number] == branching
            assert len(step) == step_tokens
            assert level <= forks
        if step.finish_reason == "stop":
            assert response.index(EOS) == len(response) - 1
        elif not children[step.number]:
            assert len(response) == limit


def test_rewards_are_means_of_leaves_below_and_unknown_where_the_budget_cut():
    def step(reward=None, finish_reason=None):
        grade = None if reward is None else Grade(reward, "")
        return Part(Tokens.of([5], [-1.0]), finish_reason or (None if reward is None else "stop"), grade)

    steps = [step(), step(1.0), step(1.0), step(finish_reason="length"), step()]
    tree = kit.tree(PROMPT, 0, steps, [-1, -1, 0, 0, -1])
    assert part_rewards(tree) == {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.0}
    settings = Job(recipe(sampling="tree", objective="treerpo"))
    assert filter_groups([tree], settings) == (["q"], [])
    equal = kit.tree(PROMPT, 0, [step(1.0), step(1.0)], [-1, -1])
    assert filter_groups([equal], settings) == ([], ["q"])


def test_more_forks_than_tokens_fork_at_each_token():
    lengths = [len(step) for step in sampled(2, 9, None, 3, seed=4, order=0).parts]
    assert lengths == [1] * len(lengths)


def test_of_a_tree_only_lines_without_an_end_count_as_cut():
    """A part that forked has no finish reason, either."""
    steps = [Part(Tokens.of([5, 6], -1.0), reason) for reason in (None, "stop", "length", None)]
    metrics = KIND.harvest_metrics([kit.tree(PROMPT, 0, steps, [-1, 0, 0, -1])])
    assert metrics["harvest/budget_fraction"] == metrics["harvest/truncated_fraction"] == 1 / 4
