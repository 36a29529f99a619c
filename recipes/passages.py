"""A search tool: the passages of a local file that a query's words fit best (BM25)."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from megatron_eqlen.data.files import read_records
from megatron_eqlen.environments.tool_calls import ToolEnvironment, tool
from megatron_eqlen.types import Prompt

SATURATION, LENGTH = 1.5, 0.75
"""BM25's k1 and b."""
_WORD = re.compile(r"\w+")


class SearchTool(ToolEnvironment):
    """Answers queries. It keeps no state."""

    def __init__(self, prompt: Prompt, seed: int, index: str, top_k: int = 3, longest: int = 1500) -> None:
        """``index``: file of records with ``text``, and ``title`` or not. ``longest``: characters of an
        answer."""
        self.index, self.top_k, self.longest = index_of(index), top_k, longest

    @classmethod
    def start(cls, **options: Any) -> None:
        index_of(options["index"])

    @tool
    def search(self, query: str) -> str:
        """Search for passages."""
        return "\n\n".join(self.index.best(query, self.top_k))[: self.longest] or "(nothing found)"

    def fork(self) -> SearchTool:
        return self


class Index:
    """Passages, and how often each word stands in which."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self.counts: dict[str, dict[int, int]] = defaultdict(dict)
        self.lengths = [0] * len(passages)
        for number, passage in enumerate(passages):
            words = Counter(_WORD.findall(passage.lower()))
            self.lengths[number] = words.total()
            for word, count in words.items():
                self.counts[word][number] = count
        self.mean = sum(self.lengths) / max(len(passages), 1)

    def best(self, query: str, top_k: int) -> list[str]:
        """Return the passages with the highest scores, of equal ones the first in the file."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_WORD.findall(query.lower())):
            of_word = self.counts.get(word, {})
            rarity = math.log(1 + (len(self.passages) - len(of_word) + 0.5) / (len(of_word) + 0.5))
            for number, count in of_word.items():
                damped = SATURATION * (1 - LENGTH + LENGTH * self.lengths[number] / self.mean)
                scores[number] += rarity * count * (SATURATION + 1) / (count + damped)
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.passages[number] for number in ranked[:top_k]]


@cache
def index_of(path: str) -> Index:
    """Read an index once. Raises ValueError for a file that is not there or a record without text."""
    passages: list[str] = []
    for number, record in enumerate(read_records(Path(path), ["text"], ["title"]), 1):
        if not isinstance(record, dict) or not isinstance(text := record.get("text"), str):
            raise ValueError(f'{path}: record {number}: expected {{"text": "..."}}, found {record!r:.80}')
        passages.append(f"{record['title']}\n{text}" if record.get("title") else text)
    return Index(passages)
