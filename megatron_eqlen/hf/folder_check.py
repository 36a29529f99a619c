"""Check that a folder holds every trained tensor of a model, in its shape and in a dtype of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_eqlen.files import CheckpointError
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.hf.families import HEAD, embedding, weight_map
from megatron_eqlen.hf.folder import DTYPES, HFFolder, first_few, say_once
from megatron_eqlen.hf.weight_map import Weight

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that a trained tensor may have on disk."""

UNTRAINED = ("mtp.", "model.visual.")
"""Beginnings of names that are carried through conversion, never trained: layers of multi-token prediction,
and Qwen3.5's encoder of images."""


def with_tied_head(
    tensors: Iterable[tuple[str, Tensor]], model: ModelConfig, folder: HFFolder
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and, if ``folder`` stores a tied output layer, the embeddings again under its
    name."""
    (embeddings,) = embedding(model).hf
    for name, tensor in tensors:
        yield name, tensor
        if name == embeddings and model.tie_word_embeddings and HEAD in folder.entries:
            yield HEAD, tensor


def check_folder(folder: HFFolder, model: ModelConfig) -> dict[str, Weight]:
    """Return the weight map by Megatron name, if ``folder`` holds all its tensors in their shapes. Warns of
    tensors that the model does not use."""
    family = read_config(folder.path).model_type
    if family != model.model_type:
        raise CheckpointError(f"{folder.path}: expected a {model.model_type} model, found {family}")
    weights = weight_map(model)
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes, strict=True):
            _check_tensor(folder, name, shape)
    by_name = {weight.megatron: weight for weight in weights}
    if model.tie_word_embeddings:  # the last pipeline stage keeps a copy
        by_name["output_layer.weight"] = embedding(model)
        _check_tied(folder, weights[0])
    carried = UNTRAINED
    if model.family.glm:
        carried += (f"{model.prefix}layers.{model.num_hidden_layers}.",)
    expected = {name for weight in weights for name in weight.hf} | {HEAD}
    unused = [name for name in folder.entries if name not in expected and not name.startswith(carried)]
    if unused:
        say_once(f"{folder.path}: the model has no use for {first_few(unused)}: not trained")
    return by_name


def _check_tensor(folder: HFFolder, name: str, shape: tuple[int, ...]) -> None:
    entry = folder.entries.get(name)
    if entry is None:
        raise CheckpointError(f"{folder.path}: {name} is missing")
    where = f"{folder.path / entry.file}: {name}"
    if entry.shape != shape:
        raise CheckpointError(f"{where}: expected shape {shape}, found {entry.shape}")
    if DTYPES[entry.dtype] not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{where}: {entry.dtype} is not a weight's dtype: expected F32, BF16, F16 or F64 "
            "(dequantise a quantised model first)"
        )


def _check_tied(folder: HFFolder, embeddings: Weight) -> None:
    """Raise CheckpointError if an output layer beside tied embeddings differs from them: Transformers then
    does not tie (``PreTrainedModel.tie_weights``) but vLLM does, so the folder must decide."""
    if HEAD not in folder.entries:
        return
    _check_tensor(folder, HEAD, embeddings.shapes[0])
    (name,) = embeddings.hf
    rows = (folder.tensor(each).split(4096) for each in (name, HEAD))
    if not all(torch.equal(row.double(), other.double()) for row, other in zip(*rows, strict=True)):
        raise CheckpointError(
            f"{folder.path}: config.json has tie_word_embeddings: true, but {HEAD} differs from {name}. "
            f"Set it to false to use {HEAD}, as Transformers does, or remove that tensor"
        )
