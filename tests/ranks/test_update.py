"""``Policy.update`` on a tiny model: one step is one step, in every parallel layout."""

import pytest
import torch

from megatron_eqlen.types import Metrics
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import TWO_EPOCHS, layout, one_tree_a_row, update

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(folders):
    return str(folders / "qwen3")


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Return changes that make an update compute all log-probs, those of a teacher of another family, too."""
    path = tmp_path_factory.mktemp("teacher")
    save_tiny(path, "llama", num_hidden_layers=5)
    return TWO_EPOCHS | {"teacher": {"path": str(path)}}


@pytest.mark.parametrize("rows", [1, 5])
def test_a_virtual_pipeline_trains_any_number_of_rows(folder, passes, rows):
    """The update has the reference's, teacher's and old policy's forward passes; the padding rows change no
    number."""
    minibatches = [one_tree_a_row(rows)]
    ((metrics, weights),) = run_ranks(1, update, folder, minibatches, passes)
    interleaved = passes | layout(2, pipeline=2, virtual_pipeline=2)
    for found, moved in run_ranks(2, update, folder, minibatches, interleaved):
        assert (metrics["packing/rows"], found["packing/rows"]) == (rows, rows + rows % 2)
        assert_same_step(found, moved, metrics, weights)


def assert_same_step(found: Metrics, moved: Weights, metrics: Metrics, weights: Weights) -> None:
    for name in (
        "loss/total",
        "loss/ref_kl",
        "loss/teacher_kl",
        "loss/entropy",
        "loss/tokens",
        "train/grad_norm",
    ):
        assert found[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7), name
    for name, weight in weights.items():
        torch.testing.assert_close(moved[name], weight, rtol=1e-4, atol=1e-5)
