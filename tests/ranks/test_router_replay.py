"""Router replay on token trees: the experts are the given ones, in every layout, and all else is the model's.

The reference is Transformers' model on plain sequences, made to take the same experts. Everything runs in
float64, but for the routers' softmax, which both programs compute in float32: that bounds what can be asked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_eqlen.models.router_replay import GivenExperts, measuring_agreement, routers
from megatron_eqlen.training.forward import run_rows
from megatron_eqlen.types import TokenTree
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow, weekly
from tests.kit.routes import TOP_K, force, path_routes, routed
from tests.kit.tiny_models import gradients_by_name, save_models
from tests.kit.tree_samples import forest, pack
from tests.kit.tree_training import (
    Trained,
    assert_same,
    gradients,
    record_experts,
    train_trees,
    weighted_sum,
    world_of,
    worst_difference,
)
from tests.ranks.test_models_parity import MAX_GRADIENT_ERROR, in_doubles

torch.set_num_threads(1)

MODELS = {
    "moe": ("qwen3_moe", {}),
    "some_dense": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "next": ("qwen3_next", {}),
}
LAYERS = {"moe": 4, "some_dense": 3, "next": 4}
"""Number of layers with experts."""
BUDGET = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="module")
def whole(folders) -> dict[str, Trained]:
    """Train all trees in as few rows as they fit into, in one process."""
    return {name: train_trees(folder, trees_of(name), BUDGET) for name, folder in folders.items()}


def trees_of(name: str) -> list[TokenTree]:
    return routed(forest(0), LAYERS[name])


# ---- what is right ---------------------------------------------------------------------------------------


def on_paths(folder: Path, trees: list[TokenTree]) -> Trained:
    """Return Transformers' loss and gradients: each supervised node at the end of a sequence of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    given = force(model)
    sparse = [n for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]
    total = 0.0
    for tree in trees:
        for number, node in enumerate(tree.nodes):
            if not node.weight:
                continue
            routes = torch.from_numpy(path_routes(tree, number)).long()
            given.update({layer: routes[:, column] for column, layer in enumerate(sparse)})
            tokens = torch.from_numpy(np.concatenate(path_tokens(tree, number))).long()
            logits = model(tokens[None, :-1]).logits[0, -len(node) :]
            logprobs = logits.log_softmax(-1).gather(1, tokens[-len(node) :, None])
            generated = torch.from_numpy(node.tokens.is_generated)
            loss = node.weight * node.advantage * logprobs[generated].sum()
            loss.backward()
            total += loss.item()
    return Trained(total, gradients_by_name(model))


def path_tokens(tree: TokenTree, node: int) -> list[np.ndarray]:
    at = tree.nodes[node]
    return [*(path_tokens(tree, at.parent) if at.parent >= 0 else ()), at.token_ids]


@pytest.mark.parametrize("name", MODELS)
def test_given_experts_are_what_transformers_computes_with(name, folders, whole):
    """Gradients of all weights are compared, the routers' too. (Rope's angles are in float32.)"""
    with in_doubles():
        expected = on_paths(folders[name], trees_of(name))
    assert whole[name].loss == pytest.approx(expected.loss, rel=1e-5)
    difference, weight = worst_difference(whole[name], expected)
    assert difference < MAX_GRADIENT_ERROR, f"{weight}: {difference}"


def test_given_experts_have_the_order_of_top_k_which_decides_the_last_bits_of_their_sum():
    scores = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    expected = scores.topk(4)
    shuffled = expected.indices[:, [2, 0, 3, 1]]
    shuffled[::3] = -1  # not known: the router's own
    found = GivenExperts(shuffled, replayed=True).get_replay_topk(
        scores, 4, default_compute_topk=lambda scores, number, *groups: scores.topk(number)
    )
    assert all(map(torch.equal, found, expected))


def test_routers_count_no_more_after_an_error(folders):
    with world_of(folders["moe"]) as model:
        with pytest.raises(KeyError), measuring_agreement(model):
            raise KeyError("a row")
        assert [router.agreement for router in routers(model)] == [None] * LAYERS["moe"]


def free_and_given(folder: Path, replayed: bool, reads: bool) -> tuple[Trained, Trained]:
    """Return a pass without routes, and one that is given the experts which the first one chose, or others
    where they are not ``replayed`` or not read."""
    with world_of(folder) as model:
        (chunk,) = model
        choices = record_experts(model)
        (rows,) = pack(forest(0), BUDGET, multiple_of=BUDGET)
        found = []
        for number in range(2):
            chunk.zero_grad_buffer()
            logs = run_rows(model, rows, 1.0, weighted_sum, train=True)
            found.append(Trained(sum(loss for loss, _ in logs), gradients(model)))
            layers = len(choices) // len(rows)
            for place, row in enumerate(rows[: None if number == 0 else 0]):
                routes = as_routes(choices[place * layers : (place + 1) * layers])
                row.path_columns = {"routes": routes if replayed and reads else np.roll(routes, 1, axis=0)}
            for router in routers(model):
                router.replays, router.reads_routes = replayed, reads
    return found[0], found[1]


def as_routes(chosen: list[torch.Tensor]) -> np.ndarray:
    """Return [S, layers, top_k] int16 from each layer's [S, experts] bool."""
    layers = [mask.nonzero()[:, 1].view(-1, TOP_K) for mask in chosen]
    return torch.stack(layers, dim=1).to(torch.int16).numpy()


@pytest.mark.parametrize(
    ("name", "replayed", "reads"),
    [("moe", True, True), ("next", False, True), ("moe", True, False)],
    ids=["its own choice", "another, not replayed", "another's, not read"],
)
def test_nothing_changes_bit_for_bit(name, replayed, reads, folders):
    free, given = free_and_given(folders[name], replayed, reads)
    assert given.loss == free.loss
    assert all(torch.equal(given.gradients[key], value) for key, value in free.gradients.items())


# ---- rows and layouts ------------------------------------------------------------------------------------

ROWS = {
    "expanded": {"layout": "expanded"},
    "cut": {"budget": 190, "layers": {"recompute": "full"}},  # about the longest path
    "wide": {"budget": 1000, "multiple_of": 1000},
}


@pytest.mark.parametrize(("name", "rows"), [("moe", "expanded"), ("next", "cut"), ("moe", "wide")])
def test_gradients_do_not_depend_on_the_rows(name, rows, folders, whole):
    assert_same(
        train_trees(folders[name], trees_of(name)[::-1], **{"budget": BUDGET} | ROWS[rows]), whole[name]
    )


LAYOUTS = [
    ("moe", {"expert": 2, "recompute": "full"}),
    weekly("some_dense", {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}),
    ("some_dense", {"tensor": 2, "recompute": "mlp"}),
    slow("next", {"tensor": 2, "expert": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(("name", "layers"), LAYOUTS, ids=str)
def test_gradients_do_not_depend_on_the_parallel_layout(name, layers, folders, whole):
    for trained in run_ranks(2, train_trees, folders[name], trees_of(name), BUDGET, "tree", layers):
        assert_same(trained, whole[name])


def test_trees_without_routes_choose_freely_beside_those_with_them(folders):
    """The gradient of all is the sum of those of the two kinds alone."""
    every, bare = trees_of("moe"), forest(0)
    half = len(every) // 2
    parts = [train_trees(folders["moe"], trees, BUDGET) for trees in (every[:half], bare[half:])]
    mixed = train_trees(folders["moe"], every[:half] + bare[half:], BUDGET)
    assert None not in (*parts, mixed)
    summed = {key: parts[0].gradients[key] + value for key, value in parts[1].gradients.items()}
    assert_same(mixed, Trained(sum(part.loss for part in parts), summed))
