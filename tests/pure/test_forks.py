"""Trees whose lines fork by any rule have the policy gradient: all trees of small processes, enumerated."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.objectives.advice import advice
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.harvester import Marker
from megatron_eqlen.sampling.kind import Setting
from megatron_eqlen.sampling.profile import fork_gain, forks, gain_metrics, profile_metrics
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Delta, Grade, Part, Prompt, Rollout
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


def recipe(rule=None, sampling="tree", objective="rloo", group_size=2, limit=3, loss=None, **keys):
    raw = pairs_recipe().model_dump(exclude_unset=True)
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


@pytest.mark.parametrize(
    ("rule", "loss"), [*((rule, ALIVE) for rule in RULES), ("marker", {}), ("death", {})]
)
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


def half(prompts, limit):
    return [[np.full(span.end - span.start, 0.5) for span in spans] for spans in prompts]


SAMPLED = {
    "independent": {"sampling": "independent"},
    **{rule: {"rule": rule} for rule in RULES},
    "on_policy": {"sampling": "equal_length", "pair_weight": "on_policy"},
    "streams": {
        "sampling": "equal_length",
        "pair_weight": "on_policy",
        "baseline": "streams",
        "group_size": 4,
    },
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
    return [
        [
            np.array(
                [
                    np.mean([other.reward for other in spans if other.start <= t < other.end])
                    for t in range(span.start, span.end)
                ]
            )
            for span in spans
        ]
        for spans in prompts
    ]


def too_few(prompts, limit):
    return [[np.zeros(1) for _ in spans] for spans in prompts]


def test_a_baseline_that_contains_the_own_line_turns_the_step():
    world = process(vocabulary=3, limit=3)
    settings = recipe(
        sampling="independent", objective="dr_grpo", loss={"baseline": f"{__name__}:with_own_line"}
    )
    found, truth = world.expected_estimate(settings).ravel(), world.gradient().ravel()
    cosine = found @ truth / np.linalg.norm(found) / np.linalg.norm(truth)
    assert 0.975 < cosine < 0.985


def test_treerpo_weighs_all_forks_alike_and_so_has_another_direction():
    world = process()
    settings = recipe("tokens", objective="treerpo")
    found, truth = world.expected_estimate(settings).ravel(), world.gradient().ravel()
    assert found @ truth / np.linalg.norm(found) / np.linalg.norm(truth) < 0.99


# ---- outcome profile -------------------------------------------------------------------------------------


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


def test_the_share_of_the_tokens_after_forks_is_that_of_all_tokens():
    """A mean of the shares, 0.3 here, would say that answers cost more beside their thoughts than they do."""
    rollouts = []
    for thought in (9, 1):
        lengths = {0: (thought, -1), 1: (1, 0), 2: (1, 0), 3: (thought, -1), 4: (1, 3), 5: (1, 3)}
        rollout = [
            Part(
                Tokens.of([1] * n),
                "stop" if n == 1 and parent >= 0 else None,
                Grade(1.0, ""),
                "step",
                i,
                parent,
            )
            for i, (n, parent) in lengths.items()
        ]
        rollouts.append(Rollout(Prompt("q", [1], "", "", ""), 0, "tree", 0, rollout))
    assert profile_metrics(rollouts)["profile/tokens_after"] == pytest.approx(2 / 12)


def test_the_gain_of_forks_is_that_of_the_best_of_many_allocations():
    """Noise x cost of lines that each fork into m for the last tenth of their tokens."""
    undecided, after = 0.9, 0.1
    allocations = [
        ((1 - after) * (1 - undecided) + undecided / m) * (1 - after + after * m)
        for m in np.linspace(1, 40, 2000)
    ]
    assert fork_gain([0.9, 1.0], [0.1, 0.9]) == pytest.approx(1 / min(allocations), rel=1e-3)
    assert fork_gain([0.5, 1.0], [1.0, 0.0]) >= 1
    even = np.arange(1, 1001) / 1000
    assert fork_gain(even, np.full(1000, 1e-3)) == pytest.approx(9 / 4, rel=1e-2)


def answers(prompt, right):
    """Return a tree of thoughts of 90 tokens, each closed by answers of 10; right: [thoughts, answers]."""
    parts, answered = [Part(Tokens.of([5] * 90), number=n) for n in range(len(right))], len(right)
    for thought, rewards in enumerate(right):
        for reward in rewards:
            grade = Grade(float(reward), "")
            parts.append(Part(Tokens.of([5] * 10), "stop", grade, number=answered, parent=thought))
            answered += 1
    return Rollout(Prompt(f"p{prompt}", [1], "?", "math", "1"), 0, "tree", 0, parts)


@pytest.mark.parametrize(("late", "decided", "gain"), [(True, 0.9, (2.5, 6)), (False, 0.1, (1, 1.4))])
def test_the_profile_says_where_the_outcome_is_decided_and_what_forks_there_give(late, decided, gain):
    """An answer has its thought's luck with a probability whose square the thought decides, or its own."""
    settings, draws = recipe("marker", group_size=4, limit=128), np.random.default_rng(0)
    luck, own, shared = (draws.random((100, 4, n)) for n in (1, 4, 4))
    right = np.where(shared**2 < (1 - decided), luck < 0.5, own < 0.5)
    profile, sentence = advice([answers(n, of_prompt) for n, of_prompt in enumerate(right)], settings)
    np.testing.assert_allclose(profile.ends, [0.9, 1.0])
    share, low, high = profile.decided[:, 1]
    assert low < decided < high
    assert high - low < 0.25
    assert gain[0] < profile.gain.low < profile.gain.value < profile.gain.high < gain[1]
    says = f": about {profile.gain} signal per token with " if late else f" do not pay: {share:.1%} of"
    assert sentence.startswith(f"forks after 'm' at 90% of a response{says}")
    assert sentence.endswith("(100 prompts)")


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


def test_the_profile_of_a_step_is_that_of_its_forks():
    """A response of 6 tokens is wrong; another forks after 4 into a right end of 2 and a wrong one of 4."""
    ends = [(4, None), (6, 0.0), (2, 1.0), (4, 0.0)]
    steps = [
        Part(Tokens.of([1] * length), *(("stop", Grade(reward, "")) if reward is not None else ()))
        for length, reward in ends
    ]
    metrics = profile_metrics([kit.tree(PROMPT, 0, steps, [-1, -1, 0, 0])])
    expected = {"rollouts": 1, "variance": 1 / 4, "forks": 1, "undecided": 1 / 2, "tokens_after": 3 / 7}
    assert metrics == {f"profile/{name}": pytest.approx(value) for name, value in expected.items()}
    assert gain_metrics(metrics) == {"profile/fork_gain": pytest.approx(7 / 3)}, "all is undecided there"


# ---- a fork knows the past only --------------------------------------------------------------------------

PROMPT = Prompt("q", [1, 2], "?", "math", "1")
EOS, MARKER, LENGTH = 0, 3, 24
TWO_MARKERS = Marker(lambda ids: "33" in "".join(map(str, ids)), 2)


def grown(rule, seed, order=0, other_after=LENGTH):
    """Return the parts of a tree, and which of them fork. Its tokens come from the seeds of its tracks, other
    ones after that many tokens of a response; they arrive in the pieces of ``order``."""
    (tree,) = KINDS["tree"].harvesters(
        [PROMPT], Setting(recipe(rule, limit=LENGTH, group_size=3), frozenset({EOS}), seed, TWO_MARKERS)
    )
    arrival, left = np.random.default_rng(order), {}

    def launch(tracks):
        for track in tracks:
            start = len(track.context) - len(PROMPT.token_ids)
            tokens = [
                np.random.default_rng([track.seed, n]).choice([EOS, 1, 2, *[MARKER] * 7], LENGTH)
                for n in (0, 1)
            ]
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
    assert grown(rule, seed, orders[0]) == grown(rule, seed, orders[1])
    assert forks_within(grown(rule, seed, orders[0]), now) == forks_within(
        grown(rule, seed, orders[1], now), now
    )


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


@pytest.mark.parametrize(("keys", "message"), [
    ({"rule": {"fork": "marker"}}, "expected tree_sampling.marker, found None"),
    ({"rule": {"marker": "</think>"}}, "acts only with tree_sampling.fork: marker"),
    ({"rule": {"fork": "death", "step_tokens": 3}}, "acts only with tree_sampling.fork: tokens"),
    ({"rule": {"branching": 9, "forks": 12}}, "more than 2147483647 leaves"),
    ({"objective": "gr3"}, "gr3 with sampling: tree"),
    ({"objective": "ba"}, "ba with sampling: tree"),
    ({"loss": {"advantage": "grpo"}}, "only the sign"),
    ({"loss": {"loss_agg_mode": "token-mean"}}, "biases the gradient"),
    ({"objective": "treerpo", "sampling": "independent"}, "expected sampling: tree"),
    ({"sampling": "equal_length", "loss": ALIVE}, "of two tracks that are truncated"),
    ({"sampling": "independent", "objective": "grpo", "loss": ALIVE}, "use dr_grpo or rloo"),
    ({"sampling": "independent", "objective": "dler", "loss": ALIVE}, "use dr_grpo or rloo"),
    ({"loss": {"baseline": f"{__name__}:reward_of"}}, r"called with \(prompts, limit\)"),
    ({"loss": {"baseline": f"{__name__}:too_few"}}, "expected 2 finite numbers or None, found"),
])  # fmt: skip
def test_a_recipe_of_forks_that_does_not_fit_is_refused(keys, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**keys)
