"""Byte-level BPE (GPT-2, Qwen, Llama 3): each token is a piece of the text's UTF-8, so a text can be decoded
from any token on, and ten times as fast as by the library, which goes through a string for each token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

FIRST_READ = 1024
"""Tokens at a response's end that are looked at first; then four times as many, and so on."""
LONGEST_CHARACTER = 4
"""Bytes in UTF-8."""


class BytePieces:
    """The bytes of every token of a vocabulary; a text's bytes are its tokens' bytes, one after another."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text. As in the library, bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._bytes(token_ids).decode("utf-8", errors="replace")

    def decode_end(self, token_ids: Sequence[int] | np.ndarray, after: str, longest: int) -> str:
        """``decode(token_ids).rpartition(after)[2][-longest:]``, of which no more is decoded than needed;
        ``after`` is ASCII.

        How a character is decoded does not depend on anything before an ASCII character, nor on anything more
        than three bytes away. So a read that begins in the middle of a character ends like the whole text,
        once it has ``after`` or enough characters.
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
    """The pieces of a ``tokenizers.Tokenizer``, none for ``silent`` tokens; None if its tokens (or those of a
    ``backend`` of another library) are no pieces of bytes."""
    from tokenizers import decoders

    if backend is None or type(backend.decoder) is not decoders.ByteLevel:
        return None
    letters = {letter: byte for byte, letter in enumerate(_alphabet())}
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        try:
            pieces[number] = bytes(letters[letter] for letter in token)
        except KeyError:  # an added token with a letter that stands for no byte: it is taken as it is
            pieces[number] = token.encode("utf-8")
    for number in set(silent) & set(range(len(pieces))):
        pieces[number] = b""
    return BytePieces(pieces)


def _alphabet() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabularies: itself if it is printable, else one from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
