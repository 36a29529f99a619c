"""Checking and normalising a folder of downloaded files into one prepared file with a manifest.

    files ──reader──► rows ──filter──► gold checked, prompt measured ──► OUT.parquet,
    OUT.parquet.manifest.json

Everything streams: a few hundred rows are in memory at a time, and of each question kept 16 bytes to find
duplicates. Results of the checks are written to OUT.parquet.checks.jsonl as they are found: a run that was
killed reads the files again, which is quick, but checks only the rows that have no result yet.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_eqlen.data.prepared import PreparedWriter, manifest_path, read_manifest, sha256, write_whole
from megatron_eqlen.data.prompts import format_prompt
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import read_source
from megatron_eqlen.hf.tokenizer import Tokenizer
from megatron_eqlen.recipe import SourceRecipe
from megatron_eqlen.recipe.inputs import data_files, local_path
from megatron_eqlen.rewards.code.tests import VERSION as CODE_TESTS_VERSION
from megatron_eqlen.rewards.math.grader import MathGrader

log = logging.getLogger(__name__)

CHUNK = 256
"""Rows whose golds are checked together."""
PROBE = "What is 1 + 1?"
"""Probe text: tokenizers that split it differently are different tokenizers."""

Refusal = tuple[str, str]
"""Reason why a row is left out, as it is counted, and what was found."""


def prepare(
    source: SourceRecipe,
    out: Path,
    grader: MathGrader,
    tokenizer: Tokenizer | None = None,
    max_prompt_length: int | None = None,
    progress: Callable[[Tally], None] = lambda _: None,
) -> dict[str, Any]:
    """Write ``out`` and its manifest; return the manifest. ``progress`` is called after every chunk.

    With ``tokenizer``, questions of more than ``max_prompt_length`` tokens (without an instruction) are left
    out. A killed run continues where it stopped and gives the same file; a complete file is not changed.
    Raises ValueError if no row is kept.
    """
    request = {
        "source": source.model_dump(mode="json", exclude={"name", "weight", *_unset(source)}),
        "max_prompt_length": max_prompt_length if tokenizer else None,
        "tokenizer": format_prompt(tokenizer, PROBE) if tokenizer else None,
        "grader": grader.name,
        "tests_checked": CODE_TESTS_VERSION,
        "inputs": input_digests(source),
    }
    if (manifest := _finished(out, request)) is not None:
        log.warning("%s: complete already: the same inputs were prepared in the same way", out)
        return manifest
    limit = max_prompt_length if tokenizer else None
    with CheckLog(out.with_name(out.name + ".checks.jsonl"), request) as checks:
        tally, known_by = _write(
            source, out, lambda rows: check_rows(rows, grader, tokenizer, limit), checks, progress
        )
    counts = {"rows": tally.kept, "dropped": dict(sorted(tally.dropped.items()))}
    manifest = known_by | counts | request
    write_whole(manifest_path(out), json.dumps(manifest, indent=2) + "\n")
    checks.path.unlink()
    return manifest


def _write(
    source: SourceRecipe,
    out: Path,
    check: Callable[[list[Problem]], list[Refusal | None]],
    checks: CheckLog,
    progress: Callable[[Tally], None],
) -> tuple[Tally, dict[str, str]]:
    """Write the rows that pass; return the counts and the file's digests for the manifest."""
    tally = Tally()
    writer = PreparedWriter(out)
    try:
        for chunk in _chunks(read_source(source, tally)):
            for row, refusal in zip(chunk, checks.next() or checks.add(check(chunk)), strict=True):
                if refusal is None:
                    writer.write(replace(row, gold_checked=True))
                    tally.kept += 1
                else:
                    tally.drop(row.row_id, *refusal)
            progress(tally)
        if not tally.kept:
            checks.path.unlink()
            raise ValueError(f"{source.path}: no usable row: {tally.summary(0)}")
        return tally, writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _finished(out: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of ``out`` if the file is complete and was made by the same request."""
    try:
        manifest = read_manifest(out)
    except ValueError:
        return None
    same = all(manifest.get(key) == value for key, value in request.items())
    return manifest if same and sha256(out) == manifest["sha256"] else None


def check_rows(
    rows: list[Problem], grader: MathGrader, tokenizer: Tokenizer | None, limit: int | None
) -> list[Refusal | None]:
    """Return for each row None, or why it is left out: prompt length is checked first, then the gold."""
    refusals: list[Refusal | None] = []
    for row in rows:
        length = len(format_prompt(tokenizer, row.messages or row.question)) if tokenizer and limit else 0
        refusals.append(("too_long", f"{length} tokens, limit {limit}") if limit and length > limit else None)
    math = [n for n, row in enumerate(rows) if row.grader == "math" and refusals[n] is None]
    for n, reason in zip(math, grader.check_golds([rows[n].gold for n in math]), strict=True):
        refusals[n] = (reason, repr(rows[n].gold[:200])) if reason else None
    return refusals


def _unset(source: SourceRecipe) -> set[str]:
    """Return the keys that manifests of earlier versions do not have, where they are not set."""
    return {key for key in ("revision", "config", "columns") if not getattr(source, key)}


class CheckLog:
    """Results of the checks so far, one line for each chunk, after a first line that holds the request.

    A torn last line is dropped; the log of another request is started again, with a warning.
    """

    def __init__(self, path: Path, request: dict[str, Any]) -> None:
        self.path = path
        first = json.dumps(request)
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        if lines and lines[0] != first:
            log.warning("%s: made from other inputs or settings: starting again", path)
        self._said = deque(lines[1:] if lines[:1] == [first] else [])
        if self._said:
            log.warning("%s: resuming after %d rows", path, len(self._said) * CHUNK)
        write_whole(path, "\n".join([first, *self._said]) + "\n")
        self._file = path.open("a", encoding="utf-8")

    def next(self) -> list[Refusal | None] | None:
        """Return the recorded results of the next chunk, None if it was not checked yet."""
        if not self._said:
            return None
        return [None if refusal is None else tuple(refusal) for refusal in json.loads(self._said.popleft())]

    def add(self, refusals: list[Refusal | None]) -> list[Refusal | None]:
        self._file.write(json.dumps(refusals) + "\n")
        self._file.flush()
        return refusals

    def __enter__(self) -> CheckLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def input_digests(source: SourceRecipe) -> dict[str, str]:
    """sha256 of every file the rows may have come from."""
    more = [Path(root) for root in (source.tests, source.exclude) if root]
    roots = [*(data_files(source) or [local_path(source)]), *more]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return {str(file): sha256(file) for file in files if file.is_file()}


def _chunks(rows: Iterator[Problem]) -> Iterator[list[Problem]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
