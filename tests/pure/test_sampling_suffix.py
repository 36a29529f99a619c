"""Suffix reduction against the definition: enumerate every ended response that extends B_i."""

from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.sampling.equal_length.streams import pair_rewards
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout

QUESTION = Prompt("q", [1], "?", "math", "1")


def segment(length: int, reward: float | None) -> Part:
    grade = None if reward is None else Grade(reward, "correct" if reward else "wrong")
    return Part(Tokens.of([1] * length, [0.0] * length), None if reward is None else "stop", grade)


def stream(a_rewards: list[float], last_b: float | None, tail: float | None) -> Rollout:
    lasts = [None] * (len(a_rewards) - 1) + [last_b]
    pairs = [(segment(2, a), segment(2, b)) for a, b in zip(a_rewards, lasts, strict=True)]
    outcome = "truncated" if last_b is None else "both_ended"
    return kit.stream(QUESTION, 0, 0, pairs, outcome, None if tail is None else segment(3, tail))


rewards = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(st.lists(rewards, min_size=1, max_size=6), rewards | st.none(), rewards | st.none())
def test_b_is_reduced_over_every_ended_extension(a_rewards, last_b, tail):
    tail = None if last_b is not None else tail  # nothing follows a response that ended
    result = {
        (reduce, unfinished): pair_rewards(stream(a_rewards, last_b, tail), reduce, unfinished)
        for reduce in ("max", "mean")
        for unfinished in ("zero", "drop")
    }
    for i in range(len(a_rewards)):
        extensions = a_rewards[i + 1 :] + [reward for reward in (last_b, tail) if reward is not None]
        if i == len(a_rewards) - 1 and last_b is not None:
            extensions = [last_b]
        if not extensions:
            assert result["max", "zero"][i] == result["mean", "zero"][i] == (a_rewards[i], 0.0)
            assert result["max", "drop"][i] is result["mean", "drop"][i] is None
        else:
            mean = sum(extensions) / len(extensions)
            assert result["max", "drop"][i] == result["max", "zero"][i] == (a_rewards[i], max(extensions))
            assert abs(result["mean", "drop"][i][1] - mean) < 1e-12


def test_the_worked_example():
    """A_1 wrong, A_2 right, the trunk ran out of length: B_1 can still reach a right answer, B_2 cannot."""
    assert pair_rewards(stream([0.0, 1.0], None, None)) == [(0.0, 1.0), (1.0, 0.0)]


def test_a_truncated_tail_says_nothing():
    pairs = pairs_of(stream([1.0], None, None))
    unfinished = kit.stream(QUESTION, 0, 0, pairs, "truncated", Part(Tokens.of([1], [0.0]), "length"))
    assert pair_rewards(unfinished, unfinished="drop") == [None]
