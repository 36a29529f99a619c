"""Undoes the changes that importing vLLM and building its model make to the training process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from megatron_eqlen.processes.collector import importing

_vllms_environ: dict[str, str] = {}
"""Variables that importing vLLM set (compiler caches, threads); set again only while vLLM builds a model."""


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Surround the first import of vLLM, which reads and sets environment variables."""
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with importing("scipy.signal"):  # resamples recorded speech; a second
            yield
    finally:
        _vllms_environ.update(_restore_environ(before))


@contextmanager
def contained() -> Iterator[None]:
    """Undo what vLLM does to its process while it builds a model: it replaces ``torch.set_num_threads``,
    seeds generators, sets environment variables, dtype and precision. ``VLLM_*`` stay (read later)."""
    environ = dict(os.environ)
    # what vLLM set when it was imported, and ``importing_vllm`` took back, is there for the build alone
    os.environ.update(_vllms_environ)
    # the function as well: vLLM's CPU worker puts one in its place that only warns
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count())
    try:
        # torch's generators get their states back at the end of this block, all else below
        with torch.random.fork_rng(devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        # in this order: the call is to have an effect
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        np.random.set_state(states[1])
        _restore_environ(environ)


def _restore_environ(environ: dict[str, str]) -> dict[str, str]:
    """Restore the environment except for vLLM's own variables; return the variables that were undone."""
    undone = {
        name: value
        for name, value in os.environ.items()
        if environ.get(name) != value and not name.startswith("VLLM_")
    }
    for name in undone:
        del os.environ[name]
    os.environ.update(environ | {name: os.environ[name] for name in os.environ if name.startswith("VLLM_")})
    return undone
