"""Known gaps of Megatron-Core 0.19.2, closed when a module is imported. A new version starts here."""

import logging
import queue
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

VERSION = "0.19.2"


def close(module: types.ModuleType, on_cpu: bool) -> None:
    """Close the gaps of one newly imported ``megatron.core`` module."""
    if fix := EVERYWHERE.get(module.__name__):
        fix(module)
    if on_cpu and (fix := ON_CPU.get(module.__name__)):
        fix(module)


def _check_version(core: types.ModuleType) -> None:
    if core.__version__.split("+")[0] != VERSION:  # it appends the commit of a repository around it
        found = f"Megatron-Core {core.__version__} found"
        warnings.warn(f"{found}; its gaps are known for {VERSION} only", stacklevel=2)


def _allow_gated_delta_net(gated_delta_net: Any) -> None:
    """Pass the constructor's check for fla: our forward (models/gated_delta_net.py) chooses its kernels."""
    gated_delta_net.HAVE_FLA = True


def _load_states_in_place(distrib_optimizer: Any) -> None:
    """Fix the loading of the states of torch's Adam from a checkpoint, on the device or on the host.

    States are copied from the loaded tensors, but ``step`` is not one of them (it is kept per parameter
    group): KeyError. The one loaded ``step`` tensor is then shared, so each of N parameters advances it and
    Adam's bias correction is silently N steps ahead. A host optimizer keeps the loaded tensors, some of which
    are small views of whole weights. A rank without parameters has no state with a step: AssertionError.
    """
    optimizer = distrib_optimizer.DistributedOptimizer
    set_states, load_state_dict = optimizer._set_main_param_and_optimizer_states, optimizer.load_state_dict
    state_dict = optimizer.state_dict

    def state_of_any_rank(self: Any) -> dict[str, Any]:
        if self.optimizer.state:
            return state_dict(self)
        # Megatron-Core saves the groups without their parameters, and asserts that they have a step
        groups = [{"step": 0} | group for group in self.optimizer.state_dict()["param_groups"]]
        for group in groups:
            del group["params"]
        return {"optimizer": {"param_groups": groups}}

    def set_loaded_states(
        self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
    ) -> None:
        on_host = isinstance(self.optimizer, distrib_optimizer.HybridDeviceOptimizer)
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not on_host:
            # the precision-aware optimizer scales its states itself: Megatron-Core's own path sets them
            kinds = ("param", "exp_avg", "exp_avg_sq")
            set_states(self, model_param, {kind: tensors[kind] for kind in kinds})
            return
        # everywhere else values are copied: no loaded tensor, or view of one, lives on as a state
        group, order = self.model_param_group_index_map[model_param]
        param = self.optimizer.param_groups[group]["params"][order]
        main = self.optimizer.param_to_inner_param[param] if on_host else param
        states = {"param": main, **self.optimizer.state[param]}
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            states[kind].data.copy_(tensors[kind])

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    optimizer._set_main_param_and_optimizer_states = set_loaded_states
    optimizer.load_state_dict, optimizer.state_dict = load_with_own_steps, state_of_any_rank


def _hold_main_weights_once(hybrid_optimizer: Any) -> None:
    """Drop a host optimizer's main weights, held twice from loading until the next update."""
    update_main_weights = hybrid_optimizer.HybridDeviceOptimizer._update_fp32_params_by_new_state

    def update_and_forget(self: Any) -> None:
        update_main_weights(self)
        for param, state in self.state.items():
            state["master_param"] = self.param_to_inner_param[param]

    hybrid_optimizer.HybridDeviceOptimizer._update_fp32_params_by_new_state = update_and_forget


def _collect_results_in_process(filesystem_async: Any) -> None:
    """Collect the results of writing threads in this process: another would outlive a killed trainer."""
    filesystem_async._results_queue = queue.Queue()


def _exchange_uneven_parts(mappings: Any) -> None:
    """Exchange unequal parts (experts in tensor parallelism): gloo gathers and scatters equal ones only."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_padded(part: Any, group: Any, sizes: list[int] | None = None, *buffer: bool) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, *buffer)
        # pad to the longest part, gather equal ones, and cut the padding off
        longest = max(sizes)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        parts = gather(padded, group).split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_and_take(own: Any, group: Any, sizes: list[int] | None = None, *buffer: bool) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return reduce_scatter(own, group, sizes, *buffer)
        # reduce all parts on every rank, then keep this one's
        total = own.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather_padded
    mappings._reduce_scatter_along_first_dim = reduce_and_take


def _copy_to_the_same_device(hybrid_optimizer: Any) -> None:
    """Fix a host optimizer's use of ``is_cuda`` to recognise its copies; here all tensors lie on the host."""

    def copies(self: Any, offload_fraction: float) -> tuple[list, list, dict, dict, dict]:
        assert offload_fraction == 1
        groups, copy_of = [], {}
        for group in self.param_groups:
            copy_of |= {param: param.detach().clone().float() for param in group["params"]}
            if group["params"]:
                groups.append(group | {"params": [copy_of[param] for param in group["params"]]})
        return groups, [], copy_of, {copy: param for param, copy in copy_of.items()}, dict(copy_of)

    hybrid_optimizer.HybridDeviceOptimizer._get_sub_optimizer_param_groups = copies


def quiet() -> None:
    """Silence messages that are expected on a CPU: no Apex, no Transformer Engine, no CUDA graphs, seeds that
    set the CPU's generator. Call before ``megatron.core`` is imported."""
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
    warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`", category=UserWarning)
    library = r"torch\.distributed\.(c10d_logger|checkpoint)|megatron\.core\.dist_checkpointing"
    warnings.filterwarnings("ignore", category=FutureWarning, module=library)
    seeds = logging.getLogger("megatron.core.tensor_parallel.random")
    seeds.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


EVERYWHERE: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core": _check_version,
    "megatron.core.ssm.gated_delta_net.common": _allow_gated_delta_net,
    "megatron.core.optimizer.distrib_optimizer": _load_states_in_place,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": _hold_main_weights_once,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _collect_results_in_process,
}
ON_CPU: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.tensor_parallel.mappings": _exchange_uneven_parts,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": _copy_to_the_same_device,
}
