"""The schema of a recipe: what a YAML file may say, how files are composed, and what must fit together.

``load(path, overrides)`` reads a YAML file, follows ``extends:``, applies ``key.sub=value`` overrides,
and returns a frozen, checked ``Recipe``. Every mistake is a ``RecipeError`` that names the key.
Relative paths in a recipe are relative to the working directory, as on the command line.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class RecipeError(ValueError):
    """A recipe that cannot run; the message names the key, what was expected and what was found."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelRecipe(Section):
    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer) that training starts from."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations in training; the optimizer's main weights are float32."""


class SourceRecipe(Section):
    name: str
    """Metrics are reported under this name."""
    reader: Literal["deepmath", "opencodereasoning", "jsonl", "prepared"] = "deepmath"
    path: str
    """A file, or a folder with the data set's files."""
    weight: PositiveFloat = 1.0
    """Share of the mixture."""
    split: Literal["split_0", "split_1"] | None = None
    """OpenCodeReasoning's; default: both."""
    tests: str | None = None
    """Folder of the source sets (TACO, APPS, CodeContests, Codeforces) that hold the code problems' tests."""
    min_difficulty: float | None = None
    max_difficulty: float | None = None
    exclude: str | None = None
    """A file of questions, one JSON string or line each, to leave out (decontamination)."""


class DataRecipe(Section):
    sources: list[SourceRecipe] = Field(min_length=1)
    prompts_per_step: PositiveInt = 64
    """The paper's prompt batch size."""
    max_prompt_length: PositiveInt = 2048
    """Tokens; longer prompts are left out and counted."""
    instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    instruction_role: Literal["user", "system", "none"] = "user"
    enable_thinking: bool | None = None
    """Passed to the chat template where set."""
    shuffle: bool = True


class EqualLengthRecipe(Section):
    suffix_reward: Literal["max", "mean"] = "max"
    """Reward of B_i over the ended responses that extend it (ablation: mean)."""
    unfinished: Literal["zero", "drop"] = "zero"
    """A B_i that no ended response extends: reward 0, or its pair is left out."""
    pair_count: Literal["all", "effective"] = "all"
    """N_k of Eq. 6: all pairs, as written, or only those with unequal rewards."""
    max_pairs: PositiveInt | None = None
    """Stop a stream after this many pairs; its survivor is finished alone for its reward."""
    single_pair: bool = False
    """Ablation: one pair a stream, no prefix inheritance."""
    prefix_in_gradient: bool = False
    """Ablation: the inherited prefix is trained with its side's advantage (expanded layout)."""


class TreeSamplingRecipe(Section):
    branching: Annotated[int, Field(ge=2)] = 8
    """Continuations of every step; a prompt has up to branching ** depth responses."""
    depth: PositiveInt = 3
    """Steps of a response; the last one runs to max_response_length."""
    step_tokens: PositiveInt | None = None
    """Length of a step, default max_response_length // depth (our choice)."""


class RolloutRecipe(Section):
    engine: Literal["colocated", "server"] = "colocated"
    temperature: PositiveFloat = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: int = 20
    """0 or -1: off."""
    min_p: Fraction = 0.0
    max_response_length: PositiveInt = 32768
    """Tokens after the prompt on any path."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """``raw``: log-softmax of the logits divided by the temperature alone, what the trainer computes.
    ``processed``: after top-k, top-p and min-p too."""
    keep_sampling_mask: bool = False
    """Record which tokens top-k, top-p and min-p kept, and normalise over the same ones in training: the
    trained distribution is then the sampled one (DeepSeek-V3.2, section 3.1)."""
    tokens_per_step: PositiveInt | None = None
    """Generated tokens after which a step's harvest ends early."""
    tensor_parallel: PositiveInt = 1
    max_num_seqs: PositiveInt = 512
    max_num_batched_tokens: PositiveInt = 8192
    block_size: PositiveInt = 32
    gpu_memory_utilization: Fraction = 0.85
    kv_cache_gib: PositiveFloat | None = None
    """Fixed size of the KV cache (the CPU engine needs one; default there: 1)."""
    servers: list[str] = []
    """``engine: server``: base URLs of the replicas."""
    request_timeout: PositiveFloat = 600.0
    """Seconds without progress after which an engine counts as hung."""
    sync_tolerance: PositiveFloat = 0.05
    """Largest mean absolute difference between the trainer's and the engine's log-probs right after a
    weight sync; more stops the run. Float32 on CPU stays below 1e-4."""

    @property
    def mask_width(self) -> int:
        """Most tokens that the sampling mask of a token can hold; 0: none is recorded."""
        return self.top_k if self.keep_sampling_mask else 0


class RewardRecipe(Section):
    math_rule: Literal["exact", "math_verify", "either"] = "either"
    workers: PositiveInt = 2
    """Grader processes."""
    timeout: PositiveFloat = 5.0
    """Seconds a math answer may take."""
    code_timeout: PositiveFloat = 6.0
    """Seconds a code test may take."""
    code_memory_mb: PositiveInt = 1024
    code_sandbox: Literal["strict", "best_effort"] = "strict"
    """``strict``: refuse to run programs where the machine cannot isolate them."""
    sandbox_url: str | None = None
    """A SandboxFusion-compatible server to send programs to."""
    rubric: str | None = None
    """``module:function`` called for prompts whose grader is ``rubric``."""


class LossRecipe(Section):
    """Keys left out take the objective's own default; ``eqlen train --dry-run`` prints what they are."""

    clip_ratio_low: NonNegativeFloat | None = None
    clip_ratio_high: NonNegativeFloat | None = None
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: lower bound of the objective for negative advantages."""
    kl_coef: NonNegativeFloat = 0.002
    """The paper's beta_kl, on supervised tokens against the reference model; 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Our choice (the paper names none)."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling for the train-inference mismatch."""
    rollout_is_threshold: PositiveFloat = 2.0
    minibatches: PositiveInt = 1
    """Optimizer steps per harvest (our choice: 1, on-policy)."""
    epochs: PositiveInt = 1
    loss_agg_mode: (
        Literal[
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "token-mean",
            "prompt-mean-token-mean",
        ]
        | None
    ) = None
    """How tokens are averaged, by verl's names; ``prompt-mean-token-mean`` is DAPO's equation as printed."""
    gr3_alpha: NonNegativeFloat | None = None
    """Strength of GR3's length scaling."""
    overlong_buffer: NonNegativeInt | None = None
    overlong_factor: NonNegativeFloat | None = None
    dynamic_sampling: bool | None = None
    max_num_gen_batches: PositiveInt = 10


class OptimizerRecipe(Section):
    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = 20
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: NonNegativeFloat = 0.0
    adam_beta1: Fraction = 0.9
    """Our choice, as the next three."""
    adam_beta2: Fraction = 0.999
    adam_eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm; 0 is off."""


class ParallelRecipe(Section):
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt | None = None
    expert: PositiveInt = 1
    expert_tensor: PositiveInt = 1
    sequence: bool | None = None
    """Sequence parallel; default: on with tensor > 1 in MoE models and on GPUs."""
    recompute: Literal["none", "selective", "full"] = "none"
    overlap_grad_reduce: bool = False


class PackingRecipe(Section):
    max_tokens_per_row: PositiveInt = 36864
    """Budget of a row (a micro-batch); at least the longest path, max_prompt_length + max_response_length."""
    layout: Literal["tree", "expanded"] = "tree"


class CheckpointRecipe(Section):
    every: PositiveInt = 10
    keep: PositiveInt = 2
    """The newest this many stay."""


class BenchmarkRecipe(Section):
    name: str
    reader: Literal["deepmath", "aime25", "hmmt25", "livecodebench", "jsonl", "prepared"] = "deepmath"
    path: str
    limit: PositiveInt | None = None
    since: str | None = None
    """First contest date (YYYY-MM-DD). LiveCodeBench needs both: "v6" alone names several problem sets."""
    until: str | None = None
    """Last contest date, inclusive."""


class EvaluationRecipe(Section):
    benchmarks: list[BenchmarkRecipe] = []
    samples: PositiveInt = 32
    """avg@k's k."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after. Samples are drawn as the rollout's are."""


class ReportRecipe(Section):
    wandb_project: str | None = None


class ClusterRecipe(Section):
    nodes: PositiveInt = 1
    processes_per_node: PositiveInt = 1
    """One per GPU; on CPU one per core used."""
    gpu_memory_gib: PositiveFloat = 80.0
    partition: str | None = None
    account: str | None = None
    time: str = "24:00:00"


class Recipe(Section):
    name: str
    """Names the experiment; its runs are under ``runs/NAME``."""
    run_dir: str | None = None
    """Default ``runs/NAME/METHOD-seedN``, METHOD being ``eqlen-grpo`` or ``grpo``, for example."""
    seed: NonNegativeInt = 0
    steps: PositiveInt
    gpu_hours: PositiveFloat | None = None
    """End the run after this much work, too, evaluations not counted: the paper compares methods at equal GPU
    hours. An hour of a process counts as one on CPUs."""
    sampling: Literal["equal_length", "independent", "tree"] = "equal_length"
    objective: str = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 16
    """G: independent completions of a prompt, or 2 x its dual-track subgroups."""
    model: ModelRecipe
    data: DataRecipe
    equal_length: EqualLengthRecipe = EqualLengthRecipe()
    tree_sampling: TreeSamplingRecipe = TreeSamplingRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    reward: RewardRecipe = RewardRecipe()
    loss: LossRecipe = LossRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    parallel: ParallelRecipe = ParallelRecipe()
    packing: PackingRecipe = PackingRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    report: ReportRecipe = ReportRecipe()
    cluster: ClusterRecipe = ClusterRecipe()

    @property
    def run_folder(self) -> Path:
        return (
            Path(self.run_dir)
            if self.run_dir
            else Path("runs") / self.name / f"{self.method}-seed{self.seed}"
        )

    @property
    def method(self) -> str:
        """``eqlen-grpo``: equal-length sampling; ``grpo``: independent sampling; ``eqlen-grpo-mean-reward``,
        for example: one of the paper's ablations."""
        if self.sampling != "equal_length":
            return self.objective
        ablations = {
            "single-pair": self.equal_length.single_pair,
            "prefix-in-gradient": self.equal_length.prefix_in_gradient,
            "mean-reward": self.equal_length.suffix_reward == "mean",
        }
        return "-".join(["eqlen", self.objective, *(name for name, on in ablations.items() if on)])

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.processes_per_node

    @property
    def gpus(self) -> int:
        """All that the run holds, those of its servers included."""
        servers = self.rollout.servers if self.rollout.engine == "server" else []
        return self.world_size + len(servers) * self.rollout.tensor_parallel

    @property
    def streams_per_prompt(self) -> int:
        return self.group_size // 2

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        from megatron_eqlen.objectives.registry import check_combination  # it reads recipes itself

        _check_row_budget(self)
        _check_sampling(self)
        _check_engine(self.rollout)
        _check_sampling_mask(self.rollout)
        _check_world(self)
        check_combination(self)
        return self


def _check_row_budget(recipe: Recipe) -> None:
    prompt, response = recipe.data.max_prompt_length, recipe.rollout.max_response_length
    if recipe.packing.max_tokens_per_row < prompt + response:
        raise ValueError(
            f"packing.max_tokens_per_row: {recipe.packing.max_tokens_per_row} is less than the longest path, "
            f"data.max_prompt_length {prompt} + rollout.max_response_length {response} = {prompt + response}"
        )


def _check_sampling(recipe: Recipe) -> None:
    if recipe.sampling == "equal_length" and recipe.group_size % 2:
        raise ValueError(
            f"group_size: {recipe.group_size} is odd; equal_length sampling splits it into pairs of tracks"
        )
    if recipe.equal_length.prefix_in_gradient and recipe.packing.layout != "expanded":
        raise ValueError(
            "equal_length.prefix_in_gradient: true needs packing.layout: expanded "
            "(each side trains its own copy of the prefix)"
        )


def _check_engine(rollout: RolloutRecipe) -> None:
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise ValueError(
            f"rollout.max_num_batched_tokens: {rollout.max_num_batched_tokens} is less than "
            f"rollout.max_num_seqs {rollout.max_num_seqs}: each decoding request takes a token a step"
        )
    if rollout.engine == "server" and not rollout.servers:
        raise ValueError("rollout.servers: expected at least one URL with rollout.engine: server, found none")


def _check_sampling_mask(rollout: RolloutRecipe) -> None:
    if not rollout.keep_sampling_mask:
        return
    if rollout.top_k < 1:
        raise ValueError(
            f"rollout.keep_sampling_mask: true needs rollout.top_k >= 1 (it bounds what is recorded of each "
            f"token), found {rollout.top_k}"
        )
    if rollout.logprobs_mode != "processed":
        raise ValueError(
            "rollout.keep_sampling_mask: true needs rollout.logprobs_mode: processed (both are of the kept "
            f"tokens alone), found {rollout.logprobs_mode}"
        )


def _check_world(recipe: Recipe) -> None:
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    if recipe.world_size % (tensor * pipeline):
        raise ValueError(
            f"parallel: tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} does not divide "
            f"cluster: nodes {recipe.cluster.nodes} x processes_per_node "
            f"{recipe.cluster.processes_per_node} = {recipe.world_size}"
        )
    if recipe.world_size % recipe.rollout.tensor_parallel:
        raise ValueError(
            f"rollout.tensor_parallel: {recipe.rollout.tensor_parallel} does not divide "
            f"the {recipe.world_size} processes"
        )


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """The recipe in ``path`` with ``key.sub=value`` overrides applied. Raises RecipeError."""
    raw = _read(Path(path), ())
    for override in overrides:
        _apply(raw, override)
    return parse(raw, str(path))


def parse(raw: dict[str, Any], where: str) -> Recipe:
    """A checked recipe from plain data; ``where`` names it in errors."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise RecipeError(f"{where}: " + "; ".join(lines)) from None


def check_inputs(recipe: Recipe) -> None:
    """Raise RecipeError, naming the key, for a file or folder that the recipe reads and that is not there."""
    paths = {"model.path": recipe.model.path}
    for number, source in enumerate(recipe.data.sources):
        paths[f"data.sources.{number}.path"] = source.path
    for number, benchmark in enumerate(recipe.evaluation.benchmarks):
        paths[f"evaluation.benchmarks.{number}.path"] = benchmark.path
    missing = [f"{key}: {path} does not exist" for key, path in paths.items() if not Path(path).exists()]
    if missing:
        raise RecipeError("; ".join(missing))


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML that ``load`` reads back to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def plain_differences(
    before: dict[str, Any], after: dict[str, Any], at: str = ""
) -> dict[str, tuple[Any, Any]]:
    """``{"loss.kl_coef": (old, new)}`` for every key whose plain value differs."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= plain_differences(old, new, f"{at}{key}.")
        elif old != new:
            found[f"{at}{key}"] = (old, new)
    return found


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: PyYAML alone reads ``1e-6`` as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise RecipeError(f"{path}: extends itself through {' -> '.join(map(str, seen))}")
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe file")
    try:
        raw = _yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: expected keys and values, found {type(raw).__name__}")
    base = raw.pop("extends", None)
    if base is None:
        return raw
    return _merge(_read(path.parent / base, (*seen, path.resolve())), raw)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}: expected key.sub=value")
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: not a YAML value: {error}") from None
    at: Any = raw
    *parents, last = key.split(".")
    for part in parents:
        at = _child(at, part, override)
    if isinstance(at, list):
        at[_index(at, last, override)] = value
    else:
        at[last] = value


def _child(at: Any, part: str, override: str) -> Any:
    if isinstance(at, list):
        return at[_index(at, part, override)]
    child = at.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise RecipeError(f"override {override!r}: {part} is a value ({child!r}), not a section")
    return child


def _index(at: list, part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(at):
        raise RecipeError(
            f"override {override!r}: {part!r} is not one of the list's numbers 0..{len(at) - 1}"
        )
    return int(part)


def _explain(item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _keys_at(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.0)
        return f"unknown key {key!r}" + (f" (nearest: {near[0]!r})" if near else "")
    if item["type"] == "missing":
        return f"missing key {key!r}"
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    return f"{key}: {item['msg']}, found {item['input']!r}"


def _keys_at(loc: tuple) -> list[str]:
    """The keys that the section at ``loc`` has."""
    section: Any = Recipe
    for part in loc:
        if isinstance(part, int):
            continue
        section = _section(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section(annotation: Any) -> type[Section]:
    if typing.get_origin(annotation) in (list, types.UnionType, typing.Union):
        return next(_section(arg) for arg in typing.get_args(annotation) if arg is not type(None))
    return annotation
