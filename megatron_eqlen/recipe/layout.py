"""Layouts that can start: every divisibility rule, in one place, with its arithmetic.

Recipe checks, ``plan``, model building, process groups and engines use these rules. Each rule is a line in
one of four generators, grouped by what a rule needs to know:

    groups(parallel, processes)              the ranks into parallel groups
    weights(parallel, model)                 the model over those groups (Megatron-Core)
    replicas(rollout, processes_per_node)    the ranks into engines
    engine(rollout, model)                   the model over an engine's ranks (vLLM)

Pure Python, since the rules are checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_eqlen.hf.config import ModelConfig
    from megatron_eqlen.recipe import ParallelRecipe, Recipe, RolloutRecipe

VLLM_VOCABULARY = 64
"""vLLM pads the embedding's rows to a multiple of this."""
PROCESSES = "processes (cluster.nodes x cluster.processes_per_node)"


class LayoutError(ValueError):
    """Layout that cannot start; the message names the recipe's keys and shows the numbers."""


def check(recipe: Recipe, model: ModelConfig | None = None) -> None:
    """Raise LayoutError for a layout that cannot start; without ``model`` by the recipe's own rules alone."""
    problems = [*groups(recipe.parallel, recipe.world_size)]
    if recipe.colocated:
        problems += replicas(recipe.rollout, recipe.cluster.processes_per_node)
    if model is not None:
        problems += weights(recipe.parallel, model)
        problems += engine(recipe.rollout, model)
        problems += paths(recipe, model)
        problems += options_of_experts(recipe, model)
    require(problems)


def require(problems: Iterable[str]) -> None:
    """Raise one LayoutError that lists ``problems``, if there are any."""
    if messages := list(problems):
        raise LayoutError("; ".join(messages))


def check_started(recipe: Recipe, processes: int) -> None:
    """Raise LayoutError if a launcher started another number of processes than the recipe specifies."""
    cluster = recipe.cluster
    if processes != recipe.world_size:
        product = f"nodes {cluster.nodes} x processes_per_node {cluster.processes_per_node}"
        raise LayoutError(f"cluster: {product} = {recipe.world_size} processes, but {processes} were started")


def of_teacher(parallel: ParallelRecipe, teacher: ModelConfig) -> ParallelRecipe:
    """Return the layout of a teacher in the groups of ``parallel``: its layers evenly, its own experts."""
    changes: dict[str, object] = {"layers_per_stage": None, "sequence": parallel.sequence or None}
    if teacher.experts is None:
        changes |= {"expert": 1, "expert_tensor": 1}
    return parallel.model_copy(update=changes)


def groups(parallel: ParallelRecipe, processes: int) -> Iterator[str]:
    """Yield violations of Megatron-Core's two divisions of the ranks: for dense layers and for experts."""
    tensor, pipeline = parallel.tensor, parallel.pipeline
    if parallel.sequence and tensor == 1:
        yield "parallel.sequence: true divides rows over parallel.tensor ranks, at least 2, found 1"
    # Dense layers: tensor x pipeline ranks hold the model once, and the rest is data-parallel.
    if processes % (ranks := tensor * pipeline):
        product = f"tensor {tensor} x pipeline {pipeline} = {ranks}"
        yield f"parallel: {product} does not divide the {processes} {PROCESSES}"
    # Experts divide the same ranks in a way of their own.
    experts = parallel.expert_tensor * parallel.expert * pipeline
    if processes % experts:
        product = f"expert_tensor {parallel.expert_tensor} x expert {parallel.expert} x pipeline {pipeline}"
        yield f"parallel: {product} = {experts} does not divide the {processes} {PROCESSES}"
    if parallel.virtual_pipeline and pipeline == 1:
        need = "stages a rank need parallel.pipeline of at least 2, found 1"
        yield f"parallel.virtual_pipeline: {parallel.virtual_pipeline} {need}"


def weights(parallel: ParallelRecipe, model: ModelConfig) -> Iterator[str]:
    """Yield violations of the model's division over parallel groups; heads divide by key-value group."""
    yield from _divides("parallel.tensor", parallel.tensor, _tensor_sizes(model))
    yield from _stages(parallel, model)
    if parallel.tensor > 1 and parallel.sequence is False and needs_sequence_parallel(model):
        needs = f"sequence parallelism in a {model.model_type} model (experts, Gated DeltaNet)"
        found = f"parallel.sequence: false with parallel.tensor {parallel.tensor}"
        yield f"{found}: Megatron-Core needs {needs}; omit it or set it to true"
    experts = model.experts
    if experts is None:
        # A dense model: expert parallelism would divide nothing.
        for key in ("expert", "expert_tensor"):
            if (parts := getattr(parallel, key)) > 1:
                yield f"parallel.{key}: {parts}, but a {model.model_type} model has no experts"
        return
    yield from _divides("parallel.expert", parallel.expert, {"num_experts": experts.num_experts})
    width = {"moe_intermediate_size": experts.moe_intermediate_size}
    yield from _divides("parallel.expert_tensor", parallel.expert_tensor, width)


def needs_sequence_parallel(model: ModelConfig) -> bool:
    """Return True if Megatron-Core computes the model on several tensor-parallel ranks only with sequence
    parallelism: it refuses experts without, and would not sum the gradient of Gated DeltaNet's norm."""
    return model.experts is not None or model.delta_net is not None


def stages(parallel: ParallelRecipe, model: ModelConfig) -> list[range]:
    """Return the layers of each model chunk of Megatron's; stage s of P has chunks s, s + P, ..."""
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    ends = [0, *accumulate(parallel.layers_per_stage or _nearly_even(model.num_hidden_layers, chunks))]
    return [range(start, end) for start, end in pairwise(ends)]


def _nearly_even(layers: int, chunks: int) -> list[int]:
    """Distribute layers over chunks: fewer to the last (the head), then the first (most rows in flight)."""
    least, longer = divmod(layers, chunks)
    # 10 layers on 4 chunks: 2, 3, 3, 2.
    short_first = [chunks - 1, *range(chunks - 1)]
    short = set(short_first[: chunks - longer])
    return [least + (chunk not in short) for chunk in range(chunks)]


def replicas(rollout: RolloutRecipe, processes_per_node: int) -> Iterator[str]:
    """Yield violations of the rule that a colocated engine uses neighbouring ranks of one machine."""
    if processes_per_node % rollout.tensor_parallel:
        ranks = f"cluster.processes_per_node {processes_per_node}: an engine's ranks are on one machine"
        yield f"rollout.tensor_parallel: {rollout.tensor_parallel} does not divide {ranks}"


def engine(rollout: RolloutRecipe, model: ModelConfig) -> Iterator[str]:
    """Yield keys that vLLM does not support for the model, and what its tensor parallelism cannot divide. It
    pads the vocabulary, replicates key-value heads that are too few, and divides every expert."""
    if rollout.keep_routes and model.experts is None:
        yield f"rollout.keep_routes: true, but a {model.model_type} model has no experts"
    if rollout.batch_invariant and model.delta_net:
        why = "has Gated DeltaNet, for which vLLM has no batch-invariant kernels"
        yield f"rollout.batch_invariant: true, but a {model.model_type} model {why}"
    key, parts = "rollout.tensor_parallel", rollout.tensor_parallel
    sizes = _tensor_sizes(model)
    heads = sizes.pop("num_key_value_heads")
    padded = -(-sizes.pop("vocab_size") // VLLM_VOCABULARY) * VLLM_VOCABULARY
    sizes[f"vocab_size padded to a multiple of {VLLM_VOCABULARY},"] = padded
    yield from _divides(key, parts, {"num_attention_heads": model.num_attention_heads, **sizes})
    # 2 heads on 4 ranks: each twice; 8 on 4: two each; 3 on 4 fits neither way.
    if max(parts, heads) % min(parts, heads):
        yield f"{key}: {parts} neither divides nor is a multiple of the model's num_key_value_heads {heads}"
    if model.experts:
        yield from _divides(key, parts, {"moe_intermediate_size": model.experts.moe_intermediate_size})
        if parts > model.experts.num_experts:
            yield f"{key}: {parts} is more than the model's num_experts {model.experts.num_experts}"


def paths(recipe: Recipe, model: ModelConfig) -> Iterator[str]:
    """Yield a violation if the longest path exceeds the model's positions."""
    if recipe.generates and recipe.longest_context > model.context_length:
        source = "max_position_embeddings"
        if model.has_yarn:
            source = "yarn's factor x original_max_position_embeddings"
        yield f"{recipe.longest_context_text} is more than the model's {source} {model.context_length}"


def options_of_experts(recipe: Recipe, model: ModelConfig) -> Iterator[str]:
    """Yield options of Megatron-Core and vLLM for experts that the model has not: nothing reads them."""
    experts = model.experts
    shared = experts and experts.shared_expert_intermediate_size
    lacks = f"a {model.model_type} model has no {'shared ' if experts else ''}experts"
    for key, options in ("model.megatron", recipe.model.megatron), ("rollout.vllm", recipe.rollout.vllm):
        for name in options:
            if ("moe" in name or "expert" in name) and not (shared if "shared_expert" in name else experts):
                yield f"{key}.{name}: {options[name]}, but {lacks}"


def _tensor_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides outside the experts, by their field in config.json."""
    sizes = {"num_key_value_heads": model.num_key_value_heads, "vocab_size": model.vocab_size}
    experts, delta_net = model.experts, model.delta_net
    if experts is None or not all(experts.layers):
        sizes["intermediate_size"] = model.intermediate_size
    if experts and experts.shared_expert_intermediate_size:
        sizes["shared_expert_intermediate_size"] = experts.shared_expert_intermediate_size
    if delta_net:
        sizes["linear_num_key_heads"] = delta_net.num_key_heads
        sizes["linear_num_value_heads"] = delta_net.num_value_heads
    return sizes


def _stages(parallel: ParallelRecipe, model: ModelConfig) -> Iterator[str]:
    pipeline, virtual, layers = parallel.pipeline, parallel.virtual_pipeline or 1, model.num_hidden_layers
    stages = f"parallel.pipeline: {pipeline}"
    if virtual > 1:
        stages = f"parallel.pipeline {pipeline} x parallel.virtual_pipeline {virtual} = {pipeline * virtual}"
    if pipeline * virtual > layers:
        yield f"{stages} is more than the model's num_hidden_layers {layers}"
    if split := parallel.layers_per_stage:
        if len(split) != pipeline * virtual:
            yield f"parallel.layers_per_stage: {len(split)} numbers, but {stages}"
        if sum(split) != layers:
            stated = f"parallel.layers_per_stage: {split} = {sum(split)}"
            yield f"{stated}, but the model's num_hidden_layers is {layers}"


def _divides(key: str, parts: int, sizes: dict[str, int]) -> Iterator[str]:
    for field, size in sizes.items():
        if size % parts:
            yield f"{key}: {parts} does not divide the model's {field} {size}"
