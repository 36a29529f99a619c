"""Decoder for byte-level BPE (GPT-2, Qwen, Llama 3). Each token is a piece of the text's UTF-8, so a text can
be decoded from any token, ten times as fast as by the library, which builds a string for each token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

FIRST_READ = 1024
"""Tokens at a response's end that are read first; each further read takes four times as many."""
LONGEST_CHARACTER = 4
"""Maximum bytes of a character in UTF-8."""


class BytePieces:
    """Bytes of every token of a vocabulary; a text's bytes are the concatenated bytes of its tokens."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text. As in the library, invalid UTF-8 becomes U+FFFD and unknown ids are left out."""
        return self._bytes(token_ids).decode("utf-8", errors="replace")

    def decode_end(self, token_ids: Sequence[int] | np.ndarray, after: str, longest: int) -> str:
        """Return ``decode(token_ids).rpartition(after)[2][-longest:]``, decoding no more than needed;
        ``after`` is ASCII.

        The decoding of a character does not depend on anything before an ASCII character, nor on anything
        more than three bytes away. A read that begins inside a character therefore has the same end as the
        whole text, once it contains ``after`` or enough characters.
        """
        marker, read = after.encode("ascii"), FIRST_READ
        while True:
            end = self._bytes(token_ids[-read:])
            if (found := end.rfind(marker)) >= 0:
                return end[found + len(marker) :].decode("utf-8", errors="replace")[-longest:]
            text = end.decode("utf-8", errors="replace")
            if read >= len(token_ids) or len(text) >= longest + len(after) + LONGEST_CHARACTER:
                return text[-longest:]
            read *= 4

    def _bytes(self, token_ids: Sequence[int] | np.ndarray) -> bytes:
        known, pieces = len(self._pieces), self._pieces
        return b"".join([pieces[token] for token in np.asarray(token_ids).tolist() if token < known])


def byte_pieces(backend: Any, silent: Collection[int]) -> BytePieces | None:
    """Return the pieces of a ``tokenizers.Tokenizer``, empty for ``silent`` tokens; None if its tokens (or
    the tokens of another library's ``backend``) are not pieces of bytes."""
    from tokenizers import decoders

    if backend is None or type(backend.decoder) is not decoders.ByteLevel:
        return None
    letters = {letter: byte for byte, letter in enumerate(_alphabet())}
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        try:
            pieces[number] = bytes(letters[letter] for letter in token)
        except KeyError:  # an added token with a letter that maps to no byte is used as it is
            pieces[number] = token.encode("utf-8")
    for number in set(silent) & set(range(len(pieces))):
        pieces[number] = b""
    return BytePieces(pieces)


def _alphabet() -> list[str]:
    """Return the letter for each byte in GPT-2's vocabularies: the byte itself if printable, else one from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
