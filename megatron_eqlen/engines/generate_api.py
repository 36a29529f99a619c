"""vLLM 0.32's ``/inference/v1/generate``: its events as deltas.

vLLM counts each request's tokens under the version of the weights in force (``weight_versions``), which
changes only between ``/pause`` and ``/resume``.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_eqlen.engines.protocol import Delta, of_kept, sampler_of, split_path
from megatron_eqlen.recipe import RolloutRecipe


def read_event(
    request_id: str,
    event: dict[str, Any],
    versions: Mapping[str, int],
    rollout: RolloutRecipe,
    stock: str,
    layers: Sequence[int] = (),
) -> list[Delta]:
    """Return one server-sent event as deltas, one for each policy version that sampled some of its tokens,
    with the columns that ``rollout`` keeps.

    ``versions``: policy versions by vLLM's names for them. ``stock``: the name of vLLM's sampler in the
    server. ``layers``: layers whose routes are kept. Raises
    ConnectionError for tokens of other weights, and for an event of another shape than this version's.
    """
    try:
        choice = event["choices"][0]
        delta = _delta(request_id, choice, rollout, stock, layers)
        return by_version(delta, choice["weight_versions"], versions)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"request {request_id}: expected vLLM 0.32's events, {error!r}") from error


def by_version(delta: Delta, spans: list[dict[str, Any]], versions: Mapping[str, int]) -> list[Delta]:
    """Cut a delta where the weights that sampled its tokens change; the last piece has the finish reason.

    ``spans``: ``{"version", "start", "end"}`` of all tokens that the request has had up to the delta's last.
    """
    if not delta.token_ids:
        return [delta]
    first = spans[-1]["end"] - len(delta.token_ids)
    pieces = []
    for span in spans:
        if span["end"] <= first:
            continue
        if (name := span["version"]) not in versions:
            raise ConnectionError(f"expected tokens of weights {list(versions)[-1]!r}, found {name!r}")
        within = slice(max(span["start"] - first, 0), span["end"] - first)
        columns = {column: values[within] for column, values in delta.columns.items()}
        pieces.append(
            replace(
                delta,
                token_ids=delta.token_ids[within],
                columns=columns,
                finish_reason=None,
                path={},
                policy_version=versions[name],
            )
        )
    pieces[0].path, pieces[-1].finish_reason = delta.path, delta.finish_reason
    return pieces


def _delta(
    request_id: str, choice: dict[str, Any], rollout: RolloutRecipe, stock: str, layers: Sequence[int]
) -> Delta:
    reason = choice["finish_reason"]
    chosen = (choice["logprobs"] or {"content": []})["content"]
    tokens = choice["token_ids"] or []
    path: dict[str, np.ndarray] = {}
    columns: dict[str, Any] = {"logprobs": [token["logprob"] for token in chosen]}
    if rollout.keep_sampling_mask:
        columns["kept"] = choice["sampling_mask"] or []
    if rollout.center_scores:
        likeliest = [{of["token_id"]: of["logprob"] for of in token["top_logprobs"]} for token in chosen]
        columns["kept_logprobs"] = of_kept(columns["kept"], likeliest)
    if layers and (encoded := choice["routed_experts"]) is not None:
        routes = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        path["routes"], columns["routes"] = split_path(routes, len(tokens), layers)
    finished = reason if reason in ("stop", "length", None) else "lost"
    ranks = [token["rank"] or 0 for token in chosen]
    sampler = sampler_of(max(ranks, default=0), stock)
    return Delta(request_id, tokens, columns, finished, sampler=sampler, path=path)


def cached_tokens(event: dict[str, Any]) -> int | None:
    """Return the number of prompt tokens whose KV came from the prefix cache, as the last event reports
    it."""
    details = (event.get("usage") or {}).get("prompt_tokens_details")
    return details["cached_tokens"] if details else None
