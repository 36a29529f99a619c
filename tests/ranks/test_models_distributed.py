"""The start of the parallel groups in a world that they do not fit."""

import pytest

from megatron_eqlen.models.groups import start
from megatron_eqlen.recipe import ParallelRecipe
from tests.kit.distributed import run_ranks


def layout_error(layout: dict) -> str:
    try:
        start(ParallelRecipe(**layout), seed=1)
    except ValueError as error:
        return str(error)
    return "no error"


IMPOSSIBLE = {
    "tensor 2 x context 1 x pipeline 2 = 4 does not divide the 2 processes": {"tensor": 2, "pipeline": 2},
    "pipeline 1 = 4 does not divide the 2 processes": {"expert": 4},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_a_layout_that_does_not_divide_the_world_is_refused_with_the_numbers(message):
    assert all(message in found for found in run_ranks(2, layout_error, IMPOSSIBLE[message]))
