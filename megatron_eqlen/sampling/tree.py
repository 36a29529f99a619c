"""Trees of lines: a line is continued several times where it forks.

    prompt ─┬─ part 0 ─┬─ part 2 ─ ...        group_size lines start at the prompt; the line of part 0 forked
            │          └─ part 3 ─ ...        and goes on as part 2
            └─ part 1 ─ ...

A fork depends on what was sampled before it, never on later tokens of its line, even where an engine has
delivered them already; the line itself goes on undisturbed. Lines that continue the same part share its
weight: the weighted mean over lines is unbiased for any such rule (docs/length_bias.md). TreeRPO's trees fork
at fixed lengths; groups of completions do not fork.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty, part_rewards, token_tree
from megatron_eqlen.sampling.harvester import Harvester, Marker, Setting
from megatron_eqlen.sampling.kind import SamplingKind, plural
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Metrics, Part, Prompt, Rollout, TokenTree

POLL = 16
"""Tokens between two searches of a line for the marker. The line forks from its marker on."""


class TreeSampling(SamplingKind):
    """Sampled trees; parts that continue the same part are compared."""

    name = "tree"
    shares: ClassVar[bool] = True
    """Units have shares of their rollout."""

    def harvester(self, prompt: Prompt, index: int, setting: Setting) -> GrowingTree:
        recipe, tree = setting.recipe, setting.recipe.tree_sampling
        shape = Shape(recipe.group_size, tree.branching, tree.forks, "step")
        if tree.fork == "death":
            return ForkedAtDeaths(prompt, index, setting, shape)
        search = after_marker(setting.marker) if tree.fork == "marker" else every(step_tokens(recipe))
        return GrowingTree(prompt, index, setting, shape, search)

    def compare(
        self, rollout: Rollout, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return the tree as it was sampled, without parts of unknown reward, and a unit for each set of
        siblings, whose share is the weight of the part that they continue."""
        # parts that a budget cut off have no reward, and are not trained
        rewards = part_rewards(rollout, penalty)
        parts = [part for part in rollout.parts if part.number in rewards]
        tree, nodes = token_tree(rollout, rollout.prompt_id, parts)
        # parts that continue the same part are compared with each other
        siblings: dict[int, list[Part]] = defaultdict(list)
        for part in parts:
            siblings[part.parent].append(part)
        weights = rollout.weights()
        units = [
            ComparisonUnit(
                rollout.prompt_id,
                members,
                [nodes[part.number] for part in members],
                [rewards[part.number] for part in members],
                skip_equal=False,
                share=weights[parent] if self.shares else None,
            )
            for parent, members in siblings.items()
        ]
        return tree, units

    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        places = {part.number: place for place, part in enumerate(rollout.parts)}
        labels = [
            f"step {place}" + (f" after step {places[part.parent]}" if part.parent >= 0 else "")
            for place, part in enumerate(rollout.parts)
        ]
        return f"tree of {plural(len(labels), 'step')}", labels

    def harvest_metrics(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the number of completions (each part counts as one), their lengths, and why they ended."""
        parts = [part for rollout in rollouts for part in rollout.parts]
        lengths = [len(part) for part in parts]
        # of the lines alone: a part that others continue was not cut
        ends = Counter(line.last.finish_reason for rollout in rollouts for line in rollout.lines())
        if not parts:  # all were cut before their first token
            return {"harvest/completions": 0}
        return {
            "harvest/completions": len(parts),
            "harvest/supervised_tokens": sum(lengths),
            "harvest/response_length": fmean(lengths),
            "harvest/response_length_max": max(lengths),
            "harvest/truncated_fraction": ends["length"] / len(parts),
            "harvest/budget_fraction": ends[None] / len(parts),
        }


class Independent(TreeSampling):
    """Groups of G completions, all compared with one another: trees of depth 1."""

    name = "independent"
    shares = False

    def harvester(self, prompt: Prompt, index: int, setting: Setting) -> GrowingTree:
        return GrowingTree(prompt, index, setting, Shape(setting.recipe.group_size))

    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        count = len(rollout.parts)
        return plural(count, "completion"), [f"completion {number}" for number in range(count)]


TREE, INDEPENDENT = TreeSampling(), Independent()


# ---- where a line forks ----------------------------------------------------------------------------------

Search = Callable[["OpenLine"], int | None]
"""Returns the number of tokens of its response after which a line forks next. None: its tokens do not reach a
fork, and its track's ``awaited`` says when to search again."""


@dataclass
class OpenLine:
    """An open line of a tree, from the prompt down."""

    track: Track
    offset: int
    """Tokens of the response before those of the track."""
    number: int
    """Number of the part that its next tokens make."""
    forks: int
    """Forks behind it. A line of fewer forks is heavier: each fork divides its weight."""
    searched: int
    """Tokens of the response that no later fork lies in, nor a marker that it needs."""

    @property
    def length(self) -> int:
        """Generated tokens of the response so far."""
        return self.offset + len(self.track)

    def is_alive_at(self, length: int) -> bool:
        """Return True if the line continues after ``length`` tokens of its response."""
        open_end = self.track.finish_reason is None and not self.track.awaits_answer
        return self.length > length or (self.length == length and open_end)

    def await_length(self, length: int) -> None:
        self.track.awaited = min(length - self.offset, self.track.limit)


def step_tokens(recipe: Recipe) -> int:
    """Return the tokens between two forks; by default they divide the longest response evenly."""
    tree = recipe.tree_sampling
    return tree.step_tokens or max(1, recipe.rollout.max_response_length // (tree.forks + 1))


def every(tokens: int) -> Search:
    """Return the rule that forks a line every so many tokens."""

    def search(line: OpenLine) -> int | None:
        length = (line.searched // tokens + 1) * tokens
        if line.length >= length:
            return length
        line.await_length(length)
        return None

    return search


def after_marker(marker: Marker | None) -> Search:
    """Return the rule that forks a line after the token that completes the marker."""

    def search(line: OpenLine) -> int | None:
        assert marker is not None, "the plan of a harvest has the marker"
        # `first` is the track's own token from which a marker may still begin
        first, ids = line.searched - line.offset, line.track.generated_ids
        if marker.contains(list(ids[first:])):
            ends = range(first + 1, len(ids) + 1)
            return line.offset + next(end for end in ends if marker.contains(list(ids[first:end])))
        # a marker may begin in the last width - 1 tokens and end in later ones
        line.searched = max(line.searched, line.length + 1 - marker.width)
        line.await_length(line.length + POLL)
        return None

    return search


# ---- trees that grow -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    roots: int
    """Lines that start at the prompt."""
    branching: int = 1
    """Lines that continue after a fork."""
    forks: int = 0
    """Most forks of a line, or of a tree."""
    role: str = "completion"
    """Role of its parts."""


class GrowingTree(Harvester):
    """Harvests the tree of one prompt, whose lines fork where ``search`` finds it in their own tokens."""

    def __init__(
        self, prompt: Prompt, index: int, setting: Setting, shape: Shape, search: Search | None = None
    ) -> None:
        super().__init__(prompt, index, setting)
        self.shape, self.search = shape, search
        self.lines: list[OpenLine] = []
        """Open lines, in the order of their tracks' numbers."""

    def start(self) -> list[Track]:
        return [self._open(number, [], length=0, parent=-1, forks=0) for number in range(self.shape.roots)]

    def advance(self) -> list[Track]:
        """Fork and end lines; a tree without open lines is complete."""
        launched: list[Track] = []
        for line in list(self.lines):
            # an engine may deliver several forks' worth of tokens at once
            while (length := self._next_fork(line)) is not None:
                launched += self.fork(line, length, self.shape.branching)
            if line.track.finish_reason is not None:
                self.end(line)
        return launched

    def cut(self) -> None:
        for line in list(self.lines):
            # a group has all its completions
            if len(line.track) > line.track.start or not self.shape.forks:
                self.end(line)
        self.lines.clear()
        self.outcome = "budget"

    def fork(self, line: OpenLine, length: int, branching: int) -> list[Track]:
        """Continue a line ``branching`` times after ``length`` tokens; return the new tracks."""
        track = line.track
        # what the line had up to here is a part; the line continues as its first child, others beside it
        part = self.add_part(track, self.shape.role, line.number, length - line.offset - track.start)
        first = self._first_child(part.number)
        line.number, line.searched, line.forks = first, length, line.forks + 1
        # the response's tokens up to the fork, with an environment's answer to them
        end = len(track.context) + track.place(length - line.offset)
        response = track.path[len(self.prompt.token_ids) : end]
        # tracks are numbered as the parts that they begin with
        numbers = range(first + 1, first + branching)
        return [self._open(number, response, length, part.number, line.forks) for number in numbers]

    def end(self, line: OpenLine) -> None:
        """Make the rest of a line's tokens its last part."""
        self.add_part(line.track, self.shape.role, line.number)
        self.close(line)
        if not self.lines:
            self.outcome = "complete"

    def close(self, line: OpenLine) -> None:
        self.lines.remove(line)
        del self.open[line.track.number]

    def _next_fork(self, line: OpenLine) -> int | None:
        if self.search is None or line.forks == self.shape.forks:
            return None
        length = self.search(line)
        return length if length is not None and line.is_alive_at(length) else None

    def _first_child(self, number: int) -> int:
        """Return the first part that continues a part, numbered as in a heap: fork order does not matter."""
        return self.shape.roots + number * self.shape.branching

    def _open(self, number: int, response: list[int], length: int, parent: int, forks: int) -> Track:
        """Open a line after ``response``, which has ``length`` generated tokens."""
        track = self.open_track(number, response, self.limit - length, parent)
        self.lines.append(OpenLine(track, length, number, forks, searched=length))
        if self.search is not None and forks < self.shape.forks:
            self.search(self.lines[-1])  # sets the length to await
        return track


class ForkedAtDeaths(GrowingTree):
    """Harvests a tree that forks where a line ends: the heaviest of the lines that go on."""

    forked = 0
    """Forks of the tree."""

    def advance(self) -> list[Track]:
        """Use the ends of lines in the order of their lengths, once each is certain to be the next."""
        while ended := [line for line in self.lines if line.track.finish_reason is not None]:
            # at the limit responses have an end before those without
            first = min(ended, key=lambda ln: (ln.length, ln.track.finish_reason == "length", ln.number))
            # a line that is behind may still end before `first`: wait until it has come as far
            behind = [line for line in self.lines if line not in ended and not line.is_alive_at(first.length)]
            if behind and self.forked < self.shape.forks:
                for line in behind:
                    line.await_length(first.length)
                return []
            if launched := self.die(first):
                return launched
        return []

    def answerable(self) -> list[Track]:
        """Return the tracks whose turns may be answered: an end forks another line, so a turn waits until no
        line is behind it. Lines that are behind are awaited at the first turn ahead of them."""
        waiting = [line.length for line in self.lines if line.track.awaits_answer]
        for line in self.lines:
            ahead = [length for length in waiting if length > line.length]
            if ahead and line.track.finish_reason is None and not line.track.awaits_answer:
                line.track.awaited = min(min(ahead) - line.offset, line.track.awaited)
        shortest = min((line.length for line in self.lines), default=0)
        return [line.track for line in self.lines if line.track.awaits_answer and line.length == shortest]

    def die(self, line: OpenLine) -> list[Track]:
        """End a line; fork the heaviest that goes on there and has not just forked; return the new tracks."""
        self.end(line)
        length = line.length
        others = [other for other in self.lines if other.is_alive_at(length) and other.searched < length]
        if not others or self.forked == self.shape.forks:
            return []
        heaviest = min(others, key=lambda other: (other.forks, other.number))
        return self.fork(heaviest, length, self.shape.branching)

    def fork(self, line: OpenLine, length: int, branching: int) -> list[Track]:
        launched = super().fork(line, length, branching)
        self.forked += 1
        return launched

    def _first_child(self, number: int) -> int:
        """Return the next free number: these forks have an order."""
        return self.shape.roots + self.forked * self.shape.branching
