"""``Policy.update`` on a tiny model: one step is one step, in every parallel layout."""

import pytest
import torch

from tests.kit.distributed import run_ranks
from tests.kit.marks import slow
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import layout, one_tree_a_row, update


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "qwen3")
    return str(path)


@pytest.mark.parametrize("rows", [1, slow(2), slow(3), 5])
def test_a_virtual_pipeline_trains_any_number_of_rows(folder, rows):
    """With the reference's and the old policy's forward passes; the padding rows change no number."""
    minibatches = [one_tree_a_row(rows)]
    ((metrics, weights),) = run_ranks(1, update, folder, minibatches)
    interleaved = layout(2, pipeline=2, virtual_pipeline=2)
    for found, moved in run_ranks(2, update, folder, minibatches, interleaved):
        assert (metrics["packing/rows"], found["packing/rows"]) == (rows, rows + rows % 2)
        for name in ("loss/total", "loss/ref_kl", "loss/entropy", "loss/tokens", "train/grad_norm"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7), name
        for name, weight in weights.items():
            torch.testing.assert_close(moved[name], weight, rtol=1e-4, atol=1e-5)
