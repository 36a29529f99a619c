"""Generation of one step: prompts in, rollouts out, at the engine's own speed.

    prompts ─► harvesters (one becomes a stream, or a group of completions) ─► tracks ─► engine requests
                 ▲                                                                          │
                 └──────── advance: pairs, forks, outcome ◄── tokens by position ◄── step ──┘

A harvester (``sampling.kind``) sees only token sequences; the driver here owns the engine: it admits
harvesters while the engine has free slots, hands each its tokens, submits its forks at once, submits lost
requests again, and stops at the token budget. What is harvested does not depend on the order in which tokens
arrive (unless the budget cuts it off). So a harvest that was killed goes on from the tokens that were
recorded: its tracks start with them. So does a rollout that the budget suspended, in the next step
(``carried``).
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.engine import Decoder, EngineError, StalePolicyError
from megatron_eqlen.rollout.meter import Meter
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.kind import Harvester
from megatron_eqlen.sampling.record import Part
from megatron_eqlen.sampling.track import Track, rollout_of
from megatron_eqlen.types import (
    Delta,
    Metrics,
    Prompt,
    Rollout,
    RolloutKey,
    Routes,
    Segment,
    rollout_key,
    sampled_by,
)
from megatron_eqlen.watchdog import beat

if TYPE_CHECKING:
    from megatron_eqlen.rollout.carried import Carried  # pyarrow takes long to import
    from megatron_eqlen.rollout.recorder import Recorder

MAX_ATTEMPTS = 4
"""Attempts per track. A track that is lost so often means that the engine fails."""


Key = tuple[str, int]
"""``types.rollout_key``: prompt id and number of the rollout."""


def harvest_seed(recipe: Recipe, step: int) -> int:
    """Of the rollouts that begin in a step, whose number is counted from 0."""
    return zlib.crc32(f"{recipe.seed}/{step}".encode())


def harvest(
    engine: Decoder,
    prompts: list[Prompt],
    recipe: Recipe,
    eos_token_ids: Collection[int],
    seed: int,
    on_complete: Callable[[Rollout], None] | None = None,
    on_part: Callable[[Harvester, Part], None] | None = None,
    recorder: Recorder | None = None,
    done: Iterable[Rollout] = (),
    known: Mapping[str, Segment] | None = None,
    generated_before: int = 0,
    prompt_routes: Mapping[RolloutKey, Routes] | None = None,
    whole: Callable[[Prompt, int], bool] | None = None,
    carried: Sequence[Carried] = (),
    together: Callable[[bool], bool] = bool,
    oldest_version: int | None = None,
) -> tuple[list[Rollout], Metrics]:
    """Harvest ``recipe.group_size`` tracks or completions for every prompt.

    ``seed`` differs from step to step; a track's own seed is a stable hash of it, the prompt's id and the
    track's number. ``on_part`` is called with each part of a rollout as it becomes final, and ``on_complete``
    with each rollout as it completes, after its last part: both in this thread, between two decode steps, so
    they must return at once. ``recorder`` records rollouts, and the tokens of those that are not complete.

    The rest is what earlier attempts at this harvest have recorded (``recorder.Left``): ``done`` are complete
    rollouts, returned and not generated again; ``known`` are tokens of tracks, by ``Track.name``, after which
    the engine goes on; ``generated_before`` tokens were generated for all of them; ``prompt_routes`` are of
    rollouts with such tokens.

    ``whole``: of which rollouts (prompt and number) log-probs, masks and routes are kept, by default of all.
    Of the others the rank holds token ids, which forks need.

    ``carried``: rollouts that an earlier step suspended; their prompts may be among ``prompts``, which then
    name no other rollouts. ``together``: what one of the ranks that drive this engine in step says of the
    time, for all of them.

    ``oldest_version``: of the weights that may have sampled a token of what is returned, in earlier attempts
    too; what is ``carried`` says it for itself. None: the engine's weights do not change before the harvest
    ends.

    Returns the rollouts, those that were carried first, then in the order of ``prompts`` (and of stream
    numbers), and the metrics of the whole harvest, except for requests and speeds, which are this attempt's.
    When the budget (``rollout.tokens_per_step``, ``seconds_per_step``) is spent, those that are not complete
    are cut; those that did not start are not in the list. With ``rollout.carry_over`` both are suspended and
    in the list. Raises ValueError for prompts that do not fit, EngineError for an engine that died or
    hangs, and StalePolicyError for tokens of other weights.
    """
    check_prompts(prompts, recipe, engine.max_model_len)
    eos = frozenset(eos_token_ids)
    goes_on = {rollout_key(one.rollout): one for one in carried}
    prompts = [prompt for prompt in prompts if prompt.prompt_id not in {key[0] for key in goes_on}]
    finished, version = {rollout_key(rollout): rollout for rollout in done}, engine.policy_version

    def oldest(key: Key) -> int | None:
        own = oldest_version is None or key not in goes_on
        return oldest_version if own else goes_on[key].oldest_version

    for key, rollout in finished.items():
        _check_version(rollout, version, oldest(key))
    kind = KINDS[recipe.sampling]
    harvesters = {key: _harvester(one, recipe, eos) for key, one in goes_on.items()} | {
        (one.prompt.prompt_id, one.index): one for one in kind.harvesters(prompts, recipe, eos, seed)
    }
    meter = Meter(engine, generated_before, carried if recipe.rollout.carry_over else None)
    for rollout in finished.values():
        meter.count(rollout)

    def collect(key: Key, rollout: Rollout) -> None:
        _check_version(rollout, version, oldest(key))
        finished[key] = rollout
        meter.count(rollout)
        if on_complete is not None and not rollout.suspended:
            on_complete(rollout)

    todo = {key: one for key, one in harvesters.items() if key not in finished}
    for key in (prompt_routes or {}).keys() & todo.keys():
        todo[key].prompt_routes = (prompt_routes or {})[key]
    driver = Driver(
        engine,
        recipe,
        meter,
        on_part or _nothing,
        collect,
        recorder,
        known or {},
        whole or _all,
        goes_on,
        together,
    )
    driver.run(todo)
    return [finished[key] for key in harvesters if key in finished], meter.metrics()


def _harvester(carried: Carried, recipe: Recipe, eos: frozenset[int]) -> Harvester:
    prompt = carried.rollout.prompt
    of_prompt = KINDS[recipe.sampling].harvesters([prompt], recipe, eos, carried.seed)
    found = next(one for one in of_prompt if one.index == carried.rollout.index)
    found.prompt_routes = carried.prompt_routes
    return found


def _nothing(harvester: Harvester, part: Part) -> None: ...


def _all(prompt: Prompt, index: int) -> bool:
    return True


def _check_version(rollout: Rollout, version: int, oldest: int | None) -> None:
    if oldest is None and rollout.policy_version != version:
        found, expected = rollout.policy_version, f"the engine's {version}"
    elif oldest is not None and min(sampled_by(rollout)) < oldest:
        found, expected = min(sampled_by(rollout)), f"{oldest} or newer"
    else:
        return
    raise StalePolicyError(f"{rollout.prompt_id}: generated by policy_version {found}, expected {expected}")


def check_prompts(prompts: list[Prompt], recipe: Recipe, max_model_len: int) -> None:
    """Raise ValueError for a prompt that is empty, twice there, or too long for the engine."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ValueError(f"prompt {prompt.prompt_id}: expected once in a step, found twice")
        seen.add(prompt.prompt_id)
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.prompt_id}: expected at least one token, found none")
        path = len(prompt.token_ids) + recipe.rollout.max_response_length
        if path > max_model_len:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} tokens + rollout.max_response_length "
                f"{recipe.rollout.max_response_length} = {path} exceed the engine's {max_model_len}"
            )


class Driver:
    """Runs harvesters on an engine until all are complete."""

    def __init__(
        self,
        engine: Decoder,
        recipe: Recipe,
        meter: Meter,
        announce: Callable[[Harvester, Part], None],
        collect: Callable[[Key, Rollout], None],
        recorder: Recorder | None,
        known: Mapping[str, Segment],
        whole: Callable[[Prompt, int], bool],
        carried: Mapping[Key, Carried],
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
        self.asking: dict[Key, str] = {}
        """Which request brings the routes of a rollout's prompt."""
        self.waiting: deque[tuple[Key, Harvester]] = deque()
        self.running: dict[Key, Harvester] = {}
        self.tracks: dict[str, tuple[Track, Key]] = {}
        self.generated: Counter[Key] = Counter()
        """Tokens that this step generated for what runs, in tracks that have ended."""
        self.launched: dict[Key, list[Track]] = {}
        """All tracks of what runs, if it may be suspended."""

    def run(self, harvesters: dict[Key, Harvester]) -> None:
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

    def begin(self, key: Key, harvester: Harvester) -> None:
        self.running[key] = harvester
        for track in harvester.start():
            self.launch(track, key)

    def launch(self, track: Track, key: Key) -> None:
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

    def submit(self, track: Track, key: Key) -> None:
        self.tracks[track.request_id] = (track, key)
        self.meter.launched(track)
        asked = self.prompt_routes_asked(track, key)
        self.engine.submit(track.request_id, track.path, track.remaining, track.seed, asked)

    def prompt_routes_asked(self, track: Track, key: Key) -> int:
        """How many rows of its prompt a track's request brings: the first request of a rollout brings all."""
        harvester = self.running[key]
        if not self.keep_routes or key in self.asking or harvester.prompt_routes is not None:
            return 0
        self.asking[key] = track.request_id
        return len(harvester.prompt.token_ids) - 1

    def deliver(self, deltas: list[Delta]) -> list[Key]:
        """Hand tokens to their tracks; returns the harvesters that can now decide something."""
        touched: dict[Key, None] = {}
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

    def retry(self, track: Track, key: Key, delta: Delta) -> None:
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

    def advance(self, keys: list[Key]) -> None:
        for key in keys:
            harvester = self.running[key]
            before = len(harvester.parts)
            while launched := harvester.advance():  # whose tokens may be known
                for track in launched:
                    self.launch(track, key)
            self.settle(key, harvester, before)

    def settle(self, key: Key, harvester: Harvester, before: int) -> None:
        """Announce the parts that became final, after the ``before`` first ones, and the rollout's end."""
        parts = harvester.parts[before:]
        for part in self.carried[key].recall(parts) if key in self.carried else parts:
            self.announce(harvester, part)
        if harvester.complete:
            del self.running[key]
            self.launched.pop(key, None)
            rollout, generated = harvester.rollout(self.engine.policy_version), self.generated.pop(key, 0)
            self.asking.pop(key, None)  # cut before its first token
            self.collect(key, rollout)
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

    def suspends(self, key: Key) -> bool:
        return self.carries_over and not (key in self.carried and self.carried[key].ends)

    def suspend(self, key: Key, harvester: Harvester) -> None:
        """Leave it to the next step."""
        self.running.pop(key, None)
        self.asking.pop(key, None)
        rollout, generated = harvester.rollout(self.engine.policy_version), self.generated.pop(key, 0)
        self.collect(key, rollout)
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
