"""Find the parts of an objective by name or import path, and try those of a user's own before a run starts.

loss.advantage        rewards of a comparison unit -> advantages      advantages.py
loss.surrogate        log-probs and advantages -> loss of a token     surrogates.py
loss.loss_agg_mode    member of a unit -> weight of its tokens        aggregation.py
loss.baseline         rewards of a batch -> baseline of each token    token_baseline.py
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from megatron_eqlen.metrics import check
from megatron_eqlen.objectives.advantages import ADVANTAGES
from megatron_eqlen.objectives.aggregation import AGGREGATIONS, BatchSize, Member
from megatron_eqlen.objectives.surrogates import SURROGATES, SupervisedTokens, Surrogate, TokenMetrics
from megatron_eqlen.objectives.token_baseline import BASELINES, Span, checked_baselines
from megatron_eqlen.processes.failures import fault_of
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.recipe.plugins import is_import_path, load_object

if TYPE_CHECKING:
    import torch

PARTS: dict[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    "advantage": ("advantage", ADVANTAGES),
    "surrogate": ("surrogate", SURROGATES),
    "aggregation": ("loss_agg_mode", AGGREGATIONS),
    "baseline": ("baseline", BASELINES),
}
"""Field of ``Objective`` -> (key of ``loss``, built-in parts by name)."""
BUILT_IN = f"{__package__}."
"""Start of the module names of built-in parts."""


def named_parts(loss: LossRecipe) -> dict[str, Callable[..., Any]]:
    """Return the parts that the recipe names, by field of ``Objective``. Raises ValueError."""
    named = {field: (key, getattr(loss, key), table) for field, (key, table) in PARTS.items()}
    return {
        field: load_object(name, f"loss.{key}") if is_import_path(name) else table[name]
        for field, (key, name, table) in named.items()
        if name is not None
    }


def name_of(part: Callable[..., Any], table: Mapping[str, Callable[..., Any]]) -> str | None:
    """Return the name of a built-in part; None for a user's own."""
    return next((name for name, built_in in table.items() if built_in == part), None)


def described(part: Callable[..., Any]) -> str:
    """Return a part as text: its name, and the options that no key of ``loss`` shows."""
    name = getattr(part, "__name__", type(part).__name__)
    shown = {key: value for key, value in options(part).items() if key not in LossRecipe.model_fields}
    return f"{name}({', '.join(f'{key}={value}' for key, value in shown.items())})" if shown else name


def options(part: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a part: the fields of its dataclass; a function has none."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return {}
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def try_parts(parts: Mapping[str, Callable[..., Any]]) -> None:
    """Call each part of a user's own once, with few numbers. Raises ValueError for a part that cannot be
    called with its arguments, fails, changes them, or returns something else than is expected."""
    for field, part in parts.items():
        if not part.__module__.startswith(BUILT_IN):
            try:
                _TRIALS[field](part)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
                raise ValueError(f"{field} {described(part)}: {fault_of(error)}") from error


def checked_advantages(values: Iterable[Any], members: int, where: Callable[[], str]) -> list[float]:
    """Return ``values`` as floats. Raises ValueError unless they are ``members`` finite numbers."""
    try:
        floats = [*map(float, values)]
    except (TypeError, ValueError):
        floats = []
    if len(floats) != members or not all(map(math.isfinite, floats)):
        raise ValueError(f"{where()}: expected {members} finite advantages, found {values}")
    return floats


def checked_weight(weight: float, where: str) -> float:
    """Return the weight of a member's tokens if it is finite and not negative. Raises ValueError."""
    if not (isinstance(weight, Real) and 0 <= weight < math.inf):
        raise ValueError(f"{where}: expected a finite weight of at least 0, found {weight!r}")
    return weight


def checked_surrogate(surrogate: Surrogate, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
    """Return losses and metrics. Raises ValueError unless all are tensors of the tokens' shape."""
    where, result = f"surrogate {described(surrogate)}", surrogate(tokens)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
        raise ValueError(f"{where}: expected (losses, metrics), found a {type(result).__name__}")
    for name, values in {"losses": result[0], **result[1]}.items():
        shape = getattr(values, "shape", type(values).__name__)
        if shape != tokens.logprobs.shape:
            raise ValueError(f"{where}: {name}: expected a tensor [{len(tokens.logprobs)}], found {shape}")
    return result


def _check_call(part: Callable[..., Any], field: str, arguments: Sequence[str]) -> str:
    """Return the part's name for messages. Raises ValueError unless it can be called with the arguments."""
    where = f"{field} {described(part)}"
    if isinstance(part, type):
        raise ValueError(f"{where}: expected a function or an instance, found a class: name an instance")
    signature = inspect.signature(part)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        found = f"found the signature {signature}: {error}"
        raise ValueError(f"{where}: it is called with ({', '.join(arguments)}), {found}") from None
    return where


def _try_advantage(part: Callable[..., Any]) -> None:
    where = _check_call(part, "advantage", ("rewards", "lengths"))
    # equal rewards, too, of which some estimators divide by 0
    for rewards in ([1.0, 0.0], [1.0, 1.0]):
        given = [*rewards]
        checked_advantages(part(given, [3, 3]), 2, lambda of=rewards: f"{where} of rewards {of}")
        if given != rewards:
            raise ValueError(f"{where}: it changes the rewards {rewards} to {given}: expected a new list")


def _try_aggregation(part: Callable[..., Any]) -> None:
    where = _check_call(part, "aggregation", ("member", "batch"))
    member = Member(weight=0.25, length=4, prompt_id="p", alike=1, alike_tokens=4, lengths=(4, 6))
    size = BatchSize(tokens=16, tokens_of_prompt={"p": 16}, prompts=1, max_response_length=32)
    checked_weight(part(member, size), where)


def _try_surrogate(part: Callable[..., Any]) -> None:
    import torch

    from megatron_eqlen.objectives.segments import Segments

    where = _check_call(part, "surrogate", ("tokens",))
    # [6] log-probs whose ratios are large, small and 1, with advantages of each sign
    old = torch.tensor([-20.0, -1.1, -1.0, 0.0, -1.0, -0.9], dtype=torch.float64)
    logprobs = old.flip(0).requires_grad_()
    ones, advantages = torch.ones_like(old), torch.tensor([1.0, -1.0, 0.0] * 2, dtype=torch.float64)
    segments = Segments(torch.zeros_like(ones, dtype=torch.int64))
    tokens = SupervisedTokens(logprobs, old, advantages, ones, segments)
    losses, metrics = checked_surrogate(part, tokens)
    check(dict.fromkeys(metrics, 0.0))
    # those of built-in surrogates, too; the loss fills in others
    known = "own/", "ratio", "clip_", "vespo_"
    if not all(name.removeprefix("loss/").startswith(known) for name in metrics):
        raise ValueError(f"{where}: expected metrics named loss/own/..., found {', '.join(metrics)}")
    # a rank without trees has a row without tokens
    no_tokens = (values[:0] for values in (logprobs, old, advantages, ones))
    nothing = SupervisedTokens(*no_tokens, sequences=Segments(segments.number[:0]))
    if (found := [*checked_surrogate(part, nothing)[1]]) != [*metrics]:
        raise ValueError(f"{where}: expected metrics {[*metrics]} without tokens, too, found {found}")
    if not losses.requires_grad:
        raise ValueError(f"{where}: its losses do not depend on tokens.logprobs, so nothing would be trained")
    (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
    for name, values in {"losses": losses, "gradient": slopes, **metrics}.items():
        if not values.isfinite().all():
            given = f"log-ratios {tokens.log_ratio.detach()} and advantages {advantages}"
            raise ValueError(f"{where}: {name} not finite: {values.detach()} for {given}")


def _try_baseline(part: Callable[..., Any]) -> None:
    _check_call(part, "baseline", ("prompts", "limit"))
    spans = [Span(0, 2 + number, 0.5, float(number), (0, number), 0) for number in range(2)]
    checked_baselines(part, [spans, spans], 8)


_TRIALS = {
    "advantage": _try_advantage,
    "aggregation": _try_aggregation,
    "surrogate": _try_surrogate,
    "baseline": _try_baseline,
}
