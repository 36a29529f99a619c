"""Runs harvesters on an engine: their tracks are its requests.

    prompts ─► harvesters (one for each stream, or group of completions) ─► tracks ─► engine requests
                 ▲                                                                          │
                 └──────── advance: pairs, forks, outcome ◄── tokens by position ◄── step ──┘

The driver admits harvesters while the engine has free slots, hands each its tokens, submits its forks at
once, submits lost requests again, and stops at the token or time budget.

With ``rollout.keep_routes`` a path has one row of routes for each position: that of the newest prefill. A
request under new weights (of a rollout that an earlier step began, or lost across a weight sync) computes the
whole path again, and the new tokens rest on the experts that the new weights chose for it; so the request
brings these rows, and they replace the older ones. The older tokens of the path have log-probs from older
experts. Their ratio trainer / engine compares two policies, and the routers belong to the policy: the new
weights with the experts that they choose are the policy that is trained, and the old weights with theirs the
one that sampled. The new weights with the experts of old ones are neither.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.rollout.engine import Decoder, EngineError
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.meter import Meter
from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver
from megatron_eqlen.sampling.track import Track, rollout_of
from megatron_eqlen.types import Delta, Rollout, RolloutKey, Routes

MAX_ATTEMPTS = 4
"""Attempts per track and policy version. A track that is lost so often means that the engine fails."""

PROMPT = (-1, 0)
"""Key of the prompt in ``Driver.route_versions``."""


class RouteRequest(NamedTuple):
    """Rows of routes of its path that a request brings."""

    rows: int
    version: int
    """Policy version whose prefill computes these routes."""


class Driver:
    """Runs harvesters on an engine until all are complete or the budget is used up."""

    def __init__(
        self, engine: Decoder, plan: HarvestPlan, meter: Meter, observers: Sequence[HarvestObserver]
    ) -> None:
        self.engine, self.plan, self.meter, self.observers = engine, plan, meter, observers
        self.rollout = plan.recipe.rollout
        self.recorded_tracks = plan.progress.tracks
        self.partial = {resumed.key: resumed for resumed in plan.partial}
        self.waiting: deque[tuple[RolloutKey, Harvester]] = deque()
        """Harvesters that have not started."""
        self.running: dict[RolloutKey, Harvester] = {}
        self.in_flight: dict[str, tuple[Track, RolloutKey]] = {}
        """Tracks that the engine decodes, by request id."""
        self.route_requests: dict[str, RouteRequest] = {}
        """Requests in flight that bring routes of their path."""
        self.route_versions: dict[RolloutKey, dict[tuple[int, int], int]] = {}
        """Policy version whose prefill chose the first rows of a part's routes, where it is not the one that
        sampled its tokens; by the number of the part and of these rows, or ``PROMPT``."""
        self.losses: Counter[tuple[str, int]] = Counter()
        """Lost requests by track and policy version."""
        self.generated: Counter[RolloutKey] = Counter()
        """Tokens that this step generated for each running harvester, in tracks that have ended."""
        self.launched: dict[RolloutKey, list[Track]] = {}
        """All tracks of each running harvester, if its rollout may be suspended."""

    def run(self, harvesters: dict[RolloutKey, Harvester]) -> None:
        """Run ``harvesters`` to their ends and report to the observers."""
        begun = {rollout_of(name) for name in self.recorded_tracks}
        begun |= {key for key, partial in self.partial.items() if partial.tracks}
        self.waiting.extend((key, harvester) for key, harvester in harvesters.items() if key not in begun)
        began = last_progress = time.monotonic()
        try:
            # resume rollouts with recorded tokens: all at once, as when the tokens were recorded
            for key in harvesters:
                if key in begun:
                    self.begin(key, harvesters[key])
                    self.advance([key])
            while self.waiting or self.running:
                if self.budget_used_up(time.monotonic() - began):
                    self.end_early()
                    break
                self.admit()
                deltas = self.meter.timed(self.engine.step)
                self.advance(self.deliver(deltas))
                # give up a silent engine
                now = time.monotonic()
                if deltas:
                    last_progress = now
                    beat()
                elif now - last_progress > self.rollout.request_timeout:
                    raise EngineError(
                        f"no token for {self.rollout.request_timeout:.0f} s (rollout.request_timeout) with "
                        f"{len(self.in_flight)} requests in flight"
                    )
                self.finish_decode_step()
            self.finish_decode_step(last=True)
        finally:
            self.engine.abort(list(self.in_flight))

    def budget_used_up(self, seconds: float) -> bool:
        """Return True once the step's token or time budget is used up."""
        tokens, limit = self.rollout.tokens_per_step, self.rollout.seconds_per_step
        if tokens is not None and self.meter.generated_tokens >= tokens:
            return True
        return limit is not None and self.plan.agree(seconds >= limit)

    def admit(self) -> None:
        """Start harvesters while the engine has free slots. The rest wait here, not in the engine's queue:
        there a fork would wait behind them, and its prefix might be evicted from the cache meanwhile."""
        while self.waiting and len(self.in_flight) < self.engine.max_num_seqs:
            self.begin(*self.waiting.popleft())

    def begin(self, key: RolloutKey, harvester: Harvester) -> None:
        """Start a harvester and launch its first tracks."""
        self.running[key] = harvester
        for track in harvester.start():
            self.launch(track, key)

    def launch(self, track: Track, key: RolloutKey) -> None:
        """Give a new track the tokens of earlier steps and attempts, then submit it unless it has ended."""
        harvester = self.running[key]
        track.keeps_columns = self.plan.keeps_columns(harvester.prompt, key[1])
        # tokens of earlier steps
        if (partial := self.partial.get(key)) is not None:
            track.age = partial.age
            if track.name in partial.tracks:
                track.resume(partial.tracks[track.name])
                track.prompt_routes = harvester.prompt_routes
                self.generated[key] -= len(track)
        for observer in self.observers:
            observer.track_launched(track)
        # tokens of earlier attempts at this step
        if track.name in self.recorded_tracks:
            track.resume(self.recorded_tracks[track.name])
            track.prompt_routes = harvester.prompt_routes
            if self.rollout.keep_routes and self.ended_on_older_routes(track):
                track.reopen()
        if self.rollout.keep_routes and track.keeps_columns and len(track.routes) != len(track):
            raise EngineError(
                f"track {track.name}: expected routes of the {len(track)} tokens that it had before, found "
                f"{len(track.routes)}: they were generated without rollout.keep_routes"
            )
        if self.rollout.carry_over:
            self.launched.setdefault(key, []).append(track)
        if track.finish_reason is None:
            self.submit(track, key)
        else:
            self.generated[key] += len(track)

    def submit(self, track: Track, key: RolloutKey) -> None:
        """Submit the rest of a track as a request."""
        self.in_flight[track.request_id] = (track, key)
        self.meter.launched(track)
        route_rows = self.request_routes(track, key)
        self.engine.submit(track.request_id, track.path, track.remaining, track.seed, route_rows)

    def request_routes(self, track: Track, key: RolloutKey) -> int:
        """Return the number of rows of routes that a track's request brings of its path: of the prompt for
        the first request of a rollout, of all positions where older weights chose some of the routes."""
        if not self.rollout.keep_routes:
            return 0
        version, prompt = self.engine.policy_version, self.running[key].prompt
        versions = self.route_versions.setdefault(key, {})
        if self.has_older_routes(track, key, version):
            rows = len(track.path) - 1
        elif self.running[key].prompt_routes is None and PROMPT not in versions:
            rows = len(prompt.token_ids) - 1
        else:
            return 0
        versions[PROMPT] = version
        self.route_requests[track.request_id] = RouteRequest(rows, version)
        return rows

    def has_older_routes(self, track: Track, key: RolloutKey, version: int) -> bool:
        """Return True if weights other than those of ``version`` chose routes of a track's path."""
        harvester, versions = self.running[key], self.route_versions[key]
        resumed = harvester.prompt_routes is not None and key in self.partial
        if versions.get(PROMPT, -1 if resumed else version) != version:
            return True
        if any(sampled_by != version for _, sampled_by in track.runs):
            return True
        return any(
            versions[part.number, shared] != version
            if (part.number, shared) in versions
            else any(sampled_by != version for _, sampled_by in part.segment.versions)
            for _, part, shared in harvester.parts_along(track)
        )

    def ended_on_older_routes(self, track: Track) -> bool:
        """Return True if the weights in use continued and ended a track that older weights had begun: the
        journal has its tokens, but not the routes that the weights in use chose for the older ones."""
        versions = {version for _, version in track.runs}
        current = self.engine.policy_version
        return track.finish_reason is not None and len(versions) > 1 and track.runs[-1][1] == current

    def take_routes(self, track: Track, key: RolloutKey, delta: Delta) -> None:
        """Take the routes of a track's path from the first tokens of a request that brings them."""
        request = self.route_requests.pop(delta.request_id)
        rows = _asked_routes(delta, request.rows)
        harvester, versions = self.running[key], self.route_versions[key]
        prompt = len(harvester.prompt.token_ids)
        older, newer = [], []
        # prompt
        if harvester.prompt_routes is not None:
            older.append(harvester.prompt_routes)
            newer.append(rows[: prompt - 1])
        track.prompt_routes = harvester.prompt_routes = rows[: prompt - 1]
        # finished parts
        for start, part, shared in harvester.parts_along(track):
            first = prompt - 1 + start
            if first + shared > len(rows):
                continue
            versions[part.number, 1] = versions[part.number, shared] = request.version
            if (known := part.segment.routes) is not None:
                part.segment.routes = np.concatenate([rows[first : first + shared], known[shared:]])
                older.append(known[:shared])
                newer.append(rows[first : first + shared])
        # the track's own tokens
        own = rows[len(track.context) - 1 :]
        if len(own) and track.keeps_columns:
            older.append(track.routes[: len(own)])
            newer.append(own)
            track.routes.replace(own)
        if older:
            self.meter.rerouted(np.concatenate(older), np.concatenate(newer))

    def deliver(self, deltas: list[Delta]) -> list[RolloutKey]:
        """Hand tokens to their tracks; return the keys of harvesters that can now decide something."""
        touched: dict[RolloutKey, None] = {}
        tokens = 0
        for delta in deltas:
            entry = self.in_flight.get(delta.request_id)
            if entry is None:  # sent before the engine saw the abort
                continue
            track, key = entry
            _check_delta(track, delta, self.rollout.keep_routes)
            # routes of the path
            if delta.token_ids and delta.request_id in self.route_requests:
                self.take_routes(track, key, delta)
            # tokens
            tokens += len(delta.token_ids)
            if delta.num_cached_tokens is not None:
                self.meter.prefilled(track, delta.num_cached_tokens)
            version = self.engine.policy_version if delta.policy_version is None else delta.policy_version
            if track.extend(delta, version):
                touched[key] = None
            # end of the track, or of its request alone
            if track.finish_reason is not None:
                self.generated[key] += len(track)
                self.forget(delta)
            elif delta.finish_reason is not None:
                self.retry(track, key, delta)
        self.meter.stepped(len(deltas), tokens)
        return list(touched)

    def forget(self, delta: Delta) -> None:
        """Drop the request of a track that has ended; abort it where the engine does not know of the end."""
        del self.in_flight[delta.request_id]
        if delta.finish_reason is None:
            self.engine.abort([delta.request_id])

    def retry(self, track: Track, key: RolloutKey, delta: Delta) -> None:
        """Submit the rest of a request that the engine gave up or ended early. Raises EngineError after
        MAX_ATTEMPTS."""
        del self.in_flight[delta.request_id]
        if self.route_requests.pop(delta.request_id, None) is not None:
            self.route_versions[key].pop(PROMPT, None)
        track.attempts += 1
        self.meter.retries += 1
        self.losses[track.name, self.engine.policy_version] += 1
        if (times := self.losses[track.name, self.engine.policy_version]) >= MAX_ATTEMPTS:
            raise EngineError(
                f"request {delta.request_id}: finish_reason {delta.finish_reason!r} after "
                f"{len(track)} of {track.limit} tokens without an end of sequence, {times} times"
            )
        self.submit(track, key)

    def advance(self, keys: list[RolloutKey]) -> None:
        """Let harvesters use the new tokens of their tracks, and launch their forks."""
        for key in keys:
            harvester = self.running[key]
            before = len(harvester.parts)
            while launched := harvester.advance():  # a fork may have recorded tokens, and have ended
                for track in launched:
                    self.launch(track, key)
            self.report(key, harvester, before)

    def report(self, key: RolloutKey, harvester: Harvester, before: int) -> None:
        """Tell the observers of the parts after the first ``before`` ones, and of the end of the rollout."""
        parts = harvester.parts[before:]
        new = self.partial[key].restore_grades(parts) if key in self.partial else parts
        for part in new:
            for observer in self.observers:
                observer.part_finished(harvester, part)
        if harvester.complete:
            self.launched.pop(key, None)
            rollout, generated = self.take(key, harvester)
            for observer in self.observers:
                observer.rollout_completed(rollout, generated)

    def take(self, key: RolloutKey, harvester: Harvester) -> tuple[Rollout, int]:
        """Stop running a harvester; return its rollout, and the number of tokens generated for it."""
        self.running.pop(key, None)
        self.route_versions.pop(key, None)
        return harvester.rollout(self.engine.policy_version), self.generated.pop(key, 0)

    def finish_decode_step(self, last: bool = False) -> None:
        for observer in self.observers:
            observer.decode_step_finished(last)

    def end_early(self) -> None:
        """Suspend or cut rollouts that are not complete, and start no more: the budget is used up."""
        # stop decoding
        self.engine.abort(list(self.in_flight))
        for track, key in self.in_flight.values():
            self.generated[key] += len(track)
        self.in_flight.clear()
        self.route_requests.clear()
        # end running harvesters
        for key, harvester in list(self.running.items()):
            if self.may_suspend(key):
                self.suspend(key, harvester)
            else:
                before = len(harvester.parts)
                harvester.cut()
                self.report(key, harvester, before)
        # suspend those that have not started
        for key, harvester in self.waiting:
            if self.may_suspend(key):
                harvester.start()  # its tracks get no token
                self.suspend(key, harvester)
        self.waiting.clear()

    def may_suspend(self, key: RolloutKey) -> bool:
        """Return True if the next step may resume a rollout."""
        return self.rollout.carry_over and not (key in self.partial and self.partial[key].last_step)

    def suspend(self, key: RolloutKey, harvester: Harvester) -> None:
        """Leave a rollout to the next step."""
        rollout, generated = self.take(key, harvester)
        tracks = self.launched.pop(key, ())
        for observer in self.observers:
            observer.rollout_suspended(rollout, generated, tracks)


def _asked_routes(delta: Delta, expected: int) -> Routes:
    """Return the routes of its path that a request asked for. Raises EngineError where rows are missing."""
    assert delta.routes is not None
    found = delta.routes[:0] if delta.prompt_routes is None else delta.prompt_routes
    if len(found) != expected:
        raise EngineError(
            f"request {delta.request_id}: expected routes of the first {expected} positions of its path, "
            f"found {len(found)}"
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
