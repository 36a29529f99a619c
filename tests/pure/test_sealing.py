"""Objects between ranks: only those with the job's secret are unpickled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from megatron_eqlen.processes.distributed import SECRET, SIZE, SealError, join, seal

ITEM = {"step": 5, "rows": [1.5, None]}


class Intruder:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.fixture
def sealed(monkeypatch):
    """Return a function that gives this process a secret, or none, as a launcher does."""
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))

    def with_secret(secret: str) -> None:
        monkeypatch.setenv(SECRET, secret)
        seal()

    return with_secret


def sent(item: object) -> torch.Tensor:
    """Return the bytes that torch's collectives send of an object."""
    return c10d._object_to_tensor(item, torch.device("cpu"), None)[0]


def received(data: torch.Tensor) -> object:
    return c10d._tensor_to_object(data, data.numel(), None)


def test_an_object_arrives_and_with_any_byte_changed_or_another_secret_it_is_not_unpickled(sealed, tmp_path):
    stranger = sent(Intruder(tmp_path / "made"))  # before this process seals
    sealed("secret")
    data = sent(ITEM)
    assert received(data) == ITEM
    bad = sent(Intruder(tmp_path / "made"))
    padded = torch.cat([torch.zeros(SIZE, dtype=torch.uint8), stranger])
    changed = [bad.clone() for _ in bad]
    for number, copy in enumerate(changed):
        copy[number] ^= 1
    for wrong in (stranger, padded, bad[:-1], bad[:SIZE], bad[:5], *changed):
        with pytest.raises(SealError, match="expected the seal of this job"):
            received(wrong)
    sealed("another")
    for wrong in (data, bad):
        with pytest.raises(SealError):
            received(wrong)
    assert not (tmp_path / "made").exists()
    sealed("secret")
    received(bad)
    assert (tmp_path / "made").exists(), "it would have been made"


def test_ranks_of_several_nodes_without_a_secret_are_refused_before_they_meet(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"^{SECRET}: expected a secret in the environment of all nodes"):
        join()
