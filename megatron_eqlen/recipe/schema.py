"""The schema of a recipe: what a YAML file may say, and what each key means.

Relative paths in a recipe are relative to the working directory, as on the command line.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from megatron_eqlen.recipe.budget import Budget
from megatron_eqlen.recipe.naming import variant_name
from megatron_eqlen.recipe.plugins import is_import_path


def _number(value: Any) -> Any:
    """Refuse a boolean, which Python and pydantic take for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


NUMBER = BeforeValidator(_number)
"""Last in a number's annotation: the documentation's schema lacks bounds that come after it."""
Integer = Annotated[int, NUMBER]
Real = Annotated[float, NUMBER]
PositiveInt = Annotated[int, Field(gt=0), NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), NUMBER]
BelowOne = Annotated[float, Field(ge=0, lt=1), NUMBER]


def _ascending(band: tuple[float, float]) -> tuple[float, float]:
    if band[0] > band[1]:
        raise ValueError(f"expected [low, high], found {list(band)}")
    return band


Band = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_ascending)]
"""``[low, high]``, both above 0."""

AggregationName = Literal[
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "prompt-mean-token-mean",
    "balanced-token-mean",
]
"""verl's ``loss_agg_mode``, and two more; ``objectives.aggregation`` says what each does."""

RejectionName = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""verl's ``rollout_rs`` options; ``training.mismatch`` says what each does."""


class RecipeError(ValueError):
    """A recipe that cannot run; the message names the key, what was expected and what was found."""


def one_of(*names: str) -> AfterValidator:
    """Type of a key whose value is one of ``names``, or the import path of a user's own object."""

    def check(value: str) -> str:
        if value not in names and not is_import_path(value):
            near = difflib.get_close_matches(value, names, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"expected one of {', '.join(names)}, or package.module:name, found {value!r} "
                f"(nearest: {near!r})"
            )
        return value

    return AfterValidator(check)


SourceReader = Annotated[str, one_of("deepmath", "opencodereasoning", "jsonl", "prepared")]
BenchmarkReader = Annotated[str, one_of("deepmath", "aime25", "hmmt25", "livecodebench", "jsonl", "prepared")]
GraderName = Annotated[str, one_of("math", "code", "rubric")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelRecipe(Section):
    """Which model is trained."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer) that training starts from."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations in training; the optimizer's main weights are float32."""


class SourceRecipe(Section):
    """One data set of the training prompts."""

    name: str
    """Rewards of its prompts are logged under this name."""
    reader: SourceReader = "deepmath"
    """A reader's name (data/README.md lists them), or your own's import path, ``package.module:read``."""
    grader: GraderName | None = None
    """What grades all its answers: ``math``, ``code``, ``rubric``, or the import path of your own,
    ``package.module:factory`` (rewards/README.md). Default: what the reader says of each row."""
    path: str
    """A file, or a folder with the data set's files."""
    weight: PositiveFloat = 1.0
    """Its share of the prompts, relative to the other sources' weights."""
    split: Literal["split_0", "split_1"] | None = None
    """Which half of OpenCodeReasoning; default: both."""
    tests: str | None = None
    """Folder of the source sets (TACO, APPS, CodeContests, Codeforces) that hold the code problems' tests."""
    min_difficulty: Real | None = None
    """Rows below this difficulty are left out, and rows without one."""
    max_difficulty: Real | None = None
    """Rows above this difficulty are left out, and rows without one."""
    exclude: str | None = None
    """A file of questions, one JSON string or line each, to leave out (decontamination)."""


class DataRecipe(Section):
    """The training prompts."""

    sources: list[SourceRecipe] = Field(min_length=1)
    prompts_per_step: PositiveInt = 64
    """Questions of a step; each gets ``group_size`` responses or tracks. The paper's number."""
    max_prompt_length: PositiveInt = 2048
    """Tokens; longer prompts are left out and counted."""
    instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """Told to the model with every question, unless its row has an instruction of its own."""
    instruction_role: Literal["user", "system", "none"] = "user"
    """Whose turn of the chat holds it; ``none`` leaves it out."""
    enable_thinking: bool | None = None
    """Handed to the chat template: whether the model may think first. Not set: the template's own default."""
    shuffle: bool = True
    """Rows in a new random order in each epoch, by the run's seed; false: in the order of the files."""


class EqualLengthRecipe(Section):
    """With ``sampling: equal_length``: how pairs are made and rewarded."""

    suffix_reward: Literal["max", "mean"] = "max"
    """Reward of B_i over the ended responses that extend it (ablation: mean)."""
    unfinished: Literal["zero", "drop"] = "zero"
    """A B_i that no ended response extends: reward 0, or its pair is left out."""
    pair_count: Literal["all", "effective"] = "all"
    """N_k of Eq. 6: all pairs, as written, or only those with unequal rewards."""
    max_pairs: PositiveInt | None = None
    """End a stream after this many pairs; the track that is left runs on alone to its end, for its reward."""
    single_pair: bool = False
    """Ablation: one pair a stream, no prefix inheritance."""
    prefix_in_gradient: bool = False
    """Ablation: the inherited prefix is trained with its side's advantage (expanded layout)."""


class TreeSamplingRecipe(Section):
    """With ``sampling: tree``: the shape of the sampled trees."""

    branching: Annotated[int, Field(ge=2), NUMBER] = 8
    """Continuations of every step; a prompt has up to branching ** depth responses."""
    depth: PositiveInt = 3
    """Steps of a response; the last one runs to max_response_length."""
    step_tokens: PositiveInt | None = None
    """Length of a step, default max_response_length // depth (our choice)."""


class MismatchRecipe(Section):
    """The mismatch is the mean |log-prob difference| of trainer and engine over those of an update's tokens
    that the weights sampled which it trains."""

    tolerance: PositiveFloat = 0.1
    """Nats. Float32 on CPUs stays below 1e-4, dense models in bfloat16 at 0.01 to 0.04; an engine with wrong
    weights reaches 0.7 and more."""
    window: PositiveInt = 5
    """Steps whose mean is compared with ``tolerance`` by ``warn`` and ``stop``."""
    then: Literal["warn", "skip", "stop"] = "warn"
    """``warn``: say so, once until the mean is below again. ``skip``: do not take an update whose own
    mismatch is above, as one that is not finite (``optimizer.max_skipped_updates``). ``stop``: end the run
    after the step, with a checkpoint."""


class RolloutRecipe(Section):
    """How responses are generated: sampling, the engine, and what a step's harvest may take."""

    engine: Literal["colocated", "server"] = "colocated"
    """``colocated``: vLLM in the training processes. ``server``: vLLM servers, see ``servers``."""
    temperature: Annotated[float, Field(ge=0.01), NUMBER] = 0.6
    """Of sampling and of the trainer's log-probs. vLLM would raise lower ones to 0.01 without a word."""
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.95
    """Sample among the likeliest tokens that together have this probability; 1: off."""
    top_k: Integer = 20
    """Sample among this many likeliest tokens; 0 or -1: off."""
    min_p: Fraction = 0.0
    """Sample among tokens with at least this share of the likeliest one's probability; 0: off."""
    max_response_length: PositiveInt = 32768
    """Tokens after the prompt on any path."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """``raw``: log-softmax of the logits divided by the temperature alone, what the trainer computes.
    ``processed``: after top-k, top-p and min-p too."""
    keep_sampling_mask: bool = False
    """Record which tokens top-k, top-p and min-p kept, and normalise over the same ones in training: the
    trained distribution is then the sampled one (DeepSeek-V3.2, section 3.1)."""
    keep_routes: bool = False
    """Record which experts each MoE layer chose for every token, and train with the same ones (router replay,
    R3, arXiv:2510.11370); the gates are the trainer's own. Servers must be started with it, too."""
    record_routes: bool = True
    """With ``keep_routes``: routes are in the record of a step as well, hundreds of bytes a token. Without, a
    step can be replayed with the trainer's own routing only, and one that is killed between its harvest and
    its update is generated again."""
    tokens_per_step: PositiveInt | None = None
    """Generated tokens after which a step's harvest ends early; with ``loss.dynamic_sampling``, after which
    the harvest of each batch of prompts ends that the step draws."""
    seconds_per_step: PositiveFloat | None = None
    """Seconds after which a step's harvest ends early (those of a killed attempt do not count)."""
    carry_over: bool = False
    """What a harvest that ends early has not finished goes on in the next step; otherwise it is cut."""
    max_staleness: PositiveInt = 8
    """``carry_over``: a rollout goes on for so many steps after the one that drew its prompt. It is cut then,
    so no token is trained more steps after it was sampled; with ``staleness`` the two add up."""
    tensor_parallel: PositiveInt = 1
    """GPUs of an engine or of a server's replica."""
    max_num_seqs: PositiveInt = 512
    """Most requests that an engine decodes at once."""
    max_num_batched_tokens: PositiveInt = 8192
    """Most tokens of one engine step, prefills included."""
    block_size: PositiveInt = 32
    """Tokens in a block of the KV cache."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of a GPU's memory that the engine may use while it is awake."""
    kv_cache_gib: PositiveFloat | None = None
    """Fixed size of the KV cache (the CPU engine needs one; default there: 1)."""
    park_trainer: Literal["none", "state", "all"] | None = None
    """What the trainer gives up on the GPU while the engine is awake. ``state``: gradients, and the
    optimizer's state, which goes to host memory; ``all``: the weights too, except for weight syncs.
    Default: ``state`` with a colocated engine, ``none`` with servers."""
    servers: list[str] = []
    """``engine: server``: base URLs of the replicas."""
    staleness: NonNegativeInt = 0
    """With servers: how many steps are harvested while an earlier one trains. A token is trained at most so
    many weight syncs after it was sampled. 0: each step is harvested with the weights that it trains."""
    on_sync: Literal["continue", "recompute"] = "continue"
    """With ``staleness``, what a request in flight goes on from after a weight sync: from its KV cache, which
    older weights computed, or from one that the new weights compute of all its tokens."""
    sync: Literal["tcp", "nccl"] = "tcp"
    """How weights reach servers: over TCP, once for each node; or by NCCL, where trainer and servers share a
    fabric (servers must be started with the same value)."""
    request_timeout: PositiveFloat = 600.0
    """Seconds without progress after which an engine counts as hung."""
    mismatch: MismatchRecipe = MismatchRecipe()

    @property
    def comparable(self) -> bool:
        """Whether the engine's log-probs are of the distribution that the trainer computes."""
        return self.logprobs_mode == "raw" or self.keep_sampling_mask

    @property
    def mask_width(self) -> int:
        """Most tokens that the sampling mask of a token can hold; 0: none is recorded."""
        return self.top_k if self.keep_sampling_mask else 0

    @property
    def trains_older(self) -> bool:
        """Whether steps train tokens that older weights sampled."""
        return self.carry_over or self.staleness > 0

    @property
    def parked(self) -> Literal["none", "state", "all"]:
        """``park_trainer``, or its default."""
        return self.park_trainer or ("state" if self.engine == "colocated" else "none")


class RewardRecipe(Section):
    """How responses are graded."""

    math_rule: Literal["exact", "math_verify", "either"] = "either"
    """When a math answer is right: ``exact``: the same after normalisation; ``math_verify``: equal by that
    library; ``either``: one of the two."""
    workers: PositiveInt | None = None
    """Grader processes of a rank, for each grader that it uses. None: as many as the rank has processor cores
    (affinity, cgroup quota and SLURM's share counted)."""
    step_timeout: PositiveFloat = 1800.0
    """Seconds that a step waits for grader processes after its harvest; responses without a verdict by then
    count as ``timeout``. An evaluation waits for all."""
    timeout: PositiveFloat = 5.0
    """Seconds a math answer may take."""
    code_timeout: PositiveFloat = 6.0
    """Seconds a code test may take."""
    code_memory_mb: PositiveInt = 1024
    """Memory that a code test may take; more where its problem says so."""
    code_sandbox: Literal["strict", "best_effort"] = "strict"
    """``strict``: refuse to run programs where the machine cannot isolate them; ``best_effort``: isolate them
    as far as it can, and warn."""
    lcb_strict: bool = False
    """Run programs for LiveCodeBench's problems as its own checker does, its faults included (see
    rewards/README.md)."""
    sandbox_url: str | None = None
    """A SandboxFusion-compatible server to send programs to."""
    rubric: str | None = None
    """``module:function`` called for prompts whose grader is ``rubric``."""


class LossRecipe(Section):
    """Keys left out take the objective's own default; ``eqlen train --dry-run`` prints what they are."""

    clip_ratio_low: NonNegativeFloat | None = None
    """A ratio below 1 - this is clipped."""
    clip_ratio_high: NonNegativeFloat | None = None
    """A ratio above 1 + this is clipped."""
    clip_ratio_c: Annotated[float, Field(gt=1), NUMBER] | None = None
    """Dual clip: lower bound of the objective for negative advantages."""
    kl_coef: NonNegativeFloat = 0.002
    """The paper's beta_kl, on supervised tokens against the reference model; 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How a token's KL divergence is estimated (objectives/README.md). Our choice; the paper names none."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """What ratios are relative to: the trainer's log-probs before the step's first update, or those that
    the engine recorded."""
    router_replay: bool = True
    """With ``rollout.keep_routes``: experts are those that the engine chose (R3, arXiv 2510.11370). False:
    routers choose, and ``mismatch/expert_agreement`` tells how often they choose the same."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Importance weights for the train-inference mismatch, of each token or of its segment as a whole."""
    rollout_is_threshold: PositiveFloat | Band = 2.0
    """One number truncates weights; with ``[low, high]`` weights outside give no gradient (IcePop)."""
    rollout_rs: dict[RejectionName, PositiveFloat | Band] | None = None
    """Tokens or segments beyond a bound give no gradient. Of ``k1`` it is of the ratio engine / trainer,
    ``[low, high]``, or one number for ``[1 / number, number]``; of ``k2`` and ``k3`` it is in nats."""
    rollout_token_veto_threshold: Annotated[float, Field(gt=0, lt=1), NUMBER] | None = None
    """A segment with a token whose ratio trainer / engine is below this gives no gradient; 1e-4, say."""
    minibatches: PositiveInt = 1
    """Parts of a harvest, each an optimizer step (our choice: 1, on-policy)."""
    epochs: PositiveInt = 1
    """How often a harvest is trained."""
    loss_agg_mode: AggregationName | None = None
    """How tokens are averaged, by verl's names; ``prompt-mean-token-mean`` is DAPO's equation as printed."""
    gr3_alpha: NonNegativeFloat | None = None
    """Strength of GR3's length scaling."""
    overlong_buffer: NonNegativeInt | None = None
    """DAPO: the last so many tokens before ``max_response_length`` are penalised, more and more."""
    overlong_factor: NonNegativeFloat | None = None
    """DAPO: the penalty of a response that reached the limit."""
    dynamic_sampling: bool | None = None
    """DAPO: prompts with equal rewards only are replaced by new ones."""
    max_num_gen_batches: PositiveInt = 10
    """With ``dynamic_sampling``: a step draws prompts at most so often."""


class OptimizerRecipe(Section):
    """AdamW, and where its state lives."""

    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 20
    """Updates in which the learning rate rises from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until ``steps``."""
    min_lr: NonNegativeFloat = 0.0
    """Where ``linear`` and ``cosine`` end."""
    adam_beta1: BelowOne = 0.9
    """Decay of Adam's first moment. Our choice."""
    adam_beta2: BelowOne = 0.999
    """Decay of Adam's second moment. Our choice."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment. Our choice."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's. Our choice."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm; 0 is off."""
    offload: bool = False
    """Main weights and Adam's moments live in host memory, where they are updated: 16 bytes a parameter."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of what the optimizer keeps on the GPU. ``bfloat16``: moments in bfloat16, and of each float32 main
    weight only the 16 bits that the model's weight lacks: 6 bytes a parameter, not 12. Needs a GPU and
    Transformer Engine."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which gradients are summed, over rows and over ranks; ``bfloat16`` rounds each sum."""
    max_skipped_updates: NonNegativeInt = 3
    """An update with a loss, gradient or weight that is not finite is skipped; more than this many in a row
    end the run, and no checkpoint is written meanwhile."""


class ParallelRecipe(Section):
    """How the trained model is spread over GPUs; sets of GPUs that hold the same are data-parallel."""

    tensor: PositiveInt = 1
    """GPUs that share each matrix (TP)."""
    context: PositiveInt = 1
    """GPUs that share the positions of a row (CP)."""
    pipeline: PositiveInt = 1
    """Stages, each with some of the layers (PP)."""
    virtual_pipeline: Annotated[int, Field(ge=2), NUMBER] | None = None
    """Stages of a rank, interleaved; needs ``pipeline`` > 1."""
    layers_per_stage: list[PositiveInt] | None = None
    """Layers of each pipeline stage; with ``virtual_pipeline`` of stage 0, 1, ..., and again from 0. Default:
    equally many; where they do not divide, one less on the last stage (it has the head) and on the first."""
    expert: PositiveInt = 1
    """GPUs that share a layer's experts (EP)."""
    expert_tensor: PositiveInt = 1
    """GPUs that share each matrix of an expert (ETP)."""
    sequence: bool | None = None
    """Sequence parallel; default: on with tensor > 1 in MoE models and on GPUs."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, attention, or whole layers."""
    overlap_grad_reduce: bool = False
    """Sum gradients over ranks while the backward pass goes on."""


class PackingRecipe(Section):
    """How token trees become rows."""

    max_tokens_per_row: PositiveInt = 36864
    """Budget of a row (a micro-batch); at least the longest path, max_prompt_length + max_response_length."""
    layout: Literal["tree", "expanded"] = "tree"
    """``tree``: each token once. ``expanded``: each trained segment with a copy of its prefix, which
    ``equal_length.prefix_in_gradient`` needs."""
    logits_chunk: Annotated[int, Field(ge=64, multiple_of=8), NUMBER] = 8192
    """Supervised tokens whose logits exist at once; a row with more takes them chunk by chunk, and computes
    them once more in the backward pass."""


class CheckpointRecipe(Section):
    """What a run can resume from."""

    every: PositiveInt = 10
    """Steps from one checkpoint to the next."""
    keep: PositiveInt = 2
    """The newest this many stay."""
    resharding: Literal["data_parallel", "any"] = "data_parallel"
    """Layouts that can resume from a checkpoint. ``data_parallel``: the same ``parallel`` section on any
    number of nodes; every rank writes what it holds. ``any``: all, but ranks gather the optimizer's state."""
    background: bool = True
    """Write while the next step generates; its update waits if the disk is slower than that."""


class BenchmarkRecipe(Section):
    """One benchmark."""

    name: str
    """Accuracies are logged under this name."""
    reader: BenchmarkReader = "deepmath"
    """Name of a reader (data/README.md lists them), or the import path of your own."""
    grader: GraderName | None = None
    """A grader's name or import path, as ``data.sources[].grader``; default: what the reader says."""
    path: str
    """A file, or a folder with the benchmark's files."""
    limit: PositiveInt | None = None
    """Take only the first so many problems."""
    since: str | None = None
    """First contest date (YYYY-MM-DD). LiveCodeBench needs both: "v6" alone names several problem sets."""
    until: str | None = None
    """Last contest date, inclusive."""


class EvaluationRecipe(Section):
    """Accuracies on benchmarks, before, during and after training."""

    benchmarks: list[BenchmarkRecipe] = []
    samples: PositiveInt = 32
    """Completions of each problem: the k of avg@k."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after. Samples are drawn as the rollout's are."""


class ReportRecipe(Section):
    """What is kept and shown of a run."""

    metric_names: Literal["eqlen", "verl", "slime"] = "eqlen"
    """What trackers call a metric that verl or slime has, too; ``metrics.jsonl`` always has our names."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases, too, where the package wandb is installed."""
    mlflow_experiment: str | None = None
    """Log to this experiment of MLflow, too, where its package is installed, on the server that
    MLFLOW_TRACKING_URI names."""
    samples_every: NonNegativeInt = 0
    """Steps from one table of a few scored rollouts in the trackers to the next: those that the report shows.
    0: none; what a service gets then are numbers and the recipe alone."""
    keep_streams: Literal["all", "evaluations"] | PositiveInt = "all"
    """Which steps' recorded rollouts stay: of all steps, of those that were evaluated, or of the newest N.
    Others are removed once a checkpoint from after them is saved."""


class ProfileRecipe(Section):
    """What PyTorch's profilers say, in the run's folder ``profile/``."""

    steps: list[PositiveInt] = []
    """Steps that every rank traces, counted from 1, for Chrome's and Perfetto's viewers. They are slower."""
    memory: bool = False
    """Traces have each allocation and release of memory."""
    out_of_memory: bool = False
    """When a GPU's memory runs out, write a snapshot of it, for pytorch.org/memory_viz. Each allocation takes
    longer."""


class ClusterRecipe(Section):
    """The machines."""

    nodes: PositiveInt = 1
    """Machines that train; servers come beside them."""
    processes_per_node: PositiveInt = 1
    """One per GPU; on CPU one per core used."""
    watchdog_seconds: PositiveFloat | None = 600.0
    """A run hangs if no rank makes progress for so long, or up to 3 times as long where its stage is new or
    was silent for long before: each rank's stacks go to ``RUN/hang/``, and the run ends with status 75. null:
    it waits for ever (for a debugger, say)."""
    device: Literal["gpu", "cpu"] = "gpu"
    """What a SLURM job asks for. ``gpu``: a run without a GPU is refused. ``cpu``: a run uses a GPU all the
    same where it finds one."""
    cpus_per_process: PositiveInt = 8
    """Cores that a SLURM job asks for: graders, the optimizer on the host, the engine."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of a GPU, for `eqlen plan`."""
    partition: str | None = None
    """SLURM partition of the job."""
    account: str | None = None
    """SLURM account of the job."""
    time: str = "24:00:00"
    """Time limit of a SLURM job, in which a run need not finish: it resumes in the next."""


class Recipe(Section):
    name: str
    """Names the experiment; its runs are under ``runs/NAME``."""
    inputs_from: str | None = None
    """Command that makes the model and the data; the message about a missing one names it."""
    run_dir: str | None = None
    """Default ``runs/NAME/METHOD-VARIANT-seedN``, METHOD being ``eqlen-grpo`` or ``grpo``, for example."""
    variant: dict[str, Any] = {}
    """What tells this run apart from others of its recipe file: keys and values that were given on the
    command line and that the file has otherwise. Filled in by loading."""
    seed: NonNegativeInt = 0
    """Of prompts, sampling and intervals. Part of the run folder's name."""
    steps: PositiveInt | None = None
    """End the run after this many steps. This or one of the next three must be set; with several, the first
    that is reached ends it."""
    gpu_hours: PositiveFloat | None = None
    """End the run after this much work, evaluations not counted: the paper compares methods at equal GPU
    hours. An hour of a process counts as one on CPUs."""
    generated_tokens: PositiveFloat | None = None
    """End the run after the step in which the engine has generated this many tokens for training."""
    flops: PositiveFloat | None = None
    """End the run after this many floating-point operations of the model, estimated from tokens generated,
    prefilled and trained (``plan/flops.py``): the same on any machine, however loaded."""
    sampling: Literal["equal_length", "independent", "tree"] = "equal_length"
    """How rollouts are made and what is compared: equal-length pairs, groups of whole responses, or trees."""
    objective: str = "grpo"
    """The method by name (objectives/README.md lists them), or the import path of your own."""
    group_size: Annotated[int, Field(ge=2), NUMBER] = 16
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
    profile: ProfileRecipe = ProfileRecipe()
    cluster: ClusterRecipe = ClusterRecipe()

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.gpu_hours, self.generated_tokens, self.flops)

    @property
    def run_folder(self) -> Path:
        return Path(self.run_dir) if self.run_dir else Path("runs") / self.name / self.run_name

    @property
    def run_name(self) -> str:
        """``eqlen-grpo-seed0``, or ``eqlen-grpo-group_size=8-seed0`` where the command line said so."""
        variant = [variant_name(self.variant)] if self.variant else []
        return "-".join([self.method, *variant, f"seed{self.seed}"])

    @property
    def method(self) -> str:
        """``eqlen-grpo``: equal-length sampling; ``grpo``: independent sampling; ``eqlen-grpo-mean-reward``,
        for example: one of the paper's ablations."""
        objective = self.objective.rpartition(":")[2]  # of an import path the name
        if self.sampling != "equal_length":
            return objective
        ablations = {
            "single-pair": self.equal_length.single_pair,
            "prefix-in-gradient": self.equal_length.prefix_in_gradient,
            "mean-reward": self.equal_length.suffix_reward == "mean",
        }
        return "-".join(["eqlen", objective, *(name for name, on in ablations.items() if on)])

    @property
    def graders_on_node(self) -> int:
        """Ranks of a node that grade: servers are driven by rank 0 alone, which has their responses."""
        return 1 if self.rollout.engine == "server" else self.cluster.processes_per_node

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

    @property
    def rollouts_per_prompt(self) -> int:
        """Streams, or a group or tree."""
        return self.streams_per_prompt if self.sampling == "equal_length" else 1
