"""The learning tax equals Proposition 2's value for its own example, and a count token by token."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.rollout.record.recorder import record
from tests.kit.marks import examples
from tests.kit.theory import (
    A_2,
    A_3,
    B_1,
    B_2,
    direct_coefficient,
    grpo_group,
    recipe,
    trees_of,
)
from tools.research.learning_tax import Tax, learning_tax, shared_coefficients, tax_of_run


def test_grpo_pushes_the_papers_prefix_both_ways_and_most_of_it_cancels():
    """Coefficients: -1/8 for each token of the wrong response of 4, +1/12 for each of the right one of 6."""
    group = grpo_group((B_1 + A_2, 0.0), (B_1 + B_2 + A_3, 1.0))
    tax = learning_tax(trees_of(group))
    assert (tax.shared, tax.opposed, tax.trained) == (len(B_1), len(B_1), 10)
    assert tax.gross == pytest.approx(2 * (1 / 8 + 1 / 12))
    assert tax.cancelled_share == pytest.approx(0.8)
    assert abs(direct_coefficient(group, B_1)) == pytest.approx(tax.net / len(B_1))


responses = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=4), st.sampled_from([0.0, 1.0])),
    min_size=2,
    max_size=5,
)


@examples(50)
@given(responses)
def test_shared_tokens_are_those_that_two_responses_begin_with(responses):
    group = grpo_group(*responses)
    trees = trees_of(group)
    trained, passing = defaultdict(list), Counter()
    for node in trees[0].nodes[1:]:
        for end in range(1, len(node.token_ids) + 1):
            path = tuple(node.token_ids[:end].tolist())
            passing[path] += 1
            if node.weight * node.advantage:
                trained[path].append(node.weight * node.advantage)
    expected = sorted(sorted(values) for path, values in trained.items() if passing[path] > 1)
    found = sorted(sorted(values.tolist()) for values in shared_coefficients(trees))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs)


def test_a_run_is_measured_from_what_it_recorded(tmp_path):
    groups = [grpo_group((B_1 + A_2, 0.0), (B_1 + B_2 + A_3, 1.0)), grpo_group((B_1 + A_2, 1.0), (B_1, 1.0))]
    mine = recipe("independent")
    total = Tax()
    for step, group in enumerate(groups):
        record(tmp_path / f"streams/step-{step:08d}/rank-0.arrow", [group])
        total += learning_tax(build_minibatches([group], mine)[0][0])
    assert tax_of_run(tmp_path, mine) == total
    assert np.isclose(total.cancelled_share, 0.8), "equal rewards push nothing"
    assert tax_of_run(tmp_path / "none", mine) == Tax()
