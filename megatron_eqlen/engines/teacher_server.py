"""Teacher of on-policy distillation on a vLLM server: it fills a column of the token table.

    scored rollout ──each line, from the prompt──► /v1/completions, prompt_logprobs ──► column ``teacher``

The context of a token is its whole path. The first line that holds a shared part gives its log-probs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.engines.replica import HttpLoop, Replica, ReplicaError, at_most, words
from megatron_eqlen.hf.tokenizer import Tokenizer
from megatron_eqlen.processes.failures import PAUSES
from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.tokens import TEACHER
from megatron_eqlen.types import Rollout, tokens_along

KEY = "TEACHER_API_KEY"
"""Environment variable: the secret of the teacher's server; not that of the rollout servers."""
AT_ONCE = 64
"""Lines of a rank that are with the server at the same time."""
COMPARED = 256
"""Tokens of the vocabulary whose texts ``check`` compares, besides special ones and tags."""


class TeacherServer:
    """The server at ``url``, with ``patience`` seconds for an answer. Raises EngineError if it is no vLLM."""

    def __init__(self, url: str, patience: float) -> None:
        key = os.environ.get(KEY)
        self._io = HttpLoop({"Authorization": f"Bearer {key}"} if key else {})
        self._server, self._patience = Replica(url.rstrip("/"), self._io), patience
        self._free = asyncio.Semaphore(AT_ONCE)
        self.close = self._io.close

    def check(self, tokenizer: Tokenizer, longest: int) -> None:
        """Try a path of ``longest`` tokens. Raise ValueError if the server tokenizes unlike ``tokenizer``."""
        sample = np.linspace(0, tokenizer.vocab_size - 1, COMPARED).astype(int)
        texts = [*map(tokenizer.decode, sample[:, None]), *tokenizer.special_tokens, *tokenizer.tags]
        wanted = {text: ids for text in texts if (ids := tokenizer.encode(text))}
        body = {"prompt": list(wanted), "add_special_tokens": False, "return_token_ids": True}
        answers = self._result(self._io.start(self._choices(body)))
        for (text, ids), choice in zip(wanted.items(), answers, strict=True):
            if choice["prompt_token_ids"] != ids:
                expected = f"the tokenizer of {tokenizer.folder}, which makes {ids} of {text!r}"
                found = f"one that makes {choice['prompt_token_ids']}"
                raise ValueError(f"teacher.url: {self._server.url}: expected {expected}, found {found}")
        # the longest path must fit into the server's context
        self._result(self._io.start(self._logprobs([tokenizer.vocab_size - 1] * longest)))

    def fill(self, rollouts: Iterable[Rollout]) -> None:
        """Give all parts that lack it the column ``teacher``."""
        # all lines are on their way before the first answer is awaited
        asked = []
        for rollout in rollouts:
            # lines hold every part, shared ones more than once
            for line in (rollout.line(line.last.number) for line in rollout.lines()):
                if any(TEACHER.name not in part.tokens for part in line):
                    path = [*rollout.prompt.token_ids, *tokens_along(line).tolist()]
                    asked.append((line, self._io.start(self._logprobs(path))))
        for line, answer in asked:
            logprobs = self._result(answer)
            # log-probs of the whole path but its first token: the line's are the last ones
            start = len(logprobs) - sum(len(part.tokens) for part in line)
            for part in line:
                end = start + len(part.tokens)
                if TEACHER.name not in part.tokens:
                    part.tokens = part.tokens.with_column(TEACHER.name, logprobs[start:end])
                start = end

    async def _logprobs(self, path: list[int]) -> np.ndarray:
        """Return [len(path) - 1], the log-probs of all tokens but the first."""
        async with self._free:
            (choice,) = await self._choices({"prompt": path, "prompt_logprobs": 0})
        told = zip(path[1:], choice["prompt_logprobs"][1:], strict=True)
        return np.array([at[str(token)]["logprob"] for token, at in told], TEACHER.dtype)

    async def _choices(self, body: dict[str, Any], attempt: int = 0) -> list[dict[str, Any]]:
        try:
            async with at_most(self._patience):
                return (await self._server.post("v1/completions", {"max_tokens": 1, **body}))["choices"]
        except ReplicaError:
            if attempt == len(PAUSES):
                raise
        await asyncio.sleep(PAUSES[attempt])
        return await self._choices(body, attempt + 1)

    def _result(self, answer: Any) -> Any:
        try:
            return answer.result()
        except (*ReplicaError, LookupError, TypeError) as error:
            expected = f"log-probs of prompts from vLLM's /v1/completions with the secret of {KEY}"
            found = f"{words(error)}; once it answers, the same command resumes"
            text = f"teacher.url: {self._server.url}: expected {expected}, found {found}"
            raise EngineError(text) from error
        finally:
            beat()
