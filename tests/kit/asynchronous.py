"""vLLM's asynchronous scheduling on a CPU: a step is scheduled before the tokens of the last one are known.

This is vLLM's default on GPUs. On CPUs vLLM turns it off, though all of it runs there except CUDA's streams
and events, which bring tokens to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kit.rollout_kit import open_engine

if TYPE_CHECKING:
    from megatron_eqlen.rollout.vllm.engine.colocated import ColocatedEngine


class NoStream:
    """A stream or an event of a device that does everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def without_streams(patch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event", "current_stream", "stream"):
        patch.setattr(torch.cuda, name, NoStream)


def without_refusal(patch: pytest.MonkeyPatch) -> None:
    """Make the platform keep vLLM's earlier decision."""
    from vllm.platforms.cpu import CpuPlatform

    platforms = CpuPlatform.check_and_update_config

    def keeping(vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        assert decided, "vLLM's default"
        platforms(vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keeping))


@contextmanager
def asynchronous() -> Iterator[Callable[..., ColocatedEngine]]:
    """Yield ``open_engine`` for such engines, to be used inside."""

    def open_asynchronous(*args: Any, **over: Any) -> ColocatedEngine:
        with pytest.MonkeyPatch.context() as patch:
            without_refusal(patch)
            engine = open_engine(*args, **over)
        assert engine.core.vllm_config.scheduler_config.async_scheduling
        return engine

    with pytest.MonkeyPatch.context() as patch:
        without_streams(patch)
        yield open_asynchronous
