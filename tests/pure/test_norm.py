"""RMSNorm in bfloat16 on a CPU, which is computed in blocks, beside float64."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eqlen.models.norm import CPU_ELEMENTS, RMSNorm

ROWS = CPU_ELEMENTS // 64


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("shape", [(ROWS + 3, 1, 64), (100, 1, 40, 64), (3, 1, 2 * CPU_ELEMENTS), (1, 1, 8)])
def test_values_and_gradients_are_those_of_float64_up_to_one_rounding(shape, zero_centered):
    torch.manual_seed(0)
    # part of a larger tensor, as query and key are
    x = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]].bfloat16()
    up = torch.randn(shape).bfloat16()
    weight = torch.randn(shape[-1]).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        config = SimpleNamespace(
            layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype, sequence_parallel=False
        )
        norm, given = RMSNorm(config, shape[-1]), x.detach().to(dtype).requires_grad_()
        norm.weight.data = weight.to(dtype)
        out = norm(given)
        out.backward(up.to(dtype))
        results.append((out.detach(), given.grad, norm.weight.grad))
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() <= 2**-8 * exact.norm()
