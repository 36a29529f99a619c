"""Runs harvesters on an engine: their tracks are its requests.

    prompts ─► harvesters (one becomes a stream, or a group of completions) ─► tracks ─► engine requests
                 ▲                                                                          │
                 └──────── advance: pairs, forks, outcome ◄── tokens by position ◄── step ──┘

The driver admits harvesters while the engine has free slots, hands each its tokens, submits its forks at
once, submits lost requests again, and stops at the token budget.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.engine import Decoder, EngineError
from megatron_eqlen.rollout.left import Carried
from megatron_eqlen.rollout.meter import Meter
from megatron_eqlen.sampling.kind import Harvester
from megatron_eqlen.sampling.record import Part
from megatron_eqlen.sampling.track import Track, rollout_of
from megatron_eqlen.types import Delta, Prompt, Rollout, RolloutKey, Routes, Segment
from megatron_eqlen.watchdog import beat

if TYPE_CHECKING:
    from megatron_eqlen.rollout.recorder import Recorder  # pyarrow takes long to import

MAX_ATTEMPTS = 4
"""Attempts per track. A track that is lost so often means that the engine fails."""


class Driver:
    """Runs harvesters on an engine until all are complete."""

    def __init__(
        self,
        engine: Decoder,
        recipe: Recipe,
        meter: Meter,
        announce: Callable[[Harvester, Part], None],
        collect: Callable[[Rollout], None],
        recorder: Recorder | None,
        known: Mapping[str, Segment],
        whole: Callable[[Prompt, int], bool],
        carried: Mapping[RolloutKey, Carried],
        together: Callable[[bool], bool],
    ) -> None:
        self.engine = engine
        self.meter = meter
        self.announce = announce
        self.collect = collect
        self.recorder = recorder
        self.known = known
        self.whole = whole
        self.carried = carried
        self.together = together
        self.budget, self.seconds = recipe.rollout.tokens_per_step, recipe.rollout.seconds_per_step
        self.carries_over = recipe.rollout.carry_over
        self.timeout = recipe.rollout.request_timeout
        self.keep_routes = recipe.rollout.keep_routes
        self.asking: dict[RolloutKey, str] = {}
        """Which request brings the routes of a rollout's prompt."""
        self.waiting: deque[tuple[RolloutKey, Harvester]] = deque()
        self.running: dict[RolloutKey, Harvester] = {}
        self.tracks: dict[str, tuple[Track, RolloutKey]] = {}
        self.generated: Counter[RolloutKey] = Counter()
        """Tokens that this step generated for what runs, in tracks that have ended."""
        self.launched: dict[RolloutKey, list[Track]] = {}
        """All tracks of what runs, if it may be suspended."""

    def run(self, harvesters: dict[RolloutKey, Harvester]) -> None:
        started = {rollout_of(name) for name in self.known} | {
            key for key, one in self.carried.items() if one.tracks
        }
        self.waiting.extend((key, one) for key, one in harvesters.items() if key not in started)
        began = last_progress = time.monotonic()
        try:
            for key in harvesters:  # all at once, as they were when their tokens were recorded
                if key in started:
                    self.begin(key, harvesters[key])
                    self.advance([key])
            while self.waiting or self.running:
                if self.spent(time.monotonic() - began):
                    self.cut()
                    break
                self.admit()
                deltas = self.meter.timed(self.engine.step)
                self.advance(self.deliver(deltas))
                now = time.monotonic()
                if deltas:
                    last_progress = now
                    beat()
                elif now - last_progress > self.timeout:
                    raise EngineError(
                        f"no token for {self.timeout:.0f} s (rollout.request_timeout) with "
                        f"{len(self.tracks)} requests in flight"
                    )
                self.record()
            self.record(ended=True)
        finally:
            self.engine.abort(list(self.tracks))

    def spent(self, seconds: float) -> bool:
        """Whether the step's budget is."""
        if self.budget is not None and self.meter.generated_tokens >= self.budget:
            return True
        return self.seconds is not None and self.together(seconds >= self.seconds)

    def admit(self) -> None:
        """Start harvesters while the engine has free slots. The rest wait here, not in the engine's queue:
        there a fork would wait behind them, and its prefix might be evicted from the cache meanwhile."""
        while self.waiting and len(self.tracks) < self.engine.max_num_seqs:
            self.begin(*self.waiting.popleft())

    def begin(self, key: RolloutKey, harvester: Harvester) -> None:
        self.running[key] = harvester
        for track in harvester.start():
            self.launch(track, key)

    def launch(self, track: Track, key: RolloutKey) -> None:
        """Submit a new track after the tokens that earlier steps and attempts got, or take it as ended."""
        track.whole = self.whole(self.running[key].prompt, key[1])
        if (carried := self.carried.get(key)) is not None:
            track.age = carried.age
            if track.name in carried.tracks:
                track.resume(carried.tracks[track.name])
                track.prompt_routes = self.running[key].prompt_routes
                self.generated[key] -= len(track)
        if self.recorder is not None:
            self.recorder.follow(track)
        if track.name in self.known:
            track.resume(self.known[track.name])
            track.prompt_routes = self.running[key].prompt_routes
        if self.keep_routes and track.whole and len(track.routes) != len(track):
            raise EngineError(
                f"track {track.name}: expected routes of the {len(track)} tokens that it had before, found "
                f"{len(track.routes)}: they were generated without rollout.keep_routes"
            )
        if self.carries_over:
            self.launched.setdefault(key, []).append(track)
        if track.finish_reason is None:
            self.submit(track, key)
        else:
            self.generated[key] += len(track)

    def submit(self, track: Track, key: RolloutKey) -> None:
        self.tracks[track.request_id] = (track, key)
        self.meter.launched(track)
        asked = self.prompt_routes_asked(track, key)
        self.engine.submit(track.request_id, track.path, track.remaining, track.seed, asked)

    def prompt_routes_asked(self, track: Track, key: RolloutKey) -> int:
        """How many rows of its prompt a track's request brings: the first request of a rollout brings all."""
        harvester = self.running[key]
        if not self.keep_routes or key in self.asking or harvester.prompt_routes is not None:
            return 0
        self.asking[key] = track.request_id
        return len(harvester.prompt.token_ids) - 1

    def deliver(self, deltas: list[Delta]) -> list[RolloutKey]:
        """Hand tokens to their tracks; returns the harvesters that can now decide something."""
        touched: dict[RolloutKey, None] = {}
        tokens = 0
        for delta in deltas:
            entry = self.tracks.get(delta.request_id)
            if entry is None:  # sent before the engine saw the abort
                continue
            track, key = entry
            _check_delta(track, delta, self.keep_routes)
            if delta.token_ids and self.asking.get(key) == delta.request_id:
                track.prompt_routes = self.running[key].prompt_routes = _prompt_routes(
                    delta, len(self.running[key].prompt.token_ids) - 1
                )
                del self.asking[key]
            tokens += len(delta.token_ids)
            if delta.num_cached_tokens is not None:
                self.meter.prefilled(track, delta.num_cached_tokens)
            version = self.engine.policy_version if delta.policy_version is None else delta.policy_version
            if track.extend(delta, version):
                touched[key] = None
            if track.finish_reason is not None:
                self.generated[key] += len(track)
                self.leave(delta)
            elif delta.finish_reason is not None:
                self.retry(track, key, delta)
        self.meter.stepped(len(deltas), tokens)
        return list(touched)

    def leave(self, delta: Delta) -> None:
        """A track has ended; its engine may not know yet."""
        del self.tracks[delta.request_id]
        if delta.finish_reason is None:
            self.engine.abort([delta.request_id])

    def retry(self, track: Track, key: RolloutKey, delta: Delta) -> None:
        """Submit what is left of a request that the engine gave up or ended early."""
        del self.tracks[delta.request_id]
        if self.asking.get(key) == delta.request_id:
            del self.asking[key]
        track.attempts += 1
        self.meter.retries += 1
        if track.attempts >= MAX_ATTEMPTS:
            raise EngineError(
                f"request {delta.request_id}: finish_reason {delta.finish_reason!r} after "
                f"{len(track)} of {track.limit} tokens without an end of sequence, {track.attempts} times"
            )
        self.submit(track, key)

    def advance(self, keys: list[RolloutKey]) -> None:
        for key in keys:
            harvester = self.running[key]
            before = len(harvester.parts)
            while launched := harvester.advance():  # whose tokens may be known
                for track in launched:
                    self.launch(track, key)
            self.settle(key, harvester, before)

    def settle(self, key: RolloutKey, harvester: Harvester, before: int) -> None:
        """Announce the parts that became final, after the ``before`` first ones, and the rollout's end."""
        parts = harvester.parts[before:]
        for part in self.carried[key].recall(parts) if key in self.carried else parts:
            self.announce(harvester, part)
        if harvester.complete:
            del self.running[key]
            self.launched.pop(key, None)
            rollout, generated = harvester.rollout(self.engine.policy_version), self.generated.pop(key, 0)
            self.asking.pop(key, None)  # cut before its first token
            self.collect(rollout)
            if self.recorder is not None:
                self.recorder.complete(rollout, generated)

    def record(self, ended: bool = False) -> None:
        if self.recorder is not None:
            self.recorder.tick(ended)

    def cut(self) -> None:
        """The budget is spent: suspend what is not complete, or complete it as it is; start nothing more."""
        self.engine.abort(list(self.tracks))
        for track, key in self.tracks.values():
            self.generated[key] += len(track)
        self.tracks.clear()
        for key, harvester in list(self.running.items()):
            if self.suspends(key):
                self.suspend(key, harvester)
            else:
                before = len(harvester.parts)
                harvester.cut()
                self.settle(key, harvester, before)
        for key, harvester in self.waiting:
            if self.suspends(key):
                harvester.start()  # its tracks get no token
                self.suspend(key, harvester)
        self.waiting.clear()

    def suspends(self, key: RolloutKey) -> bool:
        return self.carries_over and not (key in self.carried and self.carried[key].ends)

    def suspend(self, key: RolloutKey, harvester: Harvester) -> None:
        """Leave it to the next step."""
        self.running.pop(key, None)
        self.asking.pop(key, None)
        rollout, generated = harvester.rollout(self.engine.policy_version), self.generated.pop(key, 0)
        self.collect(rollout)
        if self.recorder is not None:
            self.recorder.suspend(rollout, generated, self.launched.pop(key, ()))


def _prompt_routes(delta: Delta, expected: int) -> Routes:
    """Those that the request asked for. Raises EngineError where they are missing."""
    assert delta.routes is not None
    found = delta.routes[:0] if delta.prompt_routes is None else delta.prompt_routes
    if len(found) != expected:
        raise EngineError(
            f"request {delta.request_id}: expected routes of {expected} prompt tokens, found {len(found)}"
        )
    return found


def _check_delta(track: Track, delta: Delta, routes: bool) -> None:
    """Raise EngineError unless a delta's lists, and its ``routes`` where they are kept, are as long as its
    tokens."""
    tokens = len(delta.token_ids)
    if len(delta.logprobs) != tokens:
        raise _broken(delta, "log-prob", len(delta.logprobs))
    if routes and tokens != (found := 0 if delta.routes is None else len(delta.routes)):
        raise _broken(delta, "row of routes", found)
    mask = delta.sampling_mask
    if mask is None and not track.mask_counts:
        return
    if len(mask or ()) != tokens:
        raise _broken(delta, "sampling mask", len(mask or ()))


def _broken(delta: Delta, column: str, found: int) -> EngineError:
    return EngineError(
        f"request {delta.request_id}: expected a {column} for each of {len(delta.token_ids)} tokens, "
        f"found {found}"
    )
