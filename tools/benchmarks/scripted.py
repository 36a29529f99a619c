"""An engine that decodes nothing: every request gets one token a step at the price of making its delta; and
ranks that are not there."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]
from transformers import PreTrainedTokenizerFast

from megatron_eqlen.engines.protocol import Request
from megatron_eqlen.types import Delta, Metrics

VOCABULARY = 32768
EOS = 0
SIGMA = 0.8
"""Standard deviation of the logarithm of lengths."""
QUESTION = 300
"""Tokens of a question, less one."""
POOL = 1 << 16
"""Number of tokens that are drawn beforehand."""


@dataclass(slots=True)
class _Request:
    given: int
    """Number of tokens delivered."""
    length: int
    """Number of tokens until the request ends."""
    ends: bool
    """True if it ends with an end of sequence, else at its limit."""
    stride: int
    """Stride of its steps through the pool, odd: no two requests have the same tokens, which compression
    would find."""


@dataclass
class ScriptedEngine:
    """Response lengths are log-normal (``SIGMA``), a fork's given that it is longer than its trunk. Ids fall
    off as words do, masks are random.

    ``seconds`` is the processor time of its own work, so that the rest of its thread's can be told apart.
    """

    median: int
    prompt: int
    """Number of tokens of every prompt."""
    kept: int = 0
    """Number of tokens in each sampling mask; 0: none is recorded."""
    max_num_seqs: int = 256
    max_model_len: int = 1 << 20
    vocab_size: int = VOCABULARY
    policy_version: int = 0
    seconds: float = 0.0
    requests: dict[str, _Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        tokens = np.minimum(rng.zipf(1.3, POOL), VOCABULARY - 1)
        self.tokens = tokens.tolist()
        self.logprobs = (-rng.exponential(0.3, POOL)).astype(np.float32).tolist()
        self.masks = _masks(tokens, self.kept, rng) if self.kept else []

    def submit(self, request: Request) -> None:
        started = time.thread_time()
        trunk = len(request.token_ids) - self.prompt
        length = response_length(np.random.default_rng(request.seed), self.median, trunk) - trunk
        ends, stride = length <= request.max_tokens, 2 * (request.seed % POOL) + 1
        self.requests[request.request_id] = _Request(0, min(length, request.max_tokens), ends, stride)
        self.seconds += time.thread_time() - started

    def step(self) -> list[Delta]:
        started = time.thread_time()
        deltas = [self._delta(name, request) for name, request in self.requests.items()]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self.requests[delta.request_id]
        self.seconds += time.thread_time() - started
        return deltas

    def _delta(self, name: str, request: _Request) -> Delta:
        place = (request.given * request.stride) % POOL
        request.given += 1
        last = request.given == request.length
        ended = last and request.ends
        token = EOS if ended else self.tokens[place]
        columns: dict[str, Any] = {"logprobs": [self.logprobs[place]]}
        if self.kept:
            columns["kept"] = [(EOS,) if ended else self.masks[place]]
        reason = ("stop" if request.ends else "length") if last else None
        cached = 0 if request.given == 1 else None
        return Delta(name, [token], columns, reason, cached)

    def abort(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self.requests.pop(name, None)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def metrics(self) -> Metrics:
        return {}


def response_length(rng: np.random.Generator, median: int, longer_than: int) -> int:
    """Draw a log-normal length, conditional on being longer than ``longer_than``."""
    while True:
        draws = median * rng.lognormal(0.0, SIGMA, 1000)
        longer = draws[draws > longer_than + 1]
        if longer.size:
            return int(longer[0])
        median = int(median * 1.5) + 1


def _masks(tokens: np.ndarray, kept: int, rng: np.random.Generator) -> list[array[int]]:
    """Return for each token ``kept`` ids, ascending, one of them the token."""
    ids = np.sort(rng.integers(1, VOCABULARY - kept, (len(tokens), kept)), axis=1) + np.arange(kept)
    places = np.minimum((ids < tokens[:, None]).sum(axis=1), kept - 1)
    ids[np.arange(len(tokens)), places] = tokens
    return [array("i", row) for row in ids.tolist()]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer for the script's token ids, each a word of five letters or so, and questions."""
    words = {f" w{number}": number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token=" w1"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" w\d+"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=" w0")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {EOS}, "pad_token_id": 1}}')
    question = "".join(f" w{2 + number}" for number in range(QUESTION))
    rows = (json.dumps({"question": f" w{1 + number}{question}", "answer": "7"}) for number in range(1000))
    (folder / "questions.jsonl").write_text("\n".join(rows))


class ScriptedRanks(dist.ProcessGroup):
    """All ranks' process group, as rank 0 sees it: the other ranks answer from a script, and take no time.

    ``seconds`` is the processor time of the script.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # pyright: ignore[reportCallIssue] (its other constructor)
        self.answers: list[bytes] = []
        """Pickled object with which each rank answers a gather; none: as rank 0 does."""
        self.received = 0
        """Bytes received from single ranks."""
        self.seconds = 0.0

    @classmethod
    @contextmanager
    def world(cls, size: int) -> Iterator[ScriptedRanks]:
        """Make the default group of ``size`` ranks."""
        if "scripted" not in dist.Backend.backend_list:
            dist.Backend.register_backend("scripted", lambda *given: cls(given[2]), devices=["cpu"])
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("scripted", store=store, rank=0, world_size=size)
        try:
            yield cast(ScriptedRanks, dist.group.WORLD)
        finally:
            dist.destroy_process_group()

    def getBackendName(self) -> str:
        return "scripted"

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: object) -> dist.Work:
        started = time.process_time()
        for rank, output in enumerate(outputs[0]):
            if rank == 0 or not self.answers:
                output.copy_(inputs[0])
            elif output.dtype == torch.uint8:
                answer = torch.frombuffer(bytearray(self.answers[rank]), dtype=torch.uint8)
                output[: len(answer)].copy_(answer)
            else:
                output.fill_(len(self.answers[rank]))
        self.seconds += time.process_time() - started
        return _done()

    def broadcast(self, tensors: list[Tensor], _: object) -> dist.Work:
        return _done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return _done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        self.received += sum(tensor.zero_().nbytes for tensor in tensors)
        return _done()


def _done() -> dist.Work:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)
