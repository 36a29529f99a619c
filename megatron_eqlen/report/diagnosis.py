"""Diagnosis: why a run does not learn, or stops to, from the newest steps in its folder.

metrics.jsonl ──► trends; no gradient? ──► streams/step-N ──► counts of the responses' ends, and an example
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.reader import fill_numbers, read_skeletons, step_files
from megatron_eqlen.report.format import MISMATCH, RESPONSE_LENGTH, compact, first_of
from megatron_eqlen.report.metrics import Records
from megatron_eqlen.report.recorded import find_decoder
from megatron_eqlen.types import UNSCORED, Metrics, Part, Rollout, last_turn

STEPS = 24
"""Number of newest steps that are looked at."""
MOST = 0.9
"""Share of a step's responses from which one kind of end is the cause."""
LOOKED_AT, TEXT = 32, 160
"""Most truncated responses that are searched for an answer, and characters of the example's end."""
FORMS = {"math": "\\boxed{", "code": "```"}
"""Text that an answer begins with, by grader."""
EQUAL = {"cut off": "responses are cut off by rollout.tokens_per_step",
         "scored": "equal rewards: {} gives the same to all"}  # fmt: skip
TRENDS = (
    ("entropy", ("loss/entropy",), 0.1, 0.02, "the policy samples hardly anything new: raise "
     "rollout.temperature or loss.clip_ratio_high, or lower optimizer.lr"),
    ("length", RESPONSE_LENGTH, 0.25, 0.0, "responses have become short: look at them, and at what "
     "rewards or penalises length"),
    ("gradient norm", ("train/grad_norm",), 1e-3, 1e-9, "nothing is learned any more"),
    ("mismatch KL", MISMATCH, 10.0, 1e-3, "engine and trainer drift apart: loss.rollout_is, and "
     "docs/troubleshooting.md"),
)  # fmt: skip
"""Name, metrics, ratio of the newest steps to the oldest that is a collapse (below 1) or a growth, the value
below which it is one anyway (from which, for a growth), and what follows."""
ENDS = 3
"""Steps at each end of the newest records that are compared."""
Diagnosis = tuple[str, str]  # kind; cause, with counts and an example


def diagnose(run: Path, recipe: Recipe, records: Records) -> Iterator[Diagnosis]:
    """Yield what is wrong in the newest steps; nothing for a run that learns. ``records``: the newest, oldest
    first. Raises ValueError naming a file that is damaged."""
    # trends from the oldest to the newest of the records
    for name, names, ratio, bound, so in () if recipe.supervised else TRENDS:
        values = [value for record in records if (value := first_of(record, names)) is not None]
        first, now = median(values[:ENDS] or [0.0]), median(values[-ENDS:] or [0.0])
        grew = ratio > 1 and now > max(bound, ratio * first)
        if len(values) >= 2 * ENDS and (grew or (ratio < 1 and now < max(bound, ratio * first))):
            change = f"{'grew' if grew else 'fell'} from {compact(first)} to {compact(now)}"
            yield name, f"{name} {change}: {so}"
    # from here on the newest step alone
    last = records[-1] if records else {}
    if failed := last.get("reward/unscored"):
        text = f"{failed:.0f} responses have no reward (reward.on_error: {recipe.reward.on_error})"
        if (left := last.get("reward/dropped_length")) is not None:
            kept = compact(first_of(last, RESPONSE_LENGTH))
            text += f"; left out were {compact(left)} tokens long, kept {kept}"
        yield UNSCORED, text
    yield from unforked(recipe, last)
    if skipped := last.get("train/skipped_updates"):
        yield "skipped", f"{skipped:.0f} updates were skipped, see the warnings above"
        return
    # was anything trained, and do nearly all responses end without an answer?
    units = last.get("objective/units") or 0
    # equal rewards are no cause where the teacher alone gives advantages
    equal = last.get("objective/zero_advantage_fraction") == 1 and recipe.loss.advantage != "none"
    idle = not last.get("train/updates") or equal or not units
    many = max(last.get("reward/verdict/no_answer") or 0, last.get("harvest/truncated_fraction") or 0) > MOST
    if last and (idle or many):
        causes = [*_ends(step_files(run / "streams" / step_name(last["step"] - 1)), recipe)]
        if units and last.get("objective/members") == units:
            causes += [("single", "equal rewards by construction: comparison units have one member")]
        why = f"none of its {units:.0f} comparison units has unequal rewards"
        # a step that trained something needs no excuse
        yield from causes or [("idle", why)][:idle]


def unforked(recipe: Recipe, harvested: Metrics) -> Iterator[Diagnosis]:
    """Yield why no line of a step forked, if the recipe has trees whose places of forks are not learned."""
    tree = recipe.tree_sampling
    if recipe.sampling == "tree" and tree.fork != "profile" and harvested.get("harvest/forks") == 0:
        why = {
            "tokens": "all responses end within tree_sampling.step_tokens",
            "marker": f"{tree.marker!r} (tree_sampling.marker) is in no response, or at its very end",
            "death": "no line goes on where another ends",
        }[tree.fork]
        yield "forks", f"no line forked: {why}"


def _ends(files: Sequence[Path], recipe: Recipe) -> Iterator[Diagnosis]:
    """Yield the cause that nearly all responses of a step share, or why their rewards are equal."""
    # how each line ended, and which rewards each prompt's lines have
    responses: list[tuple[str, Rollout, Part]] = []
    by_prompt: defaultdict[str, set[float]] = defaultdict(set)
    for rollout in read_skeletons(files):
        for last in (line.last for line in rollout.lines()):
            cut = "truncated" if last.finish_reason == "length" else "cut off"
            end = last.grade.verdict if last.grade else cut
            responses += [(end, rollout, last)]
            if end != UNSCORED:
                by_prompt[rollout.prompt_id].add(round(last.grade.reward if last.grade else 0.0, 9))
    ends, rewards = Counter(end for end, *_ in responses), set[float]().union(*by_prompt.values())
    if not rewards:
        return
    (end, count), *_ = ((end, count) for end, count in ends.most_common() if end != UNSCORED)
    # texts of lines with the most frequent end: several to look for an answer in, else one as the example
    mine = [(rollout, last) for name, rollout, last in responses if name == end]
    form, grade = FORMS.get(mine[0][0].prompt.grader, ""), mine[0][1].grade
    looked_at = mine[: LOOKED_AT if end == "truncated" else 1]
    fill_numbers([rollout for rollout, _ in looked_at], files)
    decode, note = find_decoder(recipe.model)
    turns = [last_turn(rollout.line(last.number)) for rollout, last in looked_at]
    texts = [decode(tuple(turn.tolist())) for turn in turns]
    shared = end in ("truncated", "no_answer") and count > MOST * len(responses)
    if len(rewards) > 1 and not shared:
        if any(len(values) > 1 for values in by_prompt.values()):
            return  # other parts are compared: the metrics say how many
        right = sum(max(values) > 0 for values in by_prompt.values())
        end, cause = "by prompt", f"rewards differ between prompts only: {right} of {len(by_prompt)} right"
    elif end == "truncated":
        answered = sum(bool(form) and form in text for text in texts)
        after = "their answers would come after it"
        if 2 * answered > len(texts):
            after = "they go on after their answer (`eqlen check`: how a turn ends)"
        limit = f"rollout.max_response_length: {recipe.rollout.max_response_length}"
        counted = "" if note else f", {after}; {answered} of {len(texts)} hold an answer"
        cause = f"responses are cut at {limit}{counted}"
    elif end == "no_answer":
        cause = f"the form is not met: no {form or 'answer'} in {count} responses (data.instruction)"
    else:
        which = "right: too easy" if max(rewards) > 0 else "wrong: too hard, or golds of another form"
        cause = EQUAL.get(end, f"all are {which}").format((grade and grade.grader) or "the grader")
    counts = ", ".join(f"{number} {name}" for name, number in ends.most_common())
    prompt, text = mine[0][0].prompt, f"…{texts[0][-TEXT:]}" if len(texts[0]) > TEXT else texts[0]
    gold = f", gold {prompt.gold[:40]!r}" * (prompt.grader == "math")
    detail = f", {grade.detail[-TEXT:]!r}" if grade and grade.detail else gold
    shown = f"{prompt.prompt_id}: {text!r}{detail}" + f". {note}" * bool(note)
    yield end, f"{cause} ({len(responses)} responses: {counts}); e.g. {shown}"
