"""The weights an engine expects, by Hugging Face name, read from its checkpoint's headers.

A sync that lacks a weight or brings one of another shape would leave the engine half stale without a
word, so every stream is checked against this table while it passes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

UNUSED_PREFIX = "mtp."
"""Multi-token prediction layers: part of Qwen3-Next's checkpoint, not of the rollout model."""


class WeightTable:
    """Names and shapes; ``check`` passes a stream through and counts its bytes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], tied: bool, where: str) -> None:
        self.shapes = shapes
        self.tied = tied
        self.where = where
        self.bytes_seen = 0

    @classmethod
    def read(cls, model_path: str | Path) -> WeightTable:
        """From the safetensors headers and config.json of a folder. Raises ValueError without them."""
        folder = Path(model_path)
        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: expected config.json and *.safetensors, found no such model")
        shapes = {}
        for file in files:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = tuple(weights.get_slice(name).get_shape())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(shapes, bool(config.get("tie_word_embeddings")), str(folder))

    def check(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream, without what the engine does not hold. Raises ValueError for a weight that is
        unknown, comes twice, has another shape, or (at the end) is missing."""
        self.bytes_seen = 0
        missing = {name for name in self.shapes if not self._unused(name)}
        for name, tensor in named_tensors:
            if self._unused(name):
                continue
            if name not in self.shapes:
                near = difflib.get_close_matches(name, self.shapes, n=1, cutoff=0.0)
                raise ValueError(f"weight {name!r}: not one of {self.where}'s (nearest: {near[0]!r})")
            if name not in missing:
                raise ValueError(f"weight {name!r}: expected once, found twice")
            if tuple(tensor.shape) != self.shapes[name]:
                raise ValueError(
                    f"weight {name!r}: expected shape {list(self.shapes[name])}, found {list(tensor.shape)}"
                )
            missing.remove(name)
            self.bytes_seen += tensor.numel() * tensor.element_size()
            yield name, tensor
        if missing:
            raise ValueError(
                f"weights: {len(missing)} of {len(self.shapes)} missing, for example {min(missing)!r}"
            )

    def _unused(self, name: str) -> bool:
        return name.startswith(UNUSED_PREFIX) or (self.tied and name == "lm_head.weight")
