"""Names and shapes of the weights that an engine expects: those of the model that it was started with. If a
sync lacked a weight, or had one of another shape, part of the engine would silently keep old weights, so
every stream is checked against this table while it passes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.folder import HFFolder, check_folder
from megatron_eqlen.processes.watchdog import beat


@dataclass
class WeightTable:
    """Names and shapes; ``check`` passes a stream through and counts its bytes. ``wide``: names of weights
    that are not trained, such as a router's bias, and come in float32 whatever the dtype of the others."""

    shapes: dict[str, tuple[int, ...]]
    where: str
    wide: frozenset[str] = frozenset()
    bytes_seen: int = 0

    @classmethod
    def read(cls, model_path: str | Path) -> WeightTable:
        """Read the table of a Hugging Face folder, and check it as for training. Raises ValueError."""
        weights = check_folder(HFFolder(model_path), read_config(model_path)).values()
        shapes = {name: shape for each in weights for name, shape in zip(each.hf, each.shapes, strict=True)}
        wide = frozenset(name for each in weights for name in each.hf if not each.trained)
        return cls(shapes, str(model_path), wide)

    def check(self, named: Iterable[tuple[str, Tensor]], whole: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Pass a stream of weights through. Raises ValueError for a weight that is unknown, comes twice, has
        another shape, or (at the end, if the stream is ``whole``) is missing."""
        self.bytes_seen = 0
        # a generator: each check runs as its weight passes, the last one when the stream ends
        missing = set(self.shapes)
        for name, tensor in named:
            if name not in self.shapes:
                near = difflib.get_close_matches(name, self.shapes, n=1, cutoff=0.0)
                raise ValueError(f"weight {name!r}: not one of {self.where}'s (nearest: {near[0]!r})")
            if name not in missing:
                raise ValueError(f"weight {name!r}: expected once, found twice")
            if tuple(tensor.shape) != (shape := self.shapes[name]):
                raise ValueError(f"weight {name!r}: expected shape {list(shape)}, found {list(tensor.shape)}")
            missing.remove(name)
            self.bytes_seen += tensor.numel() * tensor.element_size()
            beat()
            yield name, tensor
        if missing and whole:
            some = f"{len(missing)} of {len(self.shapes)} missing, for example {min(missing)!r}"
            raise ValueError(f"weights: {some}")
