"""Weights between Hugging Face folders and Megatron models in any parallel layout.

    load_hf(chunks, folder)           every rank reads its own part of the files
    export_hf(chunks)                 (name, unsharded tensor) one by one, on every rank
    save_hf(chunks, source, out)      a folder that Transformers and vLLM load

All follow the model's weight map (hf/families.py). They copy bits and never compute: a round trip through any
layout is exact. Peak extra memory: the two largest tensors, or for the export twice ``SENT_AT_ONCE``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eqlen.files import new_folder, refuse_existing, write_json
from megatron_eqlen.hf.adapter_map import AdapterWeights, adapter_map, peft_config, peft_tensors
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.folder import FolderWriter, HFFolder, check_folder, save_tensors, with_tied_head
from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.models import groups
from megatron_eqlen.models.lora import Adapter, adapters, merged
from megatron_eqlen.models.names import experts_per_rank, local_parameters, model_config
from megatron_eqlen.recipe import LoraRecipe

PEFT_WEIGHTS = "adapter_model.safetensors"
SENT_AT_ONCE = 256 * 2**20
"""Most bytes of consecutive weights in one message; a larger weight is sent alone. (Sent one by one, the
experts of an 80B model would be 147,000 broadcasts of 2 MB.)"""


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fill this rank's chunks from a Hugging Face folder, cast to their dtype. Raises WeightsError."""
    model = model_config(chunks)
    folder = HFFolder(path)
    by_name = check_folder(folder, model)
    for name, parameter in local_parameters(chunks).items():
        weight = by_name[name]
        parts = [_own_part(folder.tensor(hf), weight) for hf in weight.hf]
        parameter.copy_(weight.arrangement.merge(parts))


@torch.no_grad()
def export_hf(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, unsharded tensor) of every tensor of the model, in its order and dtype, with
    adapters merged. Collective over TP, PP and EP: every rank must run the iterator to its end, and gets
    every tensor. A tensor may share memory with the model: copy it to keep it."""
    yield from _export(chunks, weight_map(model_config(chunks)))


@torch.no_grad()
def export_adapters(
    chunks: Sequence[torch.nn.Module], which: Sequence[AdapterWeights]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in ``hf``, unsharded tensor) of the matrices of adapters, as ``export_hf`` does."""
    yield from _export(chunks, [weight for adapter in which for weight in (adapter.A, adapter.B)])


def save_adapters(chunks: Sequence[torch.nn.Module], lora: LoraRecipe, base: str | Path, out: Path) -> None:
    """Write the chunks' adapters to ``out``, a PEFT folder. ``base``: path of its base model. Collective."""
    refuse_existing(out)
    which = adapter_map(model_config(chunks), lora.rank, lora.targets)
    tensors = {name: tensor.cpu().clone() for name, tensor in export_adapters(chunks, which)}
    dist.barrier()  # rank 0 creates ``out`` only after every rank has checked it
    if dist.get_rank() == 0:
        with new_folder(out) as partial:
            named = {peft: tensors[own].clone() for adapter in which for peft, own in peft_tensors(adapter)}
            save_tensors(named, partial / PEFT_WEIGHTS)
            write_json(partial / "adapter_config.json", peft_config(which, lora.rank, lora.alpha, str(base)))
    dist.barrier()


def save_hf(
    chunks: Sequence[torch.nn.Module],
    source: str | Path,
    out: str | Path,
    at_least: torch.dtype | None = None,
) -> None:
    """Write the chunks' weights as a copy of the Hugging Face folder ``source``, with its configuration,
    tokenizer, dtypes (or wider ones: ``FolderWriter``), division into files and untrained tensors
    (``mtp.*``). Collective; rank 0 writes. ``out`` appears when it is complete."""
    refuse_existing(Path(out))
    model, folder = model_config(chunks), HFFolder(source)
    check_folder(folder, model)
    dist.barrier()  # rank 0 creates ``out`` only after every rank has checked it
    with new_folder(Path(out)) if dist.get_rank() == 0 else nullcontext() as partial:
        writer = FolderWriter(partial, folder, at_least) if partial else None
        for name, tensor in with_tied_head(export_hf(chunks), model, folder):
            if writer:
                writer.write(name, tensor)
        if writer:
            writer.finish()
    dist.barrier()


def _own_part(tensor: Tensor, weight: Weight) -> Tensor:
    """Return this rank's part of an unsharded Hugging Face tensor."""
    group = groups.tensor_group(weight)
    if weight.dim is None or group.size() == 1:
        return tensor
    ranges = weight.local_ranges(tuple(tensor.shape), group.rank(), group.size())
    pieces = [tensor.narrow(weight.dim, start, stop - start) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=weight.dim)


def _stages(local: dict[str, Tensor]) -> dict[str, int]:
    """Return the pipeline rank that holds each layer, or each tensor outside the layers."""
    group = groups.own().pp
    homes: list[set[str]] = [set()] * group.size()
    dist.all_gather_object(homes, {_home(name) for name in local}, group=group)
    return {home: rank for rank, names in enumerate(homes) for home in names}


def _home(name: str) -> str:
    return ".".join(name.split(".")[:3]) if name.startswith("decoder.layers.") else name


def _export(chunks: Sequence[torch.nn.Module], weights: Iterable[Weight]) -> Iterator[tuple[str, Tensor]]:
    local = _Local(local_parameters(chunks), adapters(chunks))
    like = next(iter(local.parameters.values()))
    per_rank = experts_per_rank(model_config(chunks))
    for batch in _batches(weights, _stages(local.parameters), per_rank, like.element_size()):
        names = [name for weight in batch.weights for name in weight.hf]
        # what is not trained, a router's bias, stays in float32
        empty = like.new_empty(0, dtype=like.dtype if batch.place[-1] else torch.float32)
        yield from zip(names, _gather_batch(batch, local, empty), strict=True)


@dataclass(frozen=True)
class _Local:
    """This rank's parameters and adapters, by their names in the weight maps."""

    parameters: dict[str, Tensor]
    adapters: dict[str, Adapter]

    def merged(self, name: str) -> Tensor:
        weight, adapter = self.parameters[name].detach(), self.adapters.get(name)
        return weight if adapter is None else merged(weight, adapter.A, adapter.B, adapter.scale)


@dataclass
class _Batch:
    """Consecutive weights of the model that one rank sends together."""

    place: tuple[int, int | None, bool]
    """Pipeline rank and expert-parallel rank (None: all ranks) that hold the weights; if they are trained."""
    weights: list[Weight] = field(default_factory=list)
    size: int = 0
    """Size in bytes."""


def _batches(
    weights: Iterable[Weight], stages: dict[str, int], per_rank: int, element_size: int
) -> Iterator[_Batch]:
    """Yield the weights in order, in batches of at most ``SENT_AT_ONCE``. ``per_rank``: experts of a rank."""
    batch: _Batch | None = None
    for weight in weights:
        stage = stages[_home(weight.megatron)]
        # a batch has one sender: a pipeline stage and, of experts, one expert-parallel rank
        owner = None if weight.expert is None else weight.expert // per_rank
        size = element_size * sum(map(prod, weight.shapes))
        place = (stage, owner, weight.trained)
        if batch is None or batch.place != place or batch.size + size > SENT_AT_ONCE:
            if batch is not None:
                yield batch
            batch = _Batch(place)
        batch.weights.append(weight)
        batch.size += size
    if batch is not None:
        yield batch


def _gather_batch(batch: _Batch, local: _Local, like: Tensor) -> list[Tensor]:
    """Return the batch's Hugging Face tensors on every rank: gathered over TP, broadcast over EP, then PP."""
    pipeline, (stage, owner, _) = groups.own().pp, batch.place
    shapes = [shape for weight in batch.weights for shape in weight.shapes]
    tensors = None
    if pipeline.rank() == stage:
        # of a stage's experts only the owner has these; its expert-parallel peers get them from it first
        if batch.weights[0].megatron in local.parameters:
            # merged before they are gathered: each rank computes its own part
            own = [(weight, local.merged(weight.megatron)) for weight in batch.weights]
            tensors = [part for weight, tensor in own for part in _gathered(weight, tensor)]
        if owner is not None:
            tensors = _broadcast(tensors, shapes, like, owner, groups.own().ep)
    return _broadcast(tensors, shapes, like, stage, pipeline)


def _gathered(weight: Weight, parameter: Tensor) -> list[Tensor]:
    group = groups.tensor_group(weight)
    parts = [part.contiguous() for part in weight.arrangement.split(parameter)]
    if weight.dim is None or group.size() == 1:
        return parts
    wholes = []
    for part in parts:
        # [ranks] parts of one tensor
        by_rank = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(by_rank, part, group=group)
        wholes.append(weight.gather(by_rank))
    return wholes


def _broadcast(
    tensors: list[Tensor] | None,
    shapes: list[tuple[int, ...]],
    like: Tensor,
    owner: int,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Return ``tensors`` of the group's rank ``owner`` on every rank of the group, in one message."""
    if group.size() == 1:
        assert tensors is not None
        return tensors
    sizes = [prod(shape) for shape in shapes]
    if group.rank() == owner:
        assert tensors is not None
        assert {tensor.dtype for tensor in tensors} == {like.dtype}
        # [sum of sizes]
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
    else:
        message = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
    dist.broadcast(message, group_src=owner, group=group)
    return [part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True)]
