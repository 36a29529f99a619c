"""Trees whose lines fork by any rule have the policy gradient: all trees of small processes, enumerated."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.job import parse
from megatron_eqlen.objectives.advantages import refusing
from megatron_eqlen.objectives.token_baseline import Span, fitted
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.harvester import Marker, Setting
from megatron_eqlen.sampling.tree import ForkedAtDeaths, Shape
from megatron_eqlen.types import Delta, Prompt
from tests.kit.length_bias import Process
from tests.kit.marks import examples
from tests.kit.rollouts import build_trees
from tests.pure.test_length_bias import recipe as pairs_recipe

RULES = {
    "tokens": {"fork": "tokens", "step_tokens": 1, "forks": 2},
    "tokens, 3 branches": {"fork": "tokens", "step_tokens": 2, "forks": 1, "branching": 3},
    "marker": {"fork": "marker", "marker": "m", "forks": 1},
    "two markers": {"fork": "marker", "marker": "m", "forks": 2},
    "death": {"fork": "death", "forks": 2},
    "death, 3 branches": {"fork": "death", "forks": 1, "branching": 3},
}


@cache
def reward_of(path):
    """An arbitrary reward in [0, 1] of each response."""
    return float(np.random.default_rng([7, *path]).random())


pairs = cache(pairs_recipe)


def recipe(rule=None, sampling="tree", objective="rloo", group_size=2, limit=3, loss=None, **keys):
    raw = pairs().model_dump(exclude_unset=True)
    raw["rollout"]["max_response_length"] = limit
    raw |= {"sampling": sampling, "objective": objective, "group_size": group_size}
    raw["loss"] |= {"loss_agg_mode": "seq-mean-token-sum"} | (loss or {})
    raw["equal_length"] = keys
    raw["packing"]["max_tokens_per_row"] = 129
    if rule is not None:
        raw["tree_sampling"] = RULES[rule] if isinstance(rule, str) else rule
    return parse({key: value for key, value in raw.items() if value != {}}, "test")


def process(vocabulary=2, limit=3):
    """Return a process whose token 0 ends a response and whose token 1 is the marker."""
    contexts = sum((vocabulary - 1) ** length for length in range(limit))
    logits = np.random.default_rng(5).normal(size=(contexts, vocabulary)) / 2
    return Process(logits, limit, reward_of, marker=1)


def assert_unbiased(world, settings, factor=1.0):
    truth = world.gradient()
    np.testing.assert_allclose(world.expected_estimate(settings), factor * truth, rtol=0, atol=1e-12)
    assert np.abs(truth).max() > 0.01


ALIVE, FITTED = {"baseline": "alive"}, {"baseline": "fitted"}


@pytest.mark.parametrize(("rule", "loss"), [*((r, ALIVE) for r in RULES), ("marker", {}), ("death", {})])
def test_a_tree_has_exactly_the_policy_gradient_wherever_it_forks(rule, loss):
    assert_unbiased(process(), recipe(rule, loss=loss))
    assert_unbiased(process(vocabulary=3, limit=2), recipe(rule, limit=2, loss=loss))


def test_three_roots_have_the_gradient_of_two():
    for loss in ({}, ALIVE):
        assert_unbiased(process(), recipe("death", group_size=3, loss=loss))


@pytest.mark.parametrize(("objective", "factor"), [("grpo", 1.0), ("dapo", 1.0), ("dr_grpo", 0.5)])
def test_an_objective_keeps_the_gradient_of_a_tree_up_to_a_constant(objective, factor):
    loss = {} if objective != "dapo" else {"dynamic_sampling": False, "overlong_buffer": 0}
    assert_unbiased(process(), recipe("marker", objective=objective, loss=loss), factor)


def test_responses_that_are_alive_are_an_exact_baseline_of_each_other():
    assert_unbiased(process(), recipe(sampling="independent", objective="dr_grpo", group_size=3, loss=ALIVE))


@pytest.mark.parametrize(("keys", "prompts"), [
    ({"rule": "marker"}, 1),
    ({"rule": "death"}, 1),
    ({"sampling": "independent", "objective": "dr_grpo"}, 2),
], ids=str)  # fmt: skip
def test_a_fit_to_other_prompts_is_an_exact_baseline(keys, prompts):
    """The fit of a prompt is that of one tree of another prompt, here the unlikely ones. ``prompts``: number
    that weights divide by."""
    world, settings = process(vocabulary=3, limit=2), recipe(loss=FITTED, limit=2, **keys)
    trees = sorted(world.streams(settings), key=lambda tree: tree[1])
    expected, fit = np.zeros((2, *world.logits.shape)), 0.0
    for tree, probability in trees:
        alone = build_trees([tree], recipe(loss=ALIVE, limit=2, **keys))[0]
        for number, (other, _) in enumerate(trees[:2]):
            other = replace(other, prompt=replace(other.prompt, prompt_id="other"))
            built = build_trees([tree, other], settings)[0][:1]
            expected[number] += probability * world.estimate(built)
            fit += np.abs(built[0].nodes[1].advantage - alone[0].nodes[1].advantage).max()
    for found in expected:
        np.testing.assert_allclose(prompts * found, world.gradient(), rtol=0, atol=1e-12)
    assert fit > 1


def test_a_fit_comes_the_nearer_to_what_can_be_fitted_the_more_prompts_it_has():
    """Fit two lines, of which one is right: the mean of the other says which, exactly."""
    lines = [Span(0, 4, 0.5, reward, (0, number), 0) for number, reward in enumerate((1.0, 0.0))]
    for prompts in (11, 101, 1001):
        baselines = np.array(fitted([lines] * prompts, 4)[0])
        np.testing.assert_allclose(baselines, [[1.0] * 4, [0.0] * 4], atol=3 / prompts)


def half(prompts, limit):
    return [[np.full(span.end - span.start, 0.5) for span in spans] for spans in prompts]


SAMPLED = {
    "independent": {"sampling": "independent"},
    **{rule: {"rule": rule} for rule in RULES},
    "on_policy": {"sampling": "equal_length", "pair_weight": "on_policy"},
    "streams": {"sampling": "equal_length", "pair_weight": "on_policy", "baseline": "streams",
                "group_size": 4, "max_pairs": 1},
}  # fmt: skip
BIASED = {
    ("baseline", "fitted"), ("baseline", f"{__name__}:half"), ("advantage", "reward"), ("advantage", "gr3"),
}  # fmt: skip
PARTS = [("baseline", name) for name in ("unit", "alive", "fitted", f"{__name__}:half")] + [
    ("advantage", name) for name in ("rloo", "dr_grpo", "reward", "gr3")
]


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_leaving_out_prompts_of_equal_rewards_is_refused_or_keeps_the_gradient(kind, part):
    """Rewards are 0 or 1, so that many prompts have equal ones."""
    world = process(vocabulary=3, limit=2)
    world = replace(world, reward=lambda path: float(reward_of(path) > 0.5))
    keys = {"limit": 2, "objective": "dr_grpo", **SAMPLED[kind]}
    loss = {"dynamic_sampling": True, part[0]: part[1]}
    needs_lines = keys.get("sampling") == "equal_length" and part == ("baseline", "alive")
    if part in BIASED or needs_lines:
        with pytest.raises(RecipeError, match=f"{part[0]}: |objective: {part[1]}"):
            recipe(loss=loss, **keys)
        return
    settings = recipe(loss=loss, **keys)
    found, truth = world.expected_estimate(settings), world.gradient()
    factor = float((found * truth).sum() / (truth * truth).sum())
    np.testing.assert_allclose(found, factor * truth, rtol=0, atol=1e-12)
    assert factor == pytest.approx(0.5 if part in {("advantage", "dr_grpo"), ("baseline", "unit")} else 1)


def with_own_line(prompts, limit):
    """The mean of all lines that are alive: the optimal token baseline as published, where tokens have like
    score norms."""

    def alive(spans, t):
        return np.mean([other.reward for other in spans if other.start <= t < other.end])

    return [[np.array([alive(spans, t) for t in range(s.start, s.end)]) for s in spans] for spans in prompts]


def too_few(prompts, limit):
    return [[np.zeros(1) for _ in spans] for spans in prompts]


def test_a_baseline_that_contains_the_own_line_turns_the_step():
    world = process(vocabulary=3, limit=3)
    own = {"baseline": f"{__name__}:with_own_line"}
    settings = recipe(sampling="independent", objective="dr_grpo", loss=own)
    found, truth = world.expected_estimate(settings).ravel(), world.gradient().ravel()
    cosine = found @ truth / np.linalg.norm(found) / np.linalg.norm(truth)
    assert 0.975 < cosine < 0.985


def test_treerpo_weighs_all_forks_alike_and_so_has_another_direction():
    world = process()
    settings = recipe("tokens", objective="treerpo")
    found, truth = world.expected_estimate(settings).ravel(), world.gradient().ravel()
    assert found @ truth / np.linalg.norm(found) / np.linalg.norm(truth) < 0.99


# ---- a fork knows the past only --------------------------------------------------------------------------

PROMPT = Prompt("q", [1, 2], "?", "math", "1")
EOS, MARKER, LENGTH = 0, 3, 24
TWO_MARKERS = Marker(lambda ids: "33" in "".join(map(str, ids)), 2)


def grown(rule, seed, order=0, other_after=LENGTH):
    """Return the parts of a tree, and which of them fork. Its tokens come from the seeds of its tracks, other
    ones after that many tokens of a response; they arrive in the pieces of ``order``."""
    settings = Setting(recipe(rule, limit=LENGTH, group_size=3), frozenset({EOS}), seed, TWO_MARKERS)
    (tree,) = KINDS["tree"].harvesters([PROMPT], settings)
    arrival, left = np.random.default_rng(order), {}

    def launch(tracks):
        for track in tracks:
            start = len(track.context) - len(PROMPT.token_ids)
            draws = [np.random.default_rng([track.seed, n]) for n in (0, 1)]
            tokens = [draw.choice([EOS, 1, 2, *[MARKER] * 7], LENGTH) for draw in draws]
            same = max(other_after - start, 0)
            left[track] = [*tokens[0][:same].tolist(), *tokens[1][same:].tolist()]

    launch(tree.start())
    while not tree.complete:
        track = list(left)[arrival.integers(len(left))]
        tokens = left[track]
        piece = [tokens.pop(0) for _ in range(min(len(tokens), int(arrival.integers(1, LENGTH))))]
        if track.extend(Delta(track.name, piece, {"logprobs": [0.0] * len(piece)}), 0):
            while launched := tree.advance():
                launch(launched)
        left = {track: tokens for track, tokens in left.items() if track.finish_reason is None}
    return tree.rollout(0)


@given(
    rule=st.sampled_from([*RULES.values(), {"fork": "tokens", "step_tokens": 5}]),
    seed=st.integers(0, 99),
    orders=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    now=st.integers(1, LENGTH),
)
@examples(60)
def test_forks_depend_on_earlier_tokens_alone_and_not_on_their_arrival(rule, seed, orders, now):
    tree = grown(rule, seed, orders[0])
    assert tree == grown(rule, seed, orders[1])
    assert forks_within(tree, now) == forks_within(grown(rule, seed, orders[1], now), now)


def forks_within(tree, now):
    """Return the parts that fork within the first ``now`` tokens."""
    ends, inner = tree.ends(), {part.parent for part in tree.parts}
    return [part for part in tree.parts if part.number in inner and ends[part.number] <= now]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_forks(rule):
    trees = [grown(RULES[rule], seed) for seed in range(20)]
    assert sum(len(forks_within(tree, LENGTH)) for tree in trees) >= 10
    for tree in trees:
        assert sum(line.weight for line in tree.lines()) == pytest.approx(1)
        assert len(forks_within(tree, LENGTH)) <= (RULES[rule]["forks"] if "death" in rule else 3 * 3)


@refusing(tree="why not")
def careful(rewards, lengths):
    return list(rewards)


@pytest.mark.parametrize(("keys", "message"), [
    ({"rule": {"fork": "marker"}}, "expected tree_sampling.marker, found None"),
    ({"rule": {"marker": "</think>"}}, "acts only with tree_sampling.fork: marker or profile"),
    ({"rule": {"fork": "death", "step_tokens": 3}}, "acts only with tree_sampling.fork: tokens or profile"),
    ({"rule": {"fork": "profile", "step_tokens": 3}}, "no line forks after 6 tokens, with .*length: 3"),
    ({"rule": {"fork": "profile", "step_tokens": 1, "forks": 3}}, "no line forks after 3 tokens, with"),
    ({"rule": {"fork": "profile", "marker": "</think>", "forks": 3}}, "forks: 3 places by tokens need tree_"),
    ({"rule": {"branching": 9, "forks": 12}}, "more than 2147483647 leaves"),
    ({"objective": "gr3"}, "gr3 with sampling: tree"),
    ({"objective": "ba"}, "ba with sampling: tree"),
    ({"loss": {"advantage": f"{__name__}:careful"}}, "loss.advantage: careful with sampling: tree: why not"),
    ({"loss": {"advantage": "grpo"}}, "only the sign"),
    ({"loss": {"loss_agg_mode": "token-mean"}}, "biases the gradient"),
    ({"objective": "treerpo", "sampling": "independent"}, "expected sampling: tree"),
    ({"sampling": "equal_length", "loss": ALIVE}, "of two truncated tracks"),
    ({"sampling": "independent", "objective": "grpo", "loss": ALIVE}, "expected objective: dr_grpo or rloo"),
    ({"sampling": "independent", "objective": "dler", "loss": ALIVE}, "expected objective: dr_grpo or rloo"),
    ({"loss": {"baseline": f"{__name__}:reward_of"}}, r"called with \(prompts, limit\)"),
    ({"loss": {"baseline": f"{__name__}:too_few"}}, "expected 2 finite numbers or None, found"),
])  # fmt: skip
def test_a_recipe_of_forks_that_does_not_fit_is_refused(keys, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**keys)


def of_lengths(lengths, group_size, forks):
    """Return the tree by ``death`` whose tracks end at these lengths of their responses, by number."""
    settings = recipe({"fork": "death", "forks": forks}, limit=LENGTH, group_size=group_size)
    (tree,) = KINDS["tree"].harvesters([PROMPT], Setting(settings, frozenset({EOS}), 0))
    launched = tree.start()
    while not tree.complete:
        for track in launched:
            tokens = [1] * (lengths[track.number] - len(track.context) + len(PROMPT.token_ids) - 1) + [EOS]
            track.extend(Delta(track.name, tokens, {"logprobs": [0.0] * len(tokens)}), 0)
        launched = tree.advance()
    return tree.rollout(0)


@pytest.mark.parametrize(("lengths", "group_size", "forks", "forked"), [
    ({0: 2, 1: 8, 2: 9, 4: 5, 6: 9}, 3, 2, {1: 2, 2: 5}),  # the line that forked is lighter than the other
    ({0: 2, 1: 2, 2: 8, 3: 9, 5: 7, 7: 7}, 4, 2, {2: 2, 3: 2}),  # two deaths at one length fork two lines
    ({0: 2, 1: 2, 2: 8, 4: 7, 6: 9}, 3, 2, {2: 2, 3: 7}),  # a line that just forked does not fork again
])  # fmt: skip
def test_a_death_forks_the_heaviest_line_that_goes_on_once(lengths, group_size, forks, forked):
    tree = of_lengths(lengths, group_size, forks)
    ends, inner = tree.ends(), {part.parent for part in tree.parts} - {-1}
    assert {number: ends[number] for number in inner} == forked
    assert all(len(part) for part in tree.parts)


def test_the_turn_of_a_line_waits_for_the_lines_behind_it():
    """An end behind it may fork it, before the environment's answer."""

    setting = Setting(recipe("death", limit=LENGTH), frozenset({EOS}), 0, takes_turns=True)
    tree = ForkedAtDeaths(PROMPT, 0, setting, Shape(3, 2, 1))
    calling, behind, later = tree.start()

    def extend(track, length, calls=False):
        token_ids = [1] * (length - calls) + [EOS] * calls
        track.extend(Delta(track.name, token_ids, {"logprobs": [0.0] * length}), 0)

    extend(calling, 5, calls=True)
    extend(behind, 3)
    extend(later, 7, calls=True)
    assert tree.answerable() == []
    assert behind.awaited == 5, "the nearest of the turns ahead"
    extend(behind, 2)
    assert tree.answerable() == [calling]
    assert behind.awaited == 7
