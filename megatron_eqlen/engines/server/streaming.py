"""Makes a server send routes and versions of the weights with a request's tokens (vLLM 0.32).

vLLM sends both with the last tokens only. An aborted or lost request never gets those, and a harvest aborts
most of its requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.output_processor import RequestState


def stream() -> None:
    """Make this process, a server's first, send routes and versions with the tokens that they belong to."""
    new_completion, add = RequestState._new_completion_output, RequestOutput.add

    def with_rows(self: RequestState, *args: Any, **kwargs: Any) -> CompletionOutput:
        chunks, self.routed_experts_chunks = self.routed_experts_chunks, []
        output = new_completion(self, *args, **kwargs)
        output.routed_experts = np.concatenate(chunks) if chunks else None
        output.weight_versions = self._weight_version_spans()
        return output

    def add_rows(self: RequestOutput, next_output: RequestOutput, aggregate: bool) -> None:
        """Join the rows of outputs that nobody has fetched yet."""
        rows = [out.routed_experts for output in (self, next_output) for out in output.outputs]
        add(self, next_output, aggregate)
        if aggregate and (found := [routes for routes in rows if routes is not None]):
            (output,) = self.outputs
            output.routed_experts = np.concatenate(found)

    RequestState._new_completion_output = with_rows
    RequestOutput.add = add_rows
