"""PolicyModel: the head at supervised positions, the router's loss on supervised tokens, token-tree rows."""

import pytest
import torch
from torch import Tensor

from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Node, Row, TokenTree
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny

LENGTH = 24
SUPERVISED = [3, 4, 5, 11, 17, 22]


def build(folder: str, layout: dict, **overrides) -> list:
    from megatron_eqlen.models.build import build_model
    from megatron_eqlen.models.groups import start
    from megatron_eqlen.models.weights import load_hf
    from megatron_eqlen.recipe import ParallelRecipe

    parallel = ParallelRecipe(**layout)
    start(parallel, seed=1)
    chunks = build_model(folder, parallel, torch.float32, **overrides)
    load_hf(chunks, folder)
    return chunks


def tokens() -> Tensor:
    return torch.randint(0, 96, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def head_at(folder: str, layout: dict, positions: list[int] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (logits at SUPERVISED, gradients of a loss there): with the head everywhere or at
    ``positions``."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_eqlen.models.weights import export_hf

    chunks = build(folder, layout)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    model = DistributedDataParallel(chunks[0].config, ddp_config, chunks[0])
    supervised = None if positions is None else torch.tensor(positions)
    logits = model(tokens(), torch.arange(LENGTH)[None], None, supervised=supervised)
    logits = gather_from_tensor_model_parallel_region(logits)[0]
    logits = logits[SUPERVISED] if positions is None else logits
    (logits.log_softmax(-1)[:, 7].sum() / parallel_state.get_data_parallel_world_size()).backward()
    finalize_model_grads([model])
    for parameter in model.parameters():
        parameter.data = parameter.main_grad
    return logits.detach(), {name: tensor.clone() for name, tensor in export_hf([model])}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", {}), ("qwen3", {"tensor": 2}), ("qwen3_next", {"tensor": 2, "expert": 2})],
)
def test_the_head_at_supervised_positions_changes_no_logit_and_no_gradient(tmp_path, family, layout):
    save_tiny(tmp_path, family, tie_word_embeddings=family == "qwen3")
    world_size = layout.get("tensor", 1)
    everywhere = run_ranks(world_size, head_at, str(tmp_path), layout, None)
    supervised = run_ranks(world_size, head_at, str(tmp_path), layout, SUPERVISED)
    for (logits, gradients), (ours, our_gradients) in zip(everywhere, supervised, strict=True):
        torch.testing.assert_close(ours, logits, atol=1e-5, rtol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(our_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def router_gradients(folder: str, layout: dict, changed_token: int | None) -> dict[str, Tensor]:
    """Return gradients of the routers from the auxiliary loss alone; an unsupervised token may be another
    one."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    chunks = build(folder, layout, moe_aux_loss_coeff=1.0)
    ids = tokens()
    if changed_token is not None:
        ids[0, changed_token] = (ids[0, changed_token] + 1) % 96
    logits = chunks[0].train()(ids, torch.arange(LENGTH)[None], supervised=torch.tensor(SUPERVISED))
    (logits * 0).sum().backward()
    gradients = {}
    for name, parameter in chunks[0].named_parameters():
        if name.endswith("router.weight"):
            if chunks[0].config.sequence_parallel:
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            gradients[name] = parameter.grad
    return gradients


def expected_router_gradient(model, layer: int) -> Tensor:
    """Return the gradient of the loss of the supervised tokens by layer 0's router, from a separate forward
    pass."""
    seen = {}
    gate = model.model.layers[layer].mlp.gate
    handle = gate.register_forward_hook(lambda module, inputs, output: seen.update(hidden=inputs[0]))
    model(tokens())
    handle.remove()
    hidden = seen["hidden"].reshape(LENGTH, -1)[SUPERVISED].detach()
    weight = gate.weight.detach().clone().requires_grad_()
    switch_loss(hidden, weight, model.config.num_experts_per_tok).backward()
    return weight.grad


def test_the_routers_loss_counts_supervised_tokens_only(tmp_path):
    model = save_tiny(tmp_path, "qwen3_moe", num_hidden_layers=1)
    expected = expected_router_gradient(model, layer=0)
    name = "decoder.layers.0.mlp.router.weight"
    after_the_last = LENGTH - 1  # nothing supervised can see it
    for world_size, layout in ((1, {}), (2, {"tensor": 2})):
        for changed in (None, after_the_last):
            ours = run_ranks(world_size, router_gradients, str(tmp_path), layout, changed)
            torch.testing.assert_close(ours[0][name], expected, atol=1e-5, rtol=1e-3)


SEQUENCES = [[7, 3, 9, 1, 40, 41, 42, 50, 51], [3, 5, 8, 60, 61], [2, 4, 11, 12, 13, 14, 70, 71, 72, 73, 74]]
PROMPT = 3
"""Number of tokens of each sequence's prompt."""


def update_by_the_routers_loss(folder: str, layers: dict, budget: int) -> tuple[float, float, float]:
    """Return (rows, auxiliary loss, gradient norm) of a training step where no token has an advantage."""
    import torch.distributed as dist

    from megatron_eqlen.hf.config import read_config
    from megatron_eqlen.plan.flops import pair_cost
    from tests.kit.updates import build_policy

    changes = {
        "data": {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 3},
        "rollout": {"max_response_length": 8}, "packing": {"max_tokens_per_row": budget},
        "loss": {"kl_coef": 0.0}, "optimizer": {"clip_grad": 1e9}, "parallel": layers,
        "cluster": {"processes_per_node": dist.get_world_size()},
    }  # fmt: skip
    policy = build_policy(folder, changes)
    trees = []
    for ids in SEQUENCES:
        answer = ids[PROMPT:]
        side = Node(0, Tokens.of(answer, [-1.0] * len(answer)), 0.0, 0.1)
        trees.append(TokenTree(str(ids), [Node(-1, Tokens.of(ids[:PROMPT])), side]))
    assert policy._pack(trees).pair_cost == pair_cost(read_config(folder)), "ranks share the model's own cost"
    metrics = policy.update([trees])
    return metrics["packing/rows"], metrics["router/aux_loss"], metrics["train/grad_norm"]


@pytest.fixture(scope="module")
def two_sparse_layers(tmp_path_factory) -> tuple[str, float, float]:
    """Return (folder, loss averaged over layers, gradient norm): each layer's loss over all supervised
    tokens."""
    folder = tmp_path_factory.mktemp("moe")
    coef = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = save_tiny(folder, "qwen3_moe", num_hidden_layers=2, **coef)
    seen: list[list[Tensor]] = [[], []]
    for layer, store in zip(model.model.layers, seen, strict=True):
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, output, store=store: store.append(inputs[0])
        )
    for ids in SEQUENCES:
        model(torch.tensor([ids]), output_router_logits=False)
    losses = []
    for layer, store in zip(model.model.layers, seen, strict=True):
        hidden = torch.cat([states.reshape(-1, states.shape[-1])[PROMPT - 1 : -1] for states in store])
        losses.append(switch_loss(hidden, layer.mlp.gate.weight, model.config.num_experts_per_tok))
    (0.5 * sum(losses)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    return str(folder), sum(losses).item() / 2, norm


@pytest.mark.parametrize(
    ("ranks", "layers", "budget", "rows"),
    [
        (1, {}, 100, 1),
        (1, {}, 20, 2),
        (1, {}, 11, 3),
        (1, {"recompute": "full"}, 11, 3),
        (2, {}, 11, 4),  # one is padding alone
        (2, {"pipeline": 2}, 11, 3),
        (2, {"tensor": 2}, 20, 2),
        (2, {"expert": 2}, 100, 2),
        (2, {"context": 2}, 20, 2),
    ],
)
def test_the_routers_loss_is_of_the_whole_step_however_it_is_packed(
    two_sparse_layers, ranks, layers, budget, rows
):
    folder, loss, norm = two_sparse_layers
    for found in run_ranks(ranks, update_by_the_routers_loss, folder, layers, budget):
        assert found == (rows, pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))


def switch_loss(hidden: Tensor, router: Tensor, topk: int) -> Tensor:
    """Return the Switch-Transformer load balancing loss over T tokens: E / (T^2 k) sum_e f_e sum_t p_te."""
    probabilities = (hidden @ router.T).softmax(-1)
    count, experts = probabilities.shape
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(topk).indices, 1.0).sum(0)
    return experts / (count * count * topk) * (chosen * probabilities.sum(0)).sum()


def tree_logits(folder: str) -> tuple[Tensor, Row]:
    """Return the logits of one row that holds a tree, [32, vocab], and the row."""
    from megatron_eqlen.models.tree_params import TreeParams
    from megatron_eqlen.packing.pack import plan_rows

    chunks = build(folder, {})
    tree = TokenTree(
        "tree",
        [
            Node(-1, Tokens.of([1, 2, 3, 4])),
            Node(0, Tokens.of([5, 6, 7], [-1.0] * 3), 1.0, 0.1),
            Node(0, Tokens.of([5, 9, 10], [-1.0] * 3), 1.0, 0.1),
            Node(1, Tokens.of([11, 12], [-1.0] * 2), 1.0, 0.1),
            Node(1, Tokens.of([13], [-1.0]), 1.0, 0.1),
        ],
    )
    (row,) = plan_rows([tree], 32, 1, 1, "tree").rows(0)
    ids, positions = (torch.from_numpy(x)[None] for x in (row.input_ids, row.position_ids))
    with torch.no_grad():
        return chunks[0](ids, positions, packed_seq_params=TreeParams.from_row(row))[0], row


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_a_tree_gets_what_transformers_computes_on_each_path(tmp_path, family):
    model = save_tiny(tmp_path, family)
    ((logits, row),) = run_ranks(1, tree_logits, str(tmp_path))
    checked = 0
    for position in range(row.num_tokens):
        path = [k for k in range(position + 1) if row.visible_until[k] > position]
        assert row.position_ids[path].tolist() == list(range(len(path)))
        with torch.no_grad():
            expected = model(torch.from_numpy(row.input_ids[path])[None]).logits[0, -1]
        torch.testing.assert_close(logits[position], expected, atol=1e-4, rtol=0)
        checked += 1
    assert checked == 3 + 3 + 3 + 2 + 1
