"""The teacher's log-probs are those of Transformers on the paths of token trees, in both layouts."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_eqlen.job import Job
from megatron_eqlen.models.groups import start
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.training.forward import run_rows
from megatron_eqlen.training.policy import Teacher
from megatron_eqlen.types import Row
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny
from tests.kit.tree_samples import forest, paths
from tests.kit.updates import recipe_of

TEMPERATURE = 0.7


def log_probs(folder: str) -> dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Return log-probs of the teacher and of Transformers for each segment, by layout; the second ones alone
    of trees."""
    start(ParallelRecipe(), seed=1)
    teacher = Teacher(Job(recipe_of(folder, {})), torch.float64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = {}
    for layout in ("tree", "expanded"):
        rows = plan_rows(forest(0), 512, 1, 1, layout).rows(0)
        with teacher.weights.resident():
            ours = run_rows(
                teacher.chunks, rows, TEMPERATURE, lambda logp, _, row, at: logp.numpy(), train=False
            )
        found[layout] = {}
        for row, values in zip(rows, ours, strict=True):
            theirs = transformers(model, row) if layout == "tree" else np.zeros(len(row.labels))
            segments = row.segment_ids[row.weights > 0]
            for segment in np.unique(segments):
                at = row.segment_ids == segment
                found[layout][int(segment)] = values[segments == segment], theirs[at]
    assert teacher.weights.away
    return found


def transformers(model: torch.nn.Module, row: Row) -> np.ndarray:
    """Return [S], the log-prob of each position's label on the path to it."""
    values = np.zeros(len(row.labels))
    for path in paths(row):
        with torch.no_grad():
            logits = model(torch.from_numpy(row.input_ids[path])[None]).logits[0, -1]
        values[path[-1]] = (logits / TEMPERATURE).log_softmax(-1)[row.labels[path[-1]]]
    return values


def test_the_teachers_log_probs_are_those_of_transformers_on_every_path(tmp_path):
    save_tiny(tmp_path, "qwen2", num_hidden_layers=2)
    ((found),) = run_ranks(1, log_probs, str(tmp_path))
    assert found["tree"].keys() == found["expanded"].keys()
    for segment, (ours, theirs) in found["tree"].items():
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)  # rope's angles are in float32
        np.testing.assert_allclose(ours, found["expanded"][segment][0], rtol=1e-12)
