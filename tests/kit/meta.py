"""Build models without memory on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Build models in the block without memory on any device."""
    with torch.device("meta"), _NamedDevicesAreMeta():
        yield


class _NamedDevicesAreMeta(TorchFunctionMode):
    """Redirect devices that Megatron names to meta; ``torch.device("meta")`` sets only the default."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
