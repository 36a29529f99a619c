"""Tokenizers from a model's own files, through Transformers: ``tokenizer.json``, or a SentencePiece
``tokenizer.model``, which it converts. A set of tokens ends a response, read from ``generation_config.json``:
Qwen3 stops at ``<|im_end|>`` and ``<|endoftext|>``, but its ``config.json`` names only one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.files import expecting, read_json

log = logging.getLogger(__name__)

Turn = dict[str, Any]
"""``{"role": ..., "content": ...}``, and ``tool_calls`` and others that the template may know."""
THINKING = ("<think>", "</think>")
"""Special tokens of some models; templates look for them in the assistant's turns."""
PIECES = "tokenizer.model"
FILES = ("tokenizer.json", "vocab.json", PIECES)
PROBE = "What is 2 + 3?"
"""Text that a SentencePiece model must encode to the same ids before and after its conversion."""
BREAK = "\ufdd0"
"""Noncharacter of Unicode, where a text is cut before it is encoded."""


class TemplateError(ValueError):
    """A chat template fails at messages; names the file."""


class Tokenizer:
    """Convert text to token ids and back, and chat messages by the model's own template."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.today = datetime.now()
        """Time for templates that write a date (Llama 3.2's); a run sets that of its first start."""
        self.backend = _from_transformers(folder)
        """Transformers' tokenizer."""
        eos, pad = self.backend.eos_token_id, self.backend.pad_token_id
        self.eos_token_ids, self.pad_token_id = _special_ids(folder, eos, pad)
        added = self.backend.added_tokens_decoder
        known = self.backend.get_vocab().values()
        # An id outside the vocabulary would never end a response.
        if unknown := sorted((self.eos_token_ids | {self.pad_token_id}) - {*known}):
            ids = f"the tokenizer's ids, {min(known)} to {max(known)}"
            keys = "eos_token_id and pad_token_id of the model's files"
            raise ValueError(f"{folder}: expected {keys} among {ids}, found {unknown}")
        # "&" binds closer than "|": ends, and the padding token if it is an added one.
        self._silent = sorted(self.eos_token_ids | {self.pad_token_id} & added.keys())
        self.tags = [token.content for token in added.values() if re.fullmatch("<.+>", token.content)]
        """Texts that ``encode`` turns into a token of its own, special or not: ``<think>``."""

    def encode(self, text: str, after: str = "") -> list[int]:
        """Return the ids of ``text`` behind ``after``, none added; ``BREAK`` makes a special token text."""
        ids = partial(self.backend.encode, add_special_tokens=False)
        token_ids, last = list[int](), encodable(after).rpartition(BREAK)[2]
        # Cut at ``BREAK``, so that no token spans it: ``<`` and ``|im_end|>`` become text.
        for piece in encodable(text).split(BREAK):
            before, whole = ids(last), ids(last + piece)
            # Llama 2's puts a space before a piece alone. A token of both texts is cut.
            token_ids += whole[len(before) :] if whole[: len(before)] == before else ids(piece)
            last = "\n"
        return token_ids

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``token_ids`` without end-of-sequence and padding tokens; it keeps ``</think>``,
        and a padding token that is a letter: id 0 is ``!`` in many vocabularies."""
        kept = _without(token_ids, self._silent)
        return self.backend.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render_chat(
        self,
        messages: list[Turn],
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        answer: bool = True,
    ) -> str:
        """Return the text of ``messages``, up to the start of the assistant's ``answer`` if there is to be
        one. ``tools``: JSON schemas. Arguments of calls reach the template as objects, or as JSON if it takes
        none (DeepSeek's). ``BREAK`` stands in special tokens that are not the template's, and in all tags of
        a tool's result (``</tool_response>``): they are encoded as text.

        Raises ValueError if the model's files hold no chat template, TemplateError if that fails.
        """
        options: dict[str, Any] = {"add_generation_prompt": answer, "strftime_now": self.today.strftime}
        options |= {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        # Thinking in an assistant's turn stays as tokens; templates look for it.
        special = [token for token in self.special_tokens if token not in THINKING]
        options |= {"tools": _as_text([*tools], special)} if tools else {}
        said = {"tool": [*self.special_tokens, *self.tags]}
        if self.backend.chat_template is None:
            places = "chat_template.jinja, or chat_template in tokenizer_config.json"
            raise ValueError(f"{self.folder}: expected a chat template ({places}), found none")

        def rendered(as_json: bool) -> str:
            turns = [_with_arguments(message, as_json) for message in messages]
            texts = [_as_text(turn, said.get(turn.get("role", ""), special)) for turn in turns]
            return self.backend.apply_chat_template(texts, tokenize=False, **options)

        try:
            with suppress(Exception):  # Jinja's, or Python's in an expression of the template
                return rendered(as_json=False)
            return rendered(as_json=True)
        except Exception as error:  # noqa: BLE001  as above
            name = next(iter(self.folder.glob("chat_template.jinja")), self.folder / "tokenizer_config.json")
            roles = ", ".join(str(message.get("role")) for message in messages)
            why = f"the chat template refuses the roles {roles}: {type(error).__name__}: {error}"
            raise TemplateError(f"{name}: {why}") from None

    @property
    def vocab_size(self) -> int:
        """Upper bound of the token ids (added tokens included; the embedding may be larger)."""
        return max(self.backend.get_vocab().values()) + 1  # ids may have gaps

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self.backend.get_vocab()))

    @cached_property
    def special_tokens(self) -> list[str]:
        """Texts that ``encode`` turns into special tokens; at least one."""
        # DeepSeek's token of a user's turn is not marked special
        marked = [token.content for token in self.backend.added_tokens_decoder.values() if token.special]
        return [*marked, *(tag for tag in self.tags if re.fullmatch("<[|\uff5c].+[|\uff5c]>", tag))]

    def parts(self) -> dict[str, list[Any]]:
        """Return all that decides which tokens a text has, in order."""
        stored = json.loads(self.backend.backend_tokenizer.to_str())
        return {
            "vocabulary": sorted((number, token) for token, number in self.backend.get_vocab().items()),
            "merges": stored["model"].get("merges") or [],
            "special tokens": [(t["id"], t["content"], t["special"]) for t in stored["added_tokens"]],
        }

    def pieces_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        return self.backend.convert_ids_to_tokens(token_ids)


def encodable(text: str) -> str:
    """Return the text with ``?`` for half a surrogate pair, which has no encoding."""
    return text.encode(errors="replace").decode()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder. Raises ValueError for none, for one without an end-of-sequence
    token, or if Transformers converts a SentencePiece model to one that encodes otherwise."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: expected a model folder, found none")
    if not (present := [name for name in FILES if (path / name).is_file()]):
        found = sorted(file.name for file in path.iterdir() if file.is_file())[:5]
        raise ValueError(f"{path}: expected {' or '.join(FILES)}, found {', '.join(found) or 'none'}")
    # Files of Transformers' own format need no conversion that could go wrong.
    if present != [PIECES]:
        return Tokenizer(path)
    expected = _pieces(path / PIECES, PROBE)
    tokenizer = Tokenizer(path)
    if (found := tokenizer.pieces_of(tokenizer.encode(PROBE))) != expected:
        remedy = "tokenizer_config.json names the tokenizer_class that knows how, LlamaTokenizer for example"
        found = f"{found} after the conversion by Transformers: {remedy}"
        raise ValueError(f"{path / PIECES}: expected the pieces {expected} of {PROBE!r}, found {found}")
    return tokenizer


def _pieces(model: Path, text: str) -> list[str]:
    """Return the pieces of ``text`` by SentencePiece itself. Raises ValueError for a damaged model."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(model)).encode(text, out_type=str)
    except (OSError, RuntimeError) as error:
        found = f"another or damaged file: {error}"
        raise ValueError(f"{model}: expected a SentencePiece model, found {found}") from None


def require_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Raise ValueError, with the first difference, unless both give every text the same tokens."""
    others = theirs.parts()
    for part, values in ours.parts().items():
        # The shorter list is filled with None, so that a missing entry differs, too.
        for mine, other in zip_longest(values, others.get(part, [])):
            if mine != other:
                where = f"expected the tokenizer of {ours.folder}; the first difference is in its {part}"
                raise ValueError(f"{theirs.folder}: {where}: expected {mine}, found {other}")


def load_decoder(path: str | Path) -> Callable[[Sequence[int] | np.ndarray], str]:
    """Return ``load_tokenizer(path).decode``, for ``tokenizer.json`` without the slow import."""
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        return load_tokenizer(path).decode
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    added = backend.get_added_tokens_decoder().keys()
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as Transformers reads older folders
        config |= _read_json(folder / "special_tokens_map.json")
    # text, or a record of an added token
    names = (config.get(key) or None for key in ("eos_token", "pad_token"))
    texts = (name["content"] if isinstance(name, dict) else name for name in names)
    eos, pad = (None if text is None else backend.token_to_id(text) for text in texts)
    ends, padding = _special_ids(folder, eos, pad)
    silent = sorted(ends | {padding} & added)
    return lambda token_ids: backend.decode(_without(token_ids, silent), skip_special_tokens=False)


def _as_text(value: Any, tokens: Sequence[str]) -> Any:
    """Return messages or schemas with ``BREAK`` in each of ``tokens`` that their texts hold."""
    if isinstance(value, str):
        for token in tokens:
            # ``<|im_end|>`` is written as ``<``, ``BREAK``, ``|im_end|>``.
            value = value.replace(token, token[0] + BREAK + token[1:])
    elif isinstance(value, Mapping):
        return {_as_text(key, tokens): _as_text(each, tokens) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        return [_as_text(each, tokens) for each in value]
    return value


def _without(token_ids: Sequence[int] | np.ndarray, silent: list[int]) -> list[int]:
    ids = np.asarray(token_ids, np.int64)
    return ids[~np.isin(ids, silent)].tolist()


def _special_ids(
    folder: Path, tokenizer_eos: int | None, tokenizer_pad: int | None
) -> tuple[frozenset[int], int]:
    """Return the end-of-sequence set and the padding token of a model folder."""
    preferred = "generation_config.json"
    generation, config = _read_json(folder / preferred), _read_json(folder / "config.json")
    eos_of = {
        preferred: generation.get("eos_token_id"),
        "config.json": (config.get("text_config") or config).get("eos_token_id"),
        "the tokenizer": tokenizer_eos,
    }
    # The first file that names any decides.
    for origin, value in eos_of.items():
        if eos := _as_set(value, folder / origin):
            break
    else:
        places = f"{preferred}, config.json or the tokenizer"
        raise ValueError(f"{folder}: expected eos_token_id in {places}, found none")
    if origin != preferred:
        log.warning("%s: no eos_token_id in %s; %s says %s", folder, preferred, origin, sorted(eos))
    pad = generation.get("pad_token_id", tokenizer_pad)
    if pad is None:
        pad = min(eos)
        log.warning("%s: no padding token; end-of-sequence token %d pads instead", folder, pad)
    return eos, pad


def _with_arguments(turn: Turn, as_json: bool) -> Turn:
    """Return a turn whose calls have their arguments as objects, or as JSON; what is neither stays."""
    if not isinstance(turn.get("tool_calls"), list):
        return turn
    # The caller's turns stay as they are.
    calls = deepcopy(turn["tool_calls"])
    for call in (call for call in calls if isinstance(call, dict)):
        function = call.get("function", call)
        given = function.get("arguments") if isinstance(function, dict) else None
        if as_json and isinstance(given, dict):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
        elif isinstance(given, str) and not as_json:
            function["arguments"] = read_arguments(given)
    return {**turn, "tool_calls": calls}


def read_arguments(given: Any) -> Any:
    """Return what a call's ``arguments`` hold as JSON text; others, and endless nesting, stay as they are."""
    try:
        return json.loads(given)
    except (TypeError, ValueError, RecursionError):
        return given


def _as_set(value: Any, where: Path) -> frozenset[int]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f"{where}: eos_token_id: expected token ids, found {value!r}")
    return frozenset(tokens)


def _read_json(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _from_transformers(folder: Path) -> Any:
    """Return Transformers' tokenizer. Raises ValueError, which names the file, for damaged files."""
    # slow to import; grader workers never need it
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Damaged files are named here; Transformers would not say which it is.
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        _read_json(folder / name)
    try:
        with expecting("the files of a tokenizer", folder):
            # Of tokenizer.json AutoTokenizer takes vocabulary and merges alone for some classes: DeepSeek's
            # distilled Llama, whose class is LlamaTokenizerFast, would lose its spaces.
            kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
            return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        if type(error) is not Exception:  # which the tokenizers library raises for its file
            raise
        raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from None
