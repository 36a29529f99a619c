"""Supervised training on a tiny model: Transformers' loss in float64, and one step in every layout."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_eqlen.types import Metrics
from tests.kit.demonstrations import (
    CHATS,
    drawn,
    messages,
    minibatches,
    supervised,
    write_rows,
    write_tokenizer,
)
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import layout, update

SECTIONS = ("objective", "sampling", "data", "rollout", "loss", "packing", "optimizer", "parallel", "cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "llama", vocab_size=320)
    write_tokenizer(path)
    write_rows(path / "rows.jsonl", [{"messages": messages(chat)} for chat in CHATS])
    return path


def step(folder, ranks: int = 1, **changes) -> list[tuple[Metrics, dict[str, torch.Tensor]]]:
    recipe = supervised(folder, folder / "rows.jsonl", **changes)
    sections = {name: section for name, section in recipe.model_dump(mode="json").items() if name in SECTIONS}
    return run_ranks(ranks, update, str(folder), minibatches(recipe, len(CHATS)), sections)


@pytest.fixture(scope="module")
def alone(folder):
    return step(folder)[0]


def test_the_loss_and_its_gradient_are_those_of_transformers_in_float64(folder, alone):
    """The mean of -log p over all trained tokens of the batch, as TRL's SFTTrainer has it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    terms = []
    for row in drawn(supervised(folder, folder / "rows.jsonl"), len(CHATS)):
        ids = torch.tensor([[*row.token_ids, *row.response.token_ids.tolist()]])
        trained = torch.tensor([False] * len(row.token_ids) + row.response.is_generated.tolist())
        labels = ids.masked_fill(~trained, -100)[:, 1:]
        logits = model(input_ids=ids).logits[:, :-1]
        terms.append(
            torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")[labels[0] >= 0]
        )
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    metrics = alone[0]
    assert metrics["loss/tokens"] == len(torch.cat(terms))
    assert metrics["loss/nll"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert not [name for name in metrics if name.startswith("mismatch/") or "ratio" in name]


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {}], ids=str)
def test_two_ranks_take_the_step_of_one(folder, alone, parallel):
    """In tensor, pipeline and data parallel."""
    for found, moved in step(folder, 2, **layout(2, **parallel)):
        for name in ("loss/nll", "loss/total", "loss/tokens", "train/grad_norm"):
            assert found[name] == pytest.approx(alone[0][name], rel=1e-4), name
        for name, weight in alone[1].items():
            torch.testing.assert_close(moved[name], weight, rtol=1e-4, atol=1e-5)
