"""A run: everything that lives as long as it, and one method for each verb of the loop.

Every rank holds a ``Run`` and calls the same verbs in the same order. Prompts are split over the engine
replicas for generation and scoring; afterwards every rank has all rollouts of the step, builds the same
trees, and trains its share of the rows.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_eqlen.data.prompts import PromptSource, read_benchmark
from megatron_eqlen.data.tokenizers import load_tokenizer
from megatron_eqlen.evaluation.evaluate import evaluate
from megatron_eqlen.evaluation.result import EvaluationResult, compare, read_results, write_results
from megatron_eqlen.models.weights import save_hf
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.dynamic_sampling import filter_groups
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe
from megatron_eqlen.replicas import IN_TURN, Replicas, agree, merge
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.page import write_page
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.report.rollouts import write_questions
from megatron_eqlen.rewards.scoring import Scorer, reward_metrics
from megatron_eqlen.rollout.engine import Engine, IdleEngine
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.recorder import Recorder, read_dump, rollout_key
from megatron_eqlen.rollout.vllm_colocated import ColocatedEngine
from megatron_eqlen.rollout.vllm_server import ServerEngine
from megatron_eqlen.run_folder import RunFolder
from megatron_eqlen.training import checkpoint, distributed
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics, Prompt, Rollout, TokenTree


class SyncError(RuntimeError):
    """The engine does not compute with the trainer's weights."""


class Run:
    """One rank's view of a run. Use as a context manager.

    ``replay``: a run's ``streams`` folder whose rollouts stand in for an engine's. ``trains``: False for
    a run that only generates, with the weights at ``recipe.model.path``. ``streams``: where rollouts are
    recorded, by default in the run folder.
    """

    def __init__(
        self,
        recipe: Recipe,
        replay: Path | None = None,
        trains: bool = True,
        streams: Path | None = None,
    ) -> None:
        distributed.start(recipe.parallel, recipe.seed)
        check_world_size(recipe)
        self.recipe = recipe
        self.replay = replay
        self.objective = resolve(recipe)
        self.folder = RunFolder(recipe)
        if trains and distributed.is_rank0():
            self.folder.open(recipe)
        self.streams = streams or self.folder.streams
        self.replicas = engine_replicas(recipe)
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.source: PromptSource | None = None
        """Rank 0 draws prompts for all: a gold that cannot be checked in time must not part the ranks."""
        if distributed.is_rank0():
            self.source = PromptSource(recipe.data, self.tokenizer, recipe.seed)
        self.scorer = Scorer(recipe.reward, self.tokenizer)
        self.policy = Policy(recipe) if trains else None
        self.engine = (
            None if replay else start_engine(recipe, self.tokenizer.eos_token_ids, self.replicas, trains)
        )
        self.progress = Progress(recipe.steps, f"{recipe.name} {recipe.method}", show=distributed.is_rank0())
        self.writer: MetricsWriter | None = None
        self.number = 0
        """Steps done; while one is under way, its number from 0."""
        self.gpu_hours = 0.0
        """That the steps took."""
        self.stopping = False
        self.metrics: Metrics = {}
        self.prompts: dict[str, Prompt] = {}
        """Of the step under way, as the two below."""
        self.rollouts: list[Rollout] = []
        self.recorded: list[Rollout] = []
        """This replica's own scored rollouts."""
        self.harvests: list[Metrics] = []
        """One for each batch."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.close()
        if self.writer is not None:
            self.writer.close()
        if self.engine is not None:
            self.engine.close()
        self.scorer.close()
        if self.source is not None:
            self.source.close()
        distributed.stop()

    # ---- a run's beginning and end ------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the newest checkpoint, or from the start."""
        position = checkpoint.load(self.folder.checkpoints, self.policy)
        if position is not None:
            self.number, self.gpu_hours = position["step"], position.get("gpu_hours", 0.0)
            if self.source is not None:
                self.source.load_state_dict(position["data"])
        if distributed.is_rank0():
            if not self.complete:
                self.folder.reopen(self.number)
            self.writer = MetricsWriter(
                self.folder.path,
                self.number,
                self.recipe.report.wandb_project,
                f"{self.recipe.name}-{self.recipe.method}-seed{self.recipe.seed}",
            )
        self.progress.resume(self.number)

    def goes_on(self) -> bool:
        """Whether another step is to be taken."""
        return not self.complete and not self.stopping

    @property
    def complete(self) -> bool:
        budget = self.recipe.gpu_hours
        return self.number >= self.recipe.steps or (budget is not None and self.gpu_hours >= budget)

    def export(self) -> None:
        """The trained model as a Hugging Face folder."""
        if not agree(self.folder.export.exists):
            with self.stage("export"):
                save_hf(self.policy.chunks, self.recipe.model.path, self.folder.export)

    def report(self) -> None:
        """The run's page; where it is is the last word."""
        if distributed.is_rank0():
            self.progress.finish(write_page(self.folder.path))

    # ---- the verbs of a step ------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Everything inside is one step; its metrics are written when it ends."""
        self.metrics, self.prompts, self.rollouts, self.recorded, self.harvests = {}, {}, [], [], []
        started = time.perf_counter()
        yield
        taken = time.perf_counter() - started
        worked = taken - self.metrics.get("time/evaluate", 0.0)
        self.gpu_hours += agree(lambda: worked) * self.recipe.gpus / 3600
        self._log({"time/step": taken, "time/gpu_hours": self.gpu_hours})
        self.number += 1
        self.stopping = agree(self.folder.stop.exists)
        if self.writer is not None:
            self.writer.write(self.number, self.metrics)
        self.progress.step(self.number, self.metrics)

    def batches(self) -> Iterator[list[Prompt]]:
        """The step's prompts, the same on every rank: one batch, or as many as dynamic sampling asks for."""
        for _ in range(self.recipe.loss.max_num_gen_batches if self.objective.dynamic_sampling else 1):
            yield agree(lambda: self.source.next(self.recipe.data.prompts_per_step))
            if len(self.prompts) >= self.recipe.data.prompts_per_step:
                return

    def harvest(self, prompts: list[Prompt]) -> list[Rollout]:
        """This replica's share of the batch's rollouts, recorded as they complete."""
        mine = self.replicas.share(prompts)
        if self.replay is not None:
            return _read_recorded(self.replay / self._step_name, mine)
        folder = self.streams / self._step_name
        done = _read_recorded(folder, mine)
        with self.stage("harvest"), self._recorder() as record:
            rollouts, metrics = harvest(
                self.engine,
                mine,
                one_replicas_share(self.recipe, self.replicas),
                self.tokenizer.eos_token_ids,
                seed=zlib.crc32(f"{self.recipe.seed}/{self.number}".encode()),
                on_complete=record,
                done=done,
            )
        self.harvests.append(self.replicas.combine(metrics))
        self._log(merge(self.harvests, IN_TURN))
        return rollouts

    def score(self, rollouts: list[Rollout], prompts: list[Prompt]) -> None:
        """Grade this replica's rollouts and keep them; the step goes on with all replicas' rollouts."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        with self.stage("score"):
            self.scorer.score(rollouts, by_id)
            self.recorded += rollouts
            if self.replay is None:
                self._record_scored(prompts)
            everyone = self.replicas.gather(rollouts)
        place = {prompt_id: number for number, prompt_id in enumerate(by_id)}
        everyone.sort(key=lambda one: (place[one.prompt_id], rollout_key(one)))
        self._log(
            reward_metrics([(by_id[one.prompt_id], s.grade) for one in everyone for s, _ in one.ended()])
        )
        self._keep(everyone, by_id)

    def build_trees(self) -> list[list[TokenTree]]:
        """Advantages and weights: the step's minibatches of token trees, the same on every rank."""
        with self.stage("trees"):
            minibatches, metrics = build_minibatches(self.rollouts, self.prompts, self.recipe)
        self._log(metrics)
        generated = self.metrics.get("harvest/generated_tokens")
        if generated:
            effective = 1000 * metrics["objective/effective_samples"] / generated
            self._log({"objective/effective_per_1k_tokens": effective})
        return minibatches

    def update(self, minibatches: list[list[TokenTree]]) -> None:
        """Train on the trees; the engine sleeps meanwhile."""
        if self.engine is not None:
            self.engine.sleep()
        with self.stage("train"):
            metrics = self.policy.update(minibatches)
        tokens = metrics.get("packing/tokens", 0.0)
        self._log({**metrics, "train/tokens_per_second": tokens / self.metrics["time/train"]})
        self._check_agreement()

    def sync(self) -> None:
        """Give the engine the policy's weights."""
        if self.engine is not None:
            with self.stage("sync"):
                self.engine.wake()
                self.engine.update_weights(self.policy.weights(), self.policy.version)

    def evaluate_if_due(self) -> None:
        """Evaluate within the step where the recipe says so."""
        every = self.recipe.evaluation.every
        if every and (self.number + 1) % every == 0:
            self.evaluate(f"step-{self.number + 1:08d}")

    def evaluate(self, label: str, out: Path | None = None) -> None:
        """All benchmarks with the engine's weights; a result that is there already is kept."""
        if self.engine is None or not self.recipe.evaluation.benchmarks:
            return
        path = out or self.folder.evaluation(label)
        if not agree(path.exists):
            with self.stage("evaluate"):
                results = [self._evaluate(benchmark) for benchmark in self.recipe.evaluation.benchmarks]
            if distributed.is_rank0():
                write_results(path, results)
            dist.barrier()
        for result in read_results(path):
            self._log(result.metrics())
            accuracy = f"{result.benchmark} avg@{result.samples} {result.accuracy}"
            self.progress.evaluated(label, accuracy + self._change(result))

    def checkpoint_if_due(self) -> None:
        """Save what the next step starts from: every few steps, at the end, and when asked to stop."""
        if self.number % self.recipe.checkpoint.every and self.goes_on():
            return
        self.progress.stage("checkpoint")
        position = {"data": agree(lambda: self.source.state_dict()), "gpu_hours": self.gpu_hours}
        checkpoint.save(
            self.folder.checkpoints, self.number, self.policy, position, self.recipe.checkpoint.keep
        )
        if self.stopping and distributed.is_rank0():
            self.folder.stop.unlink(missing_ok=True)  # obeyed; the same command goes on from here

    # ---- helpers ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows ``name`` while the block runs and adds its seconds to the metric ``time/NAME``."""
        self.progress.stage(name)
        started = time.perf_counter()
        yield
        key = f"time/{name}"
        self._log({key: self.metrics.get(key, 0.0) + time.perf_counter() - started})

    def _log(self, metrics: Metrics) -> None:
        self.metrics |= metrics

    @property
    def _step_name(self) -> str:
        return f"step-{self.number:08d}"

    @property
    def _record_file(self) -> Path:
        return self.streams / self._step_name / f"rank-{dist.get_rank()}.jsonl"

    @contextlib.contextmanager
    def _recorder(self) -> Iterator[Callable[[Rollout], None] | None]:
        """What to call with each rollout that completes: one rank of each replica writes."""
        if not self.replicas.leads:
            yield None
            return
        with Recorder(self._record_file) as recorder:
            yield recorder.write

    def _record_scored(self, prompts: list[Prompt]) -> None:
        """Put the graded rollouts in place of the raw record, and the questions beside them."""
        if self.replicas.leads:
            _rewrite(self._record_file, self.recorded)
        if distributed.is_rank0():
            write_questions(self._record_file.parent, prompts)

    def _keep(self, rollouts: list[Rollout], prompts: dict[str, Prompt]) -> None:
        """Take the rollouts into the step; dynamic sampling leaves out prompts that teach nothing."""
        wanted = list(prompts)
        if self.objective.dynamic_sampling:
            room = self.recipe.data.prompts_per_step - len(self.prompts)
            keep, dropped = filter_groups(rollouts, self.recipe)
            wanted = keep[:room]
            self._log(
                {
                    "objective/filtered_prompts": self.metrics.get("objective/filtered_prompts", 0.0)
                    + len(dropped)
                }
            )
        self.prompts |= {prompt_id: prompts[prompt_id] for prompt_id in wanted}
        self.rollouts += [rollout for rollout in rollouts if rollout.prompt_id in self.prompts]

    def _evaluate(self, benchmark: BenchmarkRecipe) -> EvaluationResult:
        return evaluate(
            self.engine,
            benchmark,
            agree(lambda: read_benchmark(benchmark, self.recipe.data, self.tokenizer)),
            self.scorer,
            self.recipe,
            self.tokenizer.eos_token_ids,
            share=self.replicas.share,
            gather=self.replicas.gather,
        )

    def _change(self, result: EvaluationResult) -> str:
        """Against the run's first evaluation of the same questions, where there is one."""
        first = self.folder.evaluation("before")
        if self.policy is None or not first.exists():
            return ""
        questions = result.manifest["question_ids"]
        for before in read_results(first):
            if before.manifest["question_ids"] == questions and before.manifest != result.manifest:
                change = compare(before, result)
                return (
                    f", {100 * change.mean:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
                )
        return ""

    def _check_agreement(self) -> None:
        """The engine generated with the weights that the trainer has: their log-probs must agree."""
        rollout = self.recipe.rollout
        found = self.metrics.get("loss/mismatch_mean", 0.0)
        same_kind = rollout.logprobs_mode == "raw" or rollout.keep_sampling_mask
        if self.engine is not None and same_kind and found > rollout.sync_tolerance:
            raise SyncError(
                f"step {self.number}: the trainer's and the engine's log-probs of the same tokens differ by "
                f"{found:.2g} on average, rollout.sync_tolerance is {rollout.sync_tolerance}: "
                f"the weight sync did not take, or the two compute in different precision"
            )


def check_world_size(recipe: Recipe) -> None:
    """Raise ValueError if the launcher started another number of processes than the recipe says."""
    cluster, found = recipe.cluster, dist.get_world_size()
    if found != recipe.world_size:
        raise ValueError(
            f"cluster: nodes {cluster.nodes} x processes_per_node {cluster.processes_per_node} = "
            f"{recipe.world_size} processes, but {found} were started"
        )


def engine_replicas(recipe: Recipe) -> Replicas:
    """Servers are driven by rank 0 alone; a colocated engine by all the ranks it lives in."""
    if recipe.rollout.engine == "server":
        return Replicas(dist.get_world_size(), in_step=False)
    return Replicas(recipe.rollout.tensor_parallel)


def start_engine(
    recipe: Recipe, eos_token_ids: frozenset[int], replicas: Replicas, syncs_first: bool
) -> Engine:
    """This rank's engine, with the weights that the recipe starts from."""
    rollout, path = recipe.rollout, recipe.model.path
    longest = recipe.data.max_prompt_length + rollout.max_response_length
    if not replicas.drives:
        return IdleEngine(longest)
    if rollout.engine == "server":
        return ServerEngine(path, rollout, eos_token_ids, longest, syncs_first=syncs_first)
    return ColocatedEngine(path, rollout, recipe.model.dtype, eos_token_ids, longest, recipe.seed)


def one_replicas_share(recipe: Recipe, replicas: Replicas) -> Recipe:
    """The recipe with the token budget of one replica."""
    budget = recipe.rollout.tokens_per_step
    if budget is None:
        return recipe
    rollout = recipe.rollout.model_copy(update={"tokens_per_step": max(1, budget // replicas.count)})
    return recipe.model_copy(update={"rollout": rollout})


def _read_recorded(folder: Path, prompts: list[Prompt]) -> list[Rollout]:
    """What is recorded of these prompts, graded versions first; each rollout once."""
    wanted = {prompt.prompt_id for prompt in prompts}
    found: dict[tuple[str, int], Rollout] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for rollout in read_dump(path):
            if rollout.prompt_id in wanted:
                found.setdefault(rollout_key(rollout), rollout)
    return list(found.values())


def _rewrite(path: Path, rollouts: list[Rollout]) -> None:
    """Replace a raw record by the graded one, at once."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with Recorder(partial) as recorder:
        for rollout in rollouts:
            recorder.write(rollout)
    partial.replace(path)
