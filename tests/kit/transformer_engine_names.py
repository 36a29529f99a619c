"""A stand-in for Transformer Engine that knows its modules' names of parameters, and computes linear layers
and norms in plain torch, without tensor parallelism.

Megatron-Core's own classes around it decide how a checkpoint names and cuts these parameters, and how layers
are called. The names are those of Transformer Engine 2.20
(``pytorch/module/{linear,layernorm_linear,grouped_linear}.py``, ``pytorch/ops/op.py`` for norms); if it is
installed, a test compares them. ``tools/gpuless`` compares the arguments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

RELOADED = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.extensions.transformer_engine_spec_provider",
    "megatron.core.transformer.moe.experts",
)


class _Module(torch.nn.Module):
    """Every module has an extra state, which is empty without fp8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.dtype = kwargs.get("params_dtype", torch.float32)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or state.numel() == 0

    def add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(*shape, dtype=self.dtype)))


def _local(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return [out, in] of this tensor-parallel rank."""
    rows, columns = kwargs["out_features"], kwargs["in_features"]
    parts = kwargs["tp_size"]
    if kwargs["parallel_mode"] == "column":
        rows //= parts
    if kwargs["parallel_mode"] == "row":
        columns //= parts
    return rows, columns


class Linear(_Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parallel_mode, self.use_bias = kwargs["parallel_mode"], kwargs["bias"]
        self.parts = kwargs["tp_size"]
        self.add("weight", *_local(kwargs))

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        assert self.parts == 1
        return F.linear(inp, self.weight)


class LayerNormLinear(_Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use_bias = kwargs["bias"]
        self.add("layer_norm_weight", kwargs["in_features"])
        self.add("weight", *_local(kwargs))


class GroupedLinear(_Module):
    fp8, fp8_calibration = False, False
    fp8_meta: ClassVar[dict[str, bool]] = {"fp8_checkpoint": False}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_gemms, self.use_bias = kwargs["num_gemms"], kwargs["bias"]
        for number in range(self.num_gemms):
            self.add(f"weight{number}", *_local(kwargs))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        pass

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return torch.cat([F.linear(x, W) for x, W in zip(inp.split(m_splits), weights, strict=True)])


class RMSNorm(_Module):
    def __init__(self, normalized_shape: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.eps, self.shift = kwargs.get("eps", 1e-5), float(kwargs.get("zero_centered_gamma", False))
        self.add("weight", normalized_shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input, input.shape[-1:], self.weight + self.shift, self.eps)


class FusedAdam(torch.optim.Optimizer):
    """Adam that makes its states, and nothing else."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, bias_correction: bool = True, adam_w_mode: bool = True,
        master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False, store_param_remainders: bool = False, capturable: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})
        assert not use_decoupled_grad or master_weights
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["step"] = 1
            for param in group["params"]:
                self.state[param] = {
                    name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()
                }


def get_cpu_offload_context(
    enabled: bool = False, num_layers: int | None = 1, model_layers: int = 1,
    offload_activations: bool = True, offload_weights: bool = False, double_buffering: bool = False,
    manual_synchronization: bool = False, retain_pinned_cpu_buffers: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    assert not enabled
    return contextlib.nullcontext(), lambda output: output


STAND_INS = {
    Linear: "module.linear",
    LayerNormLinear: "module.layernorm_linear",
    GroupedLinear: "module.grouped_linear",
    FusedAdam: "optimizers.fused_adam",
    get_cpu_offload_context: "cpu_offload",
}
"""Stand-ins, and the module below ``transformer_engine.pytorch`` that defines each. ``tools/gpuless`` holds
their arguments against the wheel."""


class _Package(types.ModuleType):
    """A package that has every name: classes are empty modules, all else is a package again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Package(f"{self.__name__}.{name}") if name[0].islower() else type(name, (_Module,), {})
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    """Imports any module of the package."""

    def __init__(self, package: _Package) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package.__name__:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return functools.reduce(getattr, spec.name.split(".")[1:], self.package)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in() -> None:
    """Let Megatron-Core find Transformer Engine from here on; call in a process of its own."""
    package = _Package("transformer_engine")
    package.__version__ = "2.20.2"
    for module in (Linear, LayerNormLinear, GroupedLinear, RMSNorm):
        setattr(package.pytorch, module.__name__, module)
    package.pytorch.optimizers.FusedAdam = FusedAdam
    package.pytorch.cpu_offload.get_cpu_offload_context = get_cpu_offload_context
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]  # a real one, or the mark of a broken one
    sys.meta_path.insert(0, _Finder(package))
    for name in RELOADED:
        importlib.reload(importlib.import_module(name))
