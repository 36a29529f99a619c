"""A weight sync without effect is found on each replica; weights that do not change raise no alarm."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.rollout.sync_check import SyncCheck, digest, quantize

Weights = dict[str, torch.Tensor]


def random_weights(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{n}": torch.randn((5, n + 1), generator=generator, dtype=torch.float32).to(dtype) for n in range(8)
    }


class Replica:
    """A replica that answers with a function of its weights, in bfloat16."""

    def __init__(self) -> None:
        self.held = random_weights(99)

    def answer(self) -> tuple:
        held = [tensor.bfloat16().tolist() for tensor in self.held.values()]
        return (hash(str(held)),), (0.0,)


def sync(
    check: SyncCheck, weights: Weights, replicas: dict[str, Replica], lazy: tuple[str, ...] = ()
) -> list:
    """Return the stale replicas after a sync that has no effect on ``lazy`` ones."""
    sent = dict(check.passing(weights.items()))
    for name, replica in replicas.items():
        if name not in lazy:
            replica.held = sent
    return check.stale({name: replica.answer() for name, replica in replicas.items()})


@given(st.lists(st.tuples(st.sampled_from(["new", "same", "tiny"]), st.booleans()), max_size=8))
def test_a_replica_is_stale_where_it_holds_other_weights_than_were_sent(steps):
    """``tiny`` updates change float32 weights by less than bfloat16 can hold."""
    check, replicas = SyncCheck(), {"one": Replica(), "two": Replica()}
    weights = random_weights(0)
    assert sync(check, weights, replicas) == []
    for number, (update, fails) in enumerate(steps):
        if update == "new":
            weights = random_weights(number + 1)
        if update == "tiny":
            weights = {name: tensor * (1 + 1e-6) for name, tensor in weights.items()}
        lazy = ("two",) if fails else ()
        found = sync(check, weights, replicas, lazy)
        wrong = replicas["two"].answer() != replicas["one"].answer()
        assert found == (["two"] if wrong else [])


def test_one_changed_weight_of_many_is_no_alarm_and_many_steps_of_such_are():
    """The probe may not use the changed weight; a replica that always keeps the first weights is still
    found."""
    check, replica = SyncCheck(), {"r": Replica()}
    weights = random_weights(0)
    sync(check, weights, replica)
    found = []
    for name in weights:
        weights = weights | {name: weights[name] + 1}
        found.append(sync(check, weights, replica, lazy=("r",)))
    assert found == [[]] * 4 + [["r"]] * 4


def test_a_replica_that_was_away_is_not_compared_with_what_it_never_got():
    check, replicas = SyncCheck(), {"one": Replica(), "two": Replica()}
    sync(check, random_weights(0), replicas)
    assert sync(check, random_weights(1), {"one": replicas["one"]}) == []
    assert sync(check, random_weights(2), replicas) == []


def test_nothing_is_due_before_weights_were_sent_whole():
    check = SyncCheck()
    stream = check.passing(random_weights(0).items())
    next(stream)
    assert not check.due
    list(stream)
    assert check.due
    check.stale({})
    assert not check.due


@given(st.integers(1, 40), st.integers(0, 39), st.booleans())
def test_a_digest_sees_any_one_number_and_only_what_bfloat16_can_hold(size, at, turned):
    line = torch.linspace(-1, 1, 3 * size)
    tensor = line.view(3, size).t() if turned else line
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[at % changed.numel()] += 0.5
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(changed)
    assert digest(tensor) == digest(tensor.bfloat16())
    assert digest(torch.cat([changed[:1], tensor]).bfloat16()[1:]) == digest(tensor)


def test_a_change_that_fp8_does_not_see_is_no_alarm_with_a_quantized_engine():
    weights = random_weights(0)
    closer = {name: tensor * (1 - 0.01 * (tensor.abs() < 0.5)) for name, tensor in weights.items()}
    seen = {
        name: not torch.equal(quantize(weights[name]).float(), quantize(tensor).float())
        for name, tensor in closer.items()
    }
    assert sum(seen.values()) <= len(seen) / 2
    for quantized in (False, True):
        check, replica = SyncCheck(quantized), {"r": Replica()}
        assert sync(check, weights, replica) == []
        replica["r"].held = weights
        found = sync(check, closer, replica, lazy=("r",))
        assert found == ([] if quantized else ["r"])
    assert torch.equal(quantize(torch.zeros(2, 2)).float(), torch.zeros(2, 2))
