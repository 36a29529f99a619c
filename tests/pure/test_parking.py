"""Parked memory: free while parked, and the same numbers at the same places afterwards."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.training.parking import Parked, storage_bytes
from tests.kit.marks import examples

DTYPES = (torch.float32, torch.bfloat16, torch.int16)


@st.composite
def buffers_with_views(draw):
    """Draw [(a buffer, some of its views)], as Megatron makes parameters of its buffers."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 40))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)) + number)
        buffer = torch.randint(-99, 99, (length,), generator=generator).to(draw(st.sampled_from(DTYPES)))
        cuts = draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=4))
        found.append((buffer, [buffer[min(cut) : max(cut)] for cut in cuts]))
    return found


@examples(60)
@given(buffers_with_views(), st.booleans(), st.lists(st.sampled_from("prRw"), max_size=12))
def test_any_order_of_calls_leaves_the_numbers_and_what_shares_them(buffers, views_too, calls):
    """p: park or unpark, whichever is next; r: read; R: be resident for a while; w: write through a view."""
    tensors = [buffer for buffer, _ in buffers]
    if views_too:
        tensors += [view for _, views in buffers for view in views]
    whole = storage_bytes(tensors)
    expected = [tensor.clone() for tensor in tensors]
    parked = Parked(lambda: tensors)

    def check() -> None:
        for tensor, numbers in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, numbers)

    for call in [*calls, *("p" if calls.count("p") % 2 else "")]:
        if call == "p":
            parked.unpark() if parked.away else parked.park()
        elif call == "w" and not parked.away:
            for buffer, _ in buffers:
                buffer[-1] += 1
            expected = [tensor.clone() for tensor in tensors]
        elif call in "rR":
            with parked.readable() if call == "r" else parked.resident():
                check()
        assert storage_bytes(tensors) == (0 if parked.away else whole)
    check()
    for buffer, views in buffers:
        buffer += 1
        for view in views:
            first = view.storage_offset()
            assert torch.equal(view, buffer[first : first + len(view)]), "views are still views"


def test_numbers_that_do_not_matter_take_no_memory_and_come_back_as_zeros():
    gradients = torch.ones(8)
    parked = Parked(lambda: [gradients], keep=False)
    parked.park()
    assert storage_bytes([gradients]) == 0
    parked.unpark()
    assert torch.equal(gradients, torch.zeros(8))


def test_tensors_that_appear_later_are_parked_with_the_next_parking():
    tensors = [torch.ones(3)]
    parked = Parked(lambda: tensors)
    parked.park()
    parked.unpark()
    tensors = [torch.full((4,), 2.0), torch.full((5,), 3.0)]
    parked.park()
    assert storage_bytes(tensors) == 0
    parked.unpark()
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4, [3.0] * 5]
