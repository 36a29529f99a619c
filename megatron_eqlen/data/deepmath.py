"""DeepMath-103K: parquet files ``data/train-*`` with question, bare LaTeX final_answer, topic, difficulty.

The three R1 solutions are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_eqlen.data.files import find_files, read_records
from megatron_eqlen.data.rows import BadRow, Problem, Tally, answer_field, number_field, numbered, text_field

COLUMNS = ("question", "final_answer", "difficulty")


def read(path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of a DeepMath-103K file, or of a folder of them."""
    for file in find_files(path, "train-*.parquet", "*.parquet"):
        for row_id, record in numbered(path, file, read_records(file, COLUMNS)):
            try:
                yield Problem(
                    row_id,
                    text_field(record, "question"),
                    answer_field(record, "final_answer"),
                    difficulty=number_field(record, "difficulty"),
                )
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)
