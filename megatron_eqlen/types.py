"""Records that cross stages.

    Prompt ──harvest──► Rollout ──score──► (grades filled in) ──objective──► TokenTree ──pack──► Row

After scoring, a rank holds the arrays of the rollouts that it graded; of all others it has skeletons, the
same records with ``Placeholder`` in place of arrays. Decisions that need only lengths and grades are the same
on all ranks.

A worked example, used throughout the tests. The prompt is ``q = [1, 2]`` and 9 ends a response::

    track 1:  5 9                    track 2:  6 7 8 9

    A_1 = [5, 9]  B_1 = [6, 7]       the shorter track ended at 2, so both sides are 2 long
    a third track forks off after q + B_1 and gives  4 4 9;  track 2 has [8, 9] there
    A_2 = [8, 9]  B_2 = [4, 4]       B_2 is the trunk now; the stream continues after q + B_1 + B_2

The trunk is ``q B_1 B_2 ...``; every ``A_i`` is a leaf that forks off where ``B_i`` starts. As a token tree:
the root holds ``q``; ``A_1`` and ``B_1`` are its children; ``A_2`` and ``B_2`` are children of ``B_1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, NoReturn, cast

import numpy as np

TokenIds = np.ndarray
"""[L] int32, one-dimensional and read-only: segments of one path may share memory. Constructors accept any
sequence of integers."""

Logprobs = np.ndarray
"""[L] float32, like ``TokenIds``; the engine computes them in this precision."""

Routes = np.ndarray
"""[L, moe_layers, top_k] of ``route_dtype``: the experts that each MoE layer chose, in the model's order of
layers, without dense layers. Row i belongs to label i: the choice for the prediction of token i, at the
position whose input is the preceding token on its path. L tokens therefore have L rows wherever their path
forks, and a prompt ``q``, whose first token is not predicted, has ``len(q) - 1``."""

FinishReason = Literal["stop", "length"]
"""``stop``: the last token is in the end-of-sequence set. ``length``: the path reached its limit."""

Outcome = Literal["both_ended", "truncated", "max_pairs", "budget"]
"""Reason why a stream is complete: both tracks ended at one position; no track can end any more;
``max_pairs`` were harvested (the survivor was finished alone); the step's budget ran out."""

Suspended = Literal["suspended"]
"""Partial rollout: finished segments only; the next step resumes it (``rollout.carry_over``). Replaces an
outcome."""


Versions = tuple[tuple[int, int], ...]
"""Policy versions that sampled a piece of a path, as runs of tokens of one version: (first token, version) of
each run, starting with token 0. Nearly always one run; empty if the versions were not recorded."""


class _Arrays:
    """Equality for dataclasses with arrays."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(cast(np.ndarray, value), cast(np.ndarray, other))
    return value is other or bool(value == other)


@dataclass(frozen=True)
class Placeholder:
    """Placeholder for an array that was not read or that another rank holds: its length is known, its numbers
    are not."""

    length: int
    row: tuple[int, ...] = ()
    """``shape[1:]`` of routes; empty for other arrays."""
    dtype: str = ""
    """Dtype of routes, which depends on the model; empty for other arrays."""

    @classmethod
    def of(cls, array: np.ndarray) -> np.ndarray:
        """Return the placeholder for ``array`` in a skeleton, whose fields are annotated with the array
        types."""
        if isinstance(array, cls):
            return array
        known = cls(len(array), array.shape[1:], array.dtype.name) if array.ndim > 1 else cls(len(array))
        return cast(np.ndarray, known)

    def __len__(self) -> int:
        return self.length

    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, *self.row

    def __getitem__(self, part: object) -> Placeholder:
        if not isinstance(part, slice):
            self._refuse()
        return replace(self, length=len(range(self.length)[part]))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError(f"an array of {self.length} numbers was read where only its length is known")

    __array__ = __iter__ = _refuse


def _array(values: Any, dtype: type) -> np.ndarray:
    return cast(np.ndarray, values if isinstance(values, Placeholder) else np.asarray(values, dtype))


WIDEST_MASK = 255
"""Maximum number of ids in the sampling mask of a token."""


@dataclass(eq=False, slots=True)
class SamplingMask(_Arrays):
    """For each of L tokens, the ids that top-k, top-p and min-p kept; the token is among them."""

    ids: np.ndarray
    """[m] int32, ids of the first token, ascending, then of the second, ..."""
    counts: np.ndarray
    """[L] uint8, number of ``ids`` per token."""

    @classmethod
    def of(cls, kept: Iterable[Sequence[int]]) -> SamplingMask:
        """Make a mask from the kept ids of each token."""
        kept = list(kept)
        counts = np.fromiter(map(len, kept), np.uint8, len(kept))
        return cls(np.fromiter(chain.from_iterable(kept), np.int32, int(counts.sum())), counts)

    @classmethod
    def joined(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Join the masks of consecutive pieces of a path."""
        if len(masks) == 1:
            return masks[0]
        return cls(joined([mask.ids for mask in masks]), joined([mask.counts for mask in masks]))

    @classmethod
    def empty(cls, ids: int, tokens: int) -> SamplingMask:
        """Make a mask with room for ``ids`` kept ids of ``tokens`` tokens, to be filled."""
        return cls(np.empty(ids, np.int32), np.empty(tokens, np.uint8))

    def bare(self) -> SamplingMask:
        """Return the placeholder for this mask in a skeleton."""
        return SamplingMask(Placeholder.of(self.ids), Placeholder.of(self.counts))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Iterate over the ids of each token."""
        return iter(np.split(self.ids, np.cumsum(self.counts, dtype=np.int64)[:-1]) if len(self) else ())


def route_dtype(experts: int) -> np.dtype:
    """Return vLLM's type of routes (``RoutedExpertsCapturer``) for layers with ``experts`` experts."""
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return consecutive pieces as one array; a single piece is not copied."""
    if len(arrays) == 1:
        return arrays[0]
    for array in arrays:
        if isinstance(array, Placeholder):
            return cast(np.ndarray, replace(array, length=sum(map(len, arrays))))
    return np.concatenate(arrays)


def version_spans(runs: Sequence[tuple[int, int]], length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, version) of each of the runs of ``length`` tokens."""
    for number, (start, version) in enumerate(runs):
        yield start, runs[number + 1][0] if number + 1 < len(runs) else length, version


def versions_within(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Versions:
    """Return the versions of tokens ``start`` to ``stop`` of a path with these runs."""
    return tuple(
        (max(first - start, 0), version)
        for first, end, version in version_spans(runs, stop)
        if first < stop and start < end
    )


def joined_versions(pieces: Iterable[tuple[int, Versions]]) -> Versions:
    """Return the versions of consecutive pieces, each given with its length."""
    runs: list[tuple[int, int]] = []
    start = 0
    for length, versions in pieces:
        for first, version in versions:
            if not runs or runs[-1][1] != version:
                runs.append((start + first, version))
        start += length
    return tuple(runs)


def sampled_by(rollout: Rollout) -> set[int]:
    """Return the policy versions that sampled a rollout's tokens."""
    versions = {version for segment in rollout.segments() for _, version in segment.versions}
    return versions or {rollout.policy_version}


def _mask(kept: SamplingMask | Iterable[Sequence[int]] | None) -> SamplingMask | None:
    return kept if kept is None or isinstance(kept, SamplingMask) else SamplingMask.of(kept)


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine."""

    prompt_id: str
    """Unique in a run; names the source row, for example ``deepmath/train-00000.parquet#17``."""
    token_ids: list[int]
    """The chat-formatted prompt."""
    question: str
    grader: str
    """Grader of the answers: ``math``, ``code`` or ``rubric``."""
    gold: str
    """Reference for the grader: LaTeX or text for ``math``, a JSON of tests for ``code``."""
    source: str = ""
    """Name of the data source in the recipe (metrics are reported per source)."""
    number: int = 0
    """Number of prompts drawn before this prompt in the run (of problems before it in a benchmark): a step
    trains its prompts in this order, for any assignment to engine replicas."""


@dataclass(slots=True)
class Delta:
    """New tokens of one request since its last delta; plain lists, since they are few."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Natural log, in the recipe's ``rollout.logprobs_mode``, same length as ``token_ids``."""
    finish_reason: Literal["stop", "length", "lost"] | None = None
    """None: more will come. ``lost``: the engine gave up the request (a replica died); the tokens delivered
    so far are valid, and the caller submits the rest again."""
    sampling_mask: Sequence[Sequence[int]] | None = None
    """With ``rollout.keep_sampling_mask``: for each token the ids that were kept, ascending. ``array("i")``
    is fastest."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV came from the prefix cache; set in one of a request's deltas."""
    policy_version: int | None = None
    """Version of the weights that sampled these tokens. None: the engine's ``policy_version`` at delivery."""
    routes: Routes | None = None
    """With ``rollout.keep_routes``: one row per token."""
    prompt_routes: Routes | None = None
    """With a request's first tokens: the prompt's rows that the request asked for."""


@dataclass
class Grade:
    """Verifier's judgement of one ended response."""

    reward: float
    """Reward in [0, 1]."""
    verdict: str
    """``correct``, ``wrong``, ``no_answer``, ``unparseable``, ``timeout``, or a code verdict."""
    answer: str | None = None
    """Extracted answer, shortened to a line."""
    grader: str = ""
    """Name and version of the grader, for example ``math_verify-0.9.0``."""
    seconds: float = 0.0
    detail: str = ""
    """Details of the verdict, for example the first failing test of a program."""


@dataclass(eq=False)
class Segment(_Arrays):
    """New tokens of one track: a side of a pair, a whole completion, or a trunk's tail."""

    token_ids: TokenIds
    logprobs: Logprobs
    """The engine's log-probs of ``token_ids`` (rollout_logprobs), natural log, same length."""
    finish_reason: FinishReason | None = None
    """None if the track continued beyond this segment."""
    grade: Grade | None = None
    """Filled by scoring if ``finish_reason == "stop"``: the grade of the whole response that this segment
    ends (everything after the prompt on its path)."""
    sampling_mask: SamplingMask | None = None
    """Same length as ``token_ids``, with ``rollout.keep_sampling_mask``."""
    home: int | None = None
    """Rank that holds the arrays. None: every rank with the segment holds them."""
    routes: Routes | None = None
    """Same length as ``token_ids``, with ``rollout.keep_routes``."""
    versions: Versions = ()
    """Policy versions that sampled ``token_ids``."""
    carried: bool = False
    """True if the segment was final before this step began: an earlier step graded it, and trained it if its
    reward was final."""

    def __post_init__(self) -> None:
        self.token_ids = _array(self.token_ids, np.int32)
        self.logprobs = _array(self.logprobs, np.float32)
        self.sampling_mask = _mask(self.sampling_mask)

    def __len__(self) -> int:
        return len(self.token_ids)


NO_TOKENS = np.zeros(0, np.int32)


@dataclass
class Pair:
    """An equal-length pair: ``len(a) == len(b)``, both continuing the same prefix."""

    a: Segment
    """The side that ended (``finish_reason == "stop"``)."""
    b: Segment
    """The side that joined the trunk; ``stop`` too if both ended at this position."""


@dataclass(eq=False)
class Stream(_Arrays):
    """Rollout of one dual-track subgroup (2 of the G tracks)."""

    prompt: Prompt
    index: int
    """Index among the prompt's G/2 subgroups."""
    policy_version: int
    """Version of the engine's weights when the stream was complete: the number of optimizer steps behind
    them. Versions per token: ``Segment.versions``."""
    pairs: list[Pair]
    outcome: Outcome | Suspended
    tail: Segment | None = None
    """Tokens of the trunk's track after the last pair (the invalid suffix, never trained). If the track ended
    (``stop``), its grade still counts as an extension of every B."""
    prompt_routes: Routes | None = None
    """[len(prompt.token_ids) - 1, moe_layers, top_k], with ``rollout.keep_routes``."""

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id

    @property
    def suspended(self) -> bool:
        return self.outcome == "suspended"

    def trunk_token_ids(self, pairs: int) -> TokenIds:
        """Return the token ids of ``B_1 .. B_pairs``: the inherited prefix after the prompt."""
        return joined([NO_TOKENS, *(pair.b.token_ids for pair in self.pairs[:pairs])])

    def ended(self) -> Iterator[tuple[Segment, TokenIds]]:
        """Yield every segment that ends a response, with the whole response's token ids."""
        trunk = self.trunk_token_ids(len(self.pairs))
        end = 0
        for pair in self.pairs:
            yield pair.a, joined([trunk[:end], pair.a.token_ids])
            end += len(pair.b)
            if pair.b.finish_reason == "stop":
                yield pair.b, trunk[:end]
        if self.tail is not None and self.tail.finish_reason == "stop":
            yield self.tail, joined([trunk, self.tail.token_ids])

    def segments(self) -> Iterator[Segment]:
        for pair in self.pairs:
            yield pair.a
            yield pair.b
        if self.tail is not None:
            yield self.tail


@dataclass(eq=False)
class Group(_Arrays):
    """G independent completions of one prompt (``sampling: independent``)."""

    prompt: Prompt
    policy_version: int
    completions: list[Segment]
    index: int = 0
    """Always 0: a prompt has one group."""
    prompt_routes: Routes | None = None
    """[len(prompt.token_ids) - 1, moe_layers, top_k], with ``rollout.keep_routes``."""
    numbers: list[int] = field(default_factory=list)
    """Number of each completion among the G, ascending. Default: the indices in ``completions``."""
    suspended: bool = False
    """True for a partial rollout, with only the completions that have ended."""

    def __post_init__(self) -> None:
        self.numbers = self.numbers or list(range(len(self.completions)))

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id

    def ended(self) -> Iterator[tuple[Segment, TokenIds]]:
        """Yield every completion that ended by itself, with its token ids."""
        for completion in self.completions:
            if completion.finish_reason == "stop":
                yield completion, completion.token_ids

    def segments(self) -> Iterator[Segment]:
        yield from self.completions


@dataclass(eq=False)
class SampledTree(_Arrays):
    """Step-wise branching of one prompt (``sampling: tree``): every step that did not end a response was
    continued several times. Lists are aligned; a step comes after its parent."""

    prompt: Prompt
    policy_version: int
    steps: list[Segment]
    """Steps; ``finish_reason`` is None if the step was continued."""
    parents: list[int]
    """Index in ``steps`` of each step's parent, -1 for the prompt."""
    index: int = 0
    """Always 0: a prompt has one tree."""
    numbers: list[int] = field(default_factory=list)
    """Number of each step in the complete N-ary heap, which identifies it before all steps are known,
    ascending. Default: the indices in ``steps``."""
    suspended: bool = False
    """True for a partial rollout, with only the steps that have ended."""
    prompt_routes: Routes | None = None
    """[len(prompt.token_ids) - 1, moe_layers, top_k], with ``rollout.keep_routes``."""

    def __post_init__(self) -> None:
        self.numbers = self.numbers or list(range(len(self.steps)))

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id

    def path(self, step: int) -> list[Segment]:
        """Return the steps from the prompt down to ``step``; empty for -1."""
        return [*self.path(self.parents[step]), self.steps[step]] if step >= 0 else []

    def response(self, step: int) -> TokenIds:
        """Return the token ids from the end of the prompt to the end of a step."""
        return joined([NO_TOKENS, *(segment.token_ids for segment in self.path(step))])

    def ended(self) -> Iterator[tuple[Segment, TokenIds]]:
        """Yield every step that ends a response, with the whole response's token ids."""
        for number, step in enumerate(self.steps):
            if step.finish_reason == "stop":
                yield step, self.response(number)

    def segments(self) -> Iterator[Segment]:
        yield from self.steps


Rollout = Stream | Group | SampledTree

RolloutKey = tuple[str, int]
"""Identifier of a rollout: its prompt's id, and its number among the prompt's rollouts."""


def rollout_key(rollout: Rollout) -> RolloutKey:
    return rollout.prompt_id, rollout.index


def training_order(rollout: Rollout) -> tuple[int, int]:
    """Return the sort key that puts the rollouts of a step into the order in which they are trained."""
    return rollout.prompt.number, rollout.index


@dataclass(eq=False)
class Node(_Arrays):
    """Node of a token tree: ``token_ids`` continue the parent's path."""

    parent: int
    """Index of the parent in ``TokenTree.nodes``, -1 for the root; always before this node."""
    token_ids: TokenIds
    """Tokens of the node; the root holds the whole prompt (at least one token)."""
    advantage: float = 0.0
    weight: float = 0.0
    """Weight of every token of this node in the loss; it contains every 1/L, 1/N_k, 2/G and 1/P, so that the
    loss is a plain sum. 0: not supervised (context only)."""
    rollout_logprobs: Logprobs | None = None
    """Engine's log-probs, same length as ``token_ids``, if ``weight > 0``."""
    sampling_mask: SamplingMask | None = None
    """Same length as ``token_ids``: log-probs are normalised over these ids. None: over the vocabulary."""
    home: int | None = None
    """Rank that holds the arrays (see ``Segment.home``)."""
    routes: Routes | None = None
    """Same length as ``token_ids``, for the root one less. None: the trainer's routers choose."""
    versions: Versions = ()
    """Policy versions that sampled ``token_ids``."""

    def __post_init__(self) -> None:
        self.token_ids = _array(self.token_ids, np.int32)
        if self.rollout_logprobs is not None:
            self.rollout_logprobs = _array(self.rollout_logprobs, np.float32)
        self.sampling_mask = _mask(self.sampling_mask)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class TokenTree:
    """Prompt and everything that is trained after it; each generated token appears once."""

    name: str
    """Name for messages: the prompt's id and the stream's number."""
    nodes: list[Node]
    """``nodes[0]`` is the root."""


class WorstToken(NamedTuple):
    """Token of an update whose log-probs of trainer and engine differ most."""

    difference: float
    """|trainer - engine|, nats."""
    tree: str
    """``TokenTree.name``."""
    node: int
    """Index in ``TokenTree.nodes``."""
    token: int
    """Index in the node's tokens."""
    trainer: float
    """Trainer's log-prob."""
    engine: float

    def __str__(self) -> str:
        """Return the token's name for messages."""
        return (
            f"token {self.token} of node {self.node} of token tree {self.tree!r}: "
            f"log-prob {self.trainer:.3g} by the trainer, {self.engine:.3g} by the engine"
        )


@dataclass
class RowNode:
    """Place of a node in a row."""

    start: int
    length: int
    parent: int
    """Index in ``Row.nodes`` or -1."""
    depth: int
    """Number of ancestors."""
    position: int
    """``position_ids`` of its first input: the number of preceding tokens on its path."""


@dataclass
class Row:
    """One micro-batch: several trees (or parts of trees) in a fixed token budget of S positions.

    Nodes lie in depth-first order, longest child first. A node with labels ``y_1 .. y_L`` takes L positions
    whose inputs are (the token before the node, ``y_1 .. y_{L-1}``), so the first input of each child is its
    parent's last token, and a fork needs no special case. The root of a prompt ``q`` takes ``len(q) - 1``
    positions, unsupervised.

    Position k is visible to position q iff ``k <= q < visible_until[k]``.
    """

    input_ids: np.ndarray
    """[S] int64; padding at the end consists of one-token trees."""
    position_ids: np.ndarray
    """[S] int64, depth on the path."""
    labels: np.ndarray
    """[S] int64, the token that each position predicts."""
    visible_until: np.ndarray
    """[S] int64, end of the subtree of the position's node, exclusive."""
    segment_ids: np.ndarray
    """[S] int64, unique per supervised node of the whole batch, -1 where not supervised."""
    advantages: np.ndarray
    """[S] float64"""
    weights: np.ndarray
    """[S] float64, 0 where not supervised."""
    rollout_logprobs: np.ndarray
    """[S] float64, the engine's log-probs; 0 where not supervised."""
    versions: np.ndarray
    """[S] int64, policy version of the weights that sampled the label; -1 where not supervised or unknown."""
    nodes: list[RowNode]
    num_tokens: int
    """Positions in use; the rest up to S is padding."""
    old_logprobs: np.ndarray | None = None
    """[S] float64, the trainer's log-probs before the first update of this batch."""
    ref_logprobs: np.ndarray | None = None
    """[S] float64, the reference model's log-probs."""
    mask_ids: np.ndarray | None = None
    """[m] int64, the kept tokens of all supervised positions, concatenated. None: log-probs are normalised
    over the vocabulary."""
    mask_counts: np.ndarray | None = None
    """[n] int64, number of ``mask_ids`` for each of the n supervised positions."""
    routes: np.ndarray | None = None
    """[S, layers, top_k] int16, the experts of each position in the MoE layers of this rank; -1: the router
    chooses. None: the router chooses everywhere."""


Metrics = dict[str, float]
"""Flat names with a stage prefix: ``harvest/pairs_per_stream``, ``reward/mean``, ``loss/kl``."""
