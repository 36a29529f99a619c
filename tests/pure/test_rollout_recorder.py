"""Rollouts written as they complete read back identically, also after the writer was killed."""

from __future__ import annotations

import errno
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.files import step_name
from megatron_eqlen.record.arrow_log import ArrowLog, batches
from megatron_eqlen.record.format import BATCH_BYTES, SEGMENTS
from megatron_eqlen.record.reader import (
    CHECKED_STEPS,
    check_newest,
    fill_numbers,
    has_columns,
    read_progress,
    read_skeletons,
    read_step,
    recorded_files,
    remove_open_tracks,
    set_aside_stale,
    step_files,
)
from megatron_eqlen.record.recorder import Recorder, record_grades
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import Placeholder, Tokens
from megatron_eqlen.types import Delta, Grade, Part, Prompt, Rollout, training_order
from tests.pure.test_rollout_harvest import make_recipe


def prompt(name: str, number: int = 0) -> Prompt:
    return Prompt(name, [1], "?", "math", "1", number=number)


ODD = {"a": 0.1 + 0.2, "é": -1.0}
GRADE = Grade(0.5, "correct", "\\frac{1}{3} – π", "math_verify-0.9.0", 0.1 + 0.2, rewards=ODD)
STREAM = kit.stream(
    Prompt("deepmath/a.parquet#17", [1, 2], "¿x?", "math", "3", "deepmath", 4), 2, 5,
    [(
        Part(Tokens.of([1, 9], [-0.1, -1e-9 / 3]), "stop", GRADE),
        Part(Tokens.of([3, 4], [-1 / 3, -12.0])),
    )],
    "truncated", Part(Tokens.of([7], [-np.inf]), "length"),
)  # fmt: skip
ROUTES = np.arange(36, dtype=np.uint16).reshape(3, 4, 3) * 900
GROUP = kit.group(prompt("p"), 0, [
    Part(Tokens.of([1], [-0.5], kept=[(1, 4)], routes=ROUTES[:1]), "stop"),
    Part(Tokens.of([2, 2], [-0.1, -0.7],
        kept=[(2,), (0, 2, 9)], routes=ROUTES[1:], versions=[3, 1 << 30])),
], prompt_columns=Tokens({"routes": ROUTES[:1]}))  # fmt: skip
TREE = kit.tree(
    prompt("t", 9), 3,
    [Part(Tokens.of([4], [-1.0])), Part(Tokens.of([5], [-2.0]), "stop", GRADE)],
    [-1, 0], numbers=[1, 4],
)  # fmt: skip
EMPTY = kit.stream(prompt("q"), 0, 0, [], "budget")


def test_rollouts_and_grades_read_back_identically(tmp_path):
    path = tmp_path / "step-00000001" / "rank-0.arrow"
    kit.record(path, [STREAM, GROUP, TREE])
    assert read_step(path.parent) == read_step(str(path.parent)) == [GROUP, STREAM, TREE]
    for folder in (path.parent.parent, path.parent / "step-00000009"):
        with pytest.raises(ValueError, match=f"{folder}: expected a recorded step .*, found no rank-"):
            read_step(folder)


def test_routes_are_recorded_as_the_recipe_says(tmp_path):
    """In the record, routes take the bits that the experts' numbers need: 7 of 8 with 128 experts."""
    routes = np.random.default_rng(0).integers(0, 128, (20_000, 48, 8)).astype(np.uint8)
    segment = Part(Tokens.of(np.ones(20_000), np.zeros(20_000), routes=routes), "stop")
    group = kit.group(prompt("p"), 0, [segment], prompt_columns=Tokens({"routes": routes[:1]}))
    without = replace(segment, tokens=segment.tokens.without(["routes"]))
    bare = replace(group, parts=[without], prompt_columns=None)
    for unrecorded in ((), ("routes",)):
        path = tmp_path / str(len(unrecorded)) / "rank-0.arrow"
        with Recorder(path, unrecorded) as recorder:
            recorder.write(group)
        assert read_step(path.parent) == [bare if unrecorded else group]
        assert read_step(path.parent, without=["routes"]) == [bare]
        keeps = make_recipe(rollout={"keep_routes": True})
        assert read_progress(path.parent, [prompt("p")], keeps).rollouts == [group] * (not unrecorded)
        assert path.stat().st_size < (0.002 if unrecorded else 0.9) * routes.nbytes
    (found,) = read_skeletons([tmp_path / "0" / "rank-0.arrow"])
    assert found.parts[0].tokens["routes"] == Placeholder((20_000, 48, 8), "uint8")
    assert found.prompt_columns["routes"] == Placeholder((1, 48, 8), "uint8")
    assert has_columns(EMPTY, ["routes"]), "without tokens there is nothing to route"
    assert not has_columns(bare, ["routes"])


def test_every_attempt_at_a_step_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "rank-0.arrow"
    for rollouts in ([STREAM], [TREE], [EMPTY, STREAM]):
        kit.record(path, rollouts)
    names = sorted(path.name for path in tmp_path.glob("rank*"))
    assert names == ["rank-0-2.arrow", "rank-0-3.arrow", "rank-0.arrow"]
    assert read_step(tmp_path) == [EMPTY, STREAM, TREE], "in training order, each once"
    assert read_step(tmp_path, {"q", "t"}) == [EMPTY, TREE]


def test_a_rollout_that_a_later_attempt_generated_again_is_read_with_its_own_grades(tmp_path):
    """Its environment failed, or answered otherwise: the later one is what was trained."""
    failed = Grade.unscored("its environment failed")
    parts = [Part(Tokens.of([4], [-1.0]), "stop", failed), Part(Tokens.of([5], [-2.0]), "stop", GRADE)]
    begun = kit.tree(prompt("t", 9), 3, parts, [-1, 0], numbers=[1, 4])
    parts = [Part(Tokens.of([6, 7], [-1.0, -3.0])), Part(Tokens.of([8], [-2.0]), "stop", GRADE)]
    again = kit.tree(prompt("t", 9), 3, parts, [-1, 0], numbers=[1, 2])
    for attempt, rollouts in enumerate(([STREAM, begun], [again])):
        with Recorder(tmp_path / "rank-0.arrow") as recorder:
            for rollout in rollouts:
                recorder.write(rollout)
        record_grades(tmp_path / "rank-0.arrow", [STREAM, begun] if not attempt else [STREAM, again])
    assert read_step(tmp_path) == [STREAM, again]
    assert [part.grade for part in read_skeletons(step_files(tmp_path))[1].parts] == [None, GRADE]


def test_grades_are_a_file_of_their_own_and_nothing_is_rewritten(tmp_path):
    path = tmp_path / "rank-0.arrow"
    with Recorder(path) as recorder:
        recorder.write(STREAM)
    before = path.read_bytes()
    assert all(segment.grade is None for segment in read_step(tmp_path)[0].parts)
    record_grades(path, [STREAM])
    assert read_step(tmp_path) == [STREAM]
    assert path.read_bytes() == before


def test_cut_at_any_byte_a_file_holds_its_whole_batches(tmp_path, caplog):
    path = tmp_path / "rank-0.arrow"
    kit.record(path, [GROUP, EMPTY])
    data, rollouts = path.read_bytes(), [GROUP, EMPTY]
    for size in range(0, len(data), 131):
        path.write_bytes(data[:size])
        found = read_step(tmp_path)
        assert found == rollouts[: len(found)]
    assert "dropped a torn end of" in caplog.text


@pytest.mark.parametrize("name", ["rank-0.arrow", "grades-rank-0.arrow"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_flipped_bit_changes_no_value(tmp_path, name, closed):
    """It makes a closed file unreadable; of the file of a killed process the batches before it are read. Some
    bits have no meaning: fillings between columns, for example."""
    kit.record(tmp_path / "rank-0.arrow", [GROUP, STREAM])
    path = tmp_path / name
    data = path.read_bytes()[: None if closed else -8]
    outcomes: Counter[str] = Counter()
    for at in range(4, len(data) - 8, 131):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        try:
            found = read_step(tmp_path)
        except ValueError as error:
            message = str(error)
            outcomes["refused"] += bool(re.search(rf"/{name}: (damaged: |expected .* version)", message))
            continue
        if found == [GROUP, STREAM]:
            outcomes["the same"] += 1
            continue
        assert not closed
        assert found in ([], [GROUP], [ungraded(GROUP), ungraded(STREAM)])
        outcomes["dropped"] += 1
    assert outcomes["refused" if closed else "dropped"] > 0.6 * outcomes.total()


def ungraded(rollout: Rollout) -> Rollout:
    rollout = pickle.loads(pickle.dumps(rollout))
    for segment in rollout.parts:
        segment.grade = None
    return rollout


def test_kill_9_loses_nothing_that_was_written(tmp_path, caplog):
    script = f"""
from megatron_eqlen.record.recorder import Recorder
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Part, Prompt, Rollout
recorder = Recorder({str(tmp_path / "rank-0.arrow")!r})
for i in range(10**9):
    prompt = Prompt(str(i), [1], "?", "math", "1", number=i)
    part = Part(Tokens.of(range(50), [-0.5] * 50), "stop")
    recorder.write(Rollout(prompt, 0, "independent", 0, [part]))
    if i == 20:
        recorder._thread.submit(int).result()  # after all that was put before
        print("written", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    rollouts = read_step(tmp_path)
    assert len(rollouts) > 20
    assert [rollout.prompt_id for rollout in rollouts] == [str(i) for i in range(len(rollouts))]


def test_a_full_disk_is_an_error_of_the_next_rollout_or_of_the_end(tmp_path):
    path = tmp_path / "rank-0.arrow"
    recorder = Recorder(path)
    recorder.write(GROUP)
    recorder._thread.submit(int).result()  # it is written now
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
    try:
        recorder.write(STREAM)
        with pytest.raises(OSError, match="File too large"):
            recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert read_step(tmp_path) == [GROUP], "what was whole stays"


def test_a_file_that_is_no_record_or_of_another_version_is_refused_in_words(tmp_path):
    (tmp_path / "notes.arrow").write_text("nonsense")
    with pytest.raises(ValueError, match=r"notes\.arrow: expected rollouts .*found b'nonsense'"):
        list(batches(tmp_path / "notes.arrow", SEGMENTS))
    with pa.ipc.new_stream(str(tmp_path / "rank-7.arrow"), pa.schema({"a": pa.int32()})) as stream:
        stream.write_table(pa.table({"a": pa.array([1], pa.int32())}))
    with pytest.raises(ValueError, match=r"rank-7\.arrow: expected .* version 11, found version none"):
        read_step(tmp_path)
    older = SEGMENTS.remove(SEGMENTS.get_field_index("given"))
    with pa.ipc.new_stream(str(tmp_path / "rank-7.arrow"), older) as stream:
        stream.write_table(older.empty_table())
    with pytest.raises(ValueError, match=r"found version 11, of another release: 1 columns differ .*given"):
        read_step(tmp_path)
    older = SEGMENTS.with_metadata({b"eqlen.version": b"10"})  # the same columns with another meaning
    with pa.ipc.new_stream(str(tmp_path / "rank-7.arrow"), older) as stream:
        stream.write_table(older.empty_table())
    with pytest.raises(ValueError, match="of format version 11, found version 10"):
        read_step(tmp_path)


def test_a_closed_file_has_nothing_behind_its_rollouts(tmp_path):
    """Such as another file's, which would not be read."""
    path = tmp_path / "rank-0.arrow"
    kit.record(path, [GROUP])
    first = path.read_bytes()
    path.unlink()
    kit.record(path, [STREAM])
    path.write_bytes(first + path.read_bytes())
    with pytest.raises(ValueError, match=r"/rank-0\.arrow: damaged: expected no more bytes"):
        read_step(tmp_path)


def shape(rollout) -> list:
    """Return all that is decided without arrays."""
    facts = [(len(s), s.finish_reason, s.grade, "kept" in s.tokens) for s in rollout.parts]
    ended = [(s.finish_reason, len(response)) for s, response in rollout.ended()]
    layouts = [s.tokens.layout for s in rollout.parts]
    layouts += [rollout.prompt_columns and rollout.prompt_columns.layout]
    return [rollout.key, training_order(rollout), rollout.policy_version, facts, ended, layouts]


def test_skeletons_have_everything_but_arrays(tmp_path):
    path = tmp_path / "rank-0.arrow"
    rollouts = [GROUP, STREAM, TREE, EMPTY]
    kit.record(path, rollouts)
    found = read_skeletons([path])
    assert list(map(shape, found)) == list(map(shape, sorted(rollouts, key=training_order)))
    masks = [s.tokens["kept"] for rollout in found for s in rollout.parts if "kept" in s.tokens]
    assert [(len(mask), len(mask.values)) for mask in masks] == [(1, 2), (2, 4)]
    for used in (np.asarray, list):
        with pytest.raises(AssertionError, match=r"an array of shape \(1,\) was read where only its shape"):
            used(found[0].parts[0].token_ids)


def test_skeletons_read_no_arrays(tmp_path):
    """Arrays are damaged here, which only readers of arrays notice."""
    noise = np.random.default_rng(0).integers(0, 1 << 30, 100_000)
    long = kit.group(prompt("p"), 0, [Part(Tokens.of(noise, np.zeros(len(noise))), "stop", GRADE)])
    with Recorder(tmp_path / "rank-0.arrow") as recorder:
        for rollout in (long, STREAM):
            recorder.write(rollout)
            recorder._thread.submit(int).result()  # so each is a batch of its own
    data = bytearray((tmp_path / "rank-0.arrow").read_bytes())
    data[100_000:300_000] = bytes(200_000)
    (tmp_path / "rank-0.arrow").write_bytes(data)
    skeletons = read_skeletons(step_files(tmp_path))
    assert [skeleton.key for skeleton in skeletons] == [long.key, STREAM.key]
    with pytest.raises(ValueError, match=r"rank-0\.arrow: damaged"):
        fill_numbers(skeletons, step_files(tmp_path))
    with pytest.raises(ValueError, match=r"rank-0\.arrow: damaged"):
        read_step(tmp_path)


def test_records_of_the_newest_steps_are_verified_and_of_older_ones_not(tmp_path):
    files = [tmp_path / step_name(number) / "rank-0.arrow" for number in range(CHECKED_STEPS + 1)]
    for file in files:
        kit.record(file, [STREAM])
    whole = files[0].read_bytes()
    damaged = bytearray(whole)
    damaged[-len(whole) // 3] ^= 1
    for file in files[:2]:
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged") if file == files[1] else nullcontext():
            check_newest(tmp_path)


def test_a_batch_is_small_however_much_completes_at_once(tmp_path):
    """All streams of a step may end in one moment; their batch must not need the step's memory again."""
    path = tmp_path / "rank-0.arrow"
    segments = [Part(Tokens.of(np.full(90_000, n), np.zeros(90_000)), "stop") for n in range(10)]
    long = [kit.group(prompt(str(n), n), 0, segments[2 * n : 2 * n + 2]) for n in range(5)]
    with Recorder(path) as recorder:
        for rollout in long:
            recorder.rollout_completed(rollout, 180_000)
        recorder.decode_step_finished(last=True)
    sizes = [pc.sum(batch["tokens"]).as_py() or 0 for batch in batches(path, SEGMENTS)]
    assert sum(sizes) == 900_000 + 5, "five prompts of a token"
    assert max(sizes) < BATCH_BYTES + 90_000
    assert read_step(tmp_path) == long


def test_a_recorded_token_takes_at_most_9_bytes_in_memory_and_6_on_disk(tmp_path):
    """The tokens are like a model's: log-probs are 4 random bytes, ids fall off as words do."""
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.3, 200_000), 150_000)
    logprobs = -random.exponential(1, len(ids)).astype(np.float32)
    path = tmp_path / "rank-0.arrow"
    kit.record(path, [kit.group(prompt("p"), 0, [Part(Tokens.of(ids, logprobs), "stop")])])
    (segment,) = read_step(tmp_path)[0].parts
    assert segment.tokens.nbytes == 8 * len(segment)
    assert path.stat().st_size < 6 * len(segment)


def test_rollouts_of_weights_of_another_version_are_set_aside(tmp_path, caplog):
    """After a resume an update that was skipped may be taken: later recorded steps are stale then."""
    folder = tmp_path / "step-00000003"
    set_aside_stale(folder, 3, 3)  # nothing is recorded yet
    kit.record(folder / "rank-0.arrow", [TREE])
    set_aside_stale(folder, TREE.policy_version, TREE.policy_version)
    assert read_step(folder) == [TREE]
    kit.record(folder / "rank-1.arrow", [STREAM])
    kit.record(tmp_path / "step-00000004" / "rank-0.arrow", [TREE])
    set_aside_stale(folder, TREE.policy_version, TREE.policy_version)
    assert not folder.exists()
    assert read_step(tmp_path / "stale-step-00000004") == [TREE], "what came after it was of that run, too"
    assert read_step(tmp_path / "stale-step-00000003") == sorted([TREE, STREAM], key=training_order)
    assert "generated with policy version 3, 5, but this run is at 3" in caplog.text


@pytest.mark.parametrize(("carried", "stays"), [({}, False), ({("a", 0): 3}, False), ({("a", 0): 2}, True)])
def test_tokens_that_a_step_carried_may_be_as_old_as_their_rollout(tmp_path, carried, stays):
    folder = tmp_path / "step-00000003"
    completion = Part(Tokens.of([5, 6, 9], [-1, -1, -1], versions=[2, 4, 4]), "stop")
    kit.record(folder / "rank-0.arrow", [kit.group(prompt("a"), 4, [completion])])
    set_aside_stale(folder, 4, math.inf, carried)
    assert folder.exists() == stays


def grown(track: Track, tokens: list[int], extras: bool, version: int = 7) -> Track:
    for token in tokens:
        columns: dict[str, Any] = {"logprobs": [-token / 7]}
        if extras:
            columns |= {"kept": [(token, token + 1)], "routes": ROUTES[:1] + token}
            track.prompt_columns = Tokens({"routes": ROUTES[:2]})
        track.extend(Delta(track.request_id, [token], columns), version)
    return track


def test_cut_at_any_byte_a_journal_holds_what_all_tracks_had_at_one_moment(tmp_path):
    tracks = [Track(prompt("a/b", 1), 0, number, [], 99, frozenset([9]), 0) for number in range(2)]
    recorder = Recorder(tmp_path / "rank-0.arrow")
    for track in tracks:
        recorder.track_launched(track)
    moments: list[dict[int, Tokens]] = [{}]
    for tokens in ([1, 2], [3], [], [4, 5, 9]):
        for track in tracks[: 1 + len(tokens) % 2]:
            grown(track, tokens[:1], extras=True)
            grown(track, tokens[1:], extras=True, version=8)  # weights change between two looks at the tracks
        recorder.decode_step_finished(last=True)
        recorder._thread.submit(int).result()  # it is written now
        moments.append({track.number: track.tokens[:] for track in tracks if len(track)})
    recipe = make_recipe(rollout={"keep_routes": True})
    journal = tmp_path / "open-rank-0.arrow"
    data = journal.read_bytes()
    seen = []
    for size in (*range(0, len(data), 131), len(data)):
        journal.write_bytes(data[:size])
        progress = read_progress(tmp_path, [prompt("a/b", 1)], recipe)
        tracks_found = {}
        for partial in progress.partial:
            tracks_found = partial.tracks
            assert partial.prompt_columns == Tokens({"routes": ROUTES[:2]})
        seen.append(moments.index(tracks_found))
        assert progress.generated_tokens == sum(map(len, tracks_found.values()))
        assert not read_progress(tmp_path, [prompt("a")], recipe).partial
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2, 4}, "nothing is written where there is no news"
    recorder.close()
    assert not journal.exists()


def test_counts_are_the_last_ones_of_each_attempt_at_these_prompts(tmp_path):
    for last in (2, 3):
        counts = Counter(requests=1)
        with Recorder(tmp_path / "rank-0.arrow") as recorder:
            recorder.harvest_started("p", counts)
            recorder.write(GROUP)
            counts["requests"] = last  # after all that is written
    for name, of_these in (("p", {"requests": 2 + 3}), ("q", {})):
        assert read_progress(tmp_path, [prompt(name)], make_recipe()).counts == of_these


def test_what_a_moment_counted_is_on_disk_with_its_tokens(tmp_path):
    """A kill may come after the tokens, and before anything is in the other file."""
    recorder, counts = Recorder(tmp_path / "rank-0.arrow"), Counter(forks_prefilled=1)
    recorder.harvest_started("a/b", counts)
    track = Track(prompt("a/b", 1), 0, 0, [], 99, frozenset([9]), 0)
    recorder.track_launched(track)
    grown(track, [1, 2], extras=False)
    before = recorder.path.read_bytes()
    recorder.decode_step_finished(last=True)
    recorder._thread.submit(int).result()  # it is written now
    whole = recorder.path.read_bytes()
    for content in (before, whole):
        recorder.path.write_bytes(content)
        progress = read_progress(tmp_path, [prompt("a/b")], make_recipe())
        assert progress.partial
        assert progress.counts == {"forks_prefilled": 1}


@pytest.mark.parametrize("ranks", [(1, 3), (3, 1)])
def test_of_two_files_of_a_track_the_one_that_got_further_counts(tmp_path, ranks):
    """Names do not tell which is newer: with another number of replicas another rank had the prompt."""
    for rank, tokens in zip(ranks, ([1, 2], [1, 2, 3]), strict=True):
        recorder = Recorder(tmp_path / f"rank-{rank}.arrow")
        recorder.track_launched(track := Track(prompt("a"), 0, 0, [], 99, frozenset([9]), 0))
        grown(track, tokens, extras=False)
        recorder.decode_step_finished(last=True)
        recorder._thread.submit(int).result()
    (partial,) = read_progress(tmp_path, [prompt("a")], make_recipe()).partial
    assert partial.tracks[0].token_ids.tolist() == [1, 2, 3]


def test_an_attempt_beside_a_journal_whose_record_is_gone_has_a_file_of_its_own(tmp_path):
    track = Track(prompt("a"), 0, 0, [], 99, frozenset([9]), 0)
    for name in ("rank-0.arrow", "rank-0-2.arrow"):
        recorder = Recorder(tmp_path / "rank-0.arrow")
        assert recorder.path.name == name
        recorder.track_launched(track)
        grown(track, [1, 2], extras=False)
        recorder.decode_step_finished(last=True)
        recorder._thread.submit(int).result()
        recorder.path.unlink()
    assert len(read_progress(tmp_path, [prompt("a")], make_recipe()).partial[0].tracks[0]) == 2


def test_a_journal_of_another_version_is_set_aside_too(tmp_path):
    folder = tmp_path / "step-00000003"
    recorder = Recorder(folder / "rank-0.arrow")
    track = Track(prompt("a"), 0, 0, [], 99, frozenset([9]), 0)
    recorder.track_launched(track)
    grown(track, [1, 2], extras=False, version=2)
    recorder.decode_step_finished(last=True)
    recorder._thread.submit(int).result()
    set_aside_stale(folder, 3, 3)
    assert [path.name for path in (tmp_path / "stale-step-00000003").glob("open-*")] == ["open-rank-0.arrow"]
    assert recorded_files(folder) == []


@pytest.mark.parametrize("lacking", ["track", "prompt"])
def test_tokens_without_a_column_that_is_kept_now_are_generated_again(tmp_path, lacking):
    recorder = Recorder(tmp_path / "rank-0.arrow")
    tracks = [Track(prompt("a"), 0, number, [], 99, frozenset([9]), 0) for number in range(2)]
    for number, track in enumerate(tracks):
        recorder.track_launched(track)
        grown(track, [1, 2], extras=number == 0 or lacking == "prompt")
        if lacking == "prompt":
            track.prompt_columns = None
    bare = kit.group(prompt("b"), 0, [Part(Tokens.of([5, 9], [-1.0, -1.0]), "stop")])
    recorder.rollout_completed(bare, 2)
    recorder.decode_step_finished(last=True)
    recorder._thread.submit(int).result()
    for keeps, found in ((False, {0: 2, 1: 2}), (True, {0: 2} if lacking == "track" else {})):
        recipe = make_recipe(rollout={"keep_routes": keeps})
        progress = read_progress(tmp_path, [prompt("a"), prompt("b")], recipe)
        tracks_found = progress.partial[0].tracks if progress.partial else {}
        assert {number: len(tokens) for number, tokens in tracks_found.items()} == found
        assert progress.rollouts == [bare] * (not keeps)
        assert progress.generated_tokens == sum(found.values()) + 2 * (not keeps), "what counts in a budget"


def test_a_journal_stays_while_a_prompt_of_it_is_not_harvested(tmp_path):
    recorder = Recorder(tmp_path / "rank-0.arrow")
    for name in "ab":
        recorder.track_launched(track := Track(prompt(name), 0, 0, [], 99, frozenset([9]), 0))
        grown(track, [1, 2], extras=False)
    recorder.decode_step_finished(last=True)
    recorder._thread.submit(int).result()
    for prompt_ids, stays in (({"a", "c"}, True), ({"a", "b", "c"}, False)):
        remove_open_tracks(recorded_files(tmp_path), prompt_ids)
        assert [path.name for path in tmp_path.glob("open-*")] == ["open-rank-0.arrow"] * stays
        assert recorder.path.exists()


def test_rollouts_on_disk_are_never_ahead_of_the_tokens_of_their_moment(tmp_path, monkeypatch):
    """The disk takes one batch more."""
    recorder = Recorder(tmp_path / "rank-0.arrow")
    recorder.track_launched(track := Track(prompt("a"), 0, 0, [], 99, frozenset([9]), 0))
    grown(track, [1, 2], extras=False)
    recorder.rollout_completed(TREE, 2)
    write, written = ArrowLog.write, []

    def stopping(log: ArrowLog, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            written.append(batch)
        if len(written) <= 1:
            write(log, batch)

    monkeypatch.setattr(ArrowLog, "write", stopping)
    recorder.decode_step_finished(last=True)
    recorder._thread.submit(int).result()
    progress = read_progress(tmp_path, [prompt("a"), TREE.prompt], make_recipe())
    assert len(written) == 2
    assert (len(progress.partial), len(progress.rollouts)) == (1, 0)


def test_nothing_is_written_after_a_failure(tmp_path, monkeypatch):
    recorder, begins, tried = Recorder(tmp_path / "rank-0.arrow"), threading.Event(), []

    def full(log: ArrowLog, batch: pa.RecordBatch) -> None:
        tried.append(batch)
        begins.wait(5)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrowLog, "write", full)
    recorder.write(STREAM)
    recorder.write(TREE)
    begins.set()
    with pytest.raises(OSError, match="No space left"):
        recorder.close()
    assert len(tried) == 1


def test_a_rollout_without_parts_is_recorded_beside_another_of_its_prompt(tmp_path):
    both = [EMPTY, replace(EMPTY, index=1)]
    kit.record(tmp_path / "rank-0.arrow", both)
    assert read_step(tmp_path) == both


def test_the_grade_of_scoring_replaces_the_environments(tmp_path):
    tokens = Tokens.of([4, 9], [-1.0, -1.0])
    of_environment, final = Grade(0.5, "scored"), Grade(0.25, "scored", detail="weighed")
    with Recorder(tmp_path / "rank-0.arrow") as recorder:
        recorder.rollout_completed(kit.group(prompt("p"), 0, [Part(tokens, "stop", of_environment)]), 2)
        recorder.decode_step_finished(last=True)
    (part,) = read_step(tmp_path)[0].parts
    assert part.grade == of_environment
    taught = tokens.with_column("teacher", np.array([-0.5, -0.25], np.float32))
    graded = kit.group(prompt("p"), 0, [Part(taught, "stop", final)])
    record_grades(tmp_path / "rank-0.arrow", [graded])
    (part,) = read_step(tmp_path)[0].parts
    assert (part.grade, part.tokens) == (final, taught)
    (part,) = read_step(tmp_path, without=["teacher"])[0].parts
    assert (part.grade, part.tokens) == (final, tokens)
    (skeleton,) = skeletons = read_skeletons(step_files(tmp_path))
    fill_numbers(skeletons, step_files(tmp_path))
    assert skeleton.parts[0].tokens["teacher"].tolist() == [-0.5, -0.25]
    assert skeleton.prompt.gold == prompt("p").gold == "1"
