"""One loss and one gradient: as token trees, as 2N or N + 1 sequences, and in any parallel layout.

The reference is Megatron's model on plain causal sequences built from the trees' paths; the packer and
the tree kernels have no part in it. Everything runs in float64, Megatron's router, too
(``tree_training.TorchOfDoubles``); the experts that it chooses are compared exactly.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.types import TokenTree
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow, weekly
from tests.kit.tiny_models import SHORT, save_models
from tests.kit.tree_samples import forest, pack, paths
from tests.kit.tree_training import (
    Trained,
    assert_same,
    record_experts,
    train_sequences,
    train_trees,
    world_of,
)

torch.set_num_threads(1)

MODELS = {
    "dense": ("qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "delta_net": ("qwen3_5_text", {}),
    "moe": ("qwen3_moe", {"num_hidden_layers": 2}),
    "next": ("qwen3_next", SHORT["qwen3_next"]),
    "images": ("qwen3_5_moe", SHORT["qwen3_5_moe"]),
    "glm": ("glm4_moe", SHORT["glm4_moe"]),
}
BUDGET = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="module")
def whole(folders) -> dict[str, Trained]:
    """Train all trees in as few rows as they fit into, in one process."""
    return {name: train_trees(folder, forest(0), BUDGET) for name, folder in folders.items()}


def path_to(tree: TokenTree, node: int, supervised: set[int]) -> tuple[list[int], np.ndarray]:
    """Return tokens from the prompt to the node's end, and weight x advantage of those of ``supervised``
    nodes that the policy generated."""
    tokens, factors = [], []
    while node >= 0:
        at = tree.nodes[node]
        factor = at.weight * at.advantage if node in supervised else 0.0
        tokens = at.token_ids.tolist() + tokens
        factors = [*np.where(at.tokens.is_generated, factor, 0.0), *factors]
        node = at.parent
    return tokens, np.array(factors[1:])


def each_side_alone(trees: list[TokenTree]) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield 2N sequences: one for each supervised node."""
    for tree in trees:
        for i, node in enumerate(tree.nodes):
            if node.weight:
                yield path_to(tree, i, {i})


def each_leaf_path(trees: list[TokenTree]) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield N + 1 sequences: one for each leaf; a node is trained in the first one that passes it."""
    for tree in trees:
        left = {i for i, node in enumerate(tree.nodes) if node.weight}
        for leaf in set(range(len(tree.nodes))) - {node.parent for node in tree.nodes}:
            path, node = set(), leaf
            while node >= 0:
                path.add(node)
                node = tree.nodes[node].parent
            if left & path:
                yield path_to(tree, leaf, left & path)
                left -= path


@pytest.mark.parametrize(
    ("name", "sequences"), [*((name, each_side_alone) for name in MODELS), ("next", each_leaf_path)]
)
def test_trees_equal_plain_sequences(name, sequences, folders, whole):
    with world_of(folders[name]) as model:
        reference = train_sequences(model, sequences(forest(0)))
    assert_same(whole[name], reference)


ROWS = {
    "expanded": {"layout": "expanded"},
    "cut": {"budget": 190},  # about the longest path
    "wide": {"budget": 1000, "multiple_of": 1000},
    "recompute": {"layers": {"recompute": "full"}},
    "recompute_mlp, fused": {"layers": {"recompute": "mlp", "fusions": True}},
}


IN_ROWS = [*(("next", rows) for rows in ROWS), ("dense", "recompute_mlp, fused")]


@pytest.mark.parametrize(("name", "rows"), IN_ROWS)
def test_gradients_do_not_depend_on_the_rows(name, rows, folders, whole):
    """The order of the trees does not matter either."""
    options = {"budget": BUDGET} | ROWS[rows]
    assert_same(train_trees(folders[name], forest(0)[::-1], **options), whole[name])


PARALLEL = [
    slow("moe", {"expert_tensor": 2}),
    ("next", {}),  # data parallel
    ("images", {"tensor": 2, "expert": 2}),
    weekly("dense", {"tensor": 2, "sequence": True, "pipeline": 2}),
    slow("delta_net", {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}),
    weekly("moe", {"tensor": 2, "pipeline": 2, "expert": 2}),
    ("next", {"expert": 2}),
]


@pytest.mark.parametrize(("name", "layers"), PARALLEL, ids=str)
def test_gradients_do_not_depend_on_the_parallel_layout(name, layers, folders, whole):
    ranks = max(2, prod(layers.get(key, 1) for key in ("tensor", "pipeline")))
    for trained in run_ranks(ranks, train_trees, folders[name], forest(0), BUDGET, "tree", layers):
        assert_same(trained, whole[name])


def test_a_rank_without_a_token_takes_part(folders):
    """The rank's positions are padding, and its experts still serve the other ranks."""
    trees, layers = forest(0)[:1], {"expert": 2}
    alone = train_trees(folders["next"], trees, BUDGET)
    for trained in run_ranks(2, train_trees, folders["next"], trees, BUDGET, "tree", layers):
        assert_same(trained, alone)


@pytest.mark.parametrize("name", ["moe", "next"])
def test_every_token_goes_to_the_same_experts(name, folders):
    """Tree and plain sequences agree layer by layer, to the bit."""
    with world_of(folders[name]) as chunks:
        (model,) = chunks
        choices = record_experts(chunks)
        for row in pack(forest(0), BUDGET)[0]:
            ids, positions = torch.from_numpy(row.input_ids), torch.from_numpy(row.position_ids)
            choices.clear()
            model(ids[None], positions[None], None, packed_seq_params=TreeParams.from_row(row))
            in_tree = [choice.clone() for choice in choices]
            for node in row.nodes:
                path = torch.from_numpy(paths(row)[node.start + node.length - 1])
                choices.clear()
                model(ids[path][None], torch.arange(len(path))[None], None)
                for tree_choice, plain_choice in zip(in_tree, choices, strict=True):
                    assert (tree_choice[path] == plain_choice).all()


def test_a_model_ends_with_its_world(folders):
    """Otherwise each would keep its process groups, whose threads slow the later tests of a worker."""
    with world_of(folders["next"]) as chunks:
        train_sequences(chunks, each_leaf_path(forest(0)[:1]))
        model = weakref.ref(chunks[0].module)
    del chunks
    gc.collect()
    assert model() is None
