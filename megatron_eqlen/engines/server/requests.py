"""Changes to vLLM 0.32's server, in its first process: limits of what a request asks, since what fails in a
worker ends the engine for all; routes and versions of the weights with a request's tokens; and HTTP that
keeps neither memory nor connections of clients without the secret."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from pydantic import TypeAdapter
from uvicorn.protocols.http.h11_impl import H11Protocol
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestState

from megatron_eqlen.engines.protocol import SEED
from megatron_eqlen.engines.weights.worker import TRANSFERS

UNUSED = {
    *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids"),
    *("prompt_logprob_token_ids", "thinking_token_budget", "repetition_detection", "trace_decode_token_ids"),
}
"""Sampling parameters that no run needs; some of them index weights or need a tokenizer."""
MOST: dict[str, int] = {"n": 64, "seed": 2**63 - 1}
"""Largest values of integers, where it is not 2**31 - 1."""


def check_requests() -> None:
    """Refuse, with status 400, what ``refuse_unfit`` or ``refuse_misshapen`` refuses, on every path."""
    process = InputProcessor.process_inputs

    def checked(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = process(self, *args, **kwargs)
        if request.sampling_params is not None:
            vocab_size = self.model_config.get_vocab_size()
            refuse_unfit(request.prompt_token_ids or [], request.sampling_params, vocab_size)
        return request

    InputProcessor.process_inputs = checked
    for call, field in (("update_weights", "update_info"), ("init_weight_transfer_engine", "init_info")):
        setattr(AsyncLLM, call, _with_checked(field, getattr(AsyncLLM, call)))


def _with_checked(field: str, call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def checked(self: AsyncLLM, request: Any) -> None:
        settings = self.vllm_config.weight_transfer_config
        assert settings is not None
        refuse_misshapen(field, getattr(request, field), getattr(TRANSFERS[settings.backend], f"{field}_cls"))
        await call(self, request)

    return checked


def refuse_misshapen(field: str, asked: dict[str, Any], shape: type) -> None:
    """Raise VLLMValidationError unless these are the arguments of the dataclass ``shape``."""
    try:
        TypeAdapter(shape).validate_python(asked)
        shape(**asked)
    except (TypeError, ValueError) as error:
        raise VLLMValidationError(f"{field}: {error}", parameter=field) from None


def refuse_unfit(token_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    """Raise VLLMValidationError, with the field, for numbers out of range and settings not served."""
    for name, ids in (("token_ids", token_ids), ("stop_token_ids", params.stop_token_ids or [])):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise _unfit(name, f"tokens of 0 to {vocab_size - 1}", wrong)
    # whatever the field: a number that a kernel cannot hold would end the engine
    for field in msgspec.structs.fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name in UNUSED and value:
            raise _unfit(field.name, "nothing: it is not served here", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise _unfit(field.name, "a finite number", value)
        most = MOST.get(field.name, (1 << 31) - 1)
        # -1 is vLLM's word for none, or for all
        if isinstance(value, int) and not -1 <= value <= most:
            raise _unfit(field.name, f"a number up to {most}", value)
    if params.seed is not None and params.seed < 0:
        raise _unfit("seed", "a number from 0", params.seed)
    own = params.extra_args or {}
    if other := own.keys() - {SEED}:
        raise _unfit(f"extra_args.{min(other)}", "nothing: it is not served here", own[min(other)])
    seed = own.get(SEED, 0)
    # a bool is an int, and no seed
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise _unfit(f"extra_args.{SEED}", "a number of 64 bits", seed)
    # our sampler divides by it
    if own and not params.temperature:
        raise _unfit("temperature", f"a number above 0 beside {SEED}", params.temperature)


def _unfit(field: str, expected: str, found: object) -> VLLMValidationError:
    return VLLMValidationError(f"{field}: expected {expected}, found {found!r:.100}", parameter=field)


def stream() -> None:
    """Send routes and versions with the tokens that they belong to. vLLM sends them with the last tokens,
    which an aborted or lost request never gets, and a harvest aborts most of its requests."""
    new_completion, add = RequestState._new_completion_output, RequestOutput.add

    def with_rows(self: RequestState, *args: Any, **kwargs: Any) -> CompletionOutput:
        # rows since the last output; vLLM would keep them for the last one
        chunks, self.routed_experts_chunks = self.routed_experts_chunks, []
        output = new_completion(self, *args, **kwargs)
        output.routed_experts = np.concatenate(chunks) if chunks else None
        output.weight_versions = self._weight_version_spans()
        return output

    def add_rows(self: RequestOutput, next_output: RequestOutput, aggregate: bool) -> None:
        """Join the rows of outputs that nobody has fetched yet."""
        # taken before the outputs are joined: vLLM then replaces the earlier rows by the later
        rows = defaultdict[int, list[np.ndarray]](list)
        for out in (*self.outputs, *next_output.outputs):
            if out.routed_experts is not None:
                rows[out.index].append(out.routed_experts)
        add(self, next_output, aggregate)
        for out in self.outputs if aggregate else ():
            if out.index in rows:
                out.routed_experts = np.concatenate(rows[out.index])

    RequestState._new_completion_output = with_rows
    RequestOutput.add = add_rows


SILENCE = 30.0
"""Seconds in which a connection must bring the head of its request."""


class Impatient(H11Protocol):
    """uvicorn's HTTP that bounds a head's length, as its ``httptools`` does not, and here its time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.loop.call_later(SILENCE, self.end_silence)

    def end_silence(self) -> None:
        if self.cycle is None:
            self.transport.close()


SETTINGS: dict[str, Any] = {"http": Impatient, "ws": "none", "headers": [("connection", "close")]}
"""uvicorn's, for one request a connection and no websockets."""
