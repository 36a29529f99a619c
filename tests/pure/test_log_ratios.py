"""Quantiles of log-ratios from counts equal those of the numbers, wherever these are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.training.log_ratios import BINS, count, quantile

log_ratios = st.lists(
    st.one_of(st.floats(-25, 25), st.floats(-1e-3, 1e-3), st.just(0.0)), min_size=1, max_size=60
)


@given(log_ratios, st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]), st.integers(0, 60))
def test_a_quantile_is_within_a_percent_of_the_exact_one(values, share, cut):
    parts = [torch.tensor(part, dtype=torch.float64) for part in (values[:cut], values[cut:])]
    counts = sum(count(part) for part in parts)
    assert isinstance(counts, torch.Tensor)
    assert len(counts) == BINS
    exact = float(np.quantile(np.clip(values, -20, 20), share, method="inverted_cdf"))
    assert quantile(counts, share) == pytest.approx(exact, rel=0.0101, abs=1e-7)


def test_numbers_that_are_not_finite_do_not_break_the_counting():
    counts = count(torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=torch.float64))
    assert counts.sum() == 4
    assert quantile(counts, 1.0) == pytest.approx(1.0, rel=0.0101)
