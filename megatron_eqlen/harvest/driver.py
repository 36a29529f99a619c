"""Runs harvesters on an engine: their tracks are its requests.

    prompts ─► harvesters (one for each stream, or group of completions) ─► tracks ─► engine requests
                 ▲                                                                          │
                 └──────── advance: pairs, forks, outcome ◄── tokens by position ◄── step ──┘

The driver admits harvesters while the engine has free slots, hands each its tokens, submits forks and lost
requests at once, lets environments answer turns (``dialogues``), and stops at the step's budget of tokens.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from operator import eq

from megatron_eqlen.engines.protocol import SAMPLERS, Decoder, EngineError, Request
from megatron_eqlen.harvest.dialogues import Dialogues
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.harvest.meter import Meter
from megatron_eqlen.harvest.prompt_routes import PromptRoutes
from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Delta, Rollout, RolloutKey


def shared_prefix(tokens: Iterable[int], others: Iterable[int]) -> int:
    """Return the length of the common prefix."""
    return sum(takewhile(bool, map(eq, tokens, others)))


MAX_ATTEMPTS = 4
"""Attempts per turn of a track and policy version; a turn that is lost so often ends the harvest."""


class Driver:
    """Runs harvesters on an engine until all are complete or the budget is used up."""

    def __init__(
        self, engine: Decoder, plan: HarvestPlan, meter: Meter, dialogues: Dialogues,
        observers: Sequence[HarvestObserver],
    ) -> None:  # fmt: skip
        self.engine, self.plan, self.observers = engine, plan, observers
        self.meter, self.dialogues = meter, dialogues
        self.rollout = plan.recipe.rollout
        self.partial = {partial.key: partial for partial in plan.progress.partial}
        self.waiting: deque[Harvester] = deque()
        """Harvesters that have not started."""
        self.running: dict[RolloutKey, Harvester] = {}
        self.in_flight: dict[str, Track] = {}
        """Tracks that the engine decodes, by request id."""
        self.losses: Counter[tuple[str, int, int]] = Counter()
        """Lost requests by track, given tokens (its turn) and policy version."""
        self.generated: Counter[RolloutKey] = Counter()
        """Tokens that this step generated for each running harvester, in tracks that have ended."""
        self.launched: dict[RolloutKey, list[Track]] = {}
        """All tracks of each running harvester, if its rollout may be suspended."""
        self.unlaunched: dict[RolloutKey, set[int]] = {}
        """Tracks with recorded tokens that each running harvester has not launched again, by their number."""
        self.finished: dict[RolloutKey, Rollout] = {}
        """Complete and suspended rollouts."""
        self.prompt_routes = PromptRoutes(self.running, self.rollout.keep_routes)
        self.prefills: dict[str, tuple[int, int]] = {}
        """By request id: (tokens of its path that the step has computed before, tokens of the path)."""
        self.prompts = [rollout.prompt.token_ids for rollout in plan.progress.rollouts]
        """Prompts that the step computed, sorted: a prompt shares most with one beside it. Those of earlier
        attempts are among them, so that a resumed harvest counts the same prefill."""
        self.prompts += [partial.prompt.token_ids for partial in self.partial.values() if partial.new_tokens]
        self.prompts.sort()

    def run(self, harvesters: dict[RolloutKey, Harvester]) -> None:
        """Run ``harvesters`` to their ends and report to the observers."""
        begun = {key for key, partial in self.partial.items() if partial.tracks}
        self.waiting.extend(harvester for key, harvester in harvesters.items() if key not in begun)
        first = next((prompt.prompt_id for prompt in self.plan.prompts), "")
        for observer in self.observers:
            observer.harvest_started(first, self.meter.counts)
        last_progress, budget = time.monotonic(), self.rollout.tokens_per_step
        try:
            # resume rollouts with recorded tokens: all at once, as when the tokens were recorded
            for key in harvesters:
                if key in begun:
                    self.begin(harvesters[key])
                    self.advance([key])
            while self.waiting or self.running:
                if budget is not None and self.meter.generated_tokens >= budget:
                    self.end_early()
                    break
                self.admit()
                began = time.perf_counter()
                deltas = self.engine.step() if self.in_flight else []
                self.meter.engine_seconds += time.perf_counter() - began
                self.advance(self.deliver(deltas))
                self.converse(idle=not self.in_flight)
                # give up a silent engine
                now = time.monotonic()
                if deltas or self.dialogues.calls:
                    last_progress = now
                    beat()
                elif now - last_progress > self.rollout.request_timeout:
                    silent = f"no token for {self.rollout.request_timeout:.0f} s (rollout.request_timeout)"
                    raise EngineError(f"{silent} with {len(self.in_flight)} requests in flight")
                self.finish_decode_step()
            self.finish_decode_step(last=True)
        finally:
            self.dialogues.close()  # first: a dead engine may raise an error at each call
            self.engine.abort(list(self.in_flight))

    def admit(self) -> None:
        """Start harvesters while the engine has free slots. The rest wait here: in the engine's queue a fork
        would wait behind them, and its prefix might be evicted from the cache meanwhile."""
        while self.waiting and len(self.in_flight) < self.engine.max_num_seqs:
            self.begin(self.waiting.popleft())

    def begin(self, harvester: Harvester) -> None:
        """Start a harvester and launch its first tracks."""
        self.running[harvester.key] = harvester
        if (partial := self.partial.get(harvester.key)) is not None:
            self.generated[partial.key] = -partial.earlier_tokens
            self.unlaunched[partial.key] = set(partial.tracks)
        for track in harvester.start():
            self.launch(track)

    def launch(self, track: Track) -> None:
        """Give a new track the tokens of earlier steps and attempts, then submit it unless it has ended."""
        key, harvester = track.key, self.running[track.key]
        self.unlaunched.get(key, set()).discard(track.number)
        track.keeps_columns = self.plan.keeps_columns(harvester.prompt, harvester.index)
        if track.keeps_columns:
            track.tokens.expect(self.rollout.columns)
        # before the track resumes: a recorder's file has each track from its first token on (`end_file`)
        for observer in self.observers:
            observer.track_launched(track)
        if (partial := self.partial.get(key)) is not None:
            track.age = partial.age
            if track.number in partial.tracks:
                try:
                    track.resume(partial.tracks[track.number])
                except ValueError as error:
                    raise EngineError(f"track {track.name}: {error}") from None
                track.prompt_columns = harvester.prompt_columns
        if self.rollout.carry_over:
            self.launched.setdefault(key, []).append(track)
        # recorded tokens may end the track, or a turn that waits for its answer
        if track.finish_reason is not None:
            self.generated[key] += len(track)
        elif not track.awaits_answer:
            self.submit(track)

    def submit(self, track: Track) -> None:
        """Submit the rest of a track as a request."""
        path = track.path
        if (computed := self.computed_before(track, path)) is not None:
            self.prefills[track.request_id] = computed, len(path)
        self.in_flight[track.request_id] = track
        self.meter.counts["requests"] += 1
        # a fork whose prefix may be in the cache: not one that is resumed
        if track.is_fork and not track.attempts and not track.token_ids:
            self.meter.forks[track.request_id] = len(path)
        path_rows = self.prompt_routes.rows_of(track)
        self.engine.submit(Request(track.request_id, path, track.remaining, track.seed, path_rows))

    def computed_before(self, track: Track, path: list[int]) -> int | None:
        """Return how many of the first tokens of a track's path requests of this step have computed. None
        where the path itself was requested, and is again. Made of tokens: a resume counts the same."""
        earlier = self.partial[track.key].earlier if track.key in self.partial else {}
        # requested before in this step: all up to the environment's answer was computed, but the last token
        if len(track) > earlier.get(track.number, 0):
            end = track.end_generated
            return len(track.context) + end - 1 if end < len(track.tokens) else None
        lines: Iterable[Track] = ()
        if earlier:  # the weights that computed its lines in earlier steps are gone, and the cache with them
            launched, in_flight = self.launched.get(track.key, ()), self.in_flight
            lines = (t for t in launched if t.request_id in in_flight or len(t) > earlier.get(t.number, 0))
        # the line that it leaves computed its whole path
        elif track.is_fork:
            return len(path)
        prompt = self.running[track.key].prompt.token_ids
        place = bisect_left(self.prompts, prompt)
        shared = [shared_prefix(prompt, other) for other in self.prompts[max(place - 1, 0) : place + 1]]
        shared += [shared_prefix(path, chain(line.context, line.token_ids)) for line in lines]
        if self.prompts[place : place + 1] != [prompt]:
            self.prompts.insert(place, prompt)
        return max(shared, default=0)

    def deliver(self, deltas: list[Delta]) -> list[RolloutKey]:
        """Hand tokens to their tracks; return the keys of harvesters that can now decide something."""
        touched: dict[RolloutKey, None] = {}
        tokens = 0
        in_flight, current = self.in_flight, self.engine.policy_version
        for delta in deltas:
            track = in_flight.get(delta.request_id)
            if track is None:  # sent before the engine saw the abort
                continue
            if delta.sampler not in SAMPLERS:
                expected = f"expected tokens that {' or '.join(SAMPLERS)} drew"
                found = f"found tokens of the sampler {delta.sampler}, with draws and log-probs of its own"
                raise EngineError(f"request {delta.request_id}: {expected}, {found}")
            if delta.token_ids and track.key in self.prompt_routes.requests:
                self.prompt_routes.take(track, delta)
            tokens += len(delta.token_ids)
            if delta.token_ids and delta.request_id in self.prefills:
                self.meter.computed(*self.prefills.pop(delta.request_id))
            if delta.num_cached_tokens is not None:
                self.meter.prefilled(delta.request_id, delta.num_cached_tokens)
            version = current if delta.policy_version is None else delta.policy_version
            try:
                if track.extend(delta, version):
                    touched[track.key] = None
            except ValueError as error:
                raise EngineError(f"request {delta.request_id}: {error}") from None
            # end of the track, or of its request alone
            if track.finish_reason is not None:
                self.generated[track.key] += len(track)
                self.forget(delta)
            elif track.awaits_answer:
                self.forget(delta)
            elif delta.finish_reason is not None:
                self.retry(track, delta)
        self.meter.stepped(len(deltas), tokens)
        return list(touched)

    def forget(self, delta: Delta) -> None:
        """Drop the request of a track that has ended; abort it where the engine does not know of the end."""
        del self.in_flight[delta.request_id]
        if delta.finish_reason is None:
            self.engine.abort([delta.request_id])

    def retry(self, track: Track, delta: Delta) -> None:
        """Submit the rest of a request that the engine ended early. Raises EngineError after MAX_ATTEMPTS."""
        del self.in_flight[delta.request_id]
        self.prompt_routes.lose(track)
        track.attempts += 1
        self.meter.counts["retries"] += 1
        # counted for each turn and each sync: only a turn that is lost again and again is hopeless
        turn = track.name, track.given, self.engine.policy_version
        self.losses[turn] += 1
        if (times := self.losses[turn]) >= MAX_ATTEMPTS:
            found = f"finish_reason {delta.finish_reason!r} after {len(track)} of {track.limit} tokens"
            times_lost = f"without an end of sequence, {times} times"
            raise EngineError(f"request {delta.request_id}: {found} {times_lost}")
        self.submit(track)

    def advance(self, keys: list[RolloutKey]) -> None:
        """Let harvesters use the new tokens of their tracks, and launch their forks."""
        for key in keys:
            harvester = self.running[key]
            before = len(harvester.parts)
            while launched := harvester.advance():  # a fork may have recorded tokens, and have ended
                self.dialogues.fork(harvester, launched)
                for track in launched:
                    self.launch(track)
            self.report(harvester, before)
            if key in self.running:
                self.dialogues.begin(harvester)

    def converse(self, idle: bool) -> None:
        """Hand the answers of environments to their tracks. ``idle``: there is nothing else to do."""
        touched: dict[RolloutKey, None] = {}
        for call in self.dialogues.finished(idle):
            if (error := call.result.exception()) is None:
                self.dialogues.take(call)
            else:
                self.dialogues.fail(call, error, self.plan.recipe.reward.on_error)
            touched[call.track.key] = None
            if call.track.finish_reason is None:
                self.submit(call.track)
            else:
                self.generated[call.track.key] += len(call.track)
        self.advance(list(touched))

    def report(self, harvester: Harvester, before: int) -> None:
        """Tell the observers of the parts after the first ``before`` ones, and of the end of the rollout."""
        key, parts = harvester.key, harvester.parts[before:]
        new = self.partial[key].restore_grades(parts) if key in self.partial else parts
        for part in new:
            for observer in self.observers:
                observer.part_finished(harvester, part)
        if harvester.complete:
            self.launched.pop(key, None)
            rollout, generated = self.remove(harvester)
            for observer in self.observers:
                observer.rollout_completed(rollout, generated)

    def remove(self, harvester: Harvester) -> tuple[Rollout, int]:
        """Stop running a harvester; return its rollout, and the number of tokens generated for it."""
        key = harvester.key
        self.running.pop(key, None)
        self.unlaunched.pop(key, None)
        self.dialogues.end(key)
        rollout = harvester.rollout(self.engine.policy_version)
        self.finish(rollout)
        return rollout, self.generated.pop(key, 0)

    def finish(self, rollout: Rollout) -> None:
        """Add a rollout to the results."""
        self.finished[rollout.key] = rollout
        self.meter.count(rollout)

    def finish_decode_step(self, last: bool = False) -> None:
        for observer in self.observers:
            observer.decode_step_finished(last)

    def end_early(self) -> None:
        """Suspend or cut rollouts that are not complete, and start no more: the budget is used up."""
        # let environments repeat themselves: forks and parts that came after an answer are recorded
        while self.dialogues.calls and any(map(self.lacks, self.running)):
            self.converse(idle=True)
            beat()
        # stop decoding
        self.engine.abort(list(self.in_flight))
        for track in self.in_flight.values():
            self.generated[track.key] += len(track)
        self.in_flight.clear()
        # end running harvesters
        for key, harvester in list(self.running.items()):
            self.generated[key] += sum(len(t) for t in harvester.open.values() if t.awaits_answer)
            if self.may_suspend(key):
                self.suspend(harvester)
            else:
                before = len(harvester.parts)
                harvester.cut()
                self.report(harvester, before)
        # suspend those that have not started
        for harvester in self.waiting:
            if self.may_suspend(harvester.key):
                self.suspend(harvester)
        self.waiting.clear()

    def lacks(self, key: RolloutKey) -> bool:
        """Return True if a resumed rollout has not yet all tracks and parts that it had."""
        final = self.partial[key].final if key in self.partial else ()
        return bool(self.unlaunched.get(key)) or len(self.running[key].parts) < len(final)

    def may_suspend(self, key: RolloutKey) -> bool:
        """Return True if the next step may resume a rollout."""
        return self.rollout.carry_over and not (key in self.partial and self.partial[key].last_step)

    def suspend(self, harvester: Harvester) -> None:
        """Leave a rollout to the next step."""
        rollout, generated = self.remove(harvester)
        tracks = self.launched.pop(harvester.key, ())
        for observer in self.observers:
            observer.rollout_suspended(rollout, generated, tracks)
