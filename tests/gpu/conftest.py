"""Tests that need a GPU. They start processes of their own, or work in pytest's: what ``tests.kit.zygote``
forks cannot use a GPU, since its imports have asked for one."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NEEDS = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(NEEDS)
