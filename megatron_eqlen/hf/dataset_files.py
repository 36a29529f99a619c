"""The data files of a Hugging Face data set: those of a configuration and a split. The data set's card names
them (``configs`` in the head of README.md), or else their names do: ``data/train-00000-of-00010.parquet``,
``main/test.jsonl``. These are the rules of ``datasets`` for data sets without a loading script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

SUFFIXES = (".parquet", ".jsonl", ".json")
NOT_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json")
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in a file's path that name its split."""

# ``train-00000-of-00010.parquet``, but not in ``.cache`` of ``hf download``
_SHARD = re.compile(r"(?!\.)((?:.*/)?(\w+))-(\d{5})-of-(\d{5})\b.*")
# ``---``, YAML, ``---`` at the beginning of README.md.
_HEAD = re.compile(r"---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)


def choose_files(
    names: Sequence[str], card: Mapping[str, Any], config: str | None, split: str | None, usual: str
) -> list[str]:
    """Return those of the data set's files that belong to ``config`` and ``split``, sorted. ``usual``: the
    split if none is named and there are several. Raises ValueError."""
    splits = _splits(names, card, config)
    chosen = split or (next(iter(splits)) if len(splits) == 1 else usual)
    if chosen not in splits:
        raise ValueError(f"split (default: {usual}): expected one of {', '.join(splits)}, found {split!r}")
    files = sorted(set(splits[chosen]))
    if not files or (odd := [name for name in files if not name.endswith(SUFFIXES)]):
        others = ", ".join(odd[:3]) if files else "none"
        hint = "the hub converts public data sets: revision: refs/convert/parquet"
        raise ValueError(f"split {chosen}: expected files {', '.join(SUFFIXES)}, found {others} ({hint})")
    return files


def read_card(folder: Path) -> dict[str, Any]:
    """Return the head of the data set's README.md; empty if it has none. Raises ValueError."""
    file = folder / "README.md"
    head = _HEAD.match(file.read_text(encoding="utf-8")) if file.is_file() else None
    try:
        card = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: the head is not YAML: {' '.join(str(error).split())}") from None
    return card if isinstance(card, dict) else {}


def _splits(names: Sequence[str], card: Mapping[str, Any], config: str | None) -> dict[str, list[str]]:
    if entry := _card_entry(card, config):
        parts = entry["data_files"]
        # ``data_files: data/*.parquet`` or a list of patterns is one split; else each part names its own.
        if not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
            parts = [{"split": "train", "path": parts}]
        return {str(part["split"]): _matching(names, part["path"], entry.get("data_dir")) for part in parts}
    data = [name for name in names if name.endswith(SUFFIXES) and PurePosixPath(name).name not in NOT_DATA]
    data = [name for name in data if not any(folder.startswith(".") for folder in name.split("/"))]
    # Without a card a configuration is a folder's name: ``main/train.jsonl``.
    if config is not None:
        folders = sorted({folder for name in data for folder in PurePosixPath(name).parts[:-1]})
        data = [name for name in data if config in PurePosixPath(name).parts[:-1]]
        if not data:
            raise ValueError(f"config: expected one of {', '.join(folders) or 'none'}, found {config!r}")
    splits: dict[str, list[str]] = {}
    for name in data:
        splits.setdefault(split_of(name), []).append(name)
    return splits or {"train": data}


def _card_entry(card: Mapping[str, Any], config: str | None) -> Mapping[str, Any] | None:
    """Return the card's entry of ``config`` or its default configuration; None if it names no files."""
    entries = [entry for entry in card.get("configs") or [] if "data_files" in entry]
    if not entries:
        return None
    by_name = {str(entry.get("config_name", "default")): entry for entry in entries}
    if config is not None:
        chosen = by_name.get(config)
    else:
        # The only entry, the one marked as default, or the one with the name ``default``.
        marked = [entry for entry in entries if entry.get("default")] or [by_name.get("default")]
        chosen = entries[0] if len(entries) == 1 else marked[0]
    if chosen is None:
        raise ValueError(f"config: expected one of {', '.join(by_name)}, found {config!r}")
    return chosen


def split_of(name: str) -> str:
    """Return the split that a file belongs to, by its name."""
    if shard := _SHARD.fullmatch(name):
        return shard[2]
    # ``data/train/part-1.jsonl``: data, train, part, jsonl.
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in KEYWORDS.items() if set(known) & set(words)), "train")


def missing_shards(names: Iterable[str]) -> list[str]:
    """Return the files that are not among ``names``, where these count them: ``train-00001-of-00002``."""
    there = {shard.group(1, 4, 3) for shard in map(_SHARD.fullmatch, names) if shard}
    # the last of those that are counted from 1 on has the number of all
    counts = {(name, count) for name, count, _ in there if (name, count, count) not in there}
    whole = {(*each, f"{number:05}") for each in counts for number in range(int(each[1]))}
    return [f"{name}-{number}-of-{count}" for name, count, number in sorted(whole - there)]


def _matching(names: Sequence[str], patterns: str | Sequence[str], folder: str | None) -> list[str]:
    """Return the names that a pattern of the card matches; ``*`` stays within a folder, ``**`` does not."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    within = f"{folder}/" if folder else ""
    # Regular expressions for a glob's signs, the longest first; all else is literal.
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    split = (re.split(r"(\*\*/|\*\*|\*|\?)", f"{within}{pattern}".removeprefix("./")) for pattern in listed)
    wanted = ["".join(kinds.get(piece) or re.escape(piece) for piece in pieces) for pieces in split]
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in wanted)]
