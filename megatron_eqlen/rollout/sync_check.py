"""Detects syncs without effect: an engine that does not compute with the weights that it was sent.

    update_weights ─► digests of the weights            has an answer not changed by one bit since an earlier
    probe ──────────► each replica's answer             sync, though most weights have: that replica is stale

A probe is one short request, always the same, right after a sync (its prefix is shorter than a block of the
cache, so none of it is ever cached). Answers of different weights differ in some bit, answers of the same
weights do not: an engine that computes the same request alone rounds alike. So there is no threshold, and
steps that change nothing (no update, a learning rate of 0, bfloat16 weights that an update was too small for)
raise no alarm. The check finds syncs that have no effect at all on a replica. Where a part of the weights is
stale the answer changes; ``rollout.mismatch`` finds that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from megatron_eqlen.rollout.engine import EngineError

if TYPE_CHECKING:
    import torch

    from megatron_eqlen.rollout.engine import Answer

MOST = 0.5
"""Share of the tensors that must have changed. If one weight has, none of a probe's tokens may use it."""


class SyncError(EngineError):
    """An engine does not compute with the weights that it was sent."""


class _Probed(NamedTuple):
    answer: Answer
    sent: dict[str, torch.Tensor]


class SyncCheck:
    """Digests of the weights that were sent, and the earlier answers of the replicas.

    ``quantized``: the engine quantizes weights to fp8, which does not see every change.
    """

    def __init__(self, quantized: bool = False) -> None:
        self.quantized = quantized
        self.sent: dict[str, torch.Tensor] = {}
        self.probed: dict[str, _Probed] = {}
        """Newest answer of each replica, and the weights that had been sent when it first gave it."""
        self.due = False
        """True if weights were sent since the last probe."""

    def passing(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass a stream of weights through and keep their digests."""
        sent = {}
        for name, tensor in named_tensors:
            sent[name] = digest(quantize(tensor) if self.quantized else tensor)
            yield name, tensor
        self.sent, self.due = sent, True

    def stale(self, answers: Mapping[str, Answer]) -> list[str]:
        """Return the replicas whose answers show that they do not hold the weights that were sent."""
        self.due = False
        found = []
        for replica, answer in answers.items():
            before = self.probed.get(replica)
            if before is None or before.answer != answer:
                self.probed[replica] = _Probed(answer, self.sent)
            elif _changed(before.sent, self.sent) > MOST:
                found.append(replica)
        return found


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return [] int64 on the tensor's device: equal for equal tensors, and nearly always different for
    others. Values are compared in bfloat16, in which an engine may hold what a trainer has in float32."""
    import torch  # drivers of servers need none before the first sync

    bits = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).view(-1)
    if bits.storage_offset() % 4:  # part of a buffer: int64 are read from whole multiples only
        bits = bits.clone()
    length = bits.numel() - bits.numel() % 4
    return bits[:length].view(torch.int64).sum() + bits[length:].sum(dtype=torch.int64)


def quantize(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a matrix in fp8, with a scale for each row; other tensors unchanged."""
    import torch

    if tensor.dim() < 2:
        return tensor
    values = tensor.detach().float()
    largest = values.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (values * (torch.finfo(torch.float8_e4m3fn).max / largest)).to(torch.float8_e4m3fn)


def _changed(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> float:
    """Return share of the tensors that differ."""
    return sum(bool(now[name] != before[name]) for name in now) / max(len(now), 1)
