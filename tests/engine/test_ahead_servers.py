"""Harvests ahead of training over real servers, with suspended rollouts: a sync that fails with requests in
flight, a STOP in the middle of an overlap, other numbers of servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_eqlen.engines.servers import ServerEngine
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run.step import Step
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.training.parking import Parked
from megatron_eqlen.types import TokenTree
from tests.kit.rollout_kit import folder, server_recipe, sync_as_started
from tests.pure.test_ahead import opened, world_of_one
from tests.pure.test_ahead_carried import Trained, check_record
from tests.pure.test_rollout_harvest import EOS, versions_of

__all__ = ["world_of_one"]


@dataclass
class Policy:
    """Weights of a version; a version in ``broken`` ends a sync half way."""

    version: int
    broken: bool = False
    memory = SimpleNamespace(weights=Parked(list))

    def compare(self, trees: list[TokenTree]) -> dict[str, Any]:
        return {}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        path = folder("qwen3_moe", self.version % 2) / "model.safetensors"
        for number, (name, weight) in enumerate(load_file(path).items()):
            yield name, weight[1:] if self.broken and number == 9 else weight


def recipe_for(urls: list[str]) -> Recipe:
    limits = {"staleness": 1, "carry_over": True, "tokens_per_step": 300, "max_staleness": 2}
    recipe = server_recipe(urls, **limits)
    data = recipe.data.model_copy(update={"prompts_per_step": 4})
    return recipe.model_copy(update={"data": data, "steps": 7})


def live(streams: Path, urls: list[str], trained: dict[int, Trained], until: int, broken: int = -1) -> None:
    """Run a process of a run: train up to step ``until``, unless the sync of version ``broken`` ends it."""
    recipe = recipe_for(urls)
    engine = ServerEngine(recipe.model.path, recipe.rollout, EOS, 200, syncs_first=True)
    with opened(recipe, engine, streams) as run:
        first = len(trained)
        if trained:
            run.go_to(trained[first - 1].position)
        run.update_weights(Policy(first))
        for number in range(first, until):
            step = run.collect(Step(number, number))
            run.update_weights(Policy(number + 1, broken=number + 1 == broken))
            trained[number] = Trained(number, number + 1, step.data_position, step.rollouts)


@pytest.fixture
def untouched(servers) -> Iterator[list[str]]:
    """Yield servers; when the test is over, their weights are those of version 0 again."""
    yield [*servers]
    recipe = recipe_for([*servers])
    engine = ServerEngine(recipe.model.path, recipe.rollout, EOS, 200, syncs_first=True)
    sync_as_started(engine)
    engine.close()


def test_a_run_whose_sync_fails_continues_with_one_server_and_then_with_two_again(untouched, tmp_path):
    trained: dict[int, Trained] = {}
    with pytest.raises(ValueError, match="expected shape"):
        live(tmp_path, untouched, trained, 7, broken=3)
    assert [*trained] == [0, 1], "the step whose weights are not in force is not done"
    live(tmp_path, untouched[1:], trained, 4)
    live(tmp_path, untouched, trained, 7)
    found = check_record(tmp_path, trained, recipe_for(untouched))
    assert any(len(versions_of(rollout)) > 1 for rollout in found.ended.values()), (
        "weights changed under some"
    )
    for key, stream in found.ended.items():
        assert stream.kind == "equal_length"
        assert len(found.units[key]) == len(pairs_of(stream)), "each pair once"
