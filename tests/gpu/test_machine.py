"""The machine as ``eqlen check`` sees it, and Transformer Engine's names."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_eqlen.check import CHECKS, look
from megatron_eqlen.check.finding import Place
from tests.kit import transformer_engine_names as ours


@pytest.mark.parametrize("name", ["gpus", "collectives"])
def test_this_machines_gpus_work(name, tmp_path):
    (item,) = [item for item in CHECKS if item.name == name]
    found = look(item, Place(None, tmp_path, short=False))
    assert found is not None
    assert found.state == "ok", found


def test_the_stand_in_has_transformer_engines_names():
    real = pytest.importorskip("transformer_engine.pytorch")
    size: dict[str, Any] = {"in_features": 16, "out_features": 32, "bias": False}
    single: dict[str, Any] = {"tp_size": 1, "parallel_mode": None}
    pairs = [
        (real.Linear(**size), ours.Linear(**size, **single)),
        (real.LayerNormLinear(**size, normalization="RMSNorm"), ours.LayerNormLinear(**size, **single)),
        (real.GroupedLinear(num_gemms=2, **size), ours.GroupedLinear(num_gemms=2, **size, **single)),
        (real.RMSNorm(hidden_size=16), ours.RMSNorm(16)),
    ]
    for theirs, mine in pairs:
        assert theirs.state_dict().keys() == mine.state_dict().keys()
