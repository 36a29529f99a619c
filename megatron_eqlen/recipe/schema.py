"""Schema of a recipe: keys of a YAML file and their meanings. Paths are relative to the working directory."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema

from megatron_eqlen.recipe.budget import Budget
from megatron_eqlen.recipe.data_sets import BENCHMARKS, TRAINING, with_defaults
from megatron_eqlen.recipe.naming import variant_name
from megatron_eqlen.recipe.plugins import is_import_path
from megatron_eqlen.recipe.yaml_values import Options
from megatron_eqlen.tokens import COLUMNS, LOGPROBS


def _number(value: Any) -> Any:
    """Refuse a boolean, which Python and pydantic treat as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


NUMBER = BeforeValidator(_number)
"""Must be last in a number's annotation: the documentation's schema lacks bounds that come after it."""
Real = Annotated[float, NUMBER]
PositiveInt = Annotated[int, Field(gt=0), NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0), NUMBER]
TopK = Annotated[int, Field(ge=-1), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), NUMBER]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""Path of a file or folder, where ``~`` is the home folder, as in a shell."""


def _ascending(band: tuple[float, float]) -> tuple[float, float]:
    if band[0] > band[1]:
        raise ValueError("expected [low, high]")
    return band


Quantile = Annotated[float, Field(gt=0, le=1), NUMBER]
Band = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_ascending)]
"""``[low, high]``, both above 0."""

RejectionName = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
    "binary_kl",
]  # fmt: skip
"""verl's ``rollout_rs`` options; ``training.mismatch`` defines them."""


class RecipeError(ValueError):
    """Recipe that cannot run; the message names the key, what was expected and what was found."""


def one_of(*names: str) -> AfterValidator:
    """Validator of a key whose value is one of ``names``, or the import path of a user's own object."""

    def check(value: str) -> str:
        if value not in names and not is_import_path(value):
            # With no cutoff some name is always the nearest.
            near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.0)[0]
            # ``mine.reward`` was probably meant as ``mine:reward``.
            if "." in value:
                near = ":".join(value.rsplit(".", 1))
            expected = f"one of {', '.join(names)}, or package.module:name"
            raise ValueError(f"expected {expected}, found {value!r} (nearest: {near!r})")
        return value

    return AfterValidator(check)


ANY_COLUMNS = ("jsonl", *TRAINING, *BENCHMARKS)
"""Readers of files whose columns may have any names."""
ColumnName = Literal["question", "answer", "grader", "difficulty", "instruction", "tests"]
SourceReader = Annotated[str, one_of("jsonl", *TRAINING, "prepared")]
BenchmarkReader = Annotated[str, one_of("jsonl", *TRAINING, *BENCHMARKS, "livecodebench", "prepared")]
GraderName = Annotated[str, one_of("math", "code")]
ENVIRONMENTS = {
    "python": "megatron_eqlen.environments.python_tool:PythonTool",
    "workspace": "megatron_eqlen.environments.workspace:Workspace",
    "agent": "megatron_eqlen.environments.agent:Agent",
}
AdvantageName = Annotated[str, one_of("grpo", "dr_grpo", "rloo", "maxrl", "reward", "gr3", "none")]
BaselineName = Annotated[str, one_of("unit", "alive", "fitted")]
SurrogateName = Annotated[str, one_of("ppo", "gspo", "ctpo", "reinforce", "cispo", "vespo", "sapo", "dppo")]
AggregationName = Annotated[str, one_of(
    "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean",
    "prompt-mean-token-mean", "balanced-token-mean", "delta-l",
)]  # fmt: skip
"""verl's ``loss_agg_mode``, and three more; ``objectives.aggregation`` defines them."""


class When:
    """Metadata of a key or section: it acts only where another key has one of ``values``, or, without values,
    where that key is set: not null, 0, false or empty. ``.key`` lies in the same section.

    ``checks.idle_problems`` names a key that is set and cannot act.
    """

    def __init__(self, key: str, *values: Any) -> None:
        self.key, self.values = key, values

    def within(self, prefix: str) -> When:
        """Return the condition with the key's full name. ``prefix``: of the section, with its dot."""
        return When(prefix + self.key[1:], *self.values) if self.key.startswith(".") else self

    def is_met(self, value: Any) -> bool:
        return value in self.values if self.values else bool(value)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the key's schema with a list ``when``, for ``docs/recipe_keys.md``."""
        schema = handler(core)
        return schema | {"when": [*schema.get("when", ()), str(self).lstrip(".")]}

    def __str__(self) -> str:
        return f"{self.key}: {' or '.join(map(shown, self.values))}" if self.values else f"{self.key} set"


def shown(value: Any) -> str:
    """Return a value as YAML writes it, in one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelRecipe(Section):
    """The model that is trained."""

    path: UserPath
    """Hugging Face folder to start from, or a name on the hub, ``Qwen/Qwen3-4B``; a local folder wins."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub, default: the default branch. A run stores the commit."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters and activations in training; the optimizer's main weights are float32."""
    megatron: Options = {}
    """Further fields of Megatron-Core's ``TransformerConfig`` and ``DistributedDataParallelConfig``, such as
    ``{moe_shared_expert_overlap: true, overlap_grad_reduce: true}``; some are refused
    (``recipe/engine_options.py``). Of its ``OptimizerConfig`` ``weight_decay`` (0), ``clip_grad`` (1.0; 0 is
    off), ``adam_beta1`` (0.9), ``adam_beta2`` (0.999) and ``adam_eps`` (1e-8), our choices."""


class TeacherRecipe(Section):
    """On-policy distillation: each generated token also learns from a teacher's log-prob. The teacher may be
    of any size and family with the same tokenizer."""

    path: UserPath = ""
    """Hugging Face folder of the teacher, or its name on the hub: the trainer computes the log-probs."""
    revision: Annotated[str | None, When(".path")] = None
    """Branch, tag or commit, for a name on the hub."""
    url: Annotated[str, Field(pattern="^(https?://.+)?$")] = ""
    """Base URL of the teacher's vLLM server, in place of ``path``; its secret is in ``TEACHER_API_KEY``."""

    def __bool__(self) -> bool:
        return bool(self.path or self.url)


LoraTarget = Literal["attention", "delta_net", "mlp", "experts"]


class LoraRecipe(Section):
    """Training of adapters (LoRA) in place of the model's own weights, which are frozen."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: Annotated[PositiveFloat, When(".rank")] = 32.0
    """An adapter adds alpha / rank times B A x to a layer's output. Our choice."""
    targets: Annotated[Annotated[tuple[LoraTarget, ...], Field(min_length=1)] | None, When(".rank")] = None
    """Linear layers with adapters: those of ``attention``, ``delta_net`` (Gated DeltaNet), ``mlp`` (shared
    experts, too) and ``experts``. Default: all that the model has."""


class DataSection(Section):
    """Keys of a data set, with those that its reader's name stands for."""

    name: str
    """Name under which its rewards, or a benchmark's accuracies, are logged."""
    path: UserPath
    """A file, a data set's folder, or its name on the hub, ``zwhe99/DeepMath-103K``; a local path of that
    name wins. Default: the hub's name of the data set that ``reader`` names (recipe/data_sets.yaml)."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub, default: the default branch. A run stores the commit."""
    config: str | None = None
    """Configuration of the data set (as in ``datasets``); default: the only one, or what its card marks."""
    split: str | None = None
    """Split of the data set; default: ``train``, of a benchmark ``test``, or the only one."""
    columns: Annotated[dict[ColumnName, str], When(".reader", *ANY_COLUMNS)] = {}
    """Names of the file's columns, where they are not those that ``data/layouts.py`` recognises:
    ``{question: task}``. A dot reaches into a record: ``reward_model.ground_truth``."""
    grader: GraderName | None = None
    """Grader of all its answers: ``math``, ``code``, or the import path of your own: a function of the
    response, or a factory (docs/extending.md). Default: the grader that the reader sets for each row."""
    _defaults = model_validator(mode="before")(with_defaults)


class SourceRecipe(DataSection):
    """One data set of the training prompts."""

    reader: SourceReader = "deepmath"
    """A reader's name (docs/models_and_data.md), or the import path of your own, ``package.module:read``."""
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other sources' weights."""
    min_difficulty: Real | None = None
    """Leave out rows below this difficulty, and rows without a difficulty."""
    max_difficulty: Real | None = None
    """Leave out rows above this difficulty, and rows without a difficulty."""
    keep_duplicates: bool = False
    """Keep rows whose question came before, as small made-up data may need. A prepared file has none."""
    exclude: UserPath | None = None
    """File of questions to leave out (decontamination), one JSON string or line each."""


class DataRecipe(Section):
    """The training prompts."""

    sources: list[SourceRecipe] = Field(min_length=1)
    prompts_per_step: PositiveInt = 64
    """Prompts per step; each gets ``group_size`` responses or tracks. The paper's number."""
    max_prompt_length: PositiveInt = 2048
    """Limit in tokens; longer prompts are left out and counted."""
    instruction: Annotated[str, When(".instruction_role", "user", "system")] = (
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    """Instruction that the model gets with every question, unless the row has its own."""
    instruction_role: Literal["user", "system", "none"] = "user"
    """Chat role that holds the instruction; ``none`` leaves the instruction out."""
    enable_thinking: bool | None = None
    """Passed to the chat template: whether the model may think first. Default: the template's own."""
    shuffle: bool = True
    """Shuffle the rows again in each epoch, by the run's seed; false: keep the order of the files."""


class EqualLengthRecipe(Section):
    """Construction and reward of pairs, for ``sampling: equal_length``."""

    suffix_reward: Annotated[Literal["max", "mean"], When(".pair_weight", "paper")] = "max"
    """Reward of B_i over the ended responses that extend it (ablation: mean)."""
    unfinished: Annotated[Literal["zero", "drop"], When(".pair_weight", "paper")] = "zero"
    """B_i that no ended response extends: its reward is 0, or its pair is left out."""
    pair_count: Annotated[Literal["all", "effective"], When(".pair_weight", "paper")] = "all"
    """N_k of Eq. 6: all pairs, as written, or only pairs with unequal rewards."""
    pair_weight: Literal["paper", "on_policy"] = "paper"
    """``paper``: each of the N_k pairs of a stream has weight 1/N_k, as in Eq. 6. ``on_policy``: pair i has
    weight 2^-(i-1), tokens are summed, and the reward of B_i is an unbiased estimate of its value: the
    gradient is that of the expected reward (docs/length_bias.md)."""
    baseline: Annotated[
        Literal["pair", "streams"], When(".pair_weight", "on_policy"), When("rollout.carry_over", False)
    ] = "pair"
    """Reward that a side is compared with: the pair's other side, or, with less noise, the mean value of the
    prompt in its other streams."""
    max_pairs: PositiveInt | None = None
    """End a stream after this many pairs; the other track runs on, for its reward. 1: as in the paper."""
    prefix_in_gradient: Annotated[bool, When(".pair_weight", "paper"), When("packing.layout", "expanded")] = (
        False
    )
    """Ablation: the inherited prefix is trained with its side's advantage (expanded layout)."""


class TreeSamplingRecipe(Section):
    """Forks of sampled trees, for ``sampling: tree``: ``group_size`` lines start at the prompt, and fork."""

    fork: Literal["tokens", "marker", "death", "profile"] = "tokens"
    """``tokens``: a line forks every ``step_tokens``. ``marker``: after it has generated ``marker``, so that
    several answers continue one thought. ``death``: where a line ends, the heaviest of the others forks, so
    that as many lines go on. ``profile``: once, at one of the places after 1 to ``forks`` x ``step_tokens``
    tokens, or after ``marker`` (both, if both are set), where the run's earlier steps showed for the prompt's
    source that a fork pays; until then 1 tree of 4 tries a place with 2 lines, and no other one forks."""
    branching: Annotated[int, Field(ge=2), NUMBER] = 2
    """Lines that continue after a fork: the line itself and new ones. With ``profile``, the most."""
    forks: PositiveInt = 2
    """Most forks of a line; with ``death``, of a tree; with ``profile``, places by tokens."""
    step_tokens: Annotated[PositiveInt | None, When(".fork", "tokens", "profile")] = None
    """Tokens between forks, default max_response_length // (forks + 1) (our choice)."""
    marker: Annotated[str | None, When(".fork", "marker", "profile")] = None
    """Text that a line forks after, where the token ends that completes it: ``</think>``."""


class EnvironmentRecipe(Section):
    """Environment that answers the policy's turns with tools, games or databases (docs/agents.md)."""

    name: Annotated[str, one_of(*ENVIRONMENTS)] | None = None
    """``python``: a Python tool in the sandbox; ``workspace``: commands in a folder, made from
    ``options.template``; ``agent``: any program that speaks to OpenAI's endpoint, ``options.function``; or
    the import path of your own class, such as ``recipes.passages:SearchTool`` and
    ``recipes.verifiers_tasks:VerifiersTask``. None: a response is one turn."""
    options: Annotated[Options, When(".name")] = {}
    """Arguments of the class besides prompt and seed, typed as it declares. Quoted text stays text."""
    max_turns: Annotated[PositiveInt, When(".name")] = 8
    """The response ends with the answer to this many turns."""
    max_given_tokens: Annotated[PositiveInt, When(".name")] = 4096
    """Most tokens that the environment gives on a path; the response ends where more would be given. They
    count for context and rows, not for ``rollout.max_response_length``."""
    timeout: Annotated[PositiveFloat, When(".name")] = 60.0
    """Seconds after which a call has failed and its response has no reward."""
    workers: Annotated[PositiveInt, When(".name")] = 8
    """Calls at once, per engine replica."""


class MismatchRecipe(Section):
    """Monitoring of the train-inference mismatch: the mean |log-prob difference| of trainer and engine over
    an update's tokens that its own weights sampled, or over lines drawn from the step, if it is larger."""

    tolerance: PositiveFloat | None = None
    """Limit in nats, of a step and of what each server samples after a sync; default 0.1, or 0.5 with
    ``quantization``. Float32 on CPUs stays below 1e-4, dense models in bfloat16 at 0.01 to 0.04, in fp8 at
    ten times as much; an engine with wrong weights reaches 0.7 and more."""
    then: Literal["warn", "stop"] = "warn"
    """Reaction to a step above the tolerance. ``warn``: print a warning, once until a step is below again.
    ``stop``: end the run after the step, with a checkpoint."""


def _keys(kind: Literal["keep_key", "record_key", "train_key"]) -> Iterator[tuple[str, str]]:
    """Yield the names of the columns that depend on such a key of ``rollout``, with the key."""
    for name, column in COLUMNS.items():
        if (key := getattr(column, kind)) is not None:
            yield name, key


class RolloutRecipe(Section):
    """Generation of responses: sampling, the engine, and the limits of a step's harvest."""

    engine: Literal["colocated", "server"] = "colocated"
    """``colocated``: vLLM in the training processes. ``server``: vLLM servers, see ``servers``."""
    temperature: Annotated[float, Field(ge=0.01, le=2), NUMBER] = 0.6
    """Temperature of sampling and of the trainer's log-probs; vLLM has none beyond these bounds."""
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.95
    """Sample among the likeliest tokens whose probabilities sum to this; 1: off."""
    top_k: TopK = 20
    """Sample among this many likeliest tokens; 0 or -1: off."""
    min_p: Fraction = 0.0
    """Sample among tokens with at least this share of the likeliest token's probability; 0: off."""
    max_response_length: PositiveInt = 32768
    """Maximum number of tokens after the prompt, on any path."""
    keep_sampling_mask: bool = False
    """Record the tokens that top-k, top-p and min-p kept, and normalise over the same tokens in training: the
    trained distribution is then the sampled distribution (DeepSeek-V3.2, section 3.1)."""
    center_scores: Annotated[bool, When(".keep_sampling_mask")] = False
    """Score centering (arXiv 2609.20807): record the log-probs of the kept tokens, and subtract their mean
    score from each token's. Tokens of older or rounded weights then push nowhere if all rewards are equal."""
    keep_routes: bool = False
    """Record the experts that each MoE layer chose for every token but an environment's, and train with them
    (router replay, R3, arXiv:2510.11370); gates are the trainer's. Servers must be started with it, too."""
    record_routes: Annotated[bool, When(".keep_routes")] = True
    """Record routes on disk as well, hundreds of bytes per token. If false, ``--replay`` needs ``keep_routes:
    false``, and a step killed between its harvest and its update is generated again."""
    tokens_per_step: PositiveInt | None = None
    """Generated tokens that end a harvest early: a step's, or with ``loss.dynamic_sampling`` a batch's."""
    carry_over: Annotated[bool, When(".tokens_per_step")] = False
    """Resume unfinished rollouts of a harvest that ended early in the next step; otherwise they are cut."""
    max_staleness: Annotated[PositiveInt, When(".carry_over")] = 8
    """Number of steps for which a rollout resumes after the step that drew its prompt;
    then it is cut. No token is trained more steps after it was sampled; with ``staleness`` the two add up."""
    batch_invariant: Annotated[bool, When("cluster.device", "gpu")] = False
    """Use kernels whose results do not depend on the batch: vLLM's batch-invariant ones in the engine
    (``VLLM_BATCH_INVARIANT``; GPUs, no Gated DeltaNet), deterministic ones in training. Slower;
    ``mismatch/equal_tokens`` says how many log-probs are then equal. Servers must be started with it, too."""
    quantization: Annotated[Literal["fp8"] | None, When("model.dtype", "bfloat16")] = None
    """``fp8``: at every weight sync the engine quantizes its matrices in blocks of 128 x 128, and activations
    as it computes (vLLM's online quantization); training stays in bfloat16. Needs a correction of the
    mismatch, as ``loss.rollout_is`` (docs/recipes.md). Servers must be started with it, too."""
    vllm: Options = {}
    """Further fields of vLLM's ``EngineArgs``, as ``{async_scheduling: false}``, on GPUs
    ``{speculative_config: {method: mtp, num_speculative_tokens: 2}}``; some are refused. Servers need it."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine or server replica."""
    max_num_seqs: PositiveInt = 512
    """Maximum number of requests that an engine decodes at once."""
    block_size: PositiveInt = 32
    """Tokens per block of the KV cache."""
    gpu_memory_utilization: Quantile = 0.85
    """Share of a GPU's memory that the engine may use while it is awake."""
    kv_cache_gib: PositiveFloat | None = None
    """Fixed size of the KV cache (the CPU engine needs one; default there: 1)."""
    park_trainer: Annotated[Literal["none", "state", "all"] | None, When(".engine", "colocated")] = None
    """Trainer memory that leaves the GPU while the engine is awake. ``state``: gradients and optimizer state;
    ``all``: weights as well, except during syncs. Default: ``state`` if colocated, ``none`` with servers."""
    servers: Annotated[list[str], When(".engine", "server")] = []
    """Base URLs of the replicas."""
    staleness: Annotated[NonNegativeInt, When(".engine", "server")] = 0
    """Number of steps that are harvested while an earlier step trains. A token is trained at most this
    many weight syncs after it was sampled. 0: each step is harvested with the weights that it trains."""
    on_sync: Annotated[Literal["continue", "recompute"], When(".staleness")] = "continue"
    """KV cache with which a request in flight resumes after a weight sync: its own,
    computed with older weights, or one that the new weights recompute for all its tokens."""
    sync: Annotated[Literal["folder", "nccl"], When(".engine", "server")] = "folder"
    """Transport of weights to servers: files in ``RUN/weights``, which servers must see under the same path;
    or NCCL, if trainer and servers share a fabric (servers must be started with the same value)."""
    request_timeout: PositiveFloat = 600.0
    """Seconds without progress after which an engine counts as hung."""
    mismatch: MismatchRecipe = MismatchRecipe()

    @property
    def comparable(self) -> bool:
        """True if the engine's log-probs belong to the distribution that the trainer computes."""
        return self.keep_sampling_mask or (self.top_k < 1 and self.top_p == 1 and self.min_p == 0)

    @property
    def tolerance(self) -> float:
        """Value of ``mismatch.tolerance``, or its default."""
        return self.mismatch.tolerance or (0.5 if self.quantization else 0.1)

    @property
    def mask_width(self) -> int:
        """Maximum number of tokens in the sampling mask of a token; 0: no mask is recorded."""
        return self.top_k if self.keep_sampling_mask else 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of tokens that the engine delivers (``tokens.COLUMNS``), besides those of every track."""
        return (LOGPROBS.name, *(name for name, key in _keys("keep_key") if getattr(self, key)))

    @property
    def unrecorded_columns(self) -> tuple[str, ...]:
        """Columns that the record of rollouts leaves out."""
        return tuple(name for name, key in _keys("record_key") if not getattr(self, key))

    @property
    def untrained_columns(self) -> tuple[str, ...]:
        """Columns that no loss of this recipe reads."""
        return tuple(name for name, key in _keys("train_key") if not getattr(self, key))

    @property
    def trains_older(self) -> bool:
        """True if steps train tokens that older weights sampled."""
        return self.carry_over or self.staleness > 0


class RewardRecipe(Section):
    """Grading of responses."""

    workers: PositiveInt | None = None
    """Processes per rank for each grader. None: as many as cores (affinity, cgroup, SLURM's share)."""
    step_timeout: PositiveFloat = 1800.0
    """Seconds that a step waits for graders after its harvest; then responses without a verdict are unscored
    (``on_error``). An evaluation waits for all."""
    on_error: Literal["end", "drop", "zero"] = "drop"
    """Consequence of a failed or late grader or environment: ``end`` the run; ``drop`` the response (or its
    whole stream or tree), which selects; reward ``zero``, which teaches to avoid what fails."""
    max_unscored: Annotated[float, Field(ge=0, le=1), NUMBER, When(".on_error", "drop", "zero")] = 0.1
    """Largest share of a step's responses that may have no reward; more end the run. One always may."""
    timeout: PositiveFloat = 5.0
    """Seconds a math answer may take."""
    code_timeout: PositiveFloat = 6.0
    """Seconds a code test may take."""
    code_memory_mb: PositiveInt = 1024
    """Memory that a code test may use; a problem may set a higher limit."""
    code_python: Annotated[str, Field(pattern=r"^(3\.(1[1-9]|[2-9]\d)(\.\d+)?|/.+)$")] = "3.11"
    """Python that programs run in, a version or a path. Contest solutions are written for 3.11 and earlier:
    from 3.12 on, recursion through C functions (``lru_cache``) ends at a depth of about 500."""
    code_sandbox: Literal["strict", "best_effort"] = "strict"
    """``strict``: refuse programs where they cannot be isolated; ``best_effort``: warn, isolate less."""
    weights: dict[str, Real] = {}
    """Weights of the named rewards that graders of your own return, ``{correct: 1, format: 0.2}``: the reward
    is their weighted sum. A weight of 0 only logs."""


class LossRecipe(Section):
    """Loss. Missing keys take the objective's own defaults, which ``eqlen plan --all`` prints."""

    advantage: AdvantageName | None = None
    """Estimator of advantages by name (``objectives/advantages.py``), or the import path of your own.
    ``none``: rewards give none, only the teacher does."""
    baseline: BaselineName | None = None
    """Reward that a token is compared with, by name (``objectives/token_baseline.py``) or import path.
    ``unit``, the default: the other members of its comparison unit, as in ``advantage``. ``alive``: the
    prompt's lines alive at the token, and its mean. ``fitted``: that, corrected by a fit to other prompts."""
    surrogate: SurrogateName | None = None
    """Loss of a token before its weight, by name (``objectives/surrogates.py``), or the import path of your
    own. Its options replace those of the objective."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Clip ratios below 1 - this."""
    clip_ratio_high: NonNegativeFloat | None = None
    """Clip ratios above 1 + this."""
    clip_ratio_c: PositiveFloat | None = None
    """Dual clip: lower bound at negative advantages; above 1 except for ctpo. In dppo the largest ratio."""
    kl_coef: NonNegativeFloat = 0.002
    """The paper's beta_kl, on supervised tokens against the reference model; 0 keeps no reference."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], When(".kl_coef")] = "k3"
    """Estimator of a token's KL divergence (docs/objectives.md). Our choice; the paper names none."""
    teacher_coef: PositiveFloat = 1.0
    """c: advantages of rewards, less c (log pi - log pi_teacher), the reverse KL; acts with a teacher."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of ratios: the trainer's log-probs before the first update, or those of the engine."""
    router_replay: Annotated[bool, When("rollout.keep_routes")] = True
    """Use the experts that the engine chose (R3, arXiv 2510.11370). False: the
    trainer's routers choose, and ``mismatch/expert_agreement`` reports how often they agree."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Importance weights for the train-inference mismatch, per token or per segment."""
    rollout_is_threshold: Annotated[PositiveFloat | Band, When(".rollout_is", "token", "sequence")] = 2.0
    """A number truncates weights; with ``[low, high]``, weights outside give no gradient (IcePop)."""
    rollout_rs: dict[RejectionName, PositiveFloat | Band] | None = None
    """Bounds beyond which tokens or segments give no gradient. ``k1`` bounds the ratio engine / trainer:
    ``[low, high]``, or one number for ``[1 / number, number]``; the others are bounded in nats (KPop:
    ``binary_kl: 0.1``; a veto of segments with a ratio below 1e-4 or above 1e4: ``seq_max_k2: 42.4``)."""
    minibatches: PositiveInt = 1
    """Parts of a harvest, each an optimizer step (our choice: 1, on-policy)."""
    epochs: PositiveInt = 1
    """Number of times that a harvest is trained."""
    loss_agg_mode: AggregationName | None = None
    """Average over tokens, by verl's names (``objectives/aggregation.py``) or the import path of your own."""
    rewards: Annotated[Literal["together", "apart"] | None, When("reward.weights")] = None
    """Named rewards become advantages ``together``, as a weighted sum, or ``apart``, each by itself."""
    overlong_buffer: NonNegativeInt | None = None
    """DAPO: number of tokens before ``max_response_length`` in which a growing penalty applies."""
    overlong_factor: Annotated[NonNegativeFloat | None, When(".overlong_buffer")] = None
    """DAPO: penalty of a response that reached the limit."""
    dynamic_sampling: bool | None = None
    """DAPO: replace prompts whose rewards are all equal with new prompts."""
    length_quantiles: tuple[Quantile, Quantile, Quantile] | None = None
    """LSPO: ``[low, high, max]``. With ``dynamic_sampling``, replace also prompts whose mean response length
    is neither up to the quantile low nor from high to max, of the prompts drawn together."""
    max_num_gen_batches: Annotated[
        PositiveInt, When(".dynamic_sampling"), When("rollout.carry_over", False)
    ] = 10
    """Maximum number of batches of prompts that a step draws."""


class OptimizerRecipe(Section):
    """AdamW, and the placement of its state."""

    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 20
    """Updates in which the learning rate rises: the k-th has k / ``warmup_steps`` of it; 1 is as 0."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], When("steps")] = "constant"
    """Learning rate after the warm-up, until ``steps``."""
    min_lr: Annotated[NonNegativeFloat, When(".lr_schedule", "linear", "cosine")] = 0.0
    """Final value of ``linear`` and ``cosine``."""
    offload: Annotated[bool, When("model.dtype", "bfloat16"), When("lora.rank", 0)] = False
    """Keep main weights and Adam's moments in host memory and update them there: 16 bytes per parameter."""
    precision: Annotated[
        Literal["float32", "bfloat16"], When("model.dtype", "bfloat16"), When(".offload", False)
    ] = "float32"
    """Precision of the optimizer state on the GPU. ``bfloat16``: moments in bfloat16, and of float32 main
    weights the 16 bits that the model's lack: 6 bytes per parameter, not 12. Needs Transformer Engine."""
    grad_dtype: Annotated[Literal["float32", "bfloat16"], When("model.dtype", "bfloat16")] = "float32"
    """Dtype in which gradients are summed, over rows and ranks; ``bfloat16`` rounds each sum."""
    max_skipped_updates: NonNegativeInt = 3
    """An update with a loss or gradient that is not finite is skipped; more than this many in a row end the
    run, and no checkpoint is written meanwhile."""


class ParallelRecipe(Section):
    """Distribution of the trained model over GPUs; sets of GPUs that hold the same are data-parallel."""

    tensor: PositiveInt = 1
    """GPUs that share each matrix (TP)."""
    pipeline: PositiveInt = 1
    """Pipeline stages, each with some of the layers (PP)."""
    virtual_pipeline: Annotated[int, Field(ge=2), NUMBER] | None = None
    """Interleaved stages per rank; needs ``pipeline`` > 1."""
    layers_per_stage: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """Layers of each pipeline stage; with ``virtual_pipeline`` of stage 0, 1, ..., and again from 0. Default:
    an even split; a remainder leaves one less on the last stage (it has the head) and on the first stages."""
    expert: PositiveInt = 1
    """GPUs that share a layer's experts (EP)."""
    expert_tensor: PositiveInt = 1
    """GPUs that share each matrix of an expert (ETP)."""
    sequence: bool | None = None
    """Sequence parallel, which needs ``tensor`` > 1; default: on in MoE models and on GPUs."""
    recompute: Literal["none", "mlp", "full"] = "none"
    """Part that the backward pass recomputes: nothing, each layer's MLP or experts, or whole layers."""
    fusions: bool | None = None
    """Fused SwiGLU and, on GPUs with Transformer Engine, fused rotary angles and permutation of routed
    tokens; default: on GPUs."""


class PackingRecipe(Section):
    """Packing of token trees into rows."""

    max_tokens_per_row: PositiveInt = 36864
    """Token budget of a row (micro-batch), at least max_prompt_length + max_response_length."""
    layout: Literal["tree", "expanded"] = "tree"
    """``tree``: each token once. ``expanded``: each trained segment with a copy of its prefix, which
    ``equal_length.prefix_in_gradient`` needs."""
    logits_chunk: Annotated[int, Field(ge=64, multiple_of=8), NUMBER] = 8192
    """Supervised tokens whose logits exist at once; longer rows make them in chunks, twice (backward)."""


class CheckpointRecipe(Section):
    """Checkpoints, from which a run resumes; they are written while the next step generates."""

    every: PositiveInt = 10
    """Steps from one checkpoint to the next."""
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept."""


def _greedy_or_sampled(value: float) -> float:
    """Refuse a temperature that vLLM would silently raise to 0.01, or refuse."""
    if value and not 0.01 <= value <= 2:
        raise ValueError("expected 0 (greedy), or 0.01 to 2")
    return value


class AnswerSampling(Section):
    """Sampling of a benchmark's responses, where it is not the rollout's."""

    temperature: Annotated[float, AfterValidator(_greedy_or_sampled), NUMBER] | None = None
    """Temperature of a benchmark; 0: greedy, one sample. Default: ``evaluation``'s or ``rollout``'s."""
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    """Sample among the likeliest tokens with this total probability; 1: off. Default as ``temperature``'s."""
    top_k: TopK | None = None
    """Sample among this many likeliest tokens; 0 or -1: off. Default: as for ``temperature``."""
    max_response_length: PositiveInt | None = None
    """Maximum number of tokens after the prompt. Default: as for ``temperature``."""


class BenchmarkRecipe(DataSection, AnswerSampling):
    """One benchmark."""

    reader: BenchmarkReader = "deepmath"
    """A reader's name (docs/models_and_data.md lists them), or the import path of your own."""
    limit: PositiveInt | None = None
    """Use only the first this many problems."""
    since: Annotated[str | None, When(".reader", "livecodebench")] = None
    """First contest date (YYYY-MM-DD). LiveCodeBench needs both dates: "v6" names several problem sets."""
    until: Annotated[str | None, When(".reader", "livecodebench")] = None
    """Last contest date, inclusive."""


class EvaluationRecipe(AnswerSampling):
    """Accuracies on benchmarks, before, during and after training."""

    benchmarks: list[BenchmarkRecipe] = []
    samples: PositiveInt = 32
    """Completions of each problem: the k of avg@k."""
    every: Annotated[NonNegativeInt, When(".benchmarks")] = 0
    """Steps between evaluations; 0: only before and after training."""


class ReportRecipe(Section):
    """Records and reports of a run."""

    wandb_project: str | None = None
    """Project of Weights & Biases to which numbers and recipe are logged; needs the package wandb."""
    keep_streams: Literal["all", "evaluations"] | PositiveInt = "all"
    """Recorded rollouts to keep: all, evaluated steps', or the newest N; later checkpoints remove others."""


class ProfileRecipe(Section):
    """Output of PyTorch's profilers, in the run's folder ``profile/``."""

    steps: list[PositiveInt] = []
    """Steps, counted from 1, that every rank traces for Chrome's and Perfetto's viewers; they are slower."""


class ClusterRecipe(Section):
    """Machines of a run."""

    nodes: PositiveInt = 1
    """Machines that train; servers need further machines."""
    processes_per_node: PositiveInt = 1
    """Processes per node: one per GPU; on CPUs one per core used."""
    watchdog_seconds: Annotated[float, Field(gt=0, le=1e9), NUMBER] | None = 1800.0
    """Seconds without progress on any rank after which the run counts as hung. Each rank's stacks go to
    ``RUN/hang/``, and the run ends with status 75. null: wait for ever (for a debugger, say)."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Resource that a SLURM job requests. ``gpu``: needs a GPU. ``cpu``: still uses a GPU if there is one."""
    cpus_per_process: PositiveInt = 8
    """Cores that a SLURM job requests per process: graders, the optimizer on the host, the engine."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of a GPU, for `eqlen plan`."""
    time: str = "24:00:00"
    """Time limit of a SLURM job. A run need not finish in it: it resumes in the next job."""


SFT = "sft"
"""Value of ``objective`` for supervised training."""


class Recipe(Section):
    name: str
    """Name of the experiment; its runs are under ``runs/NAME``."""
    inputs_from: str | None = None
    """Command that makes the model and the data; shown in the message about a missing input."""
    run_dir: UserPath | None = None
    """Run folder; default ``runs/NAME/METHOD-VARIANT-seedN``, where METHOD is ``grpo`` for example."""
    variant: dict[str, str] = {}
    """Keys and values that the command line changed in the recipe file; filled in by loading."""
    seed: Annotated[int, Field(ge=0, lt=2**32), NUMBER] = 0
    """Seed of prompts and sampling. Part of the run folder's name."""
    steps: PositiveInt | None = None
    """End the run after this many steps. One of this and the next three must be set; the first ends it."""
    gpu_hours: PositiveFloat | None = None
    """End the run after this many GPU hours, without evaluations; on CPUs, hours of its processes."""
    generated_tokens: PositiveFloat | None = None
    """End the run after the step in which the engine has generated this many tokens for training."""
    flops: PositiveFloat | None = None
    """End the run after this many floating-point operations of the model, estimated from tokens generated,
    prefilled and trained (``plan/flops.py``): the same on any machine and under any load."""
    sampling: Annotated[str, one_of("equal_length", "independent", "tree")] = "equal_length"
    """How lines are sampled and compared: ``equal_length``, ``independent``, ``tree``, or an import path."""
    objective: str = "grpo"
    """Name of the method (docs/objectives.md lists them), or the import path of your own. ``sft``: supervised
    training on the assistant's turns in the data; no engine generates."""
    group_size: Annotated[int, Field(ge=2), NUMBER] = 16
    """G: lines that start at a prompt: completions, roots of a tree, or 2 x dual-track subgroups."""
    model: ModelRecipe
    lora: LoraRecipe = LoraRecipe()
    teacher: TeacherRecipe = TeacherRecipe()
    data: DataRecipe
    equal_length: Annotated[EqualLengthRecipe, When("sampling", "equal_length")] = EqualLengthRecipe()
    tree_sampling: Annotated[TreeSamplingRecipe, When("sampling", "tree")] = TreeSamplingRecipe()
    environment: EnvironmentRecipe = EnvironmentRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    reward: RewardRecipe = RewardRecipe()
    loss: LossRecipe = LossRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    parallel: ParallelRecipe = ParallelRecipe()
    packing: PackingRecipe = PackingRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    report: ReportRecipe = ReportRecipe()
    profile: ProfileRecipe = ProfileRecipe()
    cluster: ClusterRecipe = ClusterRecipe()

    @model_validator(mode="before")
    @classmethod
    def _supervised_defaults(cls, raw: Any) -> Any:
        """Give keys that ``objective: sft`` leaves out its own defaults."""
        if not isinstance(raw, dict) or raw.get("objective") != SFT:
            return raw
        # A recipe's own values come last, so that they win.
        given = {"sampling": "independent", "loss": {}} | raw
        return given | ({"loss": {"kl_coef": 0.0} | given["loss"]} if isinstance(given["loss"], dict) else {})

    @property
    def supervised(self) -> bool:
        """True if the data's own responses are trained, not sampled ones."""
        return self.objective == SFT

    @property
    def data_sets(self) -> dict[str, SourceRecipe | BenchmarkRecipe]:
        """Sources and benchmarks by key, ``data.sources.0`` for example."""
        sections = {"data.sources": self.data.sources, "evaluation.benchmarks": self.evaluation.benchmarks}
        return {f"{key}.{number}": each for key, of in sections.items() for number, each in enumerate(of)}

    @property
    def generates(self) -> bool:
        """True if an engine is started."""
        return not self.supervised or bool(self.evaluation.benchmarks)

    @property
    def colocated(self) -> bool:
        """True if an engine is started on the trainer's devices."""
        return self.generates and self.rollout.engine == "colocated"

    @property
    def parked(self) -> Literal["none", "state", "all"]:
        """Value of ``rollout.park_trainer``, or its default."""
        return self.rollout.park_trainer or ("state" if self.colocated else "none")

    @property
    def trained_temperature(self) -> float:
        """Temperature of the log-probs that are trained."""
        return 1.0 if self.supervised else self.rollout.temperature

    @property
    def longest_response(self) -> int:
        """Most tokens after a prompt, generated and given."""
        given = self.environment.max_given_tokens if self.environment.name else 0
        return self.rollout.max_response_length + given

    @property
    def longest_path(self) -> int:
        """Most tokens of a path that is trained."""
        return self.data.max_prompt_length + self.longest_response

    @property
    def longest_context(self) -> int:
        """Most tokens of a path that an engine generates, in training or for a benchmark."""
        # Benchmarks may allow longer responses than training does.
        recipes = (self, *map(self.of_benchmark, self.evaluation.benchmarks))
        longest = max(each.rollout.max_response_length for each in recipes)
        return self.longest_path + longest - self.rollout.max_response_length

    @property
    def longest_context_text(self) -> str:
        """The sum behind ``longest_context``, for messages."""
        more = self.longest_context - self.longest_path
        evaluated = f", and {more} more by evaluation's max_response_length: {self.longest_context}"
        return self.longest_path_text + evaluated * (more > 0)

    @property
    def longest_response_text(self) -> str:
        """The sum behind ``longest_response``, for messages."""
        given = f" + environment.max_given_tokens {self.environment.max_given_tokens}"
        text = f"rollout.max_response_length {self.rollout.max_response_length}"
        return text + given * (self.environment.name is not None)

    @property
    def longest_path_text(self) -> str:
        """The sum behind ``longest_path``, for messages."""
        prompt = f"data.max_prompt_length {self.data.max_prompt_length}"
        return f"{prompt} + {self.longest_response_text} = {self.longest_path}"

    def of_benchmark(self, benchmark: BenchmarkRecipe) -> Recipe:
        """Return the recipe of a benchmark's harvest: independent responses, sampled as it says."""
        # The benchmark's own keys come after those of all benchmarks.
        said = {
            key: value
            for section in (self.evaluation, benchmark)
            for key in AnswerSampling.model_fields
            if (value := getattr(section, key)) is not None
        }
        samples = 1 if said.get("temperature") == 0 else self.evaluation.samples
        unlimited = {"tokens_per_step": None, "carry_over": False, "keep_routes": False}
        rollout = self.rollout.model_copy(update=unlimited | said)
        return self.model_copy(update={"sampling": "independent", "group_size": samples, "rollout": rollout})

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.gpu_hours, self.generated_tokens, self.flops)

    @property
    def run_folder(self) -> Path:
        return Path(self.run_dir) if self.run_dir else Path("runs") / self.name / self.run_name

    @property
    def run_name(self) -> str:
        """Folder name like ``eqlen-grpo-seed0``, or ``eqlen-grpo-group_size=8-seed0`` with that override."""
        variant = [variant_name(self.variant)] if self.variant else []
        return "-".join([self.method, *variant, f"seed{self.seed}"])

    @property
    def method(self) -> str:
        """Name of the method: ``eqlen-grpo`` (equal-length), ``grpo`` (independent), or an ablation's."""
        objective = self.objective.rpartition(":")[2]  # the name in an import path
        if self.sampling != "equal_length":
            own = [self.sampling.rpartition(":")[2]] if is_import_path(self.sampling) else []
            return "-".join([*own, objective])
        # Keys that make another method get a part of the name; the rest is the variant's.
        ablations = {
            "single-pair": self.equal_length.max_pairs == 1,
            "prefix-in-gradient": self.equal_length.prefix_in_gradient,
            "mean-reward": self.equal_length.suffix_reward == "mean",
            "on-policy": self.equal_length.pair_weight == "on_policy",
        }
        return "-".join(["eqlen", objective, *(name for name, on in ablations.items() if on)])

    @property
    def graders_on_node(self) -> int:
        """Number of ranks on a node that grade: with servers only rank 0, which receives their responses."""
        return 1 if self.rollout.engine == "server" else self.cluster.processes_per_node

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.processes_per_node

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run, servers included."""
        servers = self.rollout.servers if self.rollout.engine == "server" else []
        return self.world_size + len(servers) * self.rollout.tensor_parallel

    @property
    def streams_per_prompt(self) -> int:
        return self.group_size // 2

    @property
    def rollouts_per_prompt(self) -> int:
        """Number of rollouts per prompt: streams, or one group or tree."""
        return self.streams_per_prompt if self.sampling == "equal_length" else 1
