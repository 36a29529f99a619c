"""Probes: continuations of recorded rollouts are the policy's, and values follow from them."""

import html
import json
import re
import zlib
from collections import Counter
from contextlib import closing
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.evaluation.statistics import change_of_mean
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import Job
from megatron_eqlen.processes.hold import HeldError, Hold
from megatron_eqlen.recipe import load as recipe_load
from megatron_eqlen.record import recorder as recorder_module
from megatron_eqlen.record.partial import HarvestProgress
from megatron_eqlen.record.reader import read_progress
from megatron_eqlen.record.recorder import Recorder
from megatron_eqlen.report.audit import Change, audit
from megatron_eqlen.report.page import write_probe_page
from megatron_eqlen.report.probe import QUARTERS, Probed, _mean_reward, as_json, look, probes_of, tables
from megatron_eqlen.report.rollouts import by_token
from megatron_eqlen.run.probe import ProbeFolder, ProbeOptions, Target, ends_of_sentences
from megatron_eqlen.sampling.probe import FORCED, PROBE, ProbeSampling
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Rollout, tokens_along
from tests.kit.length_bias import QUESTION, Drawing, Process, every_outcome
from tests.kit.sentencepiece_maker import write_llama_tokenizer
from tests.pure.test_forks import recipe

SAMPLINGS = {
    "independent": recipe(sampling="independent", objective="dr_grpo", limit=3),
    "tree": recipe({"fork": "tokens", "step_tokens": 1, "branching": 2, "forks": 1}, limit=3),
    "equal_length": recipe(sampling="equal_length", objective="grpo", limit=3, pair_weight="on_policy"),
}
WORLD = Process.random(3, 3, lambda path: float(sum(path) % 2), seed=3)
"""Token 0 ends a response."""
REASONS = "length", "stop"


def row(path):
    """Return the probabilities of the next token."""
    return WORLD.probabilities[WORLD.contexts[path]]


@cache
def streams(sampling):
    """Return every rollout that the process can make; tests change copies."""
    return [stream for stream, _ in WORLD.streams(SAMPLINGS[sampling])]


def sampled(sampling):
    """Return the longest rollout of the largest number of parts that the process can make."""
    longest = max(streams(sampling), key=lambda stream: (len(stream.parts), sum(map(len, stream.parts))))
    return deepcopy(longest)


def asked(rollout, places, samples, seed=0):
    """Continue a rollout at places, and look at its lines, of a group at the first."""
    lines = [(rollout, line) for line in rollout.lines()][: 1 if rollout.kind == "independent" else None]
    return ProbeSampling([rollout], lines, {rollout.key: dict.fromkeys(places, 0)}, samples, seed)


def probed(kind, settings, choose, progress=None, observers=()):
    plan = HarvestPlan(
        kind.prompts, settings, range(WORLD.ends), seed=0, progress=progress or HarvestProgress(), kind=kind
    )
    (found,), _ = harvest(Drawing(choose, row), plan, observers)
    assert found.kind == "tree", "its parts are no completions of a group, whatever was sampled"
    WORLD.grade(found)
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_at_every_place_of_every_rollout_the_continuations_are_the_policys(sampling):
    """Their distribution is that of the process, so the mean of their rewards is the value of the place."""
    settings = SAMPLINGS[sampling]
    rollout = sampled(sampling)
    ends = rollout.ends()
    places = [(p.number, n) for p in rollout.parts for n in range(ends[p.parent] + 1, ends[p.number] + 1)]
    graded = [part.grade for part in rollout.parts if part.finish_reason]
    assert sum(_assert_continued(settings, rollout, place, graded) for place in [(-1, 0), *places]) > 2


def _assert_continued(settings, rollout, place, graded):
    """Return False for the end of a response, which is no place."""
    trunk = tuple(tokens_along(rollout.line(place[0])).tolist())[: place[1]]
    if WORLD.ended(trunk) or len(trunk) == WORLD.limit:
        return False
    shares = Counter()
    for found, share in every_outcome(partial(probed, asked(rollout, [place], 1), settings)):
        (new,) = [part for part in found.parts if part.role == PROBE]
        shares[tuple(new.token_ids.tolist())] += share
        assert [p.grade for p in found.parts if p.role != PROBE and p.finish_reason] == graded
    assert shares == pytest.approx(dict(WORLD.continuations(trunk)))
    return True


def draws(rng):
    return lambda name, shares: int(rng.choice(len(shares), p=np.asarray(shares) / sum(shares)))


def test_values_changes_and_the_share_decided_are_those_of_the_process():
    settings = SAMPLINGS["independent"]
    rollout = next(r for r, _ in WORLD.streams(settings) if r.parts[0].token_ids.tolist() == [1, 2, 0])
    kind = asked(rollout, [(-1, 0), (0, 1), (0, 2)], 4000)
    found = probed(kind, settings, draws(np.random.default_rng(0)))
    result = look([found], kind, Job(settings), str)
    (response,) = result["responses"]
    value = [
        sum(p * WORLD.value((*trunk, *path)) for path, p in WORLD.continuations(trunk))
        for trunk in ((), (1,), (1, 2))
    ]
    variance = [v * (1 - v) for v in value]
    np.testing.assert_allclose(response["values"], [[v, 4000] for v in value], atol=0.03)
    changes = [*np.diff(value), WORLD.value((1, 2, 0)) - value[-1]]
    assert [stretch["text"] for stretch in response["stretches"]] == ["(1,)", "(2,)", "(0,)"]
    for stretch, change in zip(response["stretches"], changes, strict=True):
        _, low, high = stretch["change"]
        assert low < change < high < low + 0.07
    left = np.interp(QUARTERS, [0, 1 / 3, 2 / 3, 1], [*variance, 0.0])
    np.testing.assert_allclose(result["decided_by_quarter"], -np.diff(left) / left[0], rtol=0.15)


def test_lines_of_a_tree_are_printed_without_what_they_share():
    settings = SAMPLINGS["tree"]

    def texts(rollout):
        return {tuple(tokens_along(rollout.line(line.last.number)).tolist()) for line in rollout.lines()}

    rollout = deepcopy(max(streams("tree"), key=lambda stream: len(texts(stream))))
    kind = asked(rollout, [(-1, 0), (0, 1)], 4)
    result = look([probed(kind, settings, draws(np.random.default_rng(0)))], kind, Job(settings), str)
    shown = tables(result).partition("* its 95%")[0]
    one, other = (row["stretches"] for row in result["responses"] if len(row["stretches"]) > 1)
    assert one[0] == other[0]
    assert shown.count(f"'{one[0]['text']}'") == shown.count("as above  for 1 tokens") == 1
    assert shown.count("value at the prompt") == len(texts(rollout))


def test_the_page_shows_each_stretch_and_how_often_each_objective_has_the_sign(tmp_path):
    settings = SAMPLINGS["independent"]
    rollout = next(r for r, _ in WORLD.streams(settings) if r.parts[0].token_ids.tolist() == [1, 2, 0])
    kind = asked(rollout, [(-1, 0), (0, 1), (0, 2)], 4000)
    result = look([probed(kind, settings, draws(np.random.default_rng(0)))], kind, Job(settings), str)
    page = write_probe_page(tmp_path / "probe.html", 1, result, settings).read_text()
    (response,) = result["responses"]
    for stretch in response["stretches"]:
        assert page.count(f">{stretch['text']}</span>") == page.count(f"<td>{stretch['text']}</td>") == 1
        assert f"{stretch['change'][1]:+.2f} to {stretch['change'][2]:+.2f}" in page
    shown = [row for row in result["objectives"] if not row.refused]
    bars = [float(width) for width in re.findall(r'<rect y="\d+" width="([\d.]+)"', page)]
    assert bars == pytest.approx([200 * row.sign for row in shown], abs=0.1)
    assert all(row.refused in html.unescape(page) for row in result["objectives"])


OLD = {"prompt_id": "q", "index": 0, "reward": 1, "values": [[0.5, 2]], "stretches": [{"change": [0, -1, 1]}]}


@pytest.mark.parametrize("found", [{"responses": [OLD]}, {"responses": [{}]}, {}, [], None, "whole"])
def test_a_probe_that_was_written_otherwise_is_named(found, tmp_path):
    file = tmp_path / "probes/step-00000001/probe.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([] if found == "whole" else {"asked": {"step": 1}, "found": found}))
    with pytest.raises(ValueError, match=rf"{file}: expected what eqlen probe writes now"):
        probes_of(tmp_path / "streams/step-00000000")


@pytest.mark.parametrize(("name", "text", "says"), [
    ("probe.json", "[]", "probe.json: expected what eqlen probe writes"),
    ("probe.json", '{"asked": null}', "probe.json: expected what eqlen probe writes"),
    ("probe.json", '{"asked": {"step": 2}}', "holds another probe"),
    ("step-00000000", "", "expected probe.json or an empty folder, found step-00000000"),
])  # fmt: skip
def test_a_folder_that_holds_something_else_than_this_probe_is_left_as_it_is(name, text, says, tmp_path):
    (tmp_path / name).write_text(text)
    target = Target(SimpleNamespace(recipe=SAMPLINGS["tree"]), ProbeOptions(tmp_path / "run", 1))
    with pytest.raises(ValueError, match=says):
        ProbeFolder(target, tmp_path).prepare()
    assert [(file.name, file.read_text()) for file in tmp_path.glob("[!.]*")] == [(name, text)]


def test_one_probe_at_a_time_writes_to_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_eqlen.processes.hold.PATIENCE", 0.0)
    target = Target(SimpleNamespace(recipe=SAMPLINGS["tree"]), ProbeOptions(tmp_path / "run", 1))
    vars(target)["steps"] = 0
    folder = ProbeFolder(target, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with closing(Hold(tmp_path / "out")), pytest.raises(HeldError, match="another run is writing here"):
        folder.prepare()
    folder.prepare()
    folder.prepare()


def test_rewards_where_a_marker_is_forced_are_those_of_a_process_that_forces_it():
    """The process samples so many tokens, then puts token 2 into a response without one, and goes on."""
    settings, rng = SAMPLINGS["independent"], np.random.default_rng(0)
    paths, shares = zip(*WORLD.continuations(()), strict=True)
    drawn = rng.choice(len(paths), 3000, p=shares)
    parts = [
        Part(Tokens.of(path, versions=0), REASONS[WORLD.ended(path)], Grade(WORLD.value(path), ""), number=n)
        for n, path in enumerate(paths[number] for number in drawn)
    ]
    rollout = Rollout(QUESTION, 0, "independent", 0, parts)
    letters = SimpleNamespace(
        decode=lambda ids: "".join("em>"[n] for n in ids), encode=lambda text, after="": [2]
    )
    job = SimpleNamespace(recipe=settings, tokenizer=letters)
    target = Target(job, ProbeOptions(Path(), 1, "every:1", 2, 10**6, force=">"))
    vars(target)["rollouts"] = [rollout]
    found = probed(target.kind, settings, draws(rng))
    result = look([found], target.kind, Job(settings), str)
    assert [budget["length"] for budget in result["budgets"]] == [0, 1, None]
    lengths = np.array([1 if 2 in paths[n][:1] else len(paths[n]) for n in drawn])  # that need no marker
    assert [budget["forced"] for budget in result["budgets"]] == pytest.approx([1, (lengths > 1).mean(), 0])
    for budget in result["budgets"]:
        truth = 0.0
        for path, share in zip(paths, shares, strict=True):
            begin = path[: budget["length"]]
            if budget["length"] is None or 2 in begin or begin == path:
                truth += share * WORLD.value(path)
            else:
                begin = (*begin, 2)
                answers = WORLD.continuations(begin)
                truth += share * sum(p * WORLD.value((*begin, *answer)) for answer, p in answers)
        reward = budget["reward"]
        assert reward.low < truth < reward.high
        assert budget["length"] == 0 or reward.high - reward.low < 0.05  # all share the first place
        assert budget["prompts"] == {"q": reward}
    assert as_json(result)["budgets"][2]["reward"]["mean"] == reward.mean
    assert "never" in tables(result)
    forced = {part.number for part in found.with_role(FORCED) if part.parent >= 0}
    for part in found.parts:
        part.grade = Grade.unscored("failed") if part.parent in forced else part.grade
    own = [WORLD.value(paths[n]) for n in drawn if 2 in paths[n][:1] or len(paths[n]) == 1]
    budgets = look([found], target.kind, Job(settings), str)["budgets"]
    assert budgets[1]["reward"].mean == pytest.approx(np.mean(own)), "what is not known is left out"


def test_continuations_have_draws_of_their_own_and_other_ones_with_another_seed():
    """An engine draws from the seed of a request; those of the harvest are never used again."""
    settings = SAMPLINGS["tree"]
    rollout = sampled("tree")

    def seeds(kind):
        class Engine(Drawing):
            def submit(self, request):
                found.append(request.seed)
                super().submit(request)

        found = []
        engine = Engine(draws(np.random.default_rng(0)), row)
        harvest(engine, HarvestPlan([QUESTION], settings, range(WORLD.ends), seed=0, kind=kind))
        return set(found)

    places = (-1, 0), (0, len(rollout.parts[0]))
    used = [seeds(kind) for kind in (None, *(asked(rollout, places, 9, seed) for seed in (0, 1)))]
    assert [len(each) for each in used[1:]] == [18, 18]
    assert len(set.union(*used)) == sum(map(len, used))


class CutOffError(Exception):
    pass


def test_a_probe_that_was_cut_off_goes_on_with_the_tokens_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "INTERVAL", 0.0)
    settings = SAMPLINGS["tree"]
    rollout = sampled("tree")
    kind = asked(rollout, [(-1, 0), (0, len(rollout.parts[0]))], 3)
    drawn = []

    def by_path(name, shares):
        drawn.append(name)
        return zlib.crc32(repr(name).encode()) % len(shares)

    def cut_off(name, shares):
        if len(drawn) == 8:
            raise CutOffError
        return by_path(name, shares)

    whole = probed(kind, settings, by_path)
    tokens = len(drawn)
    drawn.clear()
    file = tmp_path / "step-00000000/rank-0.arrow"
    with pytest.raises(CutOffError), Recorder(file) as recorder:
        probed(kind, settings, cut_off, observers=[recorder])
    progress = read_progress(file.parent, [QUESTION], settings)
    assert 0 < progress.generated_tokens <= 8
    drawn.clear()
    assert probed(kind, settings, by_path, progress) == whole
    assert len(drawn) == tokens - progress.generated_tokens


@pytest.mark.parametrize(("before", "after", "low", "high"), [
    ([0, 1] * 8, [1] * 16, 0.19, 0.69),  # (9/18, 17/18) +- 1.96 sqrt(.25/18 + .0525/18)
    ([0.0] * 4, [0.0] * 4, -0.42, 0.42),  # four equal rewards on both sides are not certainty
    ([0.0] * 30, [1.0], 0.91, 1.03),  # the response's own reward is known
    ([1.0], [0.0] * 30, -1.03, -0.91),
    ([0.2, 0.4, 0.3], [0.9, 0.7, 0.8], 0.15, 0.85),  # 0.5 +- 4.30 sqrt(2 x 0.01/3)
    ([0.2, 0.4], [0.7, 0.9, 0.8] * 3, -0.82, 1.82),  # 0.5 +- 12.7 sqrt(0.02/2 + 0.0075/9): t of the fewer
    ([0.0], [0.7], np.nan, np.nan),  # single rewards on both sides have no variance
    ([0.0], [1.0], np.nan, np.nan),
])  # fmt: skip
def test_a_change_has_an_interval(before, after, low, high):
    change = change_of_mean(np.array(before), np.array(after))
    assert (change.low, change.high) == pytest.approx((low, high), abs=0.01, nan_ok=True)
    assert change.mean == pytest.approx(np.mean(after) - np.mean(before))


def test_the_audit_compares_each_objective_with_the_same_changes():
    """A group of two responses; the right one gains at its first token, the wrong one loses at its last."""
    settings = SAMPLINGS["independent"]
    group = next(
        stream
        for stream, _ in WORLD.streams(settings)
        if [part.token_ids.tolist() for part in stream.parts] == [[1, 0], [2, 2, 0]]
    )
    assert [part.grade.reward for part in group.parts] == [1.0, 0.0]
    right, wrong = group.line(0), group.line(1)
    truth = [Change(right, 0, 1, (0.5, 0.4, 0.6)), Change(right, 1, 2, (0.0, -0.1, 0.1)),
             Change(wrong, 0, 2, (0.1, 0.05, 0.2)), Change(wrong, 2, 3, (-0.6, -0.7, -0.5))]  # fmt: skip
    found = {
        name: agreement for agreement in audit(truth, [group], Job(settings)) for name in agreement.objectives
    }
    assert found["dr_grpo"] is found["grpo"], "they differ in size alone"
    assert "dr_grpo, alive" in found
    assert "dr_grpo, unit" not in found, "that is dr_grpo"
    # advantages +-1/2 on all tokens, scaled by 0.5: two of three signs
    assert found["dr_grpo"].sign == pytest.approx(2 / 3)
    assert found["dr_grpo"].bias_early == pytest.approx(np.mean([0.25 - 0.5, -0.25 - 0.1]))
    assert found["dr_grpo"].bias_late == pytest.approx(np.mean([0.25 - 0.0, -0.25 + 0.6]))
    given, values = [0.5, 0.5, -0.5, -0.5], [change.value[0] for change in truth]
    assert found["dr_grpo"].noise == pytest.approx(np.std(0.5 * np.array(given) - values) / np.std(values))
    # ranks (3.5, 3.5, 1.5, 1.5) and (4, 2, 3, 1)
    assert found["dr_grpo"].rank == pytest.approx(2 / np.sqrt(4 * 5))
    # equal changes share the mean of their places: (4, 2.5, 2.5, 1)
    equal = [change._replace(value=(0.0, -0.1, 0.1)) if n == 2 else change for n, change in enumerate(truth)]
    (tied,) = [a for a in audit(equal, [group], Job(settings)) if "dr_grpo" in a.objectives]
    assert tied.rank == pytest.approx(2 * 1.5 / np.sqrt(4 * 4.5))
    assert "treerpo" in found["treerpo"].refused
    assert found["the run's"] is found["dr_grpo"]
    group.parts[0].grade.reward = -1.0
    found = {name: a for a in audit(truth, [group], Job(settings)) for name in a.objectives}
    assert "rewards of at least 0" in found["maxrl"].refused
    assert found["dr_grpo"].noise > 0
    group.parts[0].grade.reward = 0.0
    penalised = recipe(sampling="independent", objective="dapo", limit=3, loss={"overlong_buffer": 2})
    found = {name: a for a in audit(truth, [group], Job(penalised)) for name in a.objectives}
    assert found["the run's"] is found["grpo"], "equal rewards are not trained, whatever a length costs"
    assert found["the run's"].sign == 0.5


def test_the_audit_asks_for_the_advantages_of_a_changes_own_tokens():
    """One of two lines forks after two tokens; truths are the advantages of RLOO, or their mean."""
    ends = [Part(Tokens.of([2, 0], [-0.5] * 2), "stop", Grade(reward, "")) for reward in (0.0, 1.0, 0.0)]
    parts = [Part(Tokens.of([1, 2], [-0.5] * 2)), *ends]
    tree = kit.tree(QUESTION, 0, parts, [-1, -1, 0, 0])
    forked, alone = tree.line(2), tree.line(1)
    truth = [Change(line, begin, end, (value,) * 3) for line, begin, end, value in (
        (forked, 0, 2, 0.5), (forked, 2, 4, 1.0), (forked, 1, 3, 0.75), (alone, 0, 2, -0.5),
    )]  # fmt: skip
    (rloo,) = [found for found in audit(truth, [tree], Job(SAMPLINGS["tree"])) if "rloo" in found.objectives]
    assert (rloo.sign, rloo.rank) == (1, pytest.approx(1))
    assert (rloo.bias_early, rloo.bias_late, rloo.noise) == pytest.approx((0, 0, 0), abs=1e-12)


@pytest.mark.parametrize("rollout", [
    {"quantization": "fp8"}, {"engine": "server", "servers": ["http://a:1"], "staleness": 1},
    {"tokens_per_step": 9, "carry_over": True}, {"request_timeout": 1e12},
], ids=["fp8", "staleness", "carry-over", "no bound yet"])  # fmt: skip
def test_the_audit_of_a_run_whose_loss_corrects_for_other_weights_has_every_objective(rollout):
    """Nothing is trained, so nothing has to be corrected, also not by objectives that cannot; a run may have
    begun with what is refused now."""
    plain = SAMPLINGS["independent"]
    raw = plain.model_dump(exclude_unset=True)
    raw |= {"rollout": raw["rollout"] | rollout, "loss": raw["loss"] | {"rollout_is": "token"}}
    raw["model"] = raw["model"] | {"dtype": "bfloat16"}
    group = next(
        stream for stream, _ in WORLD.streams(plain) if len({len(part) for part in stream.parts}) > 1
    )
    truth = [Change(group.line(0), 0, 1, (0.5, 0.4, 0.6))]
    refused = [
        {
            name
            for agreement in audit(truth, [group], Job(settings))
            if agreement.refused
            for name in agreement.objectives
        }
        for settings in (plain, recipe_load.parse(raw, "test"))
    ]
    assert refused[0] == refused[1]


def test_responses_of_unequal_weight_that_are_all_alike_have_the_interval_of_equal_ones():
    """A draw of streams counts by its share, which alone is no spread of rewards."""
    unequal = _mean_reward([(share, np.full(8, 0.5)) for share in (0.5, 0.25, 0.25)])
    assert (unequal.low, unequal.mean, unequal.high) == (0.5, 0.5, 0.5)
    right = [
        _mean_reward([(share, np.ones(4)) for share in shares]) for shares in ((0.7, 0.1, 0.2), (0.3,) * 3)
    ]
    assert right[0] == right[1]
    assert right[0].low < 1, "three are few"
    rewards = [np.array(values) for values in ([0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0])]
    weighed = _mean_reward([*zip((0.4, 0.2, 0.2, 0.2), rewards, strict=True)])
    assert weighed.mean == pytest.approx(0.4 * 0.5 + 0.2 * 1 + 0.2 * 0.5)
    assert weighed.low < weighed.mean < weighed.high
    more = _mean_reward([*zip((0.4, 0.2, 0.2, 0.2), (values + 2 for values in rewards), strict=True)])
    assert (more.low, more.high) == pytest.approx((weighed.low + 2, weighed.high + 2)), "as the rewards"


@pytest.mark.parametrize(("text", "ends"), [
    ("Add 3 to 4. So 7!\nThen 2.5", ["4.", "7!", "!\n"]),
    ("no end", []),
    ('"Go." Then?! 7', ['."', "?!"]),
    ("先算。再算！「好。」末", ["。", "！", "。」"]),
])  # fmt: skip
@pytest.mark.parametrize("width", [1, 3], ids=["letters", "bytes"])
def test_sentences_end_with_a_mark_before_a_space_or_a_wide_mark(text, ends, width):
    """A token is a letter, or a byte of one."""
    letters = [letter.encode() for letter in text]
    ids = [[*letter] for letter in letters] if width == 3 else [[ord(letter)] for letter in text]
    decode = by_token(
        lambda ids: bytes(ids).decode(errors="replace") if width == 3 else "".join(map(chr, ids))
    )
    stops = ends_of_sentences([token for tokens in ids for token in tokens], decode)
    after = np.cumsum([len(tokens) for tokens in ids]).tolist()
    cuts = [after.index(stop) + 1 for stop in stops]
    assert [text[cut - len(end) : cut] for cut, end in zip(cuts, ends, strict=True)] == ends


def test_forced_text_goes_on_also_where_a_tokenizer_begins_texts_with_a_space(tmp_path):
    write_llama_tokenizer(tmp_path, ["so it is \\boxed{7}"] * 9)
    tokenizer = load_tokenizer(tmp_path)
    job = SimpleNamespace(tokenizer=tokenizer, recipe=recipe(limit=20))
    target = Target(job, ProbeOptions(Path(), 1, "every:1", force="\\boxed{"))
    assert tokenizer.decode([*tokenizer.encode("it is: "), *target.forced]) == "it is: \\boxed{"


@pytest.mark.parametrize(("at", "force", "lengths"), [
    ("sentences", None, [3, 9]), ("forks", None, [3]), ("every:3", None, [3, 6, 9, 12]),
    ("9,4,99,3", None, [3, 4, 9]), ("every:1", "am", [*range(1, 8), 9, 10, 11]), ("every:4", "No!", [4, 8]),
    ("1,2,3", "So. </think>", [1, 2, 3]),
])  # fmt: skip
def test_places_are_told_from_the_whole_response_also_where_it_forks_and_an_environment_answers(
    at, force, lengths
):
    """ "It." ends where its line forks; an environment answers "No!" before the policy goes on. A marker is
    forced in turns that lack it, where the limit of 14 tokens leaves room."""
    ids = [ord(letter) for letter in " I am.\nNo! So 7"]
    tail = Tokens.of(ids, given=[[]] * 6 + [[0]] * 4 + [[]] * 5)
    parts = [Part(Tokens.of([ord(letter) for letter in "It."]))]
    parts += [Part(tail, "stop", Grade(1.0, ""), number=n, parent=0) for n in (1, 2)]
    rollout = Rollout(QUESTION, 0, "tree", 0, parts)
    tokenizer = SimpleNamespace(
        decode=lambda ids: "".join(map(chr, ids)), encode=lambda text, after="": [*map(ord, text)]
    )
    settings = recipe(limit=20 if force and "think" in force else 14)
    target = Target(
        SimpleNamespace(tokenizer=tokenizer, recipe=settings), ProbeOptions(Path(), 1, at, force=force)
    )
    (line, _) = rollout.lines()
    closed = 8 if force == "am" else None
    numbers = [-1, *(0 if length <= 3 else 1 for length in lengths)]
    wanted = zip(numbers, [0, *lengths], strict=True)
    assert target._places(rollout, line) == {place: 14 - (closed or place[1]) for place in wanted}
    at = {length: np.zeros(2) for length in (0, 3, 9, 11)} | {14: np.ones(1)}
    texts = [stretch["text"] for stretch in Probed(rollout, line, at).row(target.decode)["stretches"]]
    assert texts == ["It.", " I am.\nNo!", " S", "o 7"]


def test_what_is_undecided_is_the_unbiased_variance_and_linear_between_places():
    rollout = Rollout(QUESTION, 0, "independent", 0, [Part(Tokens.of([1, 2, 3, 0]), "stop", Grade(1.0, ""))])
    at = {0: np.array([0.0, 1.0]), 2: np.array([0.0, 0.0, 0.0, 1.0]), 4: np.ones(1)}
    found = Probed(rollout, next(rollout.lines()), at)
    left = [found.undecided(share) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert left == pytest.approx([1 / 2, 3 / 8, 1 / 4, 1 / 8, 0])


def test_places_without_rewards_are_left_out_and_what_is_unknown_is_null(tmp_path):
    """One continuation of the prompt has a reward, then none of the response's last place."""
    settings = SAMPLINGS["independent"]
    rollout = next(r for r, _ in WORLD.streams(settings) if r.parts[0].token_ids.tolist() == [1, 2, 0])
    results = []
    for number, places in ((-1, [(-1, 0)]), (1, [(-1, 0), (0, 1), (0, 2)])):
        kind = asked(rollout, places, 3)
        found = probed(kind, settings, lambda name, shares: 0)
        failed = [part for part in found.parts if part.role == PROBE and part.parent == number][1:]
        for part in failed:
            part.grade = Grade.unscored("failed")
        for on_error in ("drop", "zero"):
            reward = settings.reward.model_copy(update={"on_error": on_error})
            results.append(look([found], kind, Job(settings.model_copy(update={"reward": reward})), str))
        assert json.loads(json.dumps(as_json(results[-2])), parse_constant=pytest.fail)
        page = write_probe_page(tmp_path / "probe.html", 1, results[-1], settings).read_text()
        for shown in (tables(results[-1]), page):
            assert "by quarters of a response: no reward varies" in shown
    counts = [[len(row["stretches"]) for row in result["responses"]] for result in results]
    assert counts == [[], [1], [2], [3]]
