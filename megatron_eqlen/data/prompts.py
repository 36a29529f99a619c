"""Prompts for training: a weighted mixture of sources, shuffled, checked, resumable to the row.

    reader ──► rows ──filter──► shuffled epoch ──► chat format ──► length and gold checked ──► Prompt

The next prompt is a function of the recipe, the seed and two counters for each source: a resumed run draws
the same prompts. A row that cannot be used is counted by reason, and replaced by its source's next one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from megatron_eqlen.data.overlap import overlaps
from megatron_eqlen.data.rows import BadRow, Problem, Tally
from megatron_eqlen.data.sources import open_source, read_problems
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.hf.tokenizer import TemplateError, Tokenizer, Turn
from megatron_eqlen.hf.turns import QUESTION, TAKEN, left_out
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, SourceRecipe
from megatron_eqlen.types import Metrics, Prompt

log = logging.getLogger(__name__)

LEAST_USABLE = 0.5
"""Share of a source's rows below which ``eqlen check`` reports a fault."""
CHARACTERS = 1000
"""Characters of a question for each token of the limit beyond which it is too long for any tokenizer."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, for the chat template."""


class LongPrompt(BadRow):
    """A prompt of more tokens than ``data.max_prompt_length``."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__("too_long", f"{tokens} tokens, data.max_prompt_length is {limit}")
        self.tokens = tokens


class PromptMaker:
    """Turns rows into prompts. The grader that checks gold answers starts when it is first needed."""

    def __init__(self, data: DataRecipe, tokenizer: Tokenizer, tools: Tools = ()) -> None:
        self._data, self._tools = data, tools
        self._tokenizer, self._special = tokenizer, tuple(tokenizer.special_tokens)
        self._grader = MathGrader(workers=1, timeout=30.0)
        self._known: dict[str, bool] = {}
        """True for keys that the chat template writes, by role and key."""

    def make(
        self, row: Problem, recipe: SourceRecipe | BenchmarkRecipe, prompt_id: str, number: int
    ) -> Prompt:
        """Return the prompt of a row. Raises BadRow if it is too long, a chat as text, or has no gold."""
        grader = recipe.grader or row.grader
        if len(row.question) > CHARACTERS * self._data.max_prompt_length:  # which takes minutes to encode
            raise BadRow("too_long", f"{len(row.question):,} characters")
        try:
            turns = self.turns(row)
            text = self._tokenizer.render_chat(turns, self._data.enable_thinking, self._tools)
        except TemplateError as error:
            raise BadRow("refused_by_template", str(error)) from None
        if lost := left_out(text, turns):
            raise BadRow("unrendered_key", f"{lost}: the chat template leaves it out")
        token_ids = self._tokenizer.encode(text)
        if len(token_ids) > self._data.max_prompt_length:
            raise LongPrompt(len(token_ids), self._data.max_prompt_length)
        unchecked = grader == "math" and not row.gold_checked
        if unchecked and (reason := self._grader.check_golds([row.gold])[0]):
            raise BadRow(reason, repr(row.gold[:200]))
        return Prompt(prompt_id, token_ids, row.question, grader, row.gold, recipe.name, number)

    def _require_rendered(self, turn: Turn) -> None:
        """Raise BadRow for a key of a turn that the chat template does not know."""
        for key in turn.keys() - TAKEN - {"content"}:
            name = f"{turn['role']}: {key}"
            if name not in self._known:
                # Rendered with and without the key, once for each role and key: equal texts do not show it.
                alone = {other: value for other, value in turn.items() if other != key}
                chats = [[QUESTION, each] for each in (turn, alone)]
                texts = [self._tokenizer.render_chat(chat, answer=False) for chat in chats]
                self._known[name] = texts[0] != texts[1]
            if not self._known[name]:
                raise BadRow("unrendered_key", f"{name}: the chat template leaves it out")

    def turns(self, row: Problem) -> list[Turn]:
        """Return the turns of a row. Raises BadRow for a chat as text, and for keys without effect."""
        # ``<|im_start|>user`` at the beginning would be text of the question, not a turn.
        if row.question.lstrip().startswith(self._special):
            raise BadRow("rendered_chat", f"{row.question[:40]!r}: a chat is a list of turns, not their text")
        if row.messages:
            for turn in row.messages:
                self._require_rendered(turn)
            return [*row.messages]
        instruction = self._data.instruction if row.instruction is None else row.instruction
        return chat_messages(row.question, instruction, self._data.instruction_role)

    def close(self) -> None:
        self._grader.close()


class _Source:
    """One source's rows, the position in them, and what was left out."""

    def __init__(self, recipe: SourceRecipe, number: int, seed: int, shuffle: bool) -> None:
        self.name = recipe.name
        self.recipe = recipe
        self.tally = Tally()
        self.rows = open_source(recipe, self.tally)
        self.epoch = 0
        self.position = 0
        """Number of this epoch's rows that were used."""
        self.refused: set[int] = set()
        """Numbers of the rows that cannot become prompts."""
        # With the epoch the seed of the order: each source has orders of its own.
        self._key = (seed, number)
        self._shuffle = shuffle
        self._order = self._shuffled()

    def take(self, maker: PromptMaker, drawn: int) -> Prompt:
        """Return the next row that makes a prompt, as the run's ``drawn``-th. Raises ValueError if none."""
        while True:
            if self.position == len(self.rows):
                # Said once, when every row has been tried.
                if self.epoch == 0 and self.refused:
                    summary = self.tally.summary(self.tally.kept)
                    log.warning("data source %s: after its first epoch %s", self.name, summary)
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
            # a row that made no prompt is not tried again
            number = int(self._order[self.position])
            self.position += 1
            if number in self.refused:
                continue
            if (prompt := self._prompt(maker, number, drawn, self.tally)) is not None:
                # Rows are counted in their first epoch alone.
                self.tally.kept += self.epoch == 0
                return prompt
            self.refused.add(number)
            if len(self.refused) == len(self.rows):
                raise ValueError(f"data source {self.name}: {self.tally.unusable()}")

    def _prompt(self, maker: PromptMaker, number: int, drawn: int, tally: Tally) -> Prompt | None:
        """Return the prompt of a row; None for one that is left out, which ``tally`` counts."""
        row_id = f"#{number}"
        try:
            row = self.rows[number]
            row_id = row.row_id
            prompt_id = f"{self.name}/{row_id}" + (f"@{self.epoch}" if self.epoch else "")
            return maker.make(row, self.recipe, prompt_id, drawn)
        except BadRow as bad:
            tally.drop(f"{self.name}/{row_id}", bad.reason, bad.detail)
        return None

    def try_rows(self, maker: PromptMaker, count: int) -> tuple[list[Prompt], Tally]:
        """Return the prompts of ``count`` rows, evenly spaced, and what was left out; the position stays."""
        tally, numbers = Tally(), np.linspace(0, len(self.rows) - 1, min(count, len(self.rows)), dtype=int)
        prompts = (self._prompt(maker, number, 0, tally) for number in numbers.tolist())
        return [prompt for prompt in prompts if prompt is not None], tally

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": len(self.rows),
            "epoch": self.epoch,
            "position": self.position,
            "refused": sorted(self.refused),
            "kept": self.tally.kept,
            "dropped": dict(self.tally.dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] != len(self.rows):
            rows = f"expected {state['rows']} rows, as the checkpoint has, found {len(self.rows)}"
            remedy = "put its files back, or begin a run with model.path: the export of this one"
            raise ValueError(f"data source {self.name}: {self.recipe.path}: {rows}: {remedy}")
        self.epoch, self.position = state["epoch"], state["position"]
        self.refused = set(state["refused"])
        self.tally.kept = state["kept"]
        self.tally.dropped.clear()
        self.tally.dropped.update(state["dropped"])
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self.rows))
        return np.random.default_rng([*self._key, self.epoch]).permutation(len(self.rows))


class PromptSource:
    """An endless, deterministic stream of training prompts. A source's share of the prompts is its weight;
    each of its epochs is shuffled again. A prompt's id is unique in a run: it carries the epoch from the
    second one on (``deepmath/train-00000.parquet#17@1``)."""

    def __init__(
        self,
        data: DataRecipe,
        tokenizer: Tokenizer,
        seed: int,
        tools: Tools = (),
        maker: PromptMaker | None = None,
    ) -> None:
        """``tools``: an environment's, as JSON schemas for the template. ``maker``: of the prompts."""
        self._maker = maker or PromptMaker(data, tokenizer, tools)
        self._made_with = data, tokenizer, tools
        self._seed = seed
        self._sources = [_Source(recipe, n, seed, data.shuffle) for n, recipe in enumerate(data.sources)]
        weights = np.array([recipe.weight for recipe in data.sources])
        # [sources] share of the prompts up to and with each source.
        self._cumulative = np.cumsum(weights / weights.sum())
        self._drawn = 0

    def next(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        return [self._draw() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, from which a source with the same recipe and seed continues."""
        sources = {source.name: source.state_dict() for source in self._sources}
        return {"seed": self._seed, "drawn": self._drawn, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises ValueError if its sources, rows or seed differ."""
        names = [source.name for source in self._sources]
        if state["seed"] != self._seed or list(state["sources"]) != names:
            made = f"made with seed {state['seed']} and sources {list(state['sources'])}"
            raise ValueError(f"data: the checkpoint was {made}, found seed {self._seed} and {names}")
        self._drawn = state["drawn"]
        for source in self._sources:
            source.load_state_dict(state["sources"][source.name])

    def notes(self) -> list[str]:
        """Return a sentence for each source whose columns were recognised by other names than ours."""
        sources = ((source.name, "; ".join(source.tally.notes)) for source in self._sources)
        return [f"data source {name}: {text}" for name, text in sources if text]

    def samples(self, count: int) -> Iterator[list[Prompt]]:
        """Yield the prompts of ``count`` rows of each source, evenly spaced; the position stays."""
        for source in self._sources:
            yield source.try_rows(self._maker, count)[0]

    def benchmark(self, benchmark: BenchmarkRecipe) -> list[Prompt]:
        """Return all problems of a benchmark. Raises ValueError as ``read_benchmark``."""
        return read_benchmark(benchmark, *self._made_with)

    def describe(self, count: int) -> list[str]:
        """Return a sentence for each source, from ``count`` of its rows: number, rows left out and why,
        lengths of prompts. Raises ValueError if faults (``REMEDIES``) leave out more than half of them."""
        sentences: list[str] = []
        for source in self._sources:
            prompts, tally = source.try_rows(self._maker, count)
            # rows that the filters left, then prompts that these made
            stages = [(source.tally, len(source.rows)), (tally, len(prompts))]
            if prod(faults.usable(kept) for faults, kept in stages) < LEAST_USABLE:
                faults, kept = min(stages, key=lambda stage: stage[0].usable(stage[1]))
                raise ValueError(f"data source {source.name}: {faults.unusable(kept)}")
            lengths = sorted(len(prompt.token_ids) for prompt in prompts)
            text = f"{source.name}: {len(source.rows):,} rows"
            if source.tally.notes:
                text += f" ({'; '.join(source.tally.notes)})"
            if source.tally.dropped:
                text += f"; {source.tally.summary(len(source.rows))}"
            if tally.dropped:
                text += f"; of {len(prompts) + tally.dropped.total()} tried {tally.summary(len(prompts))}"
                text += f", the first {next(iter(tally.first.values()))}"
            sentences.append(f"{text}; prompts of {lengths[0]} to {lengths[-1]} tokens")
        return sentences

    def overlaps(self, benchmarks: Sequence[BenchmarkRecipe]) -> list[str]:
        """Return a sentence for each source that holds questions of a benchmark."""
        return overlaps(((source.recipe, source.rows) for source in self._sources), benchmarks)

    def close(self) -> None:
        self._maker.close()

    def _draw(self) -> Prompt:
        # A number of its own for each prompt: the draw depends on the seed and its number alone.
        point = np.random.default_rng([self._seed, self._drawn]).random()
        # Rounding may leave the last sum a little below 1.
        chosen = min(int(np.searchsorted(self._cumulative, point, side="right")), len(self._sources) - 1)
        prompt = self._sources[chosen].take(self._maker, self._drawn)
        self._drawn += 1
        return prompt


def read_benchmark(
    benchmark: BenchmarkRecipe, data: DataRecipe, tokenizer: Tokenizer, tools: Tools = ()
) -> list[Prompt]:
    """Return all problems of a benchmark in file order (the first ``limit``), formatted as the recipe formats
    questions. Raises ValueError if a row cannot be used: without it the benchmark would be another one."""
    tally = Tally(section="evaluation.benchmarks[]")
    maker = PromptMaker(data, tokenizer, tools)
    prompts: list[Prompt] = []
    long: dict[str, int] = {}
    where = f"benchmark {benchmark.name}: {benchmark.path}"
    try:
        for row in islice(read_problems(benchmark, tally), benchmark.limit):
            prompt_id = f"{benchmark.name}/{row.row_id}"
            try:
                prompts.append(maker.make(row, benchmark, prompt_id, len(prompts)))
            # All are counted, so that the error names the limit that suffices.
            except LongPrompt as bad:
                long[row.row_id] = bad.tokens
            except BadRow as bad:
                raise ValueError(f"{where}: {row.row_id}: {bad}{tally.remedy(bad.reason)}") from None
    finally:
        maker.close()
    if long:
        longest = max(long, key=long.__getitem__)
        limit, tokens = f"data.max_prompt_length: {data.max_prompt_length}", long[longest]
        found = f"{len(long)} of {len(prompts) + len(long)} questions are longer than {limit}"
        remedy = f"set data.max_prompt_length={tokens}"
        raise ValueError(f"{where}: {found}; {longest} has {tokens} tokens: {remedy}")
    # rows outside the dates that were asked for are no loss
    if tally.dropped.keys() - {"date"} or not prompts:
        raise ValueError(f"{where}: {tally.unusable(len(prompts))}")
    return prompts


def position_metrics(position: dict[str, Any] | None) -> Metrics:
    """Return the metrics of ``PromptSource.state_dict``; none on a rank that draws no prompts."""
    if position is None:
        return {}
    sources = {
        f"data/source/{name}/epochs": source["epoch"] + source["position"] / source["rows"]
        for name, source in position["sources"].items()
    }
    return {"data/prompts_drawn": float(position["drawn"])} | sources


def chat_messages(question: str, instruction: str = "", role: str = "user") -> list[Turn]:
    """Return the turns of a question. ``role``: ``user`` puts the instruction after it in the same turn
    (Qwen's model cards), ``system`` into a turn of its own before it (DeepMath's authors)."""
    if not instruction or role == "none":
        return [{"role": "user", "content": question}]
    if role == "user":
        return [{"role": "user", "content": f"{question}\n\n{instruction}"}]
    return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
