"""Protocols of an inference engine: ``Decoder`` for harvests, ``Engine`` for training.

    submit ──► (the engine decodes many requests at once) ──► step ──► [Delta, ...]

An engine takes token ids and gives token ids, in any chunks and any order relative to other requests: the
harvester depends on positions only. Weights come in as a stream of Hugging Face names; every completion
belongs to the ``policy_version`` of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from megatron_eqlen.processes.failures import ExpectedError
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.types import Delta, Metrics, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


SEED = "eqlen_seed"
"""Key in a request's ``extra_args`` that holds its seed for our sampler. For its own ``seed`` vLLM V1
makes a torch generator and rewinds it in a prefill of several steps, which fails before a first draw."""
OURS, STOCK = SAMPLERS = ("eqlen", "vLLM V2")
"""Samplers whose tokens can be trained: ours on CPUs, that of vLLM's V2 model runner on GPUs. Both draw token
t of a path from its seed and t, and give its log-prob under the distribution that it was drawn from. Ours
leaves a token's rank at 0, which vLLM's never does."""


def sampling_params(rollout: RolloutRecipe, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """Return the recipe's sampling as ``SamplingParams`` take it, without what differs between requests.
    Temperature 0 (greedy) samples from one token, which works the same in every sampler."""
    return {
        "temperature": rollout.temperature or 1.0,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0) if rollout.temperature else 1,
        "min_p": rollout.min_p,
        "stop_token_ids": sorted(eos_token_ids),
        # vLLM counts the sampled token among them
        "logprobs": rollout.top_k + 1 if rollout.center_scores else 0,
        "detokenize": False,
    }


def of_kept(kept: Sequence[Sequence[int]], known: Iterable[Mapping[int, float]]) -> list[list[float]]:
    """Return the log-probs of the ``kept`` ids of each token. ``known``: those of the likeliest; an id that
    is missing there ties with the least likely kept one."""
    found: list[list[float]] = []
    for ids, of in zip(kept, known, strict=True):
        least = min((of[token] for token in ids if token in of), default=0.0)
        found.append([of.get(token, least) for token in ids])
    return found


def seeded(seed: int, sampler: str) -> dict[str, Any]:
    """Return the sampling parameters that fix a request's draws."""
    return {"seed": seed} if sampler == STOCK else {"extra_args": {SEED: seed}}


class EngineError(ExpectedError):
    """An engine died, hangs, or broke the protocol; tokens harvested before stay recorded."""


class Request(NamedTuple):
    """A completion of ``token_ids`` that is asked for. Requests whose ids agree up to the last ``/`` share a
    prefix."""

    request_id: str
    token_ids: list[int]
    max_tokens: int
    seed: int
    """Token t of the path is drawn from ``(seed, t)``, so an interrupted request that is submitted again with
    the tokens it had gets the same continuation."""
    path_rows: int = 0
    """The first delta brings the columns of the path (``Column.of_path``) of so many tokens at its end."""

    @property
    def path_start(self) -> int:
        """First position whose routes the request brings; the last row is the first new token's."""
        return len(self.token_ids) - 1 - self.path_rows


class Decoder(Protocol):
    """The part of an engine that a harvest uses: completions."""

    policy_version: int
    """Version of the weights in use: the number of optimizer steps that made them."""
    max_model_len: int
    """Longest prompt + completion, in tokens."""
    vocab_size: int
    """Token ids are below this."""

    @property
    def max_num_seqs(self) -> int:
        """Requests decoded at once; more wait in the engine's queue."""
        ...

    def submit(self, request: Request) -> None:
        """Start a completion; ``harvest`` has checked that it fits. Raises EngineError if the weights are not
        loaded."""

    def step(self) -> list[Delta]:
        """Decode further and return the new tokens (possibly none). Raises EngineError."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown or finished ones are ignored."""

    def metrics(self) -> Metrics:
        """Counters since the last call, named ``engine/...``."""
        ...


class Engine(Decoder, Protocol):
    """An engine with weights and memory that training manages."""

    def sample_as(self, rollout: RolloutRecipe) -> None:
        """Sample requests that are submitted later by this section of a recipe."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load every weight of the model, by Hugging Face name; no later request uses keys and values cached
        before. Unfinished requests, allowed with ``rollout.staleness``, continue under the new weights.
        Raises ValueError for unknown, missing or misshapen weights; the next update must then succeed."""

    def probe(self) -> list[TokenTree]:
        """Return a line that each server in use samples now, as a tree with its name; [] in this process."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory to training; weights are dropped."""

    def wake(self) -> None:
        """Take memory back; ``update_weights`` must follow before the next ``submit``."""

    def close(self) -> None: ...


def split_path(rows: np.ndarray, tokens: int, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Split vLLM's routes ([positions, layers of the model, top_k]) of a request with ``tokens`` new tokens
    into those of its path before and those of these tokens; keep these layers."""
    rows = rows[:, layers]
    before = max(len(rows) - tokens, 0)
    return rows[:before], rows[before:]


class IdleEngine:
    """Engine of a rank that drives none: it takes part in weight syncs and is never asked for tokens."""

    max_num_seqs = 1
    vocab_size = policy_version = 0

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def submit(self, request: Request) -> None:
        raise AssertionError(f"request {request.request_id}: another rank drives the engine")

    def step(self) -> list[Delta]:
        return []

    def abort(self, request_ids: Iterable[str]) -> None:
        assert not list(request_ids)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        for _ in named_tensors:  # exporting weights is collective: every rank must take part
            pass
        self.policy_version = policy_version

    def probe(self) -> list[TokenTree]:
        return []

    def sample_as(self, rollout: RolloutRecipe) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

    def metrics(self) -> Metrics:
        return {}
