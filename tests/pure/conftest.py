"""Fixtures of tests without processes of their own."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def world_of_one():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
