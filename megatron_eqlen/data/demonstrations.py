"""Demonstrations: rows whose responses supervised training imitates (``objective: sft``).

    turns:    system  user │ assistant │ user │ assistant
    tokens:   prompt       │ trained   │ given│ trained

A turn of the assistant is trained up to the token that ends it. The chat template renders the whole chat
once; the text before each turn of the assistant must be the prompt that the model would get there.
"""

from __future__ import annotations

from megatron_eqlen.data.prompts import CHARACTERS, PromptMaker, PromptSource, Tools
from megatron_eqlen.data.rows import DEMONSTRATION, BadRow, Problem
from megatron_eqlen.hf.tokenizer import TemplateError, Tokenizer, Turn
from megatron_eqlen.hf.turns import TAKEN, left_out
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, Recipe, SourceRecipe
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Demonstration


def training_prompts(recipe: Recipe, positions: int, tokenizer: Tokenizer, tools: Tools = ()) -> PromptSource:
    """Return the recipe's training prompts, with ``objective: sft`` demonstrations of up to ``positions``."""
    if not recipe.supervised:
        return PromptSource(recipe.data, tokenizer, recipe.seed, tools)
    sources = [source.model_copy(update={"grader": DEMONSTRATION}) for source in recipe.data.sources]
    data = recipe.data.model_copy(update={"sources": sources})
    maker = DemonstrationMaker(data, tokenizer, min(recipe.packing.max_tokens_per_row, positions))
    return PromptSource(data, tokenizer, recipe.seed, maker=maker)


class DemonstrationMaker(PromptMaker):
    """Turns rows into demonstrations of at most ``longest`` tokens."""

    def __init__(self, data: DataRecipe, tokenizer: Tokenizer, longest: int) -> None:
        super().__init__(data, tokenizer)
        self._longest = longest

    def make(
        self, row: Problem, recipe: SourceRecipe | BenchmarkRecipe, prompt_id: str, number: int
    ) -> Demonstration:
        """Return a row's demonstration. Raises BadRow if it is too long or the template changes turns."""
        if (characters := len(row.question) + len(row.gold)) > CHARACTERS * self._longest:
            raise BadRow("long_row", f"{characters:,} characters")
        try:
            turns = self.turns(row)
            # a row of question and answer is a chat of two turns
            turns += [] if row.messages else [{"role": "assistant", "content": row.gold}]
            prompt, response = self._encode(turns)
        except TemplateError as error:
            raise BadRow("refused_by_template", str(error)) from None
        if (length := len(prompt) + len(response)) > self._longest:
            raise BadRow("long_row", f"{length} tokens, a row or the model's context has {self._longest}")
        return Demonstration(
            prompt_id, prompt, row.question, DEMONSTRATION, row.gold, recipe.name, number, response
        )

    def _encode(self, turns: list[Turn]) -> tuple[list[int], Tokens]:
        """Return the token ids before the assistant's first turn, and the table of all that follow."""
        tokenizer, thinking = self._tokenizer, self._data.enable_thinking
        whole = tokenizer.render_chat(turns, thinking, answer=False)
        if lost := left_out(whole, turns, thoughts=True):
            raise BadRow("unrendered_key", f"{lost}: the chat template leaves it out")
        starts: list[int] = []
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                if not (turn["content"].strip() or turn.keys() - TAKEN - {"content"}):
                    raise BadRow("no_response", f"turn {number}: expected words or calls, found none")
                before = tokenizer.render_chat(turns[:number], thinking)
                if not whole.startswith(before):
                    changes = f"writes the turns before turn {number} in another way once it follows"
                    raise BadRow("changed_turns", f"the chat template of {tokenizer.folder} {changes}")
                starts.append(len(before))
        token_ids, given, bounds = list[int](), list[list[int]](), [0, *starts, len(whole)]
        # A turn of the assistant, and what is given up to the next:
        # ``4<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n``.
        for answer, (before, start, end) in enumerate(zip(bounds, starts, bounds[2:], strict=False)):
            ids = tokenizer.encode(whole[start:end], after=whole[before:start])
            ends = [place for place, token in enumerate(ids) if token in tokenizer.eos_token_ids]
            if not ends:
                expected = "a chat template that ends the assistant's turn with an end of sequence"
                found = f"({sorted(tokenizer.eos_token_ids)}), found {ids[-2:]}"
                raise BadRow("changed_turns", f"expected {expected} {found}")
            trained = ends[0] + 1
            # Nothing after the last trained token is needed.
            token_ids += ids if end < len(whole) else ids[:trained]
            # Trained tokens have no number; given ones have that of the turn that they answer.
            given += [[]] * trained + [[answer]] * (len(token_ids) - len(given) - trained)
        # no engine gave these log-probs, and the loss reads none
        return tokenizer.encode(whole[: starts[0]]), Tokens.of(token_ids, 0.0, given=given)
