"""The plan's counts equal Megatron's allocations and autograd's saved tensors, on real models in real
layouts."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_eqlen.job import Job, parse
from megatron_eqlen.models import weights
from megatron_eqlen.models.gated_delta_net import CHUNK
from megatron_eqlen.models.groups import start
from megatron_eqlen.models.tree_params import KERNEL_CHUNK
from megatron_eqlen.plan.activations import CPU_CHUNK, CPU_LOSS_BLOCK, FLA_CHUNK, LOSS_BLOCK, activations
from megatron_eqlen.plan.host import checkpoint_bytes
from megatron_eqlen.plan.memory import communicators
from megatron_eqlen.plan.trainer import SENT_AT_ONCE, RankBuffers, optimizer_bytes, trainer
from megatron_eqlen.processes import distributed
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.logprobs import BLOCK_ELEMENTS, CPU_ELEMENTS
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Node, TokenTree
from tests.kit import updates
from tests.kit.distributed import run_ranks
from tests.kit.marks import weekly_but
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import TWO_EPOCHS, one_tree_a_row, save, update

ROW = 256


@dataclass(frozen=True)
class Case:
    family: str
    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows of each data-parallel rank: enough to fill a pipeline."""
        return 4 if "pipeline" in self.parallel else 2


CASES = {
    "dense, state on the host, gradients in bfloat16": Case(
        "qwen3", 2, optimizer={"offload": True, "grad_dtype": "bfloat16"}
    ),
    "dense, sequence parallel": Case("qwen3", 2, {"tensor": 2, "sequence": True}),
    "dense, tied, recomputed, pipeline": Case(
        "qwen3", 2, {"recompute": "full", "pipeline": 2}, model={"tie_word_embeddings": True}
    ),
    "dense, virtual pipeline, overlapped": Case(
        "qwen3", 4, {"pipeline": 2, "virtual_pipeline": 2}, "float32", megatron={"overlap_grad_reduce": True}
    ),
    "dense and sparse layers, whose MLPs are recomputed": Case(
        "qwen3_moe", 2, {"expert": 2, "recompute": "mlp"}, model={"mlp_only_layers": [1]}
    ),
    "dense and sparse layers, fused": Case(
        "qwen3_moe", 2, {"expert": 2, "fusions": True}, model={"mlp_only_layers": [1]}
    ),
    "experts cut in two, recomputed": Case(
        "qwen3_moe", 2, {"tensor": 2, "expert_tensor": 2, "recompute": "full"}
    ),
    "hybrid, tensor, expert and pipeline parallel": Case(
        "qwen3_next", 4, {"tensor": 2, "pipeline": 2, "expert": 2}, model={"num_hidden_layers": 8}
    ),
    "hybrid, adapters, tensor, expert and pipeline parallel": Case(
        "qwen3_next", 4, {"tensor": 2, "pipeline": 2, "expert": 2}, "float32", lora={"rank": 24}
    ),
}


def recipe_of(folder: str, case: Case, row: int = ROW):
    """Return a recipe whose rows are one chunk of the head."""
    return parse(
        {
            "name": "plan", "steps": 1,
            "model": {"path": folder, "dtype": case.dtype, "megatron": case.megatron},
            "data": {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 6},
            "rollout": {"max_response_length": row - 6, "temperature": 1.0},
            "packing": {"max_tokens_per_row": row}, "loss": {"kl_coef": 0.0},
            "optimizer": case.optimizer, "parallel": case.parallel, "lora": case.lora,
            "cluster": {"processes_per_node": case.ranks},
        },
        "test",
    )  # fmt: skip


def causal_rows(count: int, row: int = ROW) -> list[TokenTree]:
    """Return trees of one path, each as long as a row: forks would make the CPU's attention copy their
    prefixes."""
    generator = torch.Generator().manual_seed(0)
    trees = []
    for number in range(count):
        tokens = torch.randint(0, 90, (row + 1,), generator=generator, dtype=torch.int32)
        prompt, answer = tokens.split([3, row - 2])
        side = Node(0, Tokens.of(answer.numpy(), np.full(len(answer), -1.0, np.float32)), 1.0, 1 / count)
        trees.append(TokenTree(str(number), [Node(-1, Tokens.of(prompt.numpy())), side]))
    return trees


class Saved:
    """Bytes that autograd keeps now and kept at most, each storage once; parameters are not counted."""

    def __init__(self, ignored: set[int]) -> None:
        self.ignored = ignored
        self.holders: dict[int, int] = {}
        self.bytes = self.most = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Kept(self, tensor), lambda kept: kept.tensor
        ):
            yield


class Kept:
    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        storage = tensor.untyped_storage()
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        if self.key in saved.ignored:
            self.size = 0
        count = saved.holders.get(self.key, 0)
        saved.holders[self.key] = count + 1
        if not count:
            saved.bytes += self.size
            saved.most = max(saved.most, saved.bytes)

    def __del__(self) -> None:
        self.saved.holders[self.key] -= 1
        if not self.saved.holders[self.key]:
            self.saved.bytes -= self.size


class Live(TorchDispatchMode):
    """Peak bytes of the tensors that are made inside and still alive; ``before``: memory that was there."""

    def __init__(self, before: set[int]) -> None:
        super().__init__()
        self.before = before
        self.sizes: dict[int, int] = {}
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes and key not in self.before:
            self.sizes[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key)


def host_state(policy: Any) -> int:
    """Return the bytes of main weights and moments of an optimizer on the host."""
    parts = [part.optimizer for part in policy.optimizer.chained_optimizers]
    copies = [copy for part in parts for copy in getattr(part, "cpu_copys_map_gpu_param", {})]
    moments = [
        tensor
        for part in parts
        for hosted in getattr(part, "cpu_optimizers", [])
        for state in hosted.state.values()
        for tensor in (state["exp_avg"], state["exp_avg_sq"])
    ]
    return sum(tensor.nbytes for tensor in (*copies, *moments))


def measure(folder: str, case: Case) -> dict[str, Any]:
    """Return what this rank really holds, in bytes, and its pipeline stage."""
    from megatron.core import parallel_state

    recipe = recipe_of(folder, case)
    start(recipe.parallel, seed=1)
    policy = Policy(Job(recipe))
    model: list[Any] = [*policy.ddp_chunks]  # Megatron's ``buffers`` is not torch's method
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
    weights |= {each.untyped_storage().data_ptr() for chunk in model for each in chunk.parameters()}  # frozen
    saved = Saved(weights)
    trees = causal_rows(case.rows * parallel_state.get_data_parallel_world_size())
    rows = policy._prepare(trees).rows
    assert rows is not None
    assert [row.num_tokens for row in rows] == [ROW] * case.rows
    with saved.watching():
        policy._backward(rows, policy.version)
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        **policy.memory.on_device(),
        "host": host_state(policy),
        "saved": saved.most,
    }


EACH_PUSH = {
    "dense, state on the host, gradients in bfloat16", "dense, sequence parallel",
    "dense, virtual pipeline, overlapped", "dense and sparse layers, fused",
    "hybrid, adapters, tensor, expert and pipeline parallel",
}  # fmt: skip


@pytest.fixture(scope="module", params=weekly_but(EACH_PUSH, CASES))
def planned_and_real(request, tmp_path_factory):
    """Return (case, job, measurements of every rank)."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("plan")
    save_tiny(folder, case.family, **case.model)
    ranks = run_ranks(case.ranks, measure, str(folder), case)
    return case, Job(recipe_of(str(folder), case)), ranks


def padding(rank: RankBuffers) -> int:
    """Return the most elements that Megatron adds: 63 to a parameter, and in the middle of a bucket and at
    its end up to twice the multiple of 128 and the data-parallel size."""
    return sum(63 * len(buffer.sizes) + 4 * 128 * buffer.ranks for buffer in rank.buffers)


def test_weights_and_gradients_are_those_of_megatrons_buffers_without_their_padding(planned_and_real):
    _, job, ranks = planned_and_real
    stages = trainer(job)
    for rank in ranks:
        planned = stages[rank["stage"]]
        more = 4 * padding(planned.parameters)
        assert planned.weights <= rank["weights"] <= planned.weights + more
        assert planned.gradients <= rank["gradients"] <= planned.gradients + more


def test_the_optimizers_state_is_that_of_every_parameter_once(planned_and_real):
    _, job, ranks = planned_and_real
    recipe = job.recipe
    stages, each = trainer(job), optimizer_bytes(recipe)
    for number, stage in enumerate(stages):
        here = [rank["optimizer"] + rank["host"] for rank in ranks if rank["stage"] == number]
        assert max(here) == pytest.approx(stage.optimizer, abs=each * padding(stage.parameters))
        whole = sum(len(here) // buffer.ranks * buffer.elements for buffer in stage.parameters.buffers)
        assert sum(here) == each * whole
        if recipe.optimizer.offload:
            assert {rank["optimizer"] for rank in ranks} == {0}


def test_what_autograd_keeps_is_within_a_tenth_of_the_plan(planned_and_real):
    case, job, ranks = planned_and_real
    recipe, model = job.recipe, job.model
    for stage in range(recipe.parallel.pipeline):
        here = [rank["saved"] for rank in ranks if rank["stage"] == stage]
        sequence = recipe.parallel.tensor > 1 and bool(recipe.parallel.sequence or model.experts)
        planned = activations(job, stage, sequence=sequence, gpu=False, imbalance=1.0, rows=case.rows)
        assert sum(here) / len(here) == pytest.approx(
            planned.kept + max(planned.layer, planned.head), rel=0.1
        )


def groups_used(folder: str, changes: dict[str, Any]) -> set[str]:
    """Return the names of this rank's groups that carry tensors in an update and an export. Objects have a
    group of their own."""
    from torch.distributed import ProcessGroup

    words = ("gather", "reduce", "all_to_all", "alltoall", "broadcast", "send", "recv")
    used: set[str] = set()

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            if group.size() > 1 and group is not distributed.host():
                used.add(group.group_name)
            return real(group, *args, **options)

        return call

    for name in dir(ProcessGroup):
        if any(word in name for word in words):
            setattr(ProcessGroup, name, watched(getattr(ProcessGroup, name)))
    update(folder, [one_tree_a_row(4)], TWO_EPOCHS | changes)
    return used


GROUPS = {
    "dense, tied, pipeline": ("qwen3", {"tensor": 2, "pipeline": 2}, {"tie_word_embeddings": True}),
    "experts, tensor parallel": ("qwen3_moe", {"tensor": 2, "expert": 2}, {}),
}


@pytest.mark.parametrize("name", weekly_but({"experts, tensor parallel"}, GROUPS))
def test_communicators_are_the_groups_that_carry_tensors(name, tmp_path):
    family, parallel, model = GROUPS[name]
    save_tiny(tmp_path, family, **model)
    changes = {"parallel": parallel, "cluster": {"processes_per_node": 4}}
    used = run_ranks(4, groups_used, str(tmp_path), changes)
    planned = communicators(Job(updates.recipe_of(str(tmp_path), changes)))
    assert max(map(len, used)) == len(planned)


WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 32,
    "num_hidden_layers": 2, "vocab_size": 96,
}  # fmt: skip
"""Layers so large that nothing else counts beside them."""
MANY: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 4}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "shared_expert_intermediate_size": 256, "full_attention_interval": 2,
}  # fmt: skip
PEAKS = {
    "dense, sequence parallel": Case(
        "qwen3", 2, {"recompute": "full", "tensor": 2, "sequence": True}, "float32", WIDE
    ),
    "experts, tensor and expert parallel": Case(
        "qwen3_moe", 2, {"recompute": "full", "tensor": 2, "expert": 2}, model=WIDE | MANY
    ),
    "hybrid": Case("qwen3_next", 1, {"recompute": "full"}, model=WIDE | MANY | LINEAR),
    "a large vocabulary": Case("qwen3", 1, {"recompute": "full"}, model=WIDE | {"vocab_size": 16384}),
}
LONG = 512


def measure_peak(folder: str, case: Case) -> int:
    """Return the peak bytes that the passes of a row need on this rank, beside what lives as long as the
    policy."""
    from megatron.core import parallel_state

    recipe = recipe_of(folder, case, LONG)
    start(recipe.parallel, seed=1)
    policy = Policy(Job(recipe))
    rows = policy._prepare(causal_rows(parallel_state.get_data_parallel_world_size(), LONG)).rows
    assert rows is not None
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    with Live({tensor.untyped_storage()._cdata for tensor in tensors}) as live:
        policy._backward(rows, policy.version)
    return live.most


@pytest.mark.parametrize("name", weekly_but({"a large vocabulary", "hybrid"}, PEAKS))
def test_a_row_never_needs_more_than_the_plan_says_and_not_much_less(name, tmp_path):
    case = PEAKS[name]
    save_tiny(tmp_path, case.family, **case.model)
    job = Job(recipe_of(str(tmp_path), case, LONG))
    plan = partial(activations, job, 0, sequence=case.parallel.get("tensor", 1) > 1, gpu=False, rows=1)
    most = max(run_ranks(case.ranks, measure_peak, str(tmp_path), case))
    # rounding decides how evenly a router of random weights divides the tokens
    assert 0.75 * plan(imbalance=1.0).peak < most < 1.01 * plan().peak


def save_policy(folder: str, case: Case, out: str) -> None:
    recipe = recipe_of(folder, case)
    start(recipe.parallel, seed=1)
    save(Path(out), 1, Policy(Job(recipe)), {}, keep=2)


def test_a_checkpoint_is_as_large_as_planned(tmp_path):
    case = Case("qwen3_moe", 2, {"expert": 2}, model=WIDE | MANY)
    save_tiny(tmp_path / "model", case.family, **case.model)
    run_ranks(case.ranks, save_policy, str(tmp_path / "model"), case, str(tmp_path / "checkpoints"))
    files = (tmp_path / "checkpoints").rglob("*.distcp")
    planned = checkpoint_bytes(Job(recipe_of(str(tmp_path / "model"), case)))
    assert sum(file.stat().st_size for file in files) == pytest.approx(planned, rel=0.02)


def test_the_plan_knows_the_sizes_of_chunks_blocks_and_messages():
    blocks = [torch.float32.itemsize * elements for elements in (BLOCK_ELEMENTS, CPU_ELEMENTS)]
    real = (CHUNK, KERNEL_CHUNK, *blocks, weights.SENT_AT_ONCE)
    assert real == (CPU_CHUNK, FLA_CHUNK, LOSS_BLOCK, CPU_LOSS_BLOCK, SENT_AT_ONCE)
