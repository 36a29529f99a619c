"""Starting and stopping the parallel groups."""

import pytest

from tests.kit.distributed import run_ranks


def layout_error(layout: dict) -> str:
    from megatron_eqlen.models.groups import start
    from megatron_eqlen.recipe import ParallelRecipe

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


def restarted() -> list[tuple[int, int]]:
    """Return the (TP, PP) sizes of two runs one after the other in the same processes; alone, without a
    launcher."""
    import os

    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_eqlen.models.groups import start, stop
    from megatron_eqlen.processes.distributed import is_rank0
    from megatron_eqlen.recipe import ParallelRecipe

    sizes = []
    for layout in ({"tensor": 1}, {"pipeline": 1}):
        start(ParallelRecipe(**layout), seed=1)
        assert is_rank0()
        sizes.append(
            (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_pipeline_model_parallel_world_size(),
            )
        )
        stop()
        assert not dist.is_initialized()
        os.environ.pop("RANK", None)
    return sizes


def test_a_process_alone_is_a_world_and_can_start_again():
    assert run_ranks(1, restarted) == [[(1, 1), (1, 1)]]


def random_numbers() -> tuple[float, float]:
    """Return random numbers (inside tensor-parallel regions, outside)."""
    import torch
    from megatron.core import tensor_parallel

    from megatron_eqlen.models.groups import start
    from megatron_eqlen.recipe import ParallelRecipe

    start(ParallelRecipe(tensor=2), seed=11)
    outside = torch.rand(1).item()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return torch.rand(1).item(), outside


def test_tensor_parallel_ranks_draw_apart_inside_their_regions_and_alike_outside():
    (inside0, outside0), (inside1, outside1) = run_ranks(2, random_numbers)
    assert inside0 != inside1
    assert outside0 == outside1
    assert run_ranks(2, random_numbers) == [(inside0, outside0), (inside1, outside1)]
