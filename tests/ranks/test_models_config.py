"""config.json decides everything: its own fields, both spellings, and a clear error where a model cannot
work."""

import json
import math
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_eqlen import hf
from megatron_eqlen.hf.config import ConfigError, parse_config, read_config
from megatron_eqlen.hf.config_fields import FAMILIES as FAMILY_TABLE
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.models.config import hybrid_arguments, scaled_rope, transformer_config
from megatron_eqlen.plan.flops import active_parameters, pair_cost
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.run.session import use_deterministic_kernels
from tests.kit.distributed import run_ranks
from tests.kit.meta import meta_device
from tests.kit.tiny_models import FAMILIES, LLAMA3, tiny_config

SHIPPED = Path(hf.__file__).parent / "configs"
PARAMETERS = {"qwen3-32b": 32.762, "qwen3-next-80b-a3b-thinking": 79.674, "qwen3.5-35b-a3b": 34.661}
"""Billions of parameters of the published checkpoints without the multi-token prediction layer."""


def saved(tmp_path, family: str, **changes) -> dict[str, Any]:
    """Return the config that Transformers writes for a tiny model."""
    tiny_config(family, **changes).save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def count_on_meta(config: Path) -> int:
    from megatron_eqlen.models.build import build_model
    from megatron_eqlen.models.groups import start

    start(ParallelRecipe(), seed=1)
    with meta_device():
        chunks = build_model(read_config(config), ParallelRecipe(), torch.bfloat16)
    return sum(parameter.numel() for parameter in chunks[0].parameters())


def mapped(config: Path) -> int:
    """Return the number of parameters of the weights that the model's files hold."""
    return sum(math.prod(shape) for weight in weight_map(read_config(config)) for shape in weight.shapes)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_real_models_have_their_published_size(name, tmp_path):
    """The built model has four layers, one period of Qwen3-Next; their weights are mapped like all others."""
    assert mapped(SHIPPED / f"{name}.json") / 1e9 == pytest.approx(PARAMETERS[name], abs=5e-4)
    short = json.loads((SHIPPED / f"{name}.json").read_text())
    short.get("text_config", short)["num_hidden_layers"] = 4
    (tmp_path / "config.json").write_text(json.dumps(short))
    assert run_ranks(1, count_on_meta, tmp_path) == [mapped(tmp_path)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shipped_files_are_understood_whole(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = read_config(SHIPPED / f"{name}.json")
    next_ = name != "qwen3-32b"
    assert hybrid_arguments(model, ParallelRecipe())["rotary_base"] == (1e7 if next_ else 1e6)
    assert hybrid_arguments(model, ParallelRecipe())["rotary_percent"] == (0.25 if next_ else 1.0)
    if next_:
        assert model.delta_net is not None
        assert model.experts is not None
        assert 4 * sum(model.delta_net.layers) == 3 * model.num_hidden_layers
        assert model.delta_net.layers[:4] == (True, True, True, False)
        assert all(model.experts.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_old_and_new_spellings_are_one_model(tmp_path, family):
    new = saved(tmp_path, family)
    rope = new["rope_parameters"]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        old["rope_scaling"] = rope
    if "num_local_experts" in old:
        old["num_experts"] = old.pop("num_local_experts")
    if FAMILY_TABLE[family].hybrid:
        del old["layer_types"]
        old["full_attention_interval"] = 4
    assert parse_config(old, "old") == parse_config(new, "new")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_has_a_default(tmp_path, family):
    """Every field that is read is needed, except those whose absence the families' files allow."""
    whole = saved(tmp_path, family)
    model = parse_config(whole, "whole")
    optional = {"head_dim"} if FAMILY_TABLE[family].head_dim != "given" else set()
    named_otherwise = {"rope_parameters": "rope_theta", "layer_types": "full_attention_interval"}
    for name in set(whole) - optional:
        rest = {key: value for key, value in whole.items() if key != name}
        found = parsed_or_error(rest)
        assert found == model or named_otherwise.get(name, name) in str(found), name


def test_a_file_that_does_not_tie_embeddings_has_a_head_of_its_own(tmp_path):
    raw = saved(tmp_path, "llama")
    raw.pop("tie_word_embeddings")
    assert parse_config(raw, "here.json") == parse_config(raw | {"tie_word_embeddings": False}, "there.json")


def parsed_or_error(raw: dict) -> object:
    try:
        return parse_config(raw, "rest")
    except ConfigError as error:
        return error


REFUSED = {
    "attention_bias": (True, "qwen3"),
    "hidden_act": ("gelu", "qwen3"),
    "attention_dropout": (0.1, "qwen3_moe"),
    "use_sliding_window": (True, "qwen3_moe"),
    "rope_scaling": ({"rope_type": "yarn", "rope_theta": 1e6}, "qwen3"),
    "rope_parameters": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "qwen3"),
    "quantization_config": ({"quant_method": "fp8"}, "qwen3_next"),
    "layer_types": (["sliding_attention"] * 4, "qwen3"),
    "model_type": ("mistral", "qwen3"),
    "mlp_bias": (True, "llama"),
    "use_mrope": (True, "qwen2"),
    "is_causal": (False, "qwen3"),
    "sliding_window": (4096, "llama"),
    "logit_scale": (0.25, "llama"),
    "bias": (True, "llama"),
    "qkv_bias": (True, "qwen3_next"),
    "layer_scale": (True, "qwen3_5_text"),
    "qk_norm": (True, "qwen2"),
    "compression_config": ({"format": "int-quantized"}, "qwen3"),
    "num_attention_heads": ("many", "qwen3"),
    "num_hidden_layers": (0, "qwen3"),
    "partial_rotary_factor": (0.5, "qwen3"),
    "rope_theta": (5.0, "qwen3"),
    "num_key_value_heads": (None, "qwen3"),
    "vocab_size": (10**400, "qwen3"),
    "rms_norm_eps": (float("nan"), "qwen3"),
    "rope_parameters.rope_theta": ("big", "qwen3"),
    "rope_parameters.factor": (2.0, "qwen3_moe"),
    "rope_parameters.rope_type": (["default"], "qwen3_moe"),
    "output_router_logits": ("yes", "qwen3_moe"),
    "num_experts": (6, "qwen3_moe"),
}


@pytest.mark.parametrize(
    ("family", "field"), [("qwen2", "qkv_bias"), ("qwen3", "qk_norm"), ("glm4_moe", "bias")]
)
def test_a_field_that_neither_vllm_nor_transformers_reads_in_a_family_refuses_no_model(family, field):
    """Other programs write such fields, which say what the family has in any case."""
    raw = tiny_config(family).to_dict()
    assert parse_config(raw | {field: True}, "here.json") == parse_config(raw, "here.json")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_OPTIONS = {
    "as documented": {},
    "an attention factor": {"attention_factor": 1.25},
    "nulls": {"attention_factor": None, "mscale": None},
    "mscale": {"mscale": 0.8, "mscale_all_dim": 0.5},
    "one mscale": {"mscale": 0.8},
    "mscale of nothing": {"mscale": 0.8, "mscale_all_dim": 0},
    "betas": {"beta_fast": 24, "beta_slow": 2.5},
    "one dimension between": {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "not truncated": {"truncate": False},
    "no factor": {"factor": 1},
    "whole numbers": {"factor": 4, "mscale": 1, "mscale_all_dim": 1},
    "short": {"original_max_position_embeddings": 64, "factor": 2.5},
}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("options", YARN_OPTIONS)
def test_yarn_is_that_of_transformers_to_the_bit(family, options):
    """The heads and bases are the real models', with every option."""
    rope = YARN | YARN_OPTIONS[options]
    name = {"qwen3": "qwen3-32b", "qwen3_next": "qwen3-next-80b-a3b-thinking"}[family]
    raw = json.loads((SHIPPED / f"{name}.json").read_text()) | {"rope_scaling": rope}
    model = parse_config(raw, "here.json")
    config = tiny_config(
        family, rope_scaling=dict(rope), rope_theta=raw["rope_theta"], head_dim=raw["head_dim"]
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = scaled_rope(model)
    assert ours is not None
    assert torch.equal(ours[0], frequencies)
    assert ours[1] == factor
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config,
    )

    megatron = transformer_config(model, ParallelRecipe(), torch.float32)
    assert _yarn_get_concentration_factor_from_config(megatron) == pytest.approx(factor, rel=1e-15)
    assert model.context_length == int(rope["factor"] * rope["original_max_position_embeddings"])


def test_deterministic_kernels_are_selected_for_torch_cublas_megatron_and_vllm(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    model = parse_config(tiny_config("qwen3").to_dict(), "test")
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert transformer_config(model, ParallelRecipe(), torch.float32).deterministic_mode
    finally:
        torch.use_deterministic_algorithms(False)
    assert not transformer_config(model, ParallelRecipe(), torch.float32).deterministic_mode
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("factor", [8.0, 32])
def test_llama3_scaling_is_that_of_transformers_to_the_bit(factor):
    """The numbers are those of Llama 3.1 and 3.2."""
    rope = LLAMA3 | {"rope_theta": 5e5, "factor": factor, "original_max_position_embeddings": 8192}
    config = tiny_config("llama", rope_parameters=dict(rope), head_dim=128)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = scaled_rope(parse_config(config.to_dict(), "here.json"))
    assert ours is not None
    assert torch.equal(ours[0], expected)
    assert ours[1] == attention_factor == 1


@pytest.mark.parametrize("option", ["moe_enable_deepep", "delay_wgrad_compute"])
def test_an_option_that_megatron_refuses_is_an_error_that_names_the_key(option):
    model = parse_config(tiny_config("qwen3_moe").to_dict(), "config")
    with pytest.raises(ValueError, match=rf"model.megatron: .*{option}.*: Megatron-Core refuses it: "):
        transformer_config(model, ParallelRecipe(), torch.bfloat16, **{option: True})


YARN_REFUSED = {
    "factor": (None, "expected float, found None"),
    "original_max_position_embeddings": (None, "expected int, found None"),
    "beta_fast": (0, "expected more than 0"),
    "beta_slow": (None, "expected more than 0, found None"),
    "truncate": ("no", "expected bool, found 'no'"),
    "low_freq_factor": (1.0, "not supported with rope_type 'yarn'"),
    "rope_theta": (5.0, "is 1000000.0 but rope_scaling.rope_theta is 5.0"),
}


@pytest.mark.parametrize("option", YARN_REFUSED)
def test_what_yarn_cannot_be_is_refused_by_name(option):
    value, message = YARN_REFUSED[option]
    raw = json.loads((SHIPPED / "qwen3-32b.json").read_text())
    with pytest.raises(ConfigError, match=f"here.json: .*{option}.*{re.escape(message)}"):
        parse_config(raw | {"rope_scaling": YARN | {option: value}}, "here.json")
    for missing in ("factor", "original_max_position_embeddings"):
        rest = {key: kept for key, kept in YARN.items() if key != missing}
        with pytest.raises(ConfigError, match=f"rope_scaling: missing field '{missing}'"):
            parse_config(raw | {"rope_scaling": rest}, "here.json")


@pytest.mark.parametrize(("field", "value", "message"), [
    ("rope_scaling", YARN, "rope_scaling beside rope_parameters"),
    ("original_max_position_embeddings", 4096, "is 4096 but rope_parameters.orig"),
])  # fmt: skip
def test_two_places_that_disagree_are_refused(tmp_path, field, value, message):
    """Transformers silently takes one of them."""
    raw = saved(tmp_path, "qwen3", rope_parameters=YARN | {"rope_theta": 1e4})
    with pytest.raises(ConfigError, match=message):
        parse_config(raw | {field: value}, "here.json")


@pytest.mark.parametrize("field", REFUSED)
def test_what_changes_the_result_and_is_not_supported_is_named(tmp_path, field):
    value, family = REFUSED[field]
    raw = saved(tmp_path, family)
    outer, _, inner = field.partition(".")
    raw |= {outer: raw[outer] | {inner: value}} if inner else {field: value}
    with pytest.raises(ConfigError, match=rf"here.json: {outer}.*{inner}"):
        parse_config(raw, "here.json")


SIZES = {
    "query heads": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 4},
     "num_key_value_heads 4, found 6"),
    "more key-value heads": ("qwen3", {"num_key_value_heads": 8}, "num_attention_heads: .* 8, found 4"),
    "an odd head": ("qwen3", {"head_dim": 15}, "head_dim x partial_rotary_factor: .* of 2, found 15"),
    "an odd rotation": ("qwen3_next", {"head_dim": 20}, "head_dim x partial_rotary_factor: .* of 2, found 5"),
    "no rotation": ("qwen3_next", {"head_dim": 2}, "head_dim x partial_rotary_factor: .* of 2, found 0"),
    "linear heads": ("qwen3_next", {"linear_num_key_heads": 2, "linear_num_value_heads": 5},
     "linear_num_value_heads: expected a multiple of linear_num_key_heads 2, found 5"),
    "experts of a token": ("qwen3_moe", {"num_experts_per_tok": 5},
     "num_experts_per_tok: .* num_experts 4, found 5"),
    "dense layers by name": ("qwen3_moe", {"mlp_only_layers": ["first"]},
     "mlp_only_layers: .* found 'first'"),
    "too few kinds": ("qwen3", {"layer_types": ["full_attention"] * 3},
     "num_hidden_layers 4 entries, found 3"),
    "too many kinds": ("qwen3_next", {"layer_types": ["full_attention"] * 5},
     "num_hidden_layers 4 .*, found 5"),
    "biases that a family has or lacks": ("qwen2", {"attention_bias": False},
     "attention_bias: only True is supported in a qwen2 model, found False"),
    "a size of heads that is not given": ("llama", {"hidden_size": 66, "head_dim": None},
     "hidden_size 66: expected num_attention_heads 4 x head_dim, found head_dim None"),
    "a size of heads that vLLM does not read": ("qwen2", {"head_dim": 32},
     "hidden_size 64: expected num_attention_heads 4 x head_dim, found head_dim 32"),
    "a stretched rotation": ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
     "rope_parameters.rope_type: expected one of default, yarn, llama3, found 'longrope'"),
    "a kind of kinds": ("qwen3", {"layer_types": [["full_attention"]] * 4},
     "layer_types: .'full_attention'. is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_numbers_that_no_model_can_have_are_refused_by_key_and_number(tmp_path, case):
    family, changes, message = SIZES[case]
    with pytest.raises(ConfigError, match=f"here.json: .*{message}"):
        parse_config(saved(tmp_path, family) | changes, "here.json")


@pytest.mark.parametrize(("family", "field"), [
    ("qwen3_moe", "mlp_only_layers"),
    ("qwen3_next", "mlp_only_layers"),
    ("qwen3", "layer_types"),
    ("qwen3_next", "layer_types"),
    ("qwen3", "rope_scaling"),
    ("qwen3_moe", "output_router_logits"),
])  # fmt: skip
def test_null_means_what_transformers_takes_it_for(tmp_path, family, field):
    raw = saved(tmp_path, family)
    interval = {"full_attention_interval": 4} if family == "qwen3_next" else {}
    assert parse_config(raw | interval | {field: None}, "null") == parse_config(raw, "whole")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_is_refused_where_vllm_slides_it(tmp_path, family):
    """Qwen2's and Qwen3's files have one that ``use_sliding_window: false`` switches off; Transformers' Llama
    and GLM have none, and vLLM's (``EngineArgs.create_engine_config``) have it whatever that field says."""
    raw = saved(tmp_path, family) | {"use_sliding_window": False}
    slides = family in ("llama", "glm4_moe")
    for window in (None, 4096):
        found = parsed_or_error(raw | {"sliding_window": window})
        assert isinstance(found, ConfigError) == bool(slides and window), found


def test_an_unsupported_family_is_told_where_a_new_one_is_added(tmp_path):
    with pytest.raises(ConfigError, match=r"llama, qwen2, .*, found .mistral. .*hf/config_fields\.py"):
        parse_config(saved(tmp_path, "qwen3") | {"model_type": "mistral"}, "here.json")


def test_of_a_model_of_images_the_text_model_is_read(tmp_path):
    text = saved(tmp_path, "qwen3_5_text")
    model = parse_config({"model_type": "qwen3_5", "text_config": text}, "here.json")
    assert model == replace(parse_config(text, "text.json"), prefix="model.language_model.")
    for changes, message in (
        (
            {"tie_word_embeddings": True},
            "tie_word_embeddings is True but text_config.tie_word_embeddings is None",
        ),
        ({"text_config": text | {"model_type": "qwen3"}}, "text_config: model_type: expected 'qwen3_5_text'"),
        (
            {"text_config": text | {"output_gate_type": "sigmoid"}},
            "output_gate_type: only 'swish' is supported",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config({"model_type": "qwen3_5", "text_config": text} | changes, "here.json")


UNREADABLE = {
    "half": (b"{", "not valid JSON"),
    "not UTF-8": (b'{"model_type": "\xff"}', "not UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), "not UTF-8"),
    "a list": (b"[]", "expected a JSON object, found a list"),
    "a number": (b"3", "expected a JSON object, found a int"),
    "nothing": (b"", "not valid JSON"),
    "an empty object": (b"{}", "missing field 'model_type'"),
    "deep": (b"[" * 200_000, "not valid JSON"),
    "a long number": (b'{"model_type": ' + b"9" * 5000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_unreadable_files_are_named(tmp_path, fault):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    data, message = UNREADABLE[fault]
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        read_config(tmp_path)


def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(tmp_path):
    """``test_layout.py`` has every other rule."""
    model = parse_config(saved(tmp_path, "qwen3"), "tiny")
    with pytest.raises(ValueError, match="num_key_value_heads 2"):
        transformer_config(model, ParallelRecipe(tensor=4), torch.float32)


@pytest.mark.parametrize(("name", "billions", "pairs"), [("qwen3-32b", 31.98, 3.28e-5), (
    "qwen3-next-80b-a3b-thinking", 3.56, 2.76e-5)])  # fmt: skip
def test_the_cost_of_the_papers_models(name, billions, pairs):
    """A3B has 3 billion without the head. Only 12 of Qwen3-Next's 48 layers have attention."""
    model = read_config(SHIPPED / f"{name}.json")
    assert active_parameters(model) / 1e9 == pytest.approx(billions, abs=0.01)
    assert pair_cost(model) == pytest.approx(pairs, rel=0.01)
