"""The arithmetic of sizing, against numbers worked out by hand and sizes known from models' papers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cluster.plan.model_kv import read_shape, shape_of
from samovar.cluster.plan.sizing import (
    KV_FORMATS,
    SizingOptions,
    TierSpeed,
    lines,
    parse_contexts,
    parse_size,
    parse_tokens,
    prefill_s,
    read_model,
    size_model,
)
from samovar.replicas.messages import ModelRefused
from tests.support.model_shapes import MHA_7B, QWEN_32B

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "torch_dtype": "bfloat16",
}
GIB = 1 << 30


def test_a_quantized_models_size_says_nothing_of_its_parameters() -> None:
    options = SizingOptions()
    for config in (
        {**MHA_7B, "quantization_config": {"quant_method": "awq", "bits": 4}},
        {"text_config": MHA_7B, "compression_config": {"format": "x"}},
    ):
        sized = size_model(shape_of(config), 4 * GIB, 80 * GIB, [8192], options)
        assert sized.contexts[0].compute_s is None
        assert any("a quantized model" in note for note in sized.notes)
    assert size_model(shape_of(MHA_7B), 14 * GIB, 80 * GIB, [8192], options).contexts[0].compute_s is not None


def test_the_seed_examples_come_out() -> None:
    qwen = shape_of(QWEN_32B)
    assert (qwen.kind, qwen.token_bytes()) == ("GQA", 262_144)
    assert shape_of(MHA_7B).context_bytes(parse_tokens("8k")) == 4 * GIB
    # 80 GB less 65 GB of weights (GB = 10^9) is room for 27 sequences of 0.5 GiB, or 6 of 2 GiB.
    sizing = size_model(
        qwen, parse_size("65GB"), parse_size("80GB"), parse_contexts("2k,8k"), SizingOptions()
    )
    assert sizing.kv_room_bytes == 15 * 10**9
    assert [(one.tokens, one.kv_bytes, one.sequences) for one in sizing.contexts] == [
        (2048, GIB // 2, 27),
        (8192, 2 * GIB, 6),
    ]


@pytest.mark.parametrize(
    ("config", "kind", "token_bytes"),
    [
        (MHA_7B, "MHA", 2 * 32 * 4096 * 2),
        ({**MHA_7B, "num_key_value_heads": 1}, "MQA", 2 * 32 * 128 * 2),
        ({**MHA_7B, "num_key_value_heads": 8, "head_dim": 256}, "GQA", 2 * 32 * 8 * 256 * 2),
        ({**MHA_7B, "torch_dtype": "float32"}, "MHA", 2 * 32 * 4096 * 4),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, "MHA", 2 * 12 * 768 * 2),
        (
            {"model_type": "falcon", "n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True},
            "MQA",
            2 * 32 * 64 * 2,
        ),
        (DEEPSEEK, "MLA", 61 * 576 * 2),  # 70,272 B: DeepSeek-V3's
        ({"model_type": "x", "text_config": QWEN_32B}, "GQA", 262_144),
        ({**QWEN_32B, "num_hidden_layers": 3, "num_key_value_heads": [8, 4, 8]}, "GQA", 2 * 20 * 128 * 2),
    ],
)
def test_bytes_per_token_of_each_kind(config: dict[str, Any], kind: str, token_bytes: int) -> None:
    shape = shape_of(config)
    assert (shape.kind, shape.token_bytes()) == (kind, token_bytes)
    assert shape.context_bytes(1000) == 1000 * token_bytes


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (QWEN_32B, 64 * 2 * 8 * (128 + 2)),  # 0.508 of its bf16
        (MHA_7B, 32 * 2 * 32 * (128 + 2)),
        ({**QWEN_32B, "num_hidden_layers": 3, "num_key_value_heads": [8, 4, 8]}, 2 * 20 * (128 + 2)),
        (DEEPSEEK, 61 * (576 + 2)),
    ],
)
def test_int8_has_a_scale_for_each_vector(config: dict[str, Any], token_bytes: int) -> None:
    shape = shape_of(config)
    assert shape.token_bytes(KV_FORMATS["int8"]) == token_bytes
    assert shape.context_bytes(1000, KV_FORMATS["int8"]) == 1000 * token_bytes
    sizing = size_model(shape, 10**9, 80 * 10**9, (1024,), SizingOptions(stored=KV_FORMATS["int8"]))
    assert (sizing.token_bytes, sizing.contexts[0].kv_bytes) == (token_bytes, 1024 * token_bytes)


def test_a_window_bounds_what_attention_reads_and_not_what_is_kept() -> None:
    """As the engine has it (docs/adr/027-windows-are-kept-whole.md)."""
    mistral = {**MHA_7B, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096}
    shape = shape_of(mistral)
    assert shape.context_bytes(32768) == 32768 * 131_072
    assert "32 of 32 layers have a window" in shape.notes[0]
    options = SizingOptions()
    wide = replace(shape, groups=tuple(replace(group, window=None) for group in shape.groups))
    assert prefill_s(shape, 7e9, 32768, options) < prefill_s(wide, 7e9, 32768, options)
    half = ["sliding_attention", "full_attention"] * 16
    mixed = shape_of({**mistral, "layer_types": half})
    assert mixed.context_bytes(8192) == 8192 * 131_072
    assert "16 of 32 layers have a window" in mixed.notes[0]
    gemma = shape_of({**mistral, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512})
    assert sorted((group.layers, group.window) for group in gemma.groups if group.window) == [(10, 512)]
    upper = {**QWEN_32B, "use_sliding_window": True, "max_window_layers": 60, "sliding_window": 1024}
    assert sorted((group.layers, group.window or 0) for group in shape_of(upper).groups) == [
        (4, 1024),
        (60, 0),
    ]


@pytest.mark.parametrize(
    "hybrid",
    [
        {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
        {"full_attention_interval": 4, "linear_num_key_heads": 16},
        {"attn_layer_period": 4, "attn_layer_offset": 3, "mamba_d_state": 16},
        {"attn_layer_indices": [0, 4, 8, 12, 16, 20, 24, 28], "mamba_d_conv": 4},
        {"hybrid_override_pattern": "M-M*" * 8},
        {"num_kv_shared_layers": 24},
    ],
)
def test_layers_without_kv_count_for_nothing(hybrid: dict[str, Any]) -> None:
    shape = shape_of({**MHA_7B, **hybrid})
    assert shape.token_bytes() == 8 * 2 * 4096 * 2
    assert shape.other_layers == 24
    assert any("24 of 32 layers" in note for note in shape.notes)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**MHA_7B, "num_hidden_layers": None}, "number of layers"),
        ({**MHA_7B, "num_attention_heads": None}, "number of heads"),
        ({**MHA_7B, "model_type": "unheard"}, "number of KV heads"),
        ({**MHA_7B, "num_key_value_heads": 5}, "no multiple of 5"),
        ({**MHA_7B, "num_key_value_heads": "8"}, "not a number"),
        ({**MHA_7B, "hidden_size": 4097}, "head_dim is not given"),
        ({**MHA_7B, "is_encoder_decoder": True}, "encoder-decoder"),
        ({**MHA_7B, "mamba_d_state": 16}, "does not say which"),
        ({**MHA_7B, "layer_types": ["full_attention"]}, "names 1 layers, not 32"),
        ({**MHA_7B, "layer_types": ["dreaming"] * 32}, "'dreaming'"),
        ({**MHA_7B, "layer_types": ["mamba"] * 32}, "no layer keeps KV"),
        ({**MHA_7B, "layer_types": ["sliding_attention"] * 32}, "size of the window"),
        ({**MHA_7B, "sliding_window": 4096}, "not which layers"),
        ({**DEEPSEEK, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({**DEEPSEEK, "index_head_dim": 128}, "index_head_dim"),
        ({**MHA_7B, "num_key_value_heads": [8]}, "no list of 32"),
    ],
)
def test_what_cannot_be_told_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelRefused, match=says):
        shape_of(config)


def test_a_directory_is_read_with_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    assert read_model(tmp_path)[1] is None
    assert read_shape(tmp_path / "config.json") == shape_of(QWEN_32B)
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 24)
    assert read_model(tmp_path)[1] == 1024
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 65_000_000_000}}))
    assert read_model(tmp_path)[1] == 65_000_000_000
    index.write_text("[]")
    with pytest.raises(ModelRefused, match="cannot be sized"):
        read_model(tmp_path)
    for bad in ("[]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(bad)
        with pytest.raises(ModelRefused, match=r"config\.json"):
            read_model(tmp_path)


def test_decoding_is_bound_by_what_it_reads() -> None:
    shape = shape_of(QWEN_32B)
    options = SizingOptions(memory_gb_per_s=3350)
    sizing = size_model(shape, 67 * 10**9, 80 * 10**9, [8192], options)
    assert sizing.weights_tokens_per_s == pytest.approx(50.0)
    (context,) = sizing.contexts
    assert context.alone_tokens_per_s == pytest.approx(3350e9 / (67e9 + 2 * GIB))
    assert context.sequences == 6
    assert context.batch_tokens_per_s == pytest.approx(6 * 3350e9 / (67e9 + 12 * GIB))


def test_several_gpus_have_their_memory_and_speed_together() -> None:
    shape, options = shape_of(QWEN_32B), SizingOptions(gpus=4)
    one, four = (size_model(shape, 67 * 10**9, 80 * 10**9, [8192], o) for o in (SizingOptions(), options))
    assert four.kv_room_bytes == 4 * 80 * 10**9 - 67 * 10**9
    assert four.weights_tokens_per_s == pytest.approx(4 * one.weights_tokens_per_s)
    ours, theirs = four.contexts[0], one.contexts[0]
    assert theirs.compute_s is not None
    assert ours.compute_s == pytest.approx(theirs.compute_s / 4)
    pairs = zip(ours.tiers, theirs.tiers, strict=True)
    loads = {tier.tier: (tier.load_s, other.load_s) for tier, other in pairs}
    assert loads["cpu"][0] < loads["cpu"][1] / 3
    assert loads["nvme"][0] == loads["nvme"][1]  # a drive is no faster for it
    assert "4 GPUs of 74.51 GiB of GPU memory" in lines(four, KV_FORMATS["bf16"], 80 * 10**9, 4)[1]


def test_loading_beats_computing_from_some_length_on() -> None:
    """By hand, without attention: 262,144 B at 25 GB/s is 10.5 us a token; 32e9 parameters take 129 us."""
    shape = replace(shape_of(QWEN_32B), attention_width=0)
    options = SizingOptions(tflops=989, computed_share=0.5, tiers=(TierSpeed("cpu", 25, 0.01),))
    sizing = size_model(shape, 64 * 10**9, 80 * 10**9, [2048], options)
    (tier,) = sizing.contexts[0].tiers
    per_token_s = 2 * 32e9 / (989e12 * 0.5) - 262_144 / 25e9
    assert tier.tokens == int(0.01 / per_token_s) + 1
    assert tier.is_quicker
    assert tier.load_s == pytest.approx(0.01 + 2048 * 262_144 / 25e9)
    compute_s = sizing.contexts[0].compute_s
    assert compute_s == pytest.approx(2 * 32e9 * 2048 / (989e12 * 0.5))
    assert tier.gb_per_s_needed == pytest.approx(2048 * 262_144 / (compute_s - 0.01) / 1e9)


def test_attention_makes_long_prompts_worth_loading_from_a_slow_tier() -> None:
    shape = shape_of(QWEN_32B)
    options = SizingOptions(tiers=(TierSpeed("slow", 1.9, 0.0),))
    contexts = size_model(shape, 64 * 10**9, 80 * 10**9, [1024, 131_072], options).contexts
    assert [one.tiers[0].is_quicker for one in contexts] == [False, True]
    first = contexts[0].tiers[0].tokens
    assert first is not None
    assert 1024 < first < 131_072
    never = SizingOptions(tiers=(TierSpeed("tape", 0.001, 0.0),))
    assert size_model(shape, 64 * 10**9, 80 * 10**9, [1024], never).contexts[0].tiers[0].tokens is None


def test_a_mixture_needs_its_active_parameters() -> None:
    shape = shape_of(DEEPSEEK)
    sizing = size_model(shape, 671 * 10**9, 8 * 141 * 10**9, [32768], SizingOptions())
    assert sizing.contexts[0].compute_s is None
    assert sizing.contexts[0].tiers == ()
    assert any("mixture" in note for note in sizing.notes)
    told = size_model(shape, 671 * 10**9, 8 * 141 * 10**9, [32768], SizingOptions(active_params=37e9))
    assert told.contexts[0].compute_s is not None
    assert len(told.contexts[0].tiers) == 3


def test_weights_that_do_not_fit_leave_no_room() -> None:
    sizing = size_model(shape_of(MHA_7B), 90 * 10**9, 80 * 10**9, [2048], SizingOptions())
    assert sizing.contexts[0].sequences == 0
    assert sizing.contexts[0].batch_tokens_per_s == 0
    assert "the weights alone do not fit" in sizing.notes


@pytest.mark.parametrize(
    "change",
    [
        {"memory_gb_per_s": 0},
        {"tflops": float("nan")},
        {"computed_share": 1.5},
        {"reserve_share": 1.0},
        {"block_tokens": 0},
        {"tiers": (TierSpeed("x", -1, 0),)},
        {"tiers": (TierSpeed("x", 1, -1),)},
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        size_model(shape_of(MHA_7B), 1, 1, [1], replace(SizingOptions(), **change))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    tokens=st.integers(1, 200_000), more=st.integers(1, 200_000), window=st.none() | st.integers(1, 100_000)
)
def test_more_tokens_never_cost_less(tokens: int, more: int, window: int | None) -> None:
    shape = shape_of({**MHA_7B, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": window})
    options = SizingOptions()
    assert shape.context_bytes(tokens) <= shape.context_bytes(tokens + more)
    assert prefill_s(shape, 7e9, tokens, options) < prefill_s(shape, 7e9, tokens + more, options)


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_size("80GB") == 80 * 10**9
    assert parse_size(" 64 GiB ") == 64 * GIB
    assert parse_size("0.5TB") == 5 * 10**11
    assert parse_size("1024") == 1024
    assert parse_contexts("2k,8k,32k,128k") == (2048, 8192, 32768, 131_072)
    assert parse_tokens("1m") == 1 << 20
    for bad in ("", "GB", "80 XB", "-1GB", "0", "1e9", "9" * 40, "0.3", "80GB,"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(bad)
    with pytest.raises(ValueError, match="number of tokens"):
        parse_contexts("2k,,8k")
