"""Triton's interpreter with the arithmetic of a GPU where its own is wrong: kernels run on CPU tensors.

The interpreter of Triton 3.7.1 keeps bfloat16 as the integer of its bits. It computes with these integers in
products, sums and arithmetic: ``tl.sum`` of a bfloat16 tensor, as in fla's gradient of the decay, is then any
number. It also rounds to bfloat16 towards zero.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import autotuner, interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

_convert, _dot, _binary, _reduce = (
    interpreter._convert_float,
    InterpreterBuilder.create_dot,
    InterpreterBuilder.binary_op,
    ReduceOps.apply,
)


def install() -> None:
    """Replace the interpreter's faulty operations, and take one configuration of each tuned kernel."""
    interpreter._convert_float = _convert_rounded
    InterpreterBuilder.create_dot = _wide_dot
    InterpreterBuilder.binary_op = _wide_binary
    ReduceOps.apply = _wide_reduce
    autotuner.Autotuner.run = _first_configuration


def adapt(package: str) -> None:
    """Make the loops of a package's kernels count in tensors, as compiled ones do, and its own tuners take
    one configuration."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(package):
            vars(module)["range"] = _tensor_range
            for own in vars(module).values():
                if isinstance(own, type) and issubclass(own, autotuner.Autotuner) and "run" in vars(own):
                    own.run = _first_configuration


def _first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.configs[0]
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    return self.fn.run(*args, **kwargs, **config.all_kwargs())


def _wide(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def _narrow(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(_rounded(handle.data), tl.bfloat16)


def _rounded(data: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16 numbers, of ties the even one."""
    wide = torch.from_numpy(np.array(data, np.float32))
    return wide.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _convert_rounded(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if (source, target) == (tl.float32, tl.bfloat16):
        return _rounded(data)
    return _convert(data, source, target, rounding)


def _wide_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _dot(self, _wide(a), _wide(b), *rest)


def _wide_binary(self: Any, a: TensorHandle, b: TensorHandle, operation: Any) -> TensorHandle:
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
        return _binary(self, a, b, operation)
    out = _binary(self, _wide(a), _wide(b), operation)
    return _narrow(out) if out.data.dtype == np.float32 else out


def _wide_reduce(self: Any, given: Any) -> Any:
    if isinstance(given, tuple) or given.dtype.scalar != tl.bfloat16:
        return _reduce(self, given)
    out = _reduce(self, tl.core.tensor(_wide(given.handle), tl.block_type(tl.float32, given.type.shape)))
    return out.to(tl.bfloat16)


def _tensor_range(*bounds: Any) -> Any:
    semantic = interpreter.interpreter_semantic
    return (semantic.to_tensor(i) for i in builtins.range(*(int(bound) for bound in bounds)))
