"""``eqlen recipe --from``: scripts as bash reads them, and the end of every key of another trainer's."""

import json
import math
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_eqlen.cli import launch_scripts
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.cli.translate import translate
from megatron_eqlen.graders.sandbox.client import Sandbox
from megatron_eqlen.graders.sandbox.program import Isolation
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.recipe.keys import all_keys
from megatron_eqlen.recipe.load import load
from megatron_eqlen.recipe.others import HINTS, TRAINERS, defaults, row_of, table

BASE = {
    "verl": ["data.train_files=DATA", "actor_rollout_ref.model.path=M", "algorithm.adv_estimator=grpo",
             "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=9", "trainer.logger=console"],
    "trl": ["--model_name_or_path", "M", "--dataset_name", "DATA", "--reward_funcs", "accuracy_reward",
            "--num_processes", "2", "--max_steps", "9"],
    "slime": ["--hf-checkpoint", "M", "--prompt-data", "DATA", "--rm-type", "math",
              "--rollout-batch-size", "8", "--num-rollout", "9", "--n-samples-per-prompt", "4",
              "--rollout-max-response-len", "64",
              "--global-batch-size", "32", "--colocate"],
}  # fmt: skip
"""Arguments that leave no hole."""


@pytest.fixture(scope="module", autouse=True)
def one_sandbox():
    """Run all scripts in one sandbox, each in processes and a folder of its own: a sandbox takes longer to
    start than most scripts."""
    started, opened = {}, []

    def sandbox(*arguments):
        if arguments not in started:
            started[arguments] = Sandbox(*arguments)
        opened.append(arguments)
        return SimpleNamespace(command=started[arguments].command, close=opened.pop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_scripts, "Sandbox", sandbox)
        yield
    for each in started.values():
        each.close()
    assert set(started) <= {(Isolation(True, True, True), sys.executable)}
    assert not opened, "each call closes its own"


def translated(tmp_path, trainer, *words):
    """Return the translation of ``BASE`` and ``words``, an argument list."""
    file = tmp_path / "args.json"
    file.write_text(json.dumps([*BASE[trainer.partition("@")[0].replace("open-r1", "trl")], *words]))
    return translate(trainer, file)


def loaded(done, tmp_path, *overrides):
    (tmp_path / "mine.yaml").write_text(done.text("args"))
    return load(tmp_path / "mine.yaml", overrides)


ACTOR = "actor_rollout_ref.actor"
OPEN = ("model.megatron.", "rollout.vllm.", "data.sources.0.columns.", "evaluation.benchmarks.0.columns.")
"""Keys with names of their own below them."""


def test_the_table_names_keys_of_ours_and_each_of_theirs_once():
    keys = {re.sub(r"\.0\b", "[]", ".".join(key)) for key in all_keys()}
    keys |= {re.sub(r"\[\]", ".0", key) for key in keys}
    for trainer, rows in table().items():
        exact = [row.theirs for row in rows if "*" not in row.theirs]
        assert sorted(exact) == sorted(set(exact))
        assert all(row_of(trainer, row.theirs.replace("*", "x_y")) is row for row in rows), (
            "none hides another"
        )
        ours = {row.ours for row in rows if row.ours}
        assert {key for key in ours if not key.startswith(OPEN)} <= keys
        assert all(bool(row.why) + bool(row.irrelevant) + bool(row.ours and not row.why) == 1 for row in rows)
        new = [value for row in rows for value in (row.values or {}).values() if isinstance(value, dict)]
        new += [row.also for row in rows]
        assert {key for value in new for key in value} <= keys
        if trainer != HINTS:
            assert defaults(trainer).keys() <= set(exact)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_least_configuration_is_a_recipe_without_holes(tmp_path, trainer):
    recipe = loaded(translated(tmp_path, trainer), tmp_path)
    assert (recipe.steps, recipe.data.sources[0].path, recipe.sampling) == (9, "DATA", "independent")
    expected = {"verl": (1024, 1, 512, 0.01), "trl": (2, 1.0, 512, 0.0), "slime": (8, 1.0, 64, 0.01)}[trainer]
    found = recipe.data.prompts_per_step, recipe.rollout.top_p, recipe.rollout.max_response_length
    assert (*found, recipe.model.megatron["weight_decay"]) == expected
    assert recipe.loss.kl_coef == 0


HOLE, SAME, CHANGED, NOTHING = "lost", "same", "changed", "irrelevant"
ENDS = [
    ("verl", "actor_rollout_ref.actor.entropy_coeff=0.01", HOLE, "actor_rollout_ref.actor.entropy_coeff"),
    ("verl", "actor_rollout_ref.actor.entropy_coeff=0", NOTHING, None),
    ("verl", "algorithm.mystery=1", HOLE, "algorithm.mystery"),
    *(("verl", f"algorithm.adv_estimator={name}", HOLE, "objective") for name in ("gae", "gpg", "remax")),
    ("verl", "algorithm.adv_estimator=gvpo", HOLE, "objective"),
    ("verl", "algorithm.adv_estimator=rloo", SAME, {"objective": "rloo"}),
    ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", HOLE, "loss.surrogate"),
    ("verl", "actor_rollout_ref.rollout.n=1", HOLE, "group_size"),
    ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=sapo", SAME, {"loss.surrogate": "sapo"}),
    ("verl", "actor_rollout_ref.actor.tau_neg=2.0", HOLE, "actor_rollout_ref.actor.tau_neg"),
    ("verl", "data.truncation=left", CHANGED, None),
    ("verl", "data.truncation=error", SAME, None),
    ("verl", "data.prompt_key=task", SAME, {"data.sources.0.columns": {"question": "task"}}),
    ("verl", "data.image_key=pictures", HOLE, "data.image_key"),
    ("verl", "data.image_key=images", NOTHING, None),
    ("verl", "+algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", CHANGED,
     {"loss.rollout_rs": {"seq_max_k2": pytest.approx(math.log(1e-4) ** 2 / 2, rel=1e-3)}}),
    ("verl", "reward_model.reward_manager=mine", HOLE, "data.sources.0.grader"),
    ("verl", "algorithm.filter_groups.enable=False", SAME, {"loss.dynamic_sampling": False}),
    ("verl", "actor_rollout_ref.rollout.dtype=float16", HOLE, "model.dtype"),
    ("verl", "trainer.val_only=True", HOLE, "trainer.val_only"),
    # what a script took from an environment that is not there
    ("verl", "actor_rollout_ref.rollout.n=", HOLE, "group_size"),
    ("verl", "trainer.nnodes=", HOLE, "cluster.nodes"),
    ("verl", "algorithm.adv_estimator=", HOLE, "objective"),
    ("verl", "data.max_response_length=${oc.env:LONGEST}", HOLE, "rollout.max_response_length"),
    ("verl", "data.max_prompt_length=${data.train_batch_size}", SAME, {"data.max_prompt_length": 1024}),
    ("verl", "trainer.experiment_name=", NOTHING, None),
    ("trl", "--num_generations=", HOLE, "group_size"),
    ("slime", "--n-samples-per-prompt=", HOLE, "group_size"),
    ("verl", "actor_rollout_ref.model.path=", HOLE, "model.path"),
    # no value where they have one, and keys of forks
    ("verl", "actor_rollout_ref.actor.grad_clip=null", HOLE, "model.megatron.clip_grad"),
    ("verl", "~actor_rollout_ref.rollout.n", HOLE, "group_size"),
    ("verl", "~actor_rollout_ref.rollout.n=8", HOLE, "group_size"),
    ("verl", "actor_rollout_ref.rollout.top_k=null", NOTHING, None),
    ("verl", "actor_rollout_ref.rollout.n_val=8", HOLE, "actor_rollout_ref.rollout.n_val"),
    ("verl", "reward_model.format_score=0.2", HOLE, "reward_model.format_score"),
    ("verl", "trainer.rejection_sample=True", HOLE, "trainer.rejection_sample"),
    ("verl", "max_turns=4", HOLE, "max_turns"),
    ("verl", "data.train_max_samples=9", HOLE, "data.train_max_samples"),
    ("verl", "actor_rollout_ref.actor.optim.lr_warmup_steps=5", SAME, {"optimizer.warmup_steps": 20}),
    ("verl", "custom_reward_function.path=./mine/rules.py", CHANGED,
     {"data.sources.0.grader": "mine.rules:compute_score"}),
    ("verl", "actor_rollout_ref.rollout.multi_turn.enable=True", HOLE, "environment.name"),
    ("verl", "actor_rollout_ref.actor.megatron.override_transformer_config.attention_dropout=0.1", HOLE,
     "actor_rollout_ref.actor.megatron.override_transformer_config.attention_dropout"),
    ("verl", "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1", NOTHING,
     None),
    ("verl", "distillation.enabled=True", HOLE, "teacher.path"),
    ("trl", "--lr_scheduler_type=cosine_with_min_lr", SAME, {"optimizer.lr_schedule": "cosine"}),
    ("trl", "--system_prompt=Think.", SAME,
     {"data.instruction": "Think.", "data.instruction_role": "system"}),
    ("trl", "--delta=1.5", HOLE, "delta"),
    ("trl", "--lora_r=8", NOTHING, None),
    ("verl", "trainer.resume_from_path=/x/global_step_9", HOLE, "trainer.resume_from_path"),
    ("trl", "--vllm_mode=server", HOLE, "rollout.engine"),
    ("trl", "--loss_type=bnpo", CHANGED, {"loss.loss_agg_mode": "token-mean"}),
    ("trl", "--loss_type=dapo", SAME, {"loss.loss_agg_mode": "token-mean"}),
    ("trl", "--reward_funcs=mine.rules.f", SAME, {"data.sources.0.grader": "mine.rules:f"}),
    ("trl", "--adapter_magic=1", HOLE, "adapter_magic"),
    ("trl", "--reward_weights=1.0", NOTHING, None),
    ("trl", "--no_shuffle_dataset", SAME, {"data.shuffle": False}),
    ("trl", "--warmup_steps=5", SAME, {"optimizer.warmup_steps": 5}),
    ("trl@1.16", "--use_bias_correction_kl=false", NOTHING, None),
    ("slime", "--rm-type=f1", HOLE, "data.sources.0.grader"),
    ("slime", "--rm-type=dapo", CHANGED, {"data.sources.0.grader": "math"}),
    ("slime", "--label-key=label", SAME,
     {"data.sources.0.columns": {"question": "input", "answer": "label"}}),
    ("slime", "--advantage-estimator=ppo", HOLE, "objective"),
    ("slime", "--use-tis", SAME, {"loss.rollout_is": "token", "loss.rollout_is_threshold": 2.0}),
    ("slime", "--over-sampling-batch-size=64", HOLE, "loss.max_num_gen_batches"),
    ("slime", "--entropy-coef=0.00", NOTHING, None),
    ("slime", "--moe-aux-loss-coeff=0.01", HOLE, "moe_aux_loss_coeff"),
    ("slime", "--eval-min-new-tokens=9", HOLE, "eval_min_new_tokens"),
    ("slime", "--rollout-max-context-len=96", HOLE, "rollout_max_context_len"),
    ("verl", "mine/backend=verl", HOLE, "mine/backend"),
    # what learns or samples otherwise, among keys that do not
    ("slime", "--moe-z-loss-coeff=1e-3", HOLE, "moe_z_loss_coeff"),
    ("slime", "--moe-expert-capacity-factor=1.0", HOLE, "moe_expert_capacity_factor"),
    ("slime", "--qk-clip", HOLE, "qk_clip"),
    ("slime", "--qk-layernorm", NOTHING, None),
    ("slime", "--sglang-quantization=fp8", HOLE, "rollout.quantization"),
    ("verl", "actor_rollout_ref.rollout.response_length=99", SAME, {"rollout.max_response_length": 99}),
    ("verl", "actor_rollout_ref.rollout.response_length=${oc.select:data.max_response_length,9}", SAME,
     {"rollout.max_response_length": 512}),
    ("verl", "actor_rollout_ref.rollout.max_model_len=700", CHANGED, {"rollout.max_response_length": 512}),
    ("verl", "actor_rollout_ref.rollout.max_model_len=1024", SAME, {"rollout.max_response_length": 512}),
    ("verl", "actor_rollout_ref.rollout.max_model_len=null", NOTHING, None),
    ("slime", "--sglang-context-length=96", CHANGED, None),
    ("slime", "--load=/earlier", CHANGED, None),
    ("slime", "--ref-load=/converted", CHANGED, None),
    ("verl", f"{ACTOR}.load_weight=True", SAME, {"model.path": "M"}),
    ("verl", f"{ACTOR}.load_weight=False", HOLE, "model.path"),
    ("verl", f"{ACTOR}.ppo_mini_batch_size=0", HOLE, "loss.minibatches"),
    ("verl", f"{ACTOR}.ppo_mini_batch_size=-1", HOLE, "loss.minibatches"),
    ("slime", "--global-batch-size=0", HOLE, "loss.minibatches"),
    ("verl", "actor_rollout_ref.rollout.over_sample_rate=0.1", HOLE,
     "actor_rollout_ref.rollout.over_sample_rate"),
    ("verl", "skip.rollout.enable=True", HOLE, "skip.rollout.enable"),
    ("verl", "trainer.v1.sampler.custom_sampler.path=x.py", HOLE, "trainer.v1.sampler.custom_sampler.path"),
    ("verl", "actor_rollout_ref.ref.model.path=R", HOLE, "actor_rollout_ref.ref.model.path"),
    ("verl", "async_training.require_batches=2", HOLE, "data.prompts_per_step"),
    ("verl", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", CHANGED, None),
    ("verl", "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32", SAME, None),
    ("verl", "actor_rollout_ref.model.lora_adapter_path=A", HOLE,
     "actor_rollout_ref.model.lora_adapter_path"),
    ("verl", "actor_rollout_ref.model.lora.adapter_path=A", HOLE,
     "actor_rollout_ref.model.lora.adapter_path"),
    ("verl", "actor_rollout_ref.model.lora.type=dora", HOLE, "actor_rollout_ref.model.lora.type"),
    ("verl", f"{ACTOR}.megatron.override_mcore_model_config.moe_config.freeze_moe_router=True", HOLE,
     f"{ACTOR}.megatron.override_mcore_model_config.moe_config.freeze_moe_router"),
    ("verl", "data.datagen.path=x.py", HOLE, "data.sources.0.reader"),
    ("verl", "async_training.use_rollout_log_probs=True", SAME, {"loss.old_logprobs": "rollout"}),
    ("verl", "async_training.compute_prox_log_prob=True", SAME, {"loss.old_logprobs": "recompute"}),
    ("verl", "algorithm.rollout_correction.rollout_rs_threshold_lower=0.5", NOTHING, None),
    ("trl", "--vllm_max_model_length=600", CHANGED, {"rollout.max_response_length": 512}),
    ("trl", "--bias=all", HOLE, "bias"),
    ("trl", "--bias=none", NOTHING, None),
    ("trl", "--accelerate_config=zero2", NOTHING, None),
    ("trl", "--module=x.sft", HOLE, "objective"),
    # options without a value, and numbers that a program would say
    ("trl", "--gradient_accumulation_steps", HOLE, "data.prompts_per_step"),
    ("trl", "--warmup_ratio", HOLE, "optimizer.warmup_steps"),
    ("slime", "--global-batch-size", HOLE, "loss.minibatches"),
    ("trl", "--nproc_per_node=gpu", HOLE, "cluster.processes_per_node"),
    # evaluations on files that are not named
    ("verl", "trainer.test_freq=5", HOLE, "evaluation.benchmarks"),
    ("verl", "trainer.test_freq=-1", SAME, None),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "word", "end", "result"), ENDS, ids=[word for _, word, *_ in ENDS])
def test_a_key_ends_as_one_of_four_and_what_is_lost_is_a_hole(
    tmp_path, monkeypatch, trainer, word, end, result
):
    monkeypatch.setattr("megatron_eqlen.recipe.load.check_imports", lambda recipe: None)
    done = translated(tmp_path, trainer, word)
    key = word.partition("=")[0].lstrip("+-~").removeprefix("no_")
    assert done.outcomes[key if trainer == "verl" else key.replace("-", "_")] == end
    assert done.outcomes.keys() == done.theirs.keys()
    if end == HOLE:
        assert result in done.holes
        with pytest.raises(RecipeError, match=rf"{re.escape(result)}.*: \?\?\? is to be filled in"):
            loaded(done, tmp_path)
    else:
        assert not done.holes
        keys = done.keys | {
            f"data.sources.0.{name}": value for name, value in done.keys["data.sources"][0].items()
        }
        assert {name: keys[name] for name in result or {}} == (result or {})
        loaded(done, tmp_path)


def test_a_program_of_another_method_is_a_hole(tmp_path):
    def holes(trainer, *words):
        return [*translated(tmp_path, trainer, *words).holes]

    assert holes("verl", "-m", "recipe.flowrl.main_flowrl") == ["objective"]
    assert holes("verl", "train.py") == ["objective"]
    assert not any("advantages are" in text for text in translated(tmp_path, "verl", "train.py").changes)
    for program in ("verl.trainer.main_ppo", "recipe.dapo.main_dapo"):
        assert holes("verl", "-m", program) == []
    for program in ("trl/scripts/dpo.py", "sft.py", "rloo.py"):
        assert holes("trl", program) == ["objective"]
    for program in ("src/open_r1/grpo.py", "train.py"):
        assert holes("trl", "--run_name", "trl", program) == []
    assert holes("slime", "train_async.py") == ["rollout.staleness"]
    assert holes("slime", "/root/slime/train.py") == []


def test_a_lost_key_leaves_the_value_beside_it_in_sight(tmp_path):
    words = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"
    context = "actor_rollout_ref.actor.megatron.context_parallel_size"
    done = translated(tmp_path, "verl", *words, f"{context}=2")
    assert done.holes["parallel.tensor"].startswith(f"{context}=2, beside 4: ")


def test_a_fork_with_many_keys_of_its_own_is_still_verls(tmp_path):
    done = translated(tmp_path, "verl", *(f"mine.key{n}={n}" for n in range(len(BASE["verl"]) + 2)))
    assert len(done.holes) == len(BASE["verl"]) + 2


def test_longer_prompts_than_ours_are_told_where_theirs_have_no_limit(tmp_path):
    told = "data.max_prompt_length: 2048 tokens"
    assert told in translated(tmp_path, "slime").text("args")
    assert told not in translated(tmp_path, "slime", "--rollout-max-prompt-len=64").text("args")


def test_a_key_that_acts_only_with_a_hole_waits_for_it(tmp_path):
    of_lora = "actor_rollout_ref.model.lora_rank=", "actor_rollout_ref.model.lora_alpha=16"
    done = translated(tmp_path, "verl", *of_lora)
    assert [*done.holes] == ["lora.rank"]
    assert done.outcomes["actor_rollout_ref.model.lora_alpha"] == SAME
    assert loaded(done, tmp_path, "lora.rank=8").lora.alpha == 16


def test_adapters_have_the_alpha_of_their_kind(tmp_path):
    def alpha(trainer, *words):
        keys = translated(tmp_path, trainer, *words).keys
        return keys["lora.rank"], keys["lora.alpha"]

    assert alpha("verl", "actor_rollout_ref.model.lora_rank=8") == (8, 16), "FSDP's"
    assert alpha("verl", "actor_rollout_ref.model.lora.rank=8") == (8, 32), "Megatron's"
    of_megatron = "actor_rollout_ref.model.lora.alpha=9", "actor_rollout_ref.model.lora.rank=8"
    assert alpha("verl", *of_megatron) == (8, 9)
    assert alpha("trl", "--lora_alpha=4", "--use_peft") == (16, 4)
    assert alpha("trl", "--lora_r=8", "--use_peft") == (8, 32)
    assert not translated(tmp_path, "trl", "--use_peft", "--lora_target_modules", "all-linear").holes
    (tmp_path / "x.py").write_text("GRPOConfig(max_steps=9, seed=1)\nLoraConfig(lora_alpha=4, r=8)")
    keys = translate("trl", tmp_path / "x.py").keys
    assert (keys["lora.rank"], keys["lora.alpha"]) == (8, 4)
    (tmp_path / "x.py").write_text(
        "GRPOConfig(max_steps=9)\nGRPOTrainer(peft_config=LoraConfig(), model='M')"
    )
    done = translate("trl", tmp_path / "x.py")
    assert (done.keys["lora.rank"], done.keys["lora.alpha"]) == (8, 8), "PEFT's"
    assert done.holes["lora.targets"].startswith("lora_target_modules=q_proj, v_proj (its default)")


def test_holes_stand_in_a_recipe_whose_keys_contradict_each_other_and_in_no_section_of_ours(tmp_path):
    apart = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"
    done = translated(tmp_path, "verl", apart, "algorithm.mystery=1")
    assert "does not divide" in done.remarks[0]
    assert "algorithm.mystery: ???\n" in done.text("args")
    holes = translated(tmp_path, "verl", "rollout.nnodes=1", "rollout.n_gpus_per_node=2").holes
    assert holes["rollout.servers"].startswith("rollout.n_gpus_per_node=2, rollout.nnodes=1: of an async")
    text = translated(tmp_path, "trl", "--packing", "true").text("args")
    assert "\ntrl.packing: ???\n" in text
    assert "\npacking:\n  max_tokens_per_row: " in text


def test_what_is_left_out_has_the_default_of_their_version(tmp_path):
    def of(trainer, *words):
        return translated(tmp_path, trainer, *words).keys

    assert of("trl@0.15")["loss.kl_coef"] == 0.04
    assert of("trl@0.15")["rollout.temperature"] == 0.9
    assert of("trl@1.16")["loss.kl_coef"] == 0
    assert (of("trl@1.16")["loss.rollout_is"], of("trl@1.16")["loss.rollout_is_threshold"]) == (
        "sequence",
        [1e-9, 3.0],
    )
    assert (of("trl@0.24")["loss.rollout_is"], of("trl@0.24")["loss.rollout_is_threshold"]) == ("token", 2.0)
    assert "loss.rollout_is" not in {key for key, value in of("trl@0.18").items() if value != "none"}
    assert of("verl@0.5")["rollout.max_num_seqs"] == 1024
    assert of("verl@0.9")["rollout.max_num_seqs"] == 256
    assert "actor_rollout_ref.actor.entropy_coeff" in translated(tmp_path, "verl@0.3").holes
    for version in ("", "@0.9"):
        args = [word for word in BASE["verl"] if ".n=" not in word and "adv" not in word]
        (tmp_path / "args.txt").write_text("\n".join(args))
        assert {"group_size", "objective"} <= translate(f"verl{version}", tmp_path / "args.txt").holes.keys()
    for version in ("verl@0.2", "verl@1.0", "trl@0.14", "verl@new"):
        with pytest.raises(
            ValueError, match=rf"--from {version}: expected a version from 0\.\d+ to \d+\.\d+"
        ):
            translated(tmp_path, version)


@pytest.mark.parametrize(
    ("trainer", "words", "expected"),
    [
        ("verl", ["data.val_files=t.parquet"], {"temperature": 0, "samples": 1, "top_p": None}),
        ("verl@0.6", ["data.val_files=t.parquet", "actor_rollout_ref.rollout.val_kwargs.temperature=0.6"],
         {"temperature": 0}),
        ("verl", ["data.val_files=t.parquet", "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
                  "actor_rollout_ref.rollout.val_kwargs.n=8", "trainer.test_freq=5",
                  "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
                  "actor_rollout_ref.rollout.val_kwargs.temperature=0.6"],
         {"temperature": 0.6, "samples": 8, "top_p": 0.7, "top_k": -1, "every": 5}),
        ("slime", ["--eval-prompt-data", "aime", "a.jsonl", "--eval-max-response-len", "4096",
                   "--eval-top-p", "1", "--n-samples-per-eval-prompt", "16", "--eval-interval", "20"],
         {"max_response_length": 4096, "samples": 16, "top_p": 1, "temperature": None, "every": 20}),
        ("slime", ["--eval-prompt-data", "/x/a.jsonl", "--eval-interval", "20"], {"samples": 1, "every": 20}),
        ("trl", ["--eval_strategy", "steps", "--eval_steps", "3"], {"samples": 8, "every": 3}),
    ],
)  # fmt: skip
def test_evaluations_sample_as_there(tmp_path, trainer, words, expected):
    recipe = loaded(translated(tmp_path, trainer, *words), tmp_path)
    assert {key: getattr(recipe.evaluation, key) for key in expected} == expected
    assert len(recipe.evaluation.benchmarks) == 1


def test_the_strategy_no_evaluates_nothing(tmp_path):
    keys = translated(tmp_path, "trl", "--eval_strategy", "no", "--dataset_test_split", "test").keys
    assert not [key for key in keys if key.startswith("evaluation.")]


def test_the_overlong_penalty_is_on_the_scale_of_the_rewards(tmp_path, monkeypatch):
    words = ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=128",
             "reward_model.overlong_buffer.penalty_factor=1.0"]  # fmt: skip
    done = translated(tmp_path, "verl", *words)
    assert done.keys["loss.overlong_factor"] == 0.5, "rewards +1 and -1 there, 1 and 0 here"
    assert "answers are +1 and -1 there" in done.text("args")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rules.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): return 0\n"
    )
    own = translated(tmp_path, "verl", *words, "custom_reward_function.path=/x/rules.py")
    assert own.keys["loss.overlong_factor"] == 1, "rewards are those of the function"


def test_epochs_are_steps_where_the_data_are_here(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' * 9)
    files = f"data.train_files=[{tmp_path}/a.jsonl,{tmp_path}/a.jsonl]", "~trainer.total_training_steps"
    words = *files, "data.train_batch_size=4", "trainer.total_epochs=3"
    assert translated(tmp_path, "verl", *words).keys["steps"] == 3 * (18 // 4)


def test_a_number_that_is_none_is_one_hole_with_one_reason(tmp_path):
    done = translated(tmp_path, "verl", "~trainer.total_training_steps", "trainer.total_epochs=ten")
    assert done.holes == {"steps": "trainer.total_epochs=ten: expected a number"}


@pytest.mark.parametrize(
    ("trainer", "words", "key", "expected"),
    [
        ("verl", ["data.train_batch_size=80", f"{ACTOR}.ppo_mini_batch_size={{}}"], "loss.minibatches",
         {"64": (1, "there 1.25"), "40": (2, ""), "96": (1, "")}),
        ("slime", ["--global-batch-size", "{}"], "loss.minibatches", {"20": (2, "there 1.6"), "16": (2, "")}),
        ("trl", ["--steps_per_generation", "4", "--max_steps", "{}"], "steps",
         {"10": (2, "there 2.5"), "8": (2, ""), "1": (1, "there 0.25")}),
    ],
)  # fmt: skip
def test_a_number_that_is_rounded_is_told(tmp_path, trainer, words, key, expected):
    for value, (number, told) in expected.items():
        done = translated(tmp_path, trainer, *(word.format(value) for word in words))
        changes = [text.partition(", ")[2] for text in done.changes if f" -> {key}: " in text]
        assert (done.keys[key], changes) == (number, [told] * bool(told))


def test_the_header_begins_with_holes_then_the_gravest_effect(tmp_path):
    text = translated(
        tmp_path, "verl", "algorithm.mystery=1", "data.truncation=left", "trainer.val_before_train=False",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64", "trainer.balance_batch=True",
        "data.val_files=v.parquet",
    ).text("args")  # fmt: skip
    heads = re.findall(r"# (To fill in|Changes [a-z]+ ?\w* ?\w*|As there|Without effect here)", text)
    expected = ["To fill in", "Changes what is learned", "Changes what is sampled", "Changes evaluation"]
    assert heads == [*expected, "Changes speed", "As there", "Without effect here"]
    plain = translated(tmp_path, "verl", "algorithm.norm_adv_by_std_in_grpo=False").text("args")
    assert "Changes what is learned" not in plain
    assert "To fill in" not in plain


SCRIPTS = {
    "arms of other machines": "case $(uname) in Mac) N=1;; Linux) N=6;; esac\nif [ -d /npu ]; then N=2; fi\n"
    "RUN n=$N",
    "a flag before an array": "A=(n=6)\nset -x\npython3 -m verl.trainer.main_ppo -vv BASE x.n=1 "
    '"${A[@]/#/actor_rollout_ref.rollout.}"',
    "quotes of hydra": "RUN n=6 trainer.logger='[\"console\"]' data.train_files=\"['DATA']\"",
    "a trailing backslash": "RUN n=6 \\\n  \\\n\n",
    "dates, sums and Python": "X=$(date +%s)\nRUN n=$((X > 0 ? 2 * 3 : 1)) "
    "trainer.experiment_name=r-$(python3 -c 'print(7)')",
    "a shell in a launcher": "srun --ntasks 1 bash -c 'RUN n=6'\n",
    "a session": "while tmux has-session -t s; do sleep 1; done\ntmux new -d -s s\n"
    "tmux send-keys -t s 'RUN n=6' C-m\n",
    "a version of the interpreter": "P=$(ls /usr/bin | grep -xm1 'python3[.][0-9]*')\n${P:-python3} "
    "-m verl.trainer.main_ppo BASE actor_rollout_ref.rollout.n=6",
    "a remote job": "set -euo pipefail\npkill -9 python\nray stop\nray job submit --address=x -- RUN n=6",
    "an environment's value": "RUN n=${N:?give N}",
    "missing programs and files": "set -e\nsource ~/none.sh\nmodule load cuda\ncd /nowhere\nmkdir -p /data\n"
    "conda activate x\nRUN n=6\nexit 3",
    "several commands": "RUN n=2\npython3 prepare.py --local_dir x\nRUN n=6\nwandb sync",
    "answers and limits": "set -euo pipefail\nulimit -n 1048576\nV=$(pip list | grep torch | cut -f1)\n"
    "H=($(scontrol show hostnames x))\necho ${H[0]}\nRUN n=6",
    "nodes of SLURM": "#SBATCH -N 3\nset -u\nRUN n=6 trainer.nnodes=$SLURM_JOB_NUM_NODES",
    "a folder for logs": "# für später\nRUN n=6 > logs/new.log\n",
    "a file beside it": 'source "$(dirname "$0")/common.sh"\nRUN n=$N',
    "a program at a path": 'set -eu\nP=${P:-~/conda/bin}\nN=6 "$P/python3" -m verl.trainer.main_ppo BASE '
    "actor_rollout_ref.rollout.n=$N || exit 1",
    "halves of quotes and substitutions": "set -xeuo pipefail\nM=/x/y\nS=$(basename $M)\nW='/a b' V=\"/c d\" "
    "RUN n=6\nX=`basename $M` Y=$(($(echo 1) + 1))",
    "a program left running": "nohup /opt/bin/python3 -m verl.trainer.main_ppo BASE "
    "actor_rollout_ref.rollout.n=6 > x.log 2>&1 &",
    "a job of SLURM on standard input": "sbatch --nodes=3 <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\n"
    "RUN n=$N trainer.nnodes=\\$SLURM_NNODES\nEOF",
    "options and arguments of a job of SLURM": "[[ -n ${J-} ]] || exec sbatch --export=ALL,J=6 -p x $0 3\n"
    "#SBATCH --gres=gpu:h100:6\nRUN n=$SLURM_GPUS_ON_NODE trainer.nnodes=$1 data.seed=$J",
}


LAUNCHED = [
    ("accelerate launch --num_processes 6 x.py ", 1, 6, 2),
    ("torchrun --nnodes=2 --nproc_per_node 3 -m x.grpo ", 2, 3, 2),
    ("deepspeed --num_gpus 3 x.py ", 1, 3, 1),
    ("deepspeed --num_nodes 2 --num_gpus 3 x.py ", 2, 3, 2),
    ("uv run --with trl accelerate launch --num_machines 3 --num_processes 6 x.py ", 3, 2, 2),
    ("docker run --rm -e a=b --name x image torchrun --nproc_per_node 3 x.py ", 1, 3, 1),
]


@pytest.mark.parametrize(("launcher", "nodes", "processes", "prompts"), LAUNCHED)
def test_options_of_a_launcher_say_the_processes_and_those_of_other_programs_are_not_read(
    tmp_path, launcher, nodes, processes, prompts
):
    words = [word for word in BASE["trl"] if word not in ("--num_processes", "2")]
    (tmp_path / "run.sh").write_text(
        launcher + shlex.join([*words, "--per_device_train_batch_size", "4", "--num_generations", "12"])
    )
    done = translate("trl", tmp_path / "run.sh")
    assert not done.holes
    keys = "cluster.nodes", "cluster.processes_per_node", "data.prompts_per_step"
    assert tuple(done.keys.get(key, 1) for key in keys) == (nodes, processes, prompts)


def test_a_configuration_that_the_script_writes_is_read(tmp_path):
    words = shlex.join(word for word in BASE["trl"] if word not in ("--num_processes", "2"))
    (tmp_path / "run.sh").write_text(
        "mkdir -p new\ncat > new/mine.yaml <<EOF\nnum_processes: $((2 * 3))\nEOF\n"
        "echo system_prompt: $PWD/rules > new/own.yaml; printf '\\xff' > other.yml\n"
        f"accelerate launch --config_file new/mine.yaml x.py {words} --config new/own.yaml"
    )
    keys = translate("trl", tmp_path / "run.sh").keys
    assert keys["cluster.processes_per_node"] == 6
    assert keys["data.instruction"] == str(tmp_path / "rules"), "a path of this machine, not of the sandbox"


WRITES = {
    "one that it changes": "sed -i s/1e-5/3e-6/ c.yaml; echo 'beta: 0' >> c.yaml\nRUN c.yaml",
    "that of its folder": "cd other\nRUN c.yaml",
    "one of several with its name": "mkdir x; cat other/c.yaml > x/c.yaml; cp c.yaml other\nRUN x/c.yaml",
    "one at home": "cp other/c.yaml ~/mine.yaml\nRUN $HOME/mine.yaml",
    "one of its folder's name elsewhere": "mkdir ~/where; mv other/c.yaml ~/where\nRUN ~/where/c.yaml",
    "one outside": "cp other/c.yaml /tmp/mine.yaml\nRUN /tmp/mine.yaml",
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_configuration_is_read_as_the_script_leaves_it_where_its_command_is(tmp_path, kind):
    (tmp_path / "other").mkdir()
    (tmp_path / "c.yaml").write_text("learning_rate: 1e-5\n")
    (tmp_path / "other/c.yaml").write_text("learning_rate: 3e-6\n")
    (tmp_path / "run.sh").write_text(
        WRITES[kind].replace("RUN", f"trl grpo {shlex.join(BASE['trl'])} --config")
    )
    assert translate("trl", tmp_path / "run.sh").keys["optimizer.lr"] == 3e-6


def test_a_configuration_that_a_program_would_write_is_missed(tmp_path):
    (tmp_path / "run.sh").write_text(
        f"python3 x.py > c.yaml\ntrl grpo {shlex.join(BASE['trl'])} --config c.yaml"
    )
    with pytest.raises(ValueError, match=r"c\.yaml: expected a mapping .*, found None"):
        translate("trl", tmp_path / "run.sh")


def test_a_configuration_of_hydra_may_be_all_and_other_files_in_it_are_missed(tmp_path):
    (tmp_path / "conf").mkdir()
    own = "ppo_trainer, actor@x.actor: dp_actor, data/rollout@x: rollout, override hydra/job_logging: x"
    text = (
        "data: {seed: 3, train_files: DATA}\nalgorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref: {model: {path: M}, rollout: {n: 4}}\n"
    )
    (tmp_path / "conf/my.yaml").write_text(f"defaults: [{own}, _self_]\n{text}")
    for command in ('-cp "$PWD/conf" -cn=my', "--config-dir conf --config-name my.yaml"):
        (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {command}")
        keys = translate("verl", tmp_path / "run.sh").keys
        assert (keys["seed"], keys["group_size"]) == (3, 4)
    for other in ("base", "actor@actor_rollout_ref.actor: mine", "actor: actors"):
        (tmp_path / "conf/my.yaml").write_text(f"defaults: [{own}, {other}]\n{text}")
        with pytest.raises(ValueError, match=r"my\.yaml takes values from .*; give the resolved"):
            translate("verl", tmp_path / "run.sh")


def test_variables_without_a_value_are_named(tmp_path):
    quiet = (
        "if [ -z $A ]; then A=1; fi\nexport B=/x:$B\nC=${C:-1}\nD='$D'\n[[ xy =~ x(y) ]]\nfalse\n"
        'E=$?${BASH_REMATCH[1]}\ncase $F in *) ;; esac\necho \\$G "${H[@]}"\nfor I in 1; do J=$I; done\n'
        "echo ${K:-1} ${L+2} $(( ${M-1} * 0x1F + A ))\n"
    )
    words = " ".join(BASE["verl"])
    script = tmp_path / "run.sh"
    script.write_text(
        f"{quiet}torchrun x.py {words} trainer.experiment_name=$E data.seed=$SEED$A ${{TAG}} \\\n # \\\n"
        " data.x=1\n--y 2\necho $((A * SUM)) ${CUT%.*} ${UP^^} ${PART:0:2}"
    )
    done = translate("verl", script)
    assert (done.keys["name"], done.keys["seed"]) == ("1y", 1)
    names = *("$SEED", "$TAG"), *(f"the line {line} as a command" for line in ("data.x=1", "--y 2"))
    names = *names, *("$SUM", "$CUT", "$UP", "$PART")
    assert done.remarks == [f"The script reads {name}, which is not there." for name in names]


def test_files_have_names_of_their_own_and_a_hole_in_their_grader_is_one_in_each(tmp_path):
    files = "data.train_files=[a/math.parquet,b/math.parquet,a/math.parquet]"
    words = files, "data.val_files=t.parquet", "reward_model.reward_manager=mine", "trainer.test_freq=5"
    keys = translated(tmp_path, "verl", *words).keys
    sources, tests = keys["data.sources"], keys["evaluation.benchmarks"]
    assert [(each["name"], each.get("weight")) for each in sources] == [("math", 2), ("math-2", None)]
    assert {each["grader"] for each in (*sources, *tests)} == {"???"}
    own = translated(tmp_path, "verl", *words[:2], "custom_reward_function.path=nowhere.py", words[3])
    assert own.keys["data.sources"][1]["grader"] == "nowhere:compute_score"
    assert (own.keys["evaluation.every"], own.holes) == (5, {})
    assert "'nowhere:compute_score' cannot be imported" in own.remarks[0]


def test_what_the_program_rewards_without_reward_funcs_is_a_hole(tmp_path):
    (tmp_path / "a.yaml").write_text("model_name_or_path: M\ndataset_name: D\nmax_steps: 9\n")
    assert "data.sources.0.grader" in translate("trl", tmp_path / "a.yaml").holes


def test_what_python_does_not_spell_is_a_hole(tmp_path):
    (tmp_path / "x.py").write_text(
        "model = get_peft_model(load(), r=rank, lora_alpha=4)\n"
        "config = GRPOConfig(max_steps=9, seed=1, num_generations=n, max_completion_length=2 * n, **more)\n"
        'GRPOTrainer(model=model, args=config, reward_funcs=[mine, "yours"], output_dir=f"runs/{n}")\n'
    )
    done = translate("trl", tmp_path / "x.py")
    python = {"model.path", "group_size", "rollout.max_response_length", "lora.rank", "**"}
    assert python <= done.holes.keys()
    assert (done.keys["steps"], done.keys["seed"]) == (9, 1)
    assert "mine, 'yours'" in done.holes["data.sources.0.grader"]
    assert "packing.max_tokens_per_row" not in done.holes
    assert "'**': ???" in done.text("x.py")


def test_what_python_assigns_or_makes_of_the_classes_is_a_hole(tmp_path):
    (tmp_path / "x.py").write_text(
        "from trl import GRPOConfig as Config, GRPOTrainer\nclass Mine(GRPOTrainer): pass\n"
        "args = Config(max_steps=2, beta=0.5)\n"
        "args = Config(max_steps=9, seed=1, model_init_kwargs={'dtype': 'float32'}, logging_steps=1)\n"
        "args.num_generations += 2\nargs.logging_steps = 5\nnew = partial(Config, temperature=0.5)\n"
        "setattr(args, 'top_p', 0.9)\nargs = replace(args, learning_rate=5e-6)\nvars(args).update(top_k=3)\n"
        "setattr(args, 'logging_steps', 2)\nname = text.replace('{x}', 'seed')\nos.replace(old, seed)\n"
        "stats.update(seed=3, temperature=2)\n"
        "model = AutoModelForCausalLM.from_pretrained('M', load_in_4bit=True)\n"
    )
    done = translate("trl", tmp_path / "x.py")
    changed = {"group_size", "rollout.top_p", "optimizer.lr", "rollout.top_k"}
    assert done.holes.keys() >= changed | {"class Mine", "partial", "load_in_4bit"}
    assert "logging_steps" not in done.holes
    assert done.keys["seed"] == 1
    assert (done.keys["steps"], done.keys["loss.kl_coef"], done.keys["model.dtype"]) == (9, 0, "float32")
    assert done.remarks[0] == "The file has several GRPOConfig; this is the last one's."


NOT_PLAIN = (
    "missing programs and files", "answers and limits", "nodes of SLURM", "a session",
    "a program left running", "a job of SLURM on standard input", "options and arguments of a job of SLURM",
    "a version of the interpreter",
)  # fmt: skip
"""Scripts that bash alone ends, because this machine is not theirs."""


def write_script(folder, kind):
    base = " ".join(BASE["verl"])
    command = f"python3 -m verl.trainer.main_ppo {base} actor_rollout_ref.rollout."
    text = SCRIPTS[kind].replace("RUN ", command).replace("BASE", base)
    (folder / "run.sh").write_text(text, encoding="latin-1")
    (folder / "common.sh").write_text("N=6\n")
    (folder / "logs").mkdir(exist_ok=True)
    return folder / "run.sh"


@pytest.mark.parametrize("kind", SCRIPTS)
def test_bash_reads_a_script(tmp_path, kind):
    done = translate("verl", write_script(tmp_path, kind), ["N=6"])
    assert done.keys["group_size"] == 6
    assert done.keys["data.sources"][0]["path"] == "DATA"
    assert done.keys["name"] == ("r-7" if "Python" in kind else "run")
    assert ("none.sh" in done.text("run.sh")) == ("missing" in kind)
    assert done.keys["cluster.nodes"] == (3 if "SLURM" in kind else 1)


@pytest.mark.parametrize("kind", [kind for kind in SCRIPTS if kind not in NOT_PLAIN])
def test_the_arguments_are_those_of_bashs_own_trace(tmp_path, kind):
    """``set -x`` prints each command with its words expanded and quoted, before it starts."""
    script = write_script(tmp_path, kind)
    stub = tmp_path / "bin/python3"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\n[[ $1 != -c ]] || exec {sys.executable} "$@"\n')
    stub.chmod(0o755)
    for name in ("pkill", "ray", "srun", "wandb"):
        (stub.parent / name).symlink_to(stub)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "N": "6", "PS4": "+ "}
    ran = subprocess.run(
        ["bash", "-x", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    lines = [shlex.split(line) for line in ran.stderr.splitlines() if "main_ppo" in line]
    if "launcher" in kind:  # it is one word of srun's
        lines = [shlex.split(line[-1]) for line in lines]
    (*_, expected) = lines
    *_, (program, *words) = [
        command
        for command in launch_scripts.launched(script, (), {"N": "6"})[0]
        if "main_ppo" in str(command)
    ]
    assert [program, *words] == expected[-len(words) - 1 :]
    assert "n=6" in str(words)


def test_a_script_harms_nothing_and_sees_no_home(tmp_path):
    (tmp_path / "kept").write_text("here")
    secret = tmp_path.parent / "secret.txt"
    secret.write_text("a secret")
    harm = f"rm -rf {tmp_path}/kept ~ ; echo x > {tmp_path}/new; ls -A ~ | wc -l > x\n"
    (tmp_path / "run.sh").write_text(
        f'{harm}trl grpo --seed $(cat x) --run_name "$(cat {secret})" --num_generations 4'
    )
    found, *_ = launch_scripts.launched(tmp_path / "run.sh")
    assert found == [["trl", "grpo", "--seed", "0", "--run_name", "", "--num_generations", "4"]]
    assert (tmp_path / "kept").read_text() == "here"
    assert not (tmp_path / "new").exists()


def test_a_script_sees_the_small_files_of_its_repository_also_behind_links(tmp_path):
    root = tmp_path / "repository"
    for folder in (".git", "a/.cache", "/".join("abcdefgh")):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").touch()
    (tmp_path / "outside").write_text("N=1")
    (root / "linked").symlink_to(tmp_path / "outside")
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "large").write_bytes(bytes(launch_scripts.MOST_BYTES + 1))
    (root / ".env").touch()
    (root / "a/run.sh").write_text("source linked\ntrl grpo $N $(find . -type f | sort)")
    found, missing, *_ = launch_scripts.launched(root / "a/run.sh")
    assert (found, missing) == ([["trl", "grpo", "1", "./.env", "./a/run.sh", "./linked"]], [])


def test_without_a_sandbox_a_script_is_refused_and_its_saved_arguments_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_scripts, "commands_refused", lambda: "no namespaces")
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo")
    with pytest.raises(
        ValueError, match=r"machine has none \(no namespaces\); save the arguments .*args\.txt"
    ):
        translate("verl", tmp_path / "run.sh")
    (tmp_path / "args.txt").write_text("\n".join(["-m", "verl.trainer.main_ppo", *BASE["verl"]]))
    assert translate("verl", tmp_path / "args.txt").keys["group_size"] == 4


RESOLVED = """
algorithm: {adv_estimator: grpo, rollout_correction: {rollout_rs: null, rollout_rs_threshold_lower: null}}
data: {train_files: [DATA], datagen: {path: null, name: null}, sampler: {class_path: null, class_name: null}}
trainer: {total_training_steps: 9}
reward_manager:
  {source: register, name: naive, module: {_target_: a.B, path: null, name: custom_reward_manager}}
reward_model:
  {enable: false, nccl_timeout: 600, reward_loop_source: register, reward_loop_class_name: null}
actor_rollout_ref:
  model: {path: M, lora_adapter_path: null, lora: {type: lora, rank: 0, adapter_path: null}}
  rollout: {n: 4, layer_name_map: {qkv_layer_name: qkv}}
  actor:
    load_weight: true
    optim: {lr_wsd_decay_style: exponential, lr_wsd_decay_steps: null}
    megatron:
      sequence_parallel: null
      override_mcore_model_config: {}
      override_transformer_config: {recompute_granularity: null, recompute_modules: [core_attn]}
"""
"""Defaults of verl 0.7's trainers, with nulls as its resolved configurations have them."""


def test_resolved_yaml_of_verl_yaml_of_trl_and_python_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "algorithm: {adv_estimator: grpo, gamma: 1.0}\ndata: {train_files: [DATA]}\n"
        "actor_rollout_ref: {rollout: {n: 4}, model: {path: M}}\n"
    )
    assert translate("verl", tmp_path / "a.yaml").keys["group_size"] == 4
    (tmp_path / "a.yaml").write_text(RESOLVED)  # what its defaults name asks for nothing
    assert not translate("verl", tmp_path / "a.yaml").holes
    (tmp_path / "a.yaml").write_text("data: {train_files: '${x}'}\n")
    with pytest.raises(ValueError, match=r"train_files: \$\{x\}: expected resolved values"):
        translate("verl", tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(
        "beta: 0.1\nper_device_train_batch_size: 8\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nlearning_rate: 2e-6\nmax_steps: 5\n"
    )
    done = translate("open-r1", tmp_path / "b.yaml")
    assert (done.keys["loss.kl_coef"], done.keys["optimizer.min_lr"]) == (0.1, pytest.approx(2e-7))
    (tmp_path / "run.txt").write_text(f"grpo\n--config\n{tmp_path}/b.yaml\n--beta\n0.2")
    assert translate("trl", tmp_path / "run.txt").keys["loss.kl_coef"] == 0.2
    (tmp_path / "c.py").write_text(
        "GRPOConfig(max_steps=9, beta=0.3, per_device_train_batch_size=args.batch)\n"
        "GRPOTrainer(model='M', reward_funcs=[f])"
    )
    done = translate("trl", tmp_path / "c.py")
    assert (done.keys["loss.kl_coef"], done.keys["model.path"]) == (0.3, "M")
    assert "args.batch" in done.holes["data.prompts_per_step"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.sh",
            "echo hello",
            r"x\.sh: .*: expected a script that starts a training of verl, found no command",
        ),
        (
            "x.yaml",
            "- {a: 1}\n",
            r"x\.yaml: .*: expected a mapping of keys or a list of arguments, found \[\{'a': '1'\}\]",
        ),
        (
            "x.yaml",
            "data: {max_prompt_length: 8, shuffle: true}\nmodel: {path: M}\n",
            "found 3 keys, 2 of them its own, none of actor_rollout_ref",
        ),
        ("x.txt", "--rollout-batch-size\n8\n", "expected a configuration of verl .*found 0 keys"),
        (
            "x.sh",
            "python3 -m openrlhf.cli.train_ppo_ray --pretrain M",
            "found python3 -m openrlhf.cli.train_ppo_ray; bash",
        ),
        (
            "x.sh",
            "python3 -m verl.trainer.main_ppo \\\n\n  --data.train_files=D\n",
            "found python3 -m verl.trainer.main_ppo; bash",
        ),
        (
            "x.sh",
            "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=D data.prompt_key=q",
            "none of actor_rollout_ref",
        ),
    ],
)
def test_a_file_without_a_configuration_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        translate("verl", tmp_path / name)


def test_the_command_writes_a_recipe_whose_holes_are_filled_on_the_command_line(tmp_path, capsys):
    (tmp_path / "args.txt").write_text("\n".join([*BASE["verl"], "actor_rollout_ref.rollout.n=1"]))
    out = tmp_path / "mine.yaml"
    assert main(["recipe", "--from", "verl@0.9", str(tmp_path / "args.txt"), "--out", str(out)]) == 0
    assert "group_size: actor_rollout_ref.rollout.n" in capsys.readouterr().out
    assert load(out, ["group_size=8"]).group_size == 8
