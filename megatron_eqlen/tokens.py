"""Tables of tokens: consecutive tokens of a path, with named columns that hold a value for each token.

    engine ─Delta─► GrowingTokens of a track ─slice─► Part ─join─► Node ─► Row ─► loss, router replay
                            │                            └──► record on disk, other ranks

A column is declared in ``COLUMNS``, filled by its producer (the sampler, the router hook) and read by its
consumer (the loss, the router replay, a metric). Everything in between moves whole tables. Its values are an
[L] array, one number for each token; an [L, ...] array; or ``Ragged``, any number of numbers for each token.
A table without values (``Tokens.bare``) knows its columns and lengths: that is what other ranks need to plan.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NoReturn, cast, overload

import numpy as np

TokenIds = np.ndarray
"""[L] int32, one-dimensional and read-only: tables of one path may share memory."""


@dataclass(frozen=True)
class Column:
    """Declaration of a column."""

    name: str
    dtype: str | None
    """NumPy's name of the type of its numbers. None: depends on the model."""
    needed_by: Literal["rows", "loss", "moe"]
    """Ranks that train with it: all that train a row with the token, those that compute its loss, or those
    that compute MoE layers; the first axis of a token's array is then that of the model's MoE layers."""
    ragged: bool = False
    always: bool = False
    """True for a column of every track, also on ranks that neither record nor train it."""
    keep_key: str | None = None
    """Key in ``rollout`` of a recipe: true where the engine delivers the column."""
    record_key: str | None = None
    """Key in ``rollout``: false where the record of rollouts leaves the column out."""
    train_key: str | None = None
    """Property of ``rollout``: false where no loss reads the column, so it is not sent to other ranks."""
    unknown: float = 0.0
    """Value in a row where the column has none (``Row.column``)."""

    @property
    def of_path(self) -> bool:
        """True if every position of a path has values, in prompts and before forks too."""
        return self.needed_by == "moe"


TOKEN_IDS = Column("token_ids", "int32", "rows", always=True)
LOGPROBS = Column("logprobs", "float32", "loss")
"""The engine's log-probs of the tokens (rollout_logprobs), natural log, of the distribution that they were
drawn from: after temperature, top-k, top-p and min-p."""
VERSIONS = Column("versions", "int32", "loss", always=True, train_key="trains_older", unknown=-1)
"""Policy version of the weights that sampled the token."""
KEPT = Column("kept", "int32", "loss", ragged=True, keep_key="keep_sampling_mask")
"""Sampling mask: ids that top-k, top-p and min-p kept, ascending; the token is among them."""
KEPT_LOGPROBS = Column("kept_logprobs", "float32", "loss", ragged=True, keep_key="center_scores")
"""The engine's log-probs of the ids of ``kept``, as ``logprobs``."""
ROUTES = Column("routes", None, "moe", keep_key="keep_routes", record_key="record_routes", unknown=-1)
"""[moe_layers, top_k] experts that each MoE layer chose for the prediction of the token, at the position of
the preceding token on its path; in the model's order of layers, without dense layers. A prompt's first token
and an environment's tokens are not predicted: their rows are zeros and are not read."""

GIVEN = Column("given", "int32", "rows", ragged=True, always=True)
"""Only with an environment: the number of the turn that a token of the environment answers (an observation,
with what the chat template puts around it); -1 for a token that a probe put into a turn of the policy; no
number for a generated token. A bare table knows how many tokens were generated."""
TEACHER = Column("teacher", "float32", "loss", unknown=float("nan"))
"""Log-probs of a teacher on a server (``rollout.teacher``), natural log, at temperature 1."""

_ALL = (TOKEN_IDS, LOGPROBS, VERSIONS, KEPT, KEPT_LOGPROBS, ROUTES, GIVEN, TEACHER)
COLUMNS = {column.name: column for column in _ALL}
"""All columns, in the order in which they are sent and recorded."""

ALWAYS = tuple(column.name for column in COLUMNS.values() if column.always)
"""Names of the columns of every track."""

NUMBERS = tuple(column.name for column in COLUMNS.values() if column.dtype and not column.ragged)
"""Names of the columns of one number for each token."""

MOST_PER_TOKEN = 255
"""Maximum length of a token's list in a ragged column."""


# ---- values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Stands for an array that another rank holds or that was not read."""

    shape: tuple[int, ...]
    dtype: str

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> Placeholder:
        return Placeholder((len(range(len(self))[part]), *self.shape[1:]), self.dtype)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError(f"an array of shape {self.shape} was read where only its shape is known")

    __array__ = __iter__ = _refuse


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lists of numbers, one for each of L tokens."""

    values: np.ndarray
    """[m], the numbers of the first token, then of the second, ..."""
    counts: np.ndarray
    """[L] uint8, how many numbers each token has."""

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]], dtype: str = "int32") -> Ragged:
        """Return the lists as arrays."""
        lists = list(lists)
        counts = np.fromiter(map(len, lists), np.uint8, len(lists))
        return cls(np.fromiter(chain.from_iterable(lists), dtype, int(counts.sum())), counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Iterate over the numbers of each token."""
        return iter(np.split(self.values, np.cumsum(self.counts, dtype=np.int64)[:-1]) if len(self) else ())

    def __getitem__(self, part: slice) -> Ragged:
        start, stop, _ = part.indices(len(self))
        first, last = (int(self.counts[:end].sum(dtype=np.int64)) for end in (start, stop))
        return Ragged(self.values[first:last], self.counts[part])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ragged) and all(map(_equal, _arrays(self), _arrays(other)))


@dataclass(slots=True)
class Packed:
    """Lists of numbers, one for each of L tokens, as bytes: quick to append, and to send to processes."""

    numbers: bytes
    """[m] of the column's dtype."""
    counts: bytes
    """[L], how many numbers each token has."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[float]], column: Column) -> Packed | Sequence[Sequence[float]]:
        """Return the lists as bytes, or as they are if one has more than ``MOST_PER_TOKEN`` numbers."""
        lengths = [*map(len, lists)]
        if max(lengths, default=0) > MOST_PER_TOKEN:
            return lists
        numbers = array(np.dtype(column.dtype).char, chain.from_iterable(lists))
        return cls(numbers.tobytes(), bytes(lengths))

    def __len__(self) -> int:
        return len(self.counts)


Values = np.ndarray | Ragged
"""Values of a column. A bare table has ``Placeholder`` in place of each array."""


def _equal(values: Any, others: Any) -> bool:
    if isinstance(values, np.ndarray) and isinstance(others, np.ndarray):
        return np.array_equal(values, others)
    return bool(values == others)


def join(pieces: Sequence[Any]) -> Any:
    """Return consecutive pieces of a column, at least one, as one; a single piece is not copied."""
    # routes of no token are [0, 0, 0]: they do not know the model's shape, and cannot be concatenated
    pieces = [piece for piece in pieces if len(piece)] or [pieces[0]]
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Ragged):
        return Ragged(join([piece.values for piece in pieces]), join([piece.counts for piece in pieces]))
    if any(isinstance(piece, Placeholder) for piece in pieces):
        return Placeholder((sum(map(len, pieces)), *first.shape[1:]), np.dtype(first.dtype).name)
    return np.concatenate(pieces)


def _arrays(values: Any) -> list[Any]:
    return [values.values, values.counts] if isinstance(values, Ragged) else [values]


# ---- tables ----------------------------------------------------------------------------------------------


class Tokens:
    """A table: columns of equal length, by name. Not to be changed; the methods return new tables."""

    __slots__ = ("_length", "columns")

    def __init__(self, columns: Mapping[str, Any], length: int | None = None) -> None:
        """``length``: needed without columns only. Raises ValueError for columns of unequal length."""
        if length is None:
            length = len(next(iter(columns.values())))
        for name, values in columns.items():
            if len(values) != length:
                raise ValueError(f"column {name}: expected values of {length} tokens, found {len(values)}")
        self.columns = columns
        self._length = length

    @classmethod
    def of(cls, token_ids: Any, logprobs: Any = None, **columns: Any) -> Tokens:
        """Return the table of these values: any sequences, one number for all tokens, or None for no such
        column. Raises ValueError for values of unequal lengths."""
        given = {"token_ids": token_ids, "logprobs": logprobs} | columns
        length = len(token_ids)
        return cls({name: _values(name, v, length) for name, v in given.items() if v is not None})

    @classmethod
    def joined(cls, tables: Sequence[Tokens]) -> Tokens:
        """Join consecutive tables of a path. A column is kept if all tables with tokens have it."""
        tables = [table for table in tables if len(table)] or list(tables[:1])
        if len(tables) == 1:
            return tables[0]
        names = [name for name in tables[0].columns if all(name in table for table in tables)]
        columns = {name: join([table.columns[name] for table in tables]) for name in names}
        return cls(columns, sum(map(len, tables)))

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @overload
    def __getitem__(self, at: str) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Tokens: ...
    def __getitem__(self, at: str | slice) -> Any:
        """Return the values of a column, or the table of some of the tokens."""
        if isinstance(at, str):
            return self.columns[at]
        rows = {name: values[at] for name, values in self.columns.items()}
        return Tokens(rows, len(range(len(self))[at]))

    @property
    def token_ids(self) -> TokenIds:
        return self.columns["token_ids"]

    @property
    def generated(self) -> int:
        """Number of tokens that the policy generated; all but those of an environment."""
        return self._length - (len(self.columns["given"].values) if "given" in self.columns else 0)

    @property
    def is_generated(self) -> np.ndarray:
        """[L] bool, True for the tokens that the policy generated."""
        return self.columns["given"].counts == 0 if "given" in self.columns else np.ones(len(self), bool)

    @property
    def is_answer(self) -> np.ndarray:
        """[L] bool, True for the tokens of an environment."""
        answers = ~self.is_generated
        answers[answers] = self.columns["given"].values >= 0 if answers.any() else False
        return answers

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tokens)
            and len(self) == len(other)
            and self.columns.keys() == other.columns.keys()
            and all(_equal(values, other.columns[name]) for name, values in self.columns.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tokens({len(self)}: {self.layout})"

    def with_column(self, name: str, values: Any) -> Tokens:
        """Return the table with another column, or with other values in it."""
        return Tokens({**self.columns, name: values}, len(self))

    def only(self, names: Iterable[str]) -> Tokens:
        """Return the table with those of its columns that are among ``names``."""
        table = object.__new__(Tokens)  # the lengths of columns are checked
        table.columns = {name: self.columns[name] for name in names if name in self.columns}
        table._length = self._length
        return table

    def without(self, names: Collection[str]) -> Tokens:
        """Return the table without those of its columns that are among ``names``."""
        return self.only(name for name in self.columns if name not in names)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for values in self.columns.values() for array in _arrays(values))

    # ---- lengths only -------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """Names of the columns, with all that their memory depends on besides the number of tokens:
        ``token_ids logprobs kept:310 routes:48x8:uint8``."""
        words = [name if name in NUMBERS else _described(name, v) for name, v in self.columns.items()]
        # one text for the many tables that have it
        return sys.intern(" ".join(words))

    @staticmethod
    @lru_cache(1 << 16)
    def absent(length: int, layout: str) -> Tokens:
        """Return the bare table of ``length`` tokens with this ``layout``, as one object for equal ones."""
        return Tokens(dict(_placeholder(word, length) for word in layout.split()), length)

    @property
    def is_bare(self) -> bool:
        """True if all values are placeholders."""
        return all(isinstance(a, Placeholder) for values in self.columns.values() for a in _arrays(values))

    def bare(self) -> Tokens:
        """Return the table without values: a few bytes for any number of tokens."""
        return Tokens.absent(len(self), self.layout)

    def __reduce__(self) -> tuple[Any, ...]:
        # as length and layout: where it arrives, all equal ones are one object again
        if self.is_bare:
            return Tokens.absent, (len(self), self.layout)
        return Tokens, (self.columns, len(self))

    # ---- to another rank ----------------------------------------------------------------------------

    def arrays(self) -> list[np.ndarray]:
        """Return all arrays, in the order of the columns."""
        return [np.ascontiguousarray(array) for values in self.columns.values() for array in _arrays(values)]

    def with_room(self) -> Tokens:
        """Return a bare table with new arrays in place of its placeholders, to be filled."""
        return Tokens({name: _room(values) for name, values in self.columns.items()}, len(self))


def _values(name: str, values: Any, length: int) -> Any:
    column = COLUMNS[name]
    if column.ragged:
        return values if isinstance(values, Ragged) else Ragged.of(values, cast(str, column.dtype))
    if isinstance(values, Placeholder):
        return values
    if np.ndim(values) == 0:
        return np.full(length, values, column.dtype)
    return np.asarray(values, column.dtype)


def _described(name: str, values: Any) -> str:
    if isinstance(values, Ragged):
        return f"{name}:{len(values.values)}"
    return f"{name}:{'x'.join(map(str, values.shape[1:]))}:{np.dtype(values.dtype).name}"


def _placeholder(word: str, length: int) -> tuple[str, Any]:
    """Return name and placeholder of a column: the inverse of ``_described``."""
    # `logprobs`, `kept:310`, `routes:48x8:uint8`
    name, *details = word.split(":")
    if name not in COLUMNS:
        raise ValueError(f"expected the columns {', '.join(COLUMNS)}, found {name!r}")
    dtype = COLUMNS[name].dtype
    if dtype is None:
        row, dtype = details
        return name, Placeholder((length, *map(int, row.split("x"))), dtype)
    if COLUMNS[name].ragged:
        numbers, counts = Placeholder((int(details[0]),), dtype), Placeholder((length,), "uint8")
        return name, Ragged(cast(np.ndarray, numbers), cast(np.ndarray, counts))
    return name, Placeholder((length,), dtype)


def _room(values: Any) -> Any:
    if isinstance(values, Ragged):
        return Ragged(_room(values.values), _room(values.counts))
    return np.empty(values.shape, values.dtype) if isinstance(values, Placeholder) else values


# ---- tables that grow ------------------------------------------------------------------------------------


class GrowingTokens:
    """The tokens of a track, to which a decode step appends. Columns are bytes of their types: 8 for a token
    and its log-prob where lists take 72, and nearly as fast to append to."""

    __slots__ = ("_appends", "columns", "token_ids", "versions")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.versions = array("i")
        self.columns: dict[str, _Growing] = {}
        """The other columns, by name."""
        self._appends: list[tuple[str, Callable[[Any], None]]] = []
        """Names of ``columns`` and their methods ``append``."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_ids: list[int], columns: Mapping[str, Any], version: int | list[int]) -> None:
        """Append tokens that weights of ``version`` (one, or one for each) sampled, with the values of other
        ``columns``: those of the first tokens, or of ``expect``. Runs for every token. Raises ValueError for
        missing values, and for a column that earlier tokens lack."""
        count = len(token_ids)
        if not count:
            return
        # the first tokens decide which columns the track has
        if not self.token_ids:
            self.expect(columns)
        # a column too many; a missing one is noticed below, by its number of values
        if len(columns) > len(self._appends):
            raise ValueError(f"expected {', '.join(self.columns)} of each token, found {', '.join(columns)}")
        self.token_ids.fromlist(token_ids)
        self.versions.fromlist(version if isinstance(version, list) else [version] * count)
        for name, append in self._appends:
            values = columns.get(name, ())
            if len(values) != count:
                raise ValueError(f"expected {name} of {count} tokens, found {len(values)}")
            append(values)

    def blank(self, count: int) -> dict[str, Any]:
        """Return values of ``columns`` for ``count`` tokens that have none, after others that have."""
        return {name: column.blank(count) for name, column in self.columns.items()}

    def expect(self, names: Iterable[str]) -> None:
        """Make room for these columns."""
        for name in names:
            if name not in self.columns:
                self.columns[name] = _Growing(COLUMNS[name])
        self._appends = [(name, column.append) for name, column in self.columns.items()]

    def extend(self, tokens: Tokens) -> None:
        """Append the tokens of a table with all its columns. Raises ValueError where it lacks one."""
        if missing := [name for name in self.columns if name not in tokens]:
            raise ValueError(f"expected {missing[0]} of {len(tokens)} tokens that it had before, found none")
        versions = tokens.columns.get("versions", np.full(len(tokens), VERSIONS.unknown, np.int32))
        self.versions.frombytes(np.ascontiguousarray(versions).tobytes())
        self.token_ids.frombytes(np.ascontiguousarray(tokens.token_ids).tobytes())
        self.expect(name for name in tokens.columns if name not in ("token_ids", "versions"))
        for name, column in self.columns.items():
            column.extend(tokens[name])

    def cut(self, end: int) -> None:
        """Drop the tokens from number ``end`` on."""
        del self.token_ids[end:], self.versions[end:]
        for column in self.columns.values():
            column.cut(end)

    def __getitem__(self, part: slice) -> Tokens:
        # slices of arrays are copies: an array whose buffer a view exports could not grow any more
        start, stop, _ = part.indices(len(self))
        columns: dict[str, Any] = {"token_ids": np.frombuffer(self.token_ids[start:stop], np.int32)}
        for name, column in self.columns.items():
            columns[name] = column.values(start, stop)
        columns["versions"] = np.frombuffer(self.versions[start:stop], np.int32)
        return Tokens(columns, stop - start)


class _Growing:
    """A growing column: its numbers (of rows: their bytes), and in a ragged one how many each token has."""

    __slots__ = ("_counts", "_data", "_dtype", "_ragged", "_row", "append")

    def __init__(self, column: Column) -> None:
        self._counts, self._ragged = array("B"), column.ragged
        self._dtype = np.dtype(column.dtype or np.uint8)
        # rows of the model's type are kept as bytes; the first ones tell their shape and dtype
        self._row: tuple[int, ...] = (0, 0) if column.dtype is None else ()
        self._data: Any = bytearray() if column.dtype is None else array(self._dtype.char)
        numbers = self._append_rows if column.dtype is None else self._data.fromlist
        self.append: Callable[[Any], None] = self._append_lists if column.ragged else numbers
        """Appends the values of new tokens: a list of numbers or of sequences, or an array of rows."""

    def _append_lists(self, lists: Iterable[Sequence[float]] | Packed) -> None:
        if isinstance(lists, Packed):
            self._data.frombytes(lists.numbers)
            self._counts.frombytes(lists.counts)
            return
        for numbers in lists:
            if len(numbers) > MOST_PER_TOKEN:  # those that tie with the last of top-k are kept, too
                found = f"found {len(numbers)}: rollout.top_k must leave room for ties"
                raise ValueError(f"expected at most {MOST_PER_TOKEN} kept tokens, {found}")
            self._data.extend(numbers)
            self._counts.append(len(numbers))

    def _append_rows(self, rows: np.ndarray) -> None:
        if not self._data:
            self._row, self._dtype = rows.shape[1:], rows.dtype
        self._data += rows.tobytes()

    def blank(self, count: int) -> Any:
        if isinstance(self._data, bytearray):
            return np.zeros((count, *self._row), self._dtype)
        return [()] * count if self._ragged else [0.0] * count

    def extend(self, values: Values) -> None:
        if isinstance(values, Ragged):
            self._data.frombytes(values.values.tobytes())
            self._counts.frombytes(values.counts.tobytes())
        elif isinstance(self._data, bytearray):
            self._append_rows(values)
        else:
            self._data.frombytes(np.ascontiguousarray(values).tobytes())

    def cut(self, end: int) -> None:
        del self._data[self._place(end) :]
        del self._counts[end:]

    def values(self, start: int, stop: int) -> Values:
        numbers = np.frombuffer(self._data[self._place(start) : self._place(stop)], self._dtype)
        if self._ragged:
            return Ragged(numbers, np.frombuffer(self._counts[start:stop], np.uint8))
        return numbers.reshape(stop - start, *self._row)

    def _place(self, token: int) -> int:
        """Return the place of a token's first number, of rows of its first byte."""
        if self._ragged:
            return int(np.frombuffer(self._counts[:token], np.uint8).sum(dtype=np.int64))
        of_rows = isinstance(self._data, bytearray)
        return token * (math.prod(self._row) * self._dtype.itemsize if of_rows else 1)
