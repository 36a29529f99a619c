"""Records that cross stages.

    Prompt ──harvest──► Rollout ──score──► (grades filled in) ──objective──► TokenTree ──pack──► Row

After scoring, a rank holds the tokens of the rollouts that it graded; of all others it has skeletons, the
same records with bare tables (``Tokens.bare``). Decisions by lengths and grades alone are equal on all ranks.

A worked example, used throughout the tests. The prompt is ``q = [1, 2]`` and 9 ends a response::

    track 1:  5 9                    track 2:  6 7 8 9

    A_1 = [5, 9]  B_1 = [6, 7]       the shorter track ended at 2, so both sides are 2 long
    a third track forks off after q + B_1 and gives  4 4 9;  track 2 has [8, 9] there
    A_2 = [8, 9]  B_2 = [4, 4]       B_2 is the trunk now; the stream continues after q + B_1 + B_2

The trunk is ``q B_1 B_2 ...``; every ``A_i`` is a leaf that forks off where ``B_i`` starts. As a token tree:
the root holds ``q``; ``A_1`` and ``B_1`` are its children; ``A_2`` and ``B_2`` are children of ``B_1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from megatron_eqlen.tokens import COLUMNS, TokenIds, Tokens, Values, join

FinishReason = Literal["stop", "length"]
"""``stop``: the last token is in the end-of-sequence set. ``length``: the path reached its limit."""

Outcome = Literal["complete", "both_ended", "truncated", "max_pairs", "budget", "suspended"]
"""State in which a step left a rollout. ``complete``: all its tracks ended. Of streams: ``both_ended`` at one
position; ``truncated``, no track can end any more; ``max_pairs`` were harvested, and the survivor finished
alone. ``budget``: the step's ran out. ``suspended``: finished parts only; the next step resumes it."""


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine."""

    prompt_id: str
    """Unique in a run; names the source row, for example ``deepmath/train-00000.parquet#17``."""
    token_ids: list[int]
    """The chat-formatted prompt."""
    question: str
    grader: str
    """Grader of the answers: ``math``, ``code``, or an import path."""
    gold: str
    """Reference for the grader: LaTeX or text for ``math``, a JSON of tests for ``code``; for a reward
    function also columns of its file (``rewards.functions.reference``)."""
    source: str = ""
    """Name of the data source in the recipe (metrics are reported per source)."""
    number: int = 0
    """Number of prompts drawn before it in the run, the order of training (or of problems in a benchmark)."""


@dataclass(frozen=True)
class Demonstration(Prompt):
    """Prompt with the response that supervised training imitates."""

    response: Tokens = field(default_factory=lambda: Tokens.of([]))
    """Tokens of all turns after the prompt; those that are not the assistant's are ``given``."""


@dataclass(slots=True)
class Delta:
    """New tokens of one request since its last delta; plain lists, since they are few."""

    request_id: str
    token_ids: list[int]
    columns: Mapping[str, Any]
    """Values of other columns (``tokens.COLUMNS``, always the same, ``logprobs`` among them) for each token:
    lists of numbers, ragged ones as sequences (``tokens.Packed`` is fastest), or [n, ...] arrays."""
    finish_reason: Literal["stop", "length", "lost"] | None = None
    """None: more will come. ``lost``: the engine gave up the request (a replica died); its tokens so far are
    valid, and the caller submits the rest again."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV came from the prefix cache; set in one of a request's deltas."""
    policy_version: int | list[int] | None = None
    """Version of the weights that sampled these tokens, or of each; None: the engine's at delivery."""
    sampler: str = "eqlen"
    """Sampler that drew these tokens (``engines.protocol.SAMPLERS``)."""
    path: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """With a request's first tokens: columns of its path that the request asked for (``path_rows``)."""


UNSCORED = "unscored"


@dataclass
class Grade:
    """Verifier's judgement of one ended response."""

    reward: float
    """Any finite number; built-in graders give 0 to 1. A truncated response counts as 0."""
    verdict: str
    """``correct``, ``wrong``, ``no_answer``, ``unparseable``, ``timeout``, ``scored``, ``unscored``, ..."""
    answer: str | None = None
    """Extracted answer, shortened to a line."""
    grader: str = ""
    """Name and version of the grader, for example ``math_verify-0.9.0``."""
    seconds: float = 0.0
    detail: str = ""
    """Details of the verdict, for example the first failing test of a program."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named rewards, of which ``reward`` is the sum that ``reward.weights`` weighs; empty without names."""

    def __post_init__(self) -> None:
        # squares are summed, in float32 too
        for name, number in (*self.rewards.items(), ("a reward", self.reward)):
            if not abs(number) <= 1e15:
                raise ValueError(f"{self.grader}: expected {name} up to 1e15, got {number}")
        # a grader of a user's own may give numbers of NumPy or torch, which records and logs do not take
        self.reward, self.rewards = float(self.reward), {n: float(r) for n, r in self.rewards.items()}
        self.answer = self.answer if self.answer is None else str(self.answer)
        self.verdict, self.detail = str(self.verdict), str(self.detail or "")
        self.seconds = float(self.seconds)

    @classmethod
    def unscored(cls, cause: object) -> Grade:
        """Return the grade of a response without a reward: its grader or environment failed, or was late."""
        return cls(0.0, UNSCORED, detail=str(cause))


@dataclass
class Part:
    """New tokens of one track, as a part of its rollout."""

    tokens: Tokens
    """Bare on ranks other than ``home``."""
    finish_reason: FinishReason | None = None
    """None if the track continued beyond this part."""
    grade: Grade | None = None
    """Filled by scoring if ``finish_reason == "stop"``: the grade of the response that this part ends."""
    role: str = "completion"
    """Role in its sampling kind: ``completion``; ``step``; of a stream ``a``, the side of a pair that ended,
    ``b``, the side that joined the trunk, or ``tail``."""
    number: int = 0
    """Identifies the part in its rollout, whatever the order of becoming final; above its parent's."""
    parent: int = -1
    """Number of the part that this one continues, -1 for the prompt."""
    home: int | None = None
    """Rank that holds the values. None: every rank with the part holds them."""
    carried: bool = False
    """True if the part was final before this step began: an earlier step graded it."""

    def __len__(self) -> int:
        """Return the number of generated tokens; ``len(tokens)`` counts those of an environment, too."""
        return self.tokens.generated

    @property
    def token_ids(self) -> TokenIds:
        return self.tokens.token_ids


NO_TOKENS = np.zeros(0, np.int32)


def line_of(parts: Mapping[int, Part], number: int) -> list[Part]:
    """Return the parts from the prompt down to part ``number``; none for -1. ``parts``: by number."""
    line: list[Part] = []
    while number >= 0:
        line.append(parts[number])
        number = line[-1].parent
    return line[::-1]


def tokens_along(line: Iterable[Part]) -> TokenIds:
    """Return the token ids of consecutive parts; a single part is not copied."""
    return join([NO_TOKENS, *(part.token_ids for part in line)])


def last_turn(line: Sequence[Part]) -> TokenIds:
    """Return the token ids of the policy's turn since an environment's last token, at the end of a line: all
    of the line without an environment, or in skeletons."""
    token_ids = tokens_along(line)
    if any(len(part) < len(part.tokens) and not part.tokens.is_bare for part in line):
        answers = np.flatnonzero(np.concatenate([part.tokens.is_answer for part in line]))
        return token_ids[int(answers.max(initial=-1)) + 1 :]
    return token_ids


class Line(NamedTuple):
    """A line of a rollout, from the prompt down to a part that no part continues, as a sample of the policy:
    lines that share a beginning are not independent, and their lengths may decide which there are."""

    weight: float
    """The weights of a rollout add up to 1; a mean over its lines with these weights is unbiased."""
    length: int
    """Tokens."""
    last: Part


@dataclass
class Rollout:
    """Tree of parts that was sampled for one prompt. Each part continues another one, or the prompt. A group
    of independent completions is a tree of depth 1. A stream of equal-length pairs is a caterpillar: both
    sides of a pair, and the tail, continue the B side before."""

    prompt: Prompt
    index: int
    """Index among the prompt's rollouts."""
    kind: str
    """Sampling kind that made it (``Recipe.sampling``)."""
    policy_version: int
    """Version of the engine's weights when it was complete: the number of optimizer steps behind them."""
    parts: Sequence[Part]
    """In the order of their numbers, so each comes after its parent; given in any order."""
    outcome: Outcome = "complete"
    prompt_columns: Tokens | None = None
    """Columns of the prompt's tokens besides their ids, where any are kept."""

    def __post_init__(self) -> None:
        self.parts = tuple(sorted(self.parts, key=lambda part: part.number))

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id

    @property
    def key(self) -> RolloutKey:
        return self.prompt.prompt_id, self.index

    @property
    def home(self) -> int | None:
        """Rank that holds the values of its parts (see ``Part.home``)."""
        return self.parts[0].home if self.parts else None

    def is_at(self, rank: int | None) -> bool:
        """Return True on the home, on rank 0 for a rollout without parts; None: this rank stands for all."""
        return rank is None or rank == (self.home or 0)

    @property
    def suspended(self) -> bool:
        return self.outcome == "suspended"

    def with_role(self, role: str) -> list[Part]:
        return [part for part in self.parts if part.role == role]

    def line(self, number: int) -> list[Part]:
        return line_of({part.number: part for part in self.parts}, number)

    def ended(self) -> Iterator[tuple[Part, TokenIds]]:
        """Yield each part that ends a response, with the token ids of the response, or of its last turn."""
        by_number = {part.number: part for part in self.parts}
        for part in self.parts:
            if part.finish_reason == "stop":
                yield part, last_turn(line_of(by_number, part.number))

    def along[T](self, at_prompt: T, of: Callable[[T, Part], T]) -> dict[int, T]:
        """Return a value of each part, by number, from its parent's; ``at_prompt`` for -1."""
        values = {-1: at_prompt}
        for part in self.parts:
            values[part.number] = of(values[part.parent], part)
        return values

    def unscored(self) -> list[Part]:
        """Return the parts that end responses without a reward."""
        return [part for part in self.parts if part.grade and part.grade.verdict == UNSCORED]

    def ends(self) -> dict[int, int]:
        """Return the generated tokens from the prompt to each part's end, by the part's number; 0 for -1."""
        return self.along(0, lambda end, part: end + len(part))

    def weights(self) -> dict[int, float]:
        """Return the weight of each part in its rollout, by its number; 1 for -1, the prompt. Parts that
        continue the same part share its weight equally: the policy might have continued it with each."""
        siblings = Counter(part.parent for part in self.parts)
        return self.along(1.0, lambda weight, part: weight / siblings[part.parent])

    def lines(self) -> Iterator[Line]:
        inner = {part.parent for part in self.parts}
        weights, ends = self.weights(), self.ends()
        for part in self.parts:
            if part.number not in inner:
                yield Line(weights[part.number], ends[part.number], part)

    def skeleton(self) -> Rollout:
        """Return the rollout with bare tables: lengths, grades and finish reasons, a few hundred bytes a
        part, on which ranks without its tokens decide. The prompt keeps its id alone."""
        return replace(
            self,
            prompt=Prompt(self.prompt_id, [], "", "", ""),
            parts=[replace(part, tokens=part.tokens.bare()) for part in self.parts],
            prompt_columns=None if self.prompt_columns is None else self.prompt_columns.bare(),
        )


Gather = Callable[[list[Any]], list[Any]]
"""Joins the lists of all ranks (``processes.distributed.gather``); ``list`` where there is one."""
RolloutKey = tuple[str, int]
"""Identifier of a rollout: its prompt's id, and its number among the prompt's rollouts."""


def training_order(rollout: Rollout) -> tuple[int, int]:
    """Return the sort key that puts the rollouts of a step into the order in which they are trained."""
    return rollout.prompt.number, rollout.index


@dataclass
class Node:
    """Node of a token tree: ``tokens`` continue the parent's path."""

    parent: int
    """Index of the parent in ``TokenTree.nodes``, -1 for the root; always before this node."""
    tokens: Tokens
    """Tokens of the node; the root holds the whole prompt (at least one token)."""
    advantage: float | np.ndarray = 0.0
    """One number for all tokens, or an array with one for each generated token."""
    weight: float = 0.0
    """Weight of every generated token of this node in the loss, a plain sum: it contains every 1/L, 1/N_k,
    2/G and 1/P. 0: not supervised (context only)."""
    home: int | None = None
    """Rank that holds the values (see ``Part.home``); every rank has the ids of a root."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> TokenIds:
        return self.tokens.token_ids


@dataclass
class TokenTree:
    """Prompt and everything that is trained after it; each generated token appears once."""

    name: str
    """Name for messages: the prompt's id and the stream's number."""
    nodes: list[Node]
    """``nodes[0]`` is the root."""


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
    whose inputs are (the token before the node, ``y_1 .. y_{L-1}``): a fork needs no special case, since the
    first input of each child is its parent's last token. The root of a prompt ``q`` takes ``len(q) - 1``
    positions, unsupervised. Position k is visible to position q iff ``k <= q < visible_until[k]``.
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
    nodes: list[RowNode]
    num_tokens: int
    """Positions in use; the rest up to S is padding."""
    others: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """[S] float64, log-probs of other policies that the loss needs: ``old``, the trainer's before the first
    update of this batch; ``ref``, the reference model's; ``teacher``."""
    columns: dict[str, Values] = field(default_factory=dict[str, Values])
    """Columns of the supervised tokens for the loss: [S] float64 or int64 where a token has one number,
    ``Column.unknown`` elsewhere; ragged columns have one list for each of the n supervised positions."""
    path_columns: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Columns of the path (``Column.of_path``): [S, MoE layers of this rank, ...] int16, ``Column.unknown``
    at positions without values; empty if no position has any."""

    def column(self, name: str) -> np.ndarray:
        """Return [S], a column of one number for each token; all ``Column.unknown`` if the row has none."""
        if (values := self.columns.get(name)) is None:
            return np.full(len(self.labels), COLUMNS[name].unknown)
        return cast(np.ndarray, values)


Metrics = dict[str, float]
"""Flat names with a stage prefix: ``harvest/pairs_per_stream``, ``reward/mean``, ``loss/kl_penalty``."""
