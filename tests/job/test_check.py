"""``eqlen check`` of the machine that runs the tests."""

import torch

from tests.kit.jobs import run


def test_each_check_ends_and_says_something(home):
    said = run("-m", "megatron_eqlen.cli", "check", home / "recipe.yaml").stdout
    for name in ("python", "torch", "vllm", "inputs", "gpus", "space", "memory", "shared memory", "cores"):
        assert f"  {name} " in said
    assert ("  collectives " in said) == torch.cuda.is_available()
    assert said.splitlines()[-1].endswith(": ready for test")
