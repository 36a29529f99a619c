"""Replacement of ``torch.cuda`` inside ``megatron.core`` without CUDA: one device, the CPU, which runs in
order. It has what Megatron-Core calls on the paths we use. Any other name is looked up in the real
``torch.cuda``: its classes serve annotations and ``isinstance``, its functions raise there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import BFloat16Tensor, FloatTensor, HalfTensor  # noqa: F401  named in Megatron-Core


class Event:
    """Event on a device that runs in order: it has always completed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """Single stream. All instances are equal, because Megatron-Core skips work when streams differ."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


def current_stream(device: Any = None) -> Stream:
    return Stream()


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def device(device: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def current_device() -> torch.device:
    return torch.device("cpu")


def synchronize(device: Any = None) -> None: ...


def is_available() -> bool:
    return False


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def compile(function: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Replace ``torch.compile``, also as a decorator with arguments: return the function as it is."""
    return function or (lambda function: function)


def _lazy_call(call: Callable[[], None], **kwargs: Any) -> None:
    call()


class _Generators:
    def __getitem__(self, device: int) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()


class random:
    get_rng_state = staticmethod(get_rng_state)
    set_rng_state = staticmethod(set_rng_state)


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
