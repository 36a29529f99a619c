"""vLLM 0.32's ``/inference/v1/generate``: its events as deltas. vLLM counts a request's tokens under the
version of the weights in force (``weight_versions``), which changes only while it is paused."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_eqlen.engines.protocol import OURS, of_kept, split_path
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.tokens import KEPT, KEPT_LOGPROBS, Packed
from megatron_eqlen.types import Delta


def read_event(
    request_id: str,
    event: dict[str, Any],
    versions: Mapping[str, int],
    rollout: RolloutRecipe,
    stock: str,
    layers: Sequence[int] = (),
) -> Delta:
    """Return one server-sent event as a delta with the columns that ``rollout`` keeps.

    ``versions``: policy versions by vLLM's names for them. ``stock``: the name of vLLM's sampler there.
    ``layers``: layers whose routes are kept. Raises ConnectionError for tokens of other weights and for
    events of another shape than vLLM 0.32's.
    """
    path: dict[str, np.ndarray] = {}
    try:
        choice = event["choices"][0]
        reason = choice["finish_reason"]
        # an event without tokens has null in place of lists
        chosen = (choice["logprobs"] or {"content": []})["content"]
        tokens = choice["token_ids"] or []
        columns: dict[str, Any] = {"logprobs": [token["logprob"] for token in chosen]}
        if rollout.keep_sampling_mask:
            kept = choice["sampling_mask"] or []
            columns["kept"] = Packed.of(kept, KEPT)
        if rollout.center_scores:
            likeliest = [{of["token_id"]: of["logprob"] for of in token["top_logprobs"]} for token in chosen]
            columns["kept_logprobs"] = Packed.of(of_kept(kept, likeliest), KEPT_LOGPROBS)
        if layers and (encoded := choice["routed_experts"]) is not None:
            routes = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
            path["routes"], columns["routes"] = split_path(routes, len(tokens), layers)
        # vLLM's other reasons (`abort`, `error`): the rest of the track is submitted again
        finished = reason if reason in ("stop", "length", None) else "lost"
        # one token of another sampler is enough to name it
        sampler = stock if any(token["rank"] for token in chosen) else OURS
        sampled_by = versions_of(choice["weight_versions"], len(tokens), versions)
        return Delta(request_id, tokens, columns, finished, None, sampled_by, sampler, path)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"request {request_id}: expected vLLM 0.32's events, {error!r}") from error


def versions_of(spans: list[dict[str, Any]], count: int, versions: Mapping[str, int]) -> list[int]:
    """Return the policy versions of a request's last ``count`` tokens. ``spans``: version, start, end."""
    if not count:
        return []
    # a span counts from the request's first token, an event holds its last ones
    first = spans[-1]["end"] - count
    names = [span["version"] for span in spans for _ in range(max(span["start"], first), span["end"])]
    if unknown := set(names) - versions.keys():
        raise ConnectionError(f"expected tokens of weights {list(versions)[-1]!r}, found {unknown.pop()!r}")
    return [versions[name] for name in names]
