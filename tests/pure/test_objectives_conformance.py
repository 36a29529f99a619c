"""Every objective's gradient on every token equals its paper's equation, transcribed here on its own.

The transcriptions give d loss / d log pi(token) in closed form, in plain float64 loops over responses.
Ours comes from rollouts through trees, packing, rows and autograd. Every generated token has an id of its
own, so that log-probs and gradients are tables over token ids.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.rewards.scoring import weighed
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of, tail_of
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.policy_loss import policy_loss
from megatron_eqlen.types import Grade, Part, Prompt, tokens_along
from tests.kit.marks import examples
from tests.kit.recipes import OWN_GRADER, small
from tests.kit.rollouts import build_trees
from tests.kit.tree_samples import pack

LONGEST = 12
BUFFER = 5
THOROUGH = examples(10)
GROUPS = [[(2, 1.0), (3, 0.0), (LONGEST, 1.0), (4, 0.25)], [(5, 1.0), (1, 0.0)]]
"""(length, reward) of the completions of two groups."""
STREAMS = [
    ([(2, 0.0), (3, 1.0), (1, 0.0)], "truncated", 0.0),
    ([(1, 1.0), (2, 0.0)], "both_ended", 1.0),
    ([(3, 0.5)], "max_pairs", 1.0),
]
"""(length and reward of A of each pair, outcome, reward of the end) of three streams."""


def fixed(shapes):
    """Add examples that every run tries, with few drawn ones, too: ratios inside of GSPO's clip range, and
    beyond the others'."""

    def add(test):
        return example(shapes=shapes, scale=1e-4, seed=0)(example(shapes=shapes, scale=0.3, seed=0)(test))

    return add


@dataclass
class Draws:
    """Hands out token ids; log-probs of the policy, before the update, of the reference and of the engine."""

    scale: float
    seed: int
    new: list[float] = field(default_factory=lambda: [0.0, 0.0])
    old: list[float] = field(default_factory=lambda: [0.0, 0.0])
    ref: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rollout: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)

    def segment(self, length, reward=None, finish_reason=None):
        first = len(self.new)
        for _ in range(length):
            new = -self.random.exponential()
            self.new.append(new)
            self.old.append(new + self.scale * self.random.normal())
            self.ref.append(new + 0.3 * self.random.normal())
            self.rollout.append(float(np.float32(self.old[-1] + 0.5 * self.random.normal())))
        grade = None if reward is None else Grade(reward, "")
        finish_reason = finish_reason or (None if reward is None else "stop")
        return Part(Tokens.of(list(range(first, first + length)), self.rollout[first:]), finish_reason, grade)


def recipe(sampling, objective, **loss):
    equal_length = {key: loss.pop(key) for key in list(loss) if key in EQUAL_LENGTH_KEYS}
    weights, tree = loss.pop("weights", {}), loss.pop("tree", {})
    layout = "expanded" if equal_length.get("prefix_in_gradient") else "tree"
    return small(
        group_size=2, sampling=sampling, objective=objective, equal_length=equal_length, tree_sampling=tree,
        data={"max_prompt_length": 4} | (OWN_GRADER if weights else {}),
        rollout={"max_response_length": LONGEST, "top_k": 0, "top_p": 1.0},
        packing={"max_tokens_per_row": 16, "layout": layout}, loss={"kl_coef": 0.0} | loss,
        reward={"weights": weights},
    )  # fmt: skip


def prompt(number: int) -> Prompt:
    return Prompt(f"p{number}", [0, 1], "?", "math", "1")


EQUAL_LENGTH_KEYS = ("pair_count", "suffix_reward", "prefix_in_gradient", "unfinished")


def our_gradient(rollouts, tokens, recipe):
    """Return d loss / d log pi, [number of tokens]."""
    trees, _ = build_trees(rollouts, recipe)
    table = torch.tensor(tokens.new, dtype=torch.float64, requires_grad=True)
    old, ref = (torch.tensor(t, dtype=torch.float64) for t in (tokens.old, tokens.ref))
    for row in pack(trees, recipe.packing.max_tokens_per_row, layout=recipe.packing.layout)[0]:
        labels = torch.from_numpy(row.labels)
        loss, _ = policy_loss(
            table[labels],
            torch.zeros(len(labels)),
            weights=torch.from_numpy(row.weights),
            advantages=torch.from_numpy(row.advantages),
            segment_ids=torch.from_numpy(row.segment_ids),
            rollout_logprobs=torch.from_numpy(row.column("logprobs")),
            others={"old": old[labels], "ref": ref[labels]},
            objective=Job(recipe).objective,
            loss=recipe.loss,
        )
        loss.backward()
    return np.zeros(len(tokens.new)) if table.grad is None else table.grad.numpy()


# --- equations, from the papers ---------------------------------------------------------------------------


def clip_slope(ratio, advantage, low, high, dual=None):
    """Return d min(ratio A, clip(ratio) A) / d log ratio, with the dual clip max(., dual A) for A < 0.

    Log-ratios are clamped to +-20, as in verl.
    """
    if abs(math.log(ratio)) > 20:
        return 0.0
    if advantage > 0:
        return ratio * advantage if ratio < 1 + high else 0.0
    if advantage < 0:
        inside = ratio > 1 - low and (dual is None or ratio < dual)
        return ratio * advantage if inside else 0.0
    return 0.0


def standardized(rewards):
    """Return Eq. 1 of the paper, population std; all equal: 0."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [0.0] * len(rewards) if std == 0 else [(r - mean) / std for r in rewards]


def centred(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]


def leave_one_out(rewards):
    if len(rewards) == 1:
        return [0.0]
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def gr3(rewards, lengths):
    mean = sum(lengths) / len(lengths)
    return centred([r / (1 + 0.33 * n / mean) for r, n in zip(rewards, lengths, strict=True)])


def overlong(length):
    """Return DAPO's soft punishment, piecewise as in its paper."""
    if length <= LONGEST - BUFFER:
        return 0.0
    return (LONGEST - BUFFER - length) / BUFFER


def log_ratios(tokens, ids):
    return [tokens.new[i] - tokens.old[i] for i in ids]


PLAIN = {
    *("grpo", "dr_grpo", "gr3", "treerpo", "grpo_ma", "ba", "maxrl", "delta_l"),
    *("reinforce_pp", "reinforce_pp_baseline"),
}
"""Objectives with PPO's clipping on both sides of 0.2."""


def sequence_slopes(name, tokens, ids, advantage):
    """Return for each token of a response d surrogate / d log pi(token), before any averaging over
    responses."""
    ratios = log_ratios(tokens, ids)
    if name in PLAIN:
        return [clip_slope(math.exp(x), advantage, 0.2, 0.2) for x in ratios]
    if name == "dapo":
        return [clip_slope(math.exp(x), advantage, 0.2, 0.28, 10.0) for x in ratios]
    if name == "dler":
        return [clip_slope(math.exp(x), advantage, 0.2, 0.28) for x in ratios]
    if name in ("gspo", "luspo"):
        low, high = (3e-4, 4e-4) if name == "gspo" else (2e-3, 2.5e-3)
        s = math.exp(sum(ratios) / len(ids))
        return [clip_slope(s, advantage, low, high) / len(ids)] * len(ids)
    if name == "rloo":
        return [advantage] * len(ids)
    if name == "cispo":  # Eq. 4 and 5 of MiniMax-M1: sg(clip(r)) A log pi; no lower bound, r at most 5
        return [min(math.exp(min(max(x, -20), 20)), 5.0) * advantage for x in ratios]
    if name == "sapo":  # 2511.20347: the gate's slope is 4 p (1 - p), p = sigmoid(tau (ratio - 1))
        tau = 1.0 if advantage > 0 else 1.05
        ratios = [math.exp(x) if abs(x) <= 20 else 0.0 for x in ratios]
        gates = [1 / (1 + math.exp(min(-tau * (r - 1), 700))) for r in ratios]
        return [4 * p * (1 - p) * r * advantage for p, r in zip(gates, ratios, strict=True)]
    if name == "dppo":  # mask of 2602.04879; ratio at most 20, as in verl (dppo_tv)
        moved = [math.exp(tokens.new[i]) - math.exp(tokens.old[i]) for i in ids]
        free = [m <= 0.15 if advantage > 0 else m >= -0.15 for m in moved]
        ratios = [math.exp(min(max(x, -20), math.log(20))) for x in ratios]
        return [f * advantage * ratio for f, ratio in zip(free, ratios, strict=True)]
    if name == "ctpo":  # 2605.07331: the product of the ratios up to t, bounded by exp(eps sqrt(t))
        products = [sum(ratios[: t + 1]) for t in range(len(ids))]
        bounds = [[math.exp(eps * math.sqrt(t + 1)) for eps in (-0.025, 0.05, 0.05)] for t in range(len(ids))]
        return [
            clip_slope(math.exp(max(min(x, 700), -700)), advantage, 1 - low, high - 1, dual)
            for x, (low, high, dual) in zip(products, bounds, strict=True)
        ]
    assert name == "vespo"
    k, lam = (2, 3) if advantage >= 0 else (3, 2)
    w = math.exp(min(max(sum(ratios), -20), 20))
    return [w**k * math.exp(lam * (1 - w)) * advantage] * len(ids)


def advantages_of(name, rewards, lengths):
    if name in ("grpo", "dapo", "gspo", "luspo", "ba", "cispo", "sapo", "ctpo"):
        return standardized(rewards)
    if name == "reinforce_pp":
        return rewards
    if name == "rloo":
        return leave_one_out(rewards)
    if name == "maxrl":
        return [a / (sum(rewards) / len(rewards)) if any(rewards) else 0.0 for a in centred(rewards)]
    return gr3(rewards, lengths) if name == "gr3" else centred(rewards)


TOKEN_MEANS = ("dapo", "dler", "vespo", "cispo", "ctpo", "reinforce_pp", "reinforce_pp_baseline")


def response_factor(name, length, total, lengths=(1,)):
    """Return the factor of a token's slope besides 1/G and 1/P; token means divide by all tokens instead.

    ``lengths``: of the responses of the unit.
    """
    if name in TOKEN_MEANS:
        return 1 / total
    if name == "delta_l":  # x_i of 2509.07558 for alpha 1, its constant M being the limit, times G
        return len(lengths) / length / sum(1 / n for n in lengths) / LONGEST
    if name in ("dr_grpo", "dppo", "maxrl"):
        return 1 / LONGEST
    return {"gspo": 1.0, "luspo": length}.get(name, 1 / length)


# --- independent sampling ---------------------------------------------------------------------------------

lengths_and_rewards = st.lists(
    st.tuples(st.integers(1, LONGEST), st.sampled_from([0.0, 1.0, 1.0, 0.25])), min_size=1, max_size=5
)
scales = st.sampled_from([0.0, 1e-4, 0.3, 60.0])


def of_grpo(groups, name="grpo"):
    """Return token ids of each completion, its advantage by the method's estimator, and GRPO's divisor."""
    for group in groups:
        rewards = [c.grade.reward if c.grade else 0.0 for c in group.parts]
        for completion, advantage in zip(group.parts, advantages_of(name, rewards, None), strict=True):
            yield completion.token_ids, advantage, len(groups) * len(group.parts) * len(completion)


def sample_groups(shapes, tokens):
    groups = []
    for number, shape in enumerate(shapes):
        ends = [(n, None, "length") if n == LONGEST else (n, reward) for n, reward in shape]
        groups.append(kit.group(prompt(number), 0, [tokens.segment(*end) for end in ends]))
    return groups


INDEPENDENT = [
    *("grpo", "dr_grpo", "dapo", "gspo", "luspo", "rloo", "gr3", "vespo", "dler"),
    *("cispo", "reinforce_pp", "reinforce_pp_baseline", "sapo", "dppo", "maxrl", "delta_l", "ctpo"),
]


@pytest.mark.parametrize("name", INDEPENDENT)
@given(shapes=st.lists(lengths_and_rewards, min_size=1, max_size=3), scale=scales, seed=st.integers(0, 99))
@THOROUGH
@fixed(GROUPS)
def test_groups_follow_their_equation(name, shapes, scale, seed):
    tokens = Draws(scale, seed)
    groups = sample_groups(shapes, tokens)
    settings = recipe("independent", name, **({"overlong_buffer": BUFFER} if name == "dapo" else {}))
    expected = np.zeros(len(tokens.new))
    scored = []
    for group in groups:
        lengths = [len(c) for c in group.parts]
        rewards = [c.grade.reward if c.grade else 0.0 for c in group.parts]
        if name == "dapo":
            rewards = [r + overlong(n) for r, n in zip(rewards, lengths, strict=True)]
        scored.append(advantages_of(name, rewards, lengths))
    if name in ("dler", "reinforce_pp", "reinforce_pp_baseline"):  # over the batch
        flat = np.array([a for group in scored for a in group])
        mean = flat.mean() if name == "reinforce_pp" else 0.0
        std = math.sqrt(((flat - mean) ** 2).mean()) if np.ptp(flat) > 1e-9 else 0.0
        scored = [[(a - mean) / std if std else 0.0 for a in group] for group in scored]
    total = sum(len(c) for group in groups for c in group.parts)
    for group, advantages in zip(groups, scored, strict=True):
        for completion, advantage in zip(group.parts, advantages, strict=True):
            factor = response_factor(name, len(completion), total, [len(c) for c in group.parts])
            if name not in TOKEN_MEANS:
                factor /= len(groups) * len(group.parts)
            slopes = sequence_slopes(name, tokens, completion.token_ids, advantage)
            expected[completion.token_ids] = -factor * np.array(slopes)
    np.testing.assert_allclose(our_gradient(groups, tokens, settings), expected, rtol=1e-8, atol=1e-14)


@given(shapes=st.lists(lengths_and_rewards, min_size=1, max_size=3), scale=scales, seed=st.integers(0, 99))
@THOROUGH
@fixed(GROUPS)
def test_balanced_aggregation_follows_its_equation(shapes, scale, seed):
    """The equation for each group: |S+| / G times the token mean over S+, and the same for S- (arXiv
    2605.04077)."""
    tokens = Draws(scale, seed)
    groups = sample_groups(shapes, tokens)
    expected = np.zeros(len(tokens.new))
    for group in groups:
        rewards = [c.grade.reward if c.grade else 0.0 for c in group.parts]
        advantages = standardized(rewards)
        for sign in (1, -1):
            subset = [i for i, a in enumerate(advantages) if a * sign > 0]
            total = sum(len(group.parts[i]) for i in subset)
            for i in subset:
                ids = group.parts[i].token_ids
                slopes = np.array(sequence_slopes("ba", tokens, ids, advantages[i]))
                expected[ids] = -slopes / total * len(subset) / len(group.parts) / len(groups)
    found = our_gradient(groups, tokens, recipe("independent", "ba"))
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(shapes=st.lists(lengths_and_rewards, min_size=1, max_size=2), seed=st.integers(0, 99))
@THOROUGH
def test_the_kl_penalty_of_grpo(estimator, shapes, seed):
    tokens = Draws(0.0, seed)
    groups = sample_groups(shapes, tokens)
    expected = np.zeros(len(tokens.new))
    for ids, advantage, factor in of_grpo(groups):
        for i in ids:
            difference = tokens.new[i] - tokens.ref[i]
            slope = {"k1": 1.0, "k2": difference, "k3": 1 - math.exp(-difference)}[estimator]
            expected[i] = (-advantage + 0.07 * slope) / factor
    settings = recipe("independent", "grpo", kl_coef=0.07, kl_estimator=estimator)
    np.testing.assert_allclose(our_gradient(groups, tokens, settings), expected, rtol=1e-9, atol=1e-14)


def divergence(kind, log_rho):
    """Return the estimates of http://joschu.net/blog/kl-approx.html with r = trainer / engine, as verl has
    them."""
    return {"k1": -log_rho, "k2": 0.5 * log_rho**2, "k3": math.exp(log_rho) - 1 - log_rho}[kind]


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def is_kept(option, bound, log_rhos, token, probabilities):
    """Return True if verl's rollout_rs ``option`` keeps a token of a sequence, in plain loops.
    ``probabilities``: of trainer and engine for each token."""
    if option == "binary_kl":  # KPop: ringtech.notion.site/kpop
        p, q = (min(max(value, 1e-6), 1 - 1e-6) for value in probabilities[token])
        return max(binary_kl(p, q), binary_kl(q, p)) <= bound
    level, kind = option.rsplit("_", 1)
    values = [divergence(kind, x) for x in log_rhos]
    of_sequence = {"seq_sum": sum(values), "seq_mean": mean_of(values), "seq_max": max(values)}
    value = of_sequence.get(level, values[token])
    if kind != "k1":
        return value <= bound
    low, high = bound if isinstance(bound, list) else (1 / bound, bound)
    return math.log(low) <= value <= math.log(high)


bands = st.one_of(st.floats(1.05, 3), st.tuples(st.floats(0.2, 0.99), st.floats(1, 3)).map(list))
upper_bounds = st.floats(0.01, 1.0)
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
rejections = st.fixed_dictionaries(
    {},
    optional={f"{level}_k1": bands for level in LEVELS[:-1]}
    | {f"{level}_{k}": upper_bounds for level in LEVELS for k in ("k2", "k3")}
    | {"binary_kl": st.floats(1e-4, 0.1)},
)


@given(
    shapes=st.lists(lengths_and_rewards, min_size=1, max_size=2),
    seed=st.integers(0, 99),
    level=st.sampled_from(["none", "token", "sequence"]),
    band=st.tuples(st.floats(0.1, 0.99), st.floats(1, 4)).map(list),
    rejected=rejections,
    name=st.sampled_from(["grpo", "gspo", "luspo", "vespo"]),
)
@example(GROUPS, 0, "token", [0.5, 2.0], {"token_k1": 1.5}, "gspo")
@example(GROUPS, 0, "sequence", [0.5, 2.0], {"seq_max_k2": 0.3}, "luspo")
@example(GROUPS, 0, "none", [0.5, 2.0], {"token_k3": 0.1}, "vespo")
@example(GROUPS, 0, "none", [0.5, 2.0], {"binary_kl": 1e-3}, "gspo")
@examples(40)
def test_tokens_and_segments_beyond_their_bounds_give_no_gradient_and_leave_the_ratio(
    shapes, seed, level, band, rejected, name
):
    """This covers a token's own gradient, also with a sequence's ratio, and a ratio of the kept tokens, as in
    verl."""
    tokens = Draws(0.1, seed)
    level = "none" if name == "vespo" else level  # its kernel takes no other importance weight
    groups = sample_groups(shapes, tokens)
    expected = np.zeros(len(tokens.new))
    for ids, advantage, factor in of_grpo(groups, name):
        log_rhos = [tokens.old[i] - tokens.rollout[i] for i in ids]
        both = [(math.exp(tokens.old[i]), math.exp(tokens.rollout[i])) for i in ids]
        kept = [
            n for n in range(len(ids))
            if all(is_kept(option, bound, log_rhos, n, both) for option, bound in rejected.items())
        ]  # fmt: skip
        slopes = sequence_slopes(name, tokens, [ids[n] for n in kept], advantage) if kept else []
        share = len(kept) if name in ("gspo", "luspo") else 1  # of s a token has all, not 1 / length
        for n, slope in zip(kept, slopes, strict=True):
            rho = {"none": 1.0, "token": math.exp(log_rhos[n]), "sequence": math.exp(sum(log_rhos))}[level]
            weight = rho if level == "none" or band[0] <= rho <= band[1] else 0.0
            kl_slope = 1 - math.exp(tokens.ref[ids[n]] - tokens.new[ids[n]])
            expected[ids[n]] = (-weight * share * slope + 0.07 * kl_slope) / factor
    keys = {"rollout_is": level, "rollout_rs": rejected or None, "loss_agg_mode": "seq-mean-token-mean"}
    keys |= {"rollout_is_threshold": band} if level != "none" else {}
    settings_ = recipe("independent", name, kl_coef=0.07, **keys)
    np.testing.assert_allclose(our_gradient(groups, tokens, settings_), expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("name", "keys", "low", "high", "dual"), [
    ("rloo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, 0.1, 0.3, None),
    ("grpo", {"clip_ratio_high": 0.28, "clip_ratio_c": 1.5}, 0.2, 0.28, 1.5),
    ("grpo", {"old_logprobs": "rollout"}, 0.2, 0.2, None),
    ("dapo", {"loss_agg_mode": "prompt-mean-token-mean", "overlong_buffer": 0}, 0.2, 0.28, 10.0),
])  # fmt: skip
@given(shapes=st.lists(lengths_and_rewards, min_size=1, max_size=3), scale=scales, seed=st.integers(0, 99))
@THOROUGH
@fixed(GROUPS)
def test_loss_keys_change_what_they_name(name, keys, low, high, dual, shapes, scale, seed):
    tokens = Draws(scale, seed)
    groups = sample_groups(shapes, tokens)
    old = tokens.rollout if "old_logprobs" in keys else tokens.old
    expected = np.zeros(len(tokens.new))
    for group in groups:
        rewards = [c.grade.reward if c.grade else 0.0 for c in group.parts]
        whole = sum(len(c) for c in group.parts)
        advantages = advantages_of(name, rewards, None)
        for completion, advantage in zip(group.parts, advantages, strict=True):
            factor = whole if name == "dapo" else len(group.parts) * len(completion)
            for i in completion.token_ids:
                ratio = math.exp(tokens.new[i] - old[i])
                expected[i] = -clip_slope(ratio, advantage, low, high, dual) / (factor * len(groups))
    settings = recipe("independent", name, **keys)
    np.testing.assert_allclose(our_gradient(groups, tokens, settings), expected, rtol=1e-8, atol=1e-14)


# --- equal-length pairs -----------------------------------------------------------------------------------

reward = st.sampled_from([0.0, 1.0, 1.0, 0.5])
stream_shape = st.tuples(
    st.lists(st.tuples(st.integers(1, 3), reward), min_size=0, max_size=4),
    st.sampled_from(["both_ended", "truncated", "max_pairs"]),
    reward,
)


def sample_streams(shapes, tokens):
    """Return two streams a prompt, as ``group_size: 4`` has them (the recipe's own number is not read)."""
    streams = []
    for number, (pairs, outcome, last_reward) in enumerate(shapes):
        built = [(tokens.segment(n, r), tokens.segment(n)) for n, r in pairs]
        tail = None
        if outcome == "both_ended" and built:
            built[-1] = built[-1][0], tokens.segment(pairs[-1][0], last_reward)
        elif outcome == "max_pairs":
            tail = tokens.segment(1, last_reward)
        streams.append(kit.stream(prompt(number // 2), number % 2, 0, built, outcome, tail))
    return streams


def suffix_rewards(stream, reduce):
    """Return the paper's rewards: A_i by the verifier, B_i by all its extension trajectories."""
    rewards = []
    for i, pair in enumerate(pairs_of(stream)):
        if pair.b.grade is not None:
            extensions = [pair.b.grade.reward]
        else:
            extensions = [later.a.grade.reward for later in pairs_of(stream)[i + 1 :]]
            extensions += [later.b.grade.reward for later in pairs_of(stream)[i + 1 :] if later.b.grade]
            extensions += [tail_of(stream).grade.reward] if tail_of(stream) else []
        rewards.append((pair.a.grade.reward, reduce(extensions) if extensions else 0.0))
    return rewards


def mean_of(values):
    return sum(values) / len(values)


def per_prompt(streams):
    return {p: [s for s in streams if s.prompt_id == p] for p in {s.prompt_id for s in streams}}


@pytest.mark.parametrize(("name", "keys"), [
    ("grpo", {}),
    ("grpo", {"pair_count": "effective"}),
    ("grpo", {"suffix_reward": "mean"}),
    ("grpo", {"prefix_in_gradient": True}),
    ("rloo", {}),
    ("rloo", {"suffix_reward": "mean"}),
    ("dr_grpo", {}),
    ("gspo", {}),
    ("luspo", {}),
    ("dapo", {"overlong_buffer": 0}),
    ("vespo", {}),
    ("ba", {}),
    ("cispo", {}),
])  # fmt: skip
@given(shapes=st.lists(stream_shape, min_size=1, max_size=4), scale=scales, seed=st.integers(0, 99))
@THOROUGH
@fixed(STREAMS)
def test_pairs_follow_eq_5_and_eq_6(name, keys, shapes, scale, seed):
    tokens = Draws(scale, seed)
    streams = sample_streams(shapes, tokens)
    reduce = mean_of if keys.get("suffix_reward") == "mean" else max
    whole = keys.get("prefix_in_gradient", False)
    expected = np.zeros(len(tokens.new))
    prompts = per_prompt(streams)
    total = sum(2 * len(pair.a) for stream in streams for pair in pairs_of(stream))
    for subgroups in prompts.values():
        for stream in subgroups:
            rewards = suffix_rewards(stream, reduce)
            pairs = pairs_of(stream)
            live = [abs(a - b) > 1e-9 for a, b in rewards[: len(pairs)]]
            count = sum(live) if keys.get("pair_count") == "effective" else len(pairs)
            for i, pair in enumerate(pairs):
                if not live[i]:
                    continue
                prefix = tokens_along(stream.line(pair.a.parent)) if whole else []
                advantages = advantages_of(name, list(rewards[i]), [len(pair.a)] * 2)
                for side, advantage in zip((pair.a, pair.b), advantages, strict=True):
                    ids = [*prefix, *side.token_ids]
                    factor = response_factor(name, len(ids), total)
                    if name not in TOKEN_MEANS:
                        factor /= 2 * count * len(subgroups) * len(prompts)
                    slopes = sequence_slopes(name, tokens, ids, advantage)
                    expected[ids] -= factor * np.array(slopes)
    ours = our_gradient(streams, tokens, recipe("equal_length", name, **keys))
    np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-14)


@given(shapes=st.lists(stream_shape, min_size=1, max_size=3), seed=st.integers(0, 99))
@THOROUGH
def test_binary_eqlen_rloo_and_eqlen_grpo_are_one_method_on_policy(shapes, seed):
    """Source: the paper's appendix on RLOO."""
    tokens = Draws(0.0, seed)
    shapes = [([(n, round(r)) for n, r in pairs], outcome, round(r)) for pairs, outcome, r in shapes]
    streams = sample_streams(shapes, tokens)
    grpo, rloo = (our_gradient(streams, tokens, recipe("equal_length", name)) for name in ("grpo", "rloo"))
    np.testing.assert_allclose(grpo, rloo, rtol=1e-12, atol=1e-15)


WEIGHTS = {"right": 1.0, "brief": 0.5}


def with_reward(rollout, reward):
    """Return a rollout with other grades, ``reward`` of each part that has one."""
    return replace(rollout, parts=[replace(p, grade=p.grade and reward(p)) for p in rollout.parts])


@pytest.mark.parametrize("sampling", ["independent", "equal_length"])
def test_rewards_apart_are_normalised_by_name_then_added_then_scaled_by_the_batch(sampling):
    """Eq. of GDPO (2601.05242): A_k of each reward in its group, sum of w_k A_k, and its batch
    normalisation; a pair is a group of two, and B's reward is the best of its extensions by each name."""
    tokens = Draws(0.3, 0)
    pairs = sampling == "equal_length"
    rollouts = sample_streams(STREAMS, tokens) if pairs else sample_groups(GROUPS, tokens)
    values = {"right": lambda part: part.grade, "brief": lambda part: Grade(len(part) % 3, "")}
    scored = []
    for rollout in rollouts:
        of_names = []
        for name, value in values.items():
            of_name = with_reward(rollout, value)
            rewards = [[part.grade.reward if part.grade else 0.0 for part in of_name.parts]]
            units = suffix_rewards(of_name, max) if pairs else rewards
            of_names.append([WEIGHTS[name] * np.array(standardized(unit)) for unit in units])
        scored += [sum(of_unit) for of_unit in zip(*of_names, strict=True)]
    std = math.sqrt(mean_of([a * a for unit in scored for a in unit]))
    named = [
        with_reward(r, lambda p: Grade(0.0, "", rewards={n: value(p).reward for n, value in values.items()}))
        for r in rollouts
    ]
    ours = [unit.advantages for unit in weighted_units(named, Job(recipe(sampling, "gdpo", weights=WEIGHTS)))]
    assert len(ours) == len(scored)
    for mine, unit in zip(ours, scored, strict=True):
        np.testing.assert_allclose(mine, unit / std, rtol=1e-12)


def test_a_single_named_reward_trains_as_one_without_a_name():
    tokens = Draws(0.3, 0)
    groups = sample_groups(GROUPS, tokens)
    named = [
        with_reward(g, lambda p: weighed(Grade(0.0, "", rewards={"right": p.grade.reward}), {"right": 1.0}))
        for g in groups
    ]
    ours = our_gradient(named, tokens, recipe("independent", "grpo", weights={"right": 1.0}))
    assert np.array_equal(ours, our_gradient(groups, tokens, recipe("independent", "grpo")))


# --- tree sampling ----------------------------------------------------------------------------------------


@given(branching=st.integers(2, 3), depth=st.integers(1, 3), scale=scales, seed=st.integers(0, 99))
@THOROUGH
def test_treerpo_compares_siblings_by_the_mean_of_their_leaves(branching, depth, scale, seed):
    tokens = Draws(scale, seed)
    steps, parents, expected = [], [], {}
    groups = []

    def grow(parent, level):
        """Add a group of siblings; return the mean of their rewards."""
        members, rewards = [], []
        for _ in range(branching):
            leaf = level == depth or tokens.random.random() < 0.3
            length, reward = int(tokens.random.integers(1, 4)), float(tokens.random.integers(2))
            segment = tokens.segment(length, reward if leaf else None)
            steps.append(segment)
            parents.append(parent)
            rewards.append(segment.grade.reward if leaf else grow(len(steps) - 1, level + 1))
            members.append(segment)
        groups.append((members, rewards))
        return mean_of(rewards)

    grow(-1, 1)
    expected = np.zeros(len(tokens.new))
    for members, rewards in groups:
        for segment, advantage in zip(members, centred(rewards), strict=True):
            slopes = sequence_slopes("treerpo", tokens, segment.token_ids, advantage)
            expected[segment.token_ids] = -np.array(slopes) / (len(groups) * branching * len(segment))
    ours = our_gradient([kit.tree(prompt(0), 0, steps, parents)], tokens, recipe("tree", "treerpo"))
    np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-14)


@given(thoughts=st.integers(2, 4), answers=st.integers(2, 3), scale=scales, seed=st.integers(0, 99))
@THOROUGH
def test_grpo_ma_normalises_thoughts_by_their_values_and_all_answers_together(thoughts, answers, scale, seed):
    """The paper's objective: the mean over K thoughts plus the mean over their K x M answers, each divided by
    its length. A thought that ends without a fork is worth its own reward."""
    tokens = Draws(scale, seed)
    firsts, values, replies, parents = [], [], [], []
    for number in range(thoughts):
        ends = tokens.random.random() < 0.2
        mine = [] if ends else [tokens.segment(2, float(tokens.random.integers(2))) for _ in range(answers)]
        firsts.append(tokens.segment(int(tokens.random.integers(1, 4)), 1.0 if ends else None))
        values.append(mean_of([reply.grade.reward for reply in mine] or [1.0]))
        replies += mine
        parents += [number] * len(mine)
    expected = np.zeros(len(tokens.new))
    rewards = [reply.grade.reward for reply in replies]
    for members, numbers, count in ((firsts, values, thoughts), (replies, rewards, thoughts * answers)):
        for part, advantage in zip(members, standardized(numbers) if members else [], strict=True):
            slopes = sequence_slopes("grpo_ma", tokens, part.token_ids, advantage)
            expected[part.token_ids] = -np.array(slopes) / (count * len(part))
    settings = recipe("tree", "grpo_ma", tree={"fork": "tokens", "branching": answers, "forks": 1})
    rollout = kit.tree(prompt(0), 0, [*firsts, *replies], [-1] * thoughts + parents)
    ours = settings.data.prompts_per_step * our_gradient([rollout], tokens, settings)
    np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-14)
