"""inspect_model: what it says of the served families, and every refusal with its reason and fix."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    T5Config,
)

from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.model.spec import SERVED_TYPES, ModelRefused, ModelSpec, inspect_model
from samovar.replicas.start.build import model_namespace
from tests.support.engines.tiny_models import EOS_ID, PAD_ID, Family, make_tiny_model

FAMILIES: tuple[Family, ...] = get_args(Family)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def llama(tiny: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(tiny["llama"], tmp_path / "tiny-llama"))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def refusal(path: Path) -> ModelRefused:
    with pytest.raises(ModelRefused) as caught:
        inspect_model(path)
    assert caught.value.reason in str(caught.value).replace(". Fix:", ".")
    assert "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_served_family_is_described(tiny: dict[str, Path], family: str) -> None:
    spec = inspect_model(tiny[family])
    model = AutoModelForCausalLM.from_pretrained(tiny[family])
    state = model.state_dict()
    assert spec.model_type == family
    assert family in SERVED_TYPES
    assert (spec.layers, spec.q_heads, spec.kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.hidden, spec.vocab, spec.context_tokens_max) == (64, 512, 4096)
    assert spec.eos_token_ids == (EOS_ID,)
    assert "rope_theta" in spec.rope
    assert spec.has_chat_template
    assert len(spec.fingerprint) == 32
    rows = sum(state[name].shape[0] for name in state if "layers.0.self_attn.k" in name and "proj.w" in name)
    assert rows == (0 if family == "phi3" else spec.kv_heads * spec.head_dim)
    assert spec.weights_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_kv_bytes_follow_from_the_cache_that_transformers_keeps(tiny: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny["qwen3"])
    with torch.no_grad():
        cache = model(torch.arange(7)[None], use_cache=True).past_key_values
    bytes_total = sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    assert inspect_model(tiny["qwen3"]).kv_bytes_per_token(4) * 7 == bytes_total


def test_name_is_the_directory_or_what_the_converter_wrote(llama: Path) -> None:
    assert inspect_model(llama).name == "tiny-llama"
    edit_json(llama / "samovar.json", name="Some-Name")
    assert inspect_model(llama).name == "Some-Name"


def test_eos_ids_are_of_generation_config_and_tokenizer(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[7, 9])
    assert inspect_model(llama).eos_token_ids == (7, 9, EOS_ID)
    (llama / "generation_config.json").unlink()
    edit_json(llama / "config.json", eos_token_id=PAD_ID)
    edit_json(llama / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": "<|im_end|>"})
    assert inspect_model(llama).eos_token_ids == (PAD_ID, EOS_ID)


def test_model_without_chat_template_is_served(llama: Path) -> None:
    (llama / "chat_template.jinja").unlink()
    assert not inspect_model(llama).has_chat_template
    edit_json(llama / "tokenizer_config.json", chat_template="{{ messages }}")
    assert inspect_model(llama).has_chat_template


def test_qwen2_with_an_unused_window_is_served(tiny: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny["qwen2"], tmp_path / "m"))
    edit_json(path / "config.json", sliding_window=32, use_sliding_window=False, layer_types=...)
    assert inspect_model(path).model_type == "qwen2"


def test_rope_scaling_by_position_alone_is_served(llama: Path) -> None:
    edit_json(
        llama / "config.json",
        rope_parameters=...,
        rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    rope = json.loads(inspect_model(llama).rope)
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 2.0, 5e5)


def test_head_dim_may_differ_from_hidden_by_heads(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3")
    assert inspect_model(path).head_dim == 16
    edit_json(path / "config.json", head_dim=32)
    assert inspect_model(path).head_dim == 32


def test_shards_are_read_through_their_index(tiny: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny["llama"])
    path = Path(shutil.copytree(tiny["llama"], tmp_path / "sharded"))
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="100KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert inspect_model(path).weights_bytes == inspect_model(tiny["llama"]).weights_bytes
    shards[1].unlink()
    assert shards[1].name in refusal(path).reason
    assert "missing shards" in refusal(path).fix


# --- refusals: directory and config -------------------------------------------------------------


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'} does not exist" in refusal(tmp_path / "nowhere").reason


def test_file_is_refused(llama: Path) -> None:
    assert "is a file, not a model directory" in refusal(llama / "model.safetensors").reason


def test_missing_config_is_refused(llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "has no config.json" in refusal(llama).reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "config.json is not valid JSON"),
        ("\xff\xfe", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("[]", "config.json holds a JSON list"),
        ("{}", "has no model_type"),
        ('{"model_type": 7}', "has no model_type"),
    ],
)
def test_config_that_is_no_object_is_refused(llama: Path, content: str, reason: str) -> None:
    (llama / "config.json").write_bytes(content.encode("latin-1"))
    assert reason in refusal(llama).reason


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(architectures=["GPT2LMHeadModel"]), "not a causal language model"),
        (GPT2Config(), "architecture 'gpt2'"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM, not a causal language model"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "is an encoder-decoder model (t5)"),
        (GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), "architecture 'gpt_neox'"),
        (Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]), "it takes images; its text-only"),
        (MambaConfig(architectures=["MambaForCausalLM"]), "a state instead of K and V"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (LlamaConfig(architectures=["LlamaModel"]), "LlamaModel, not a causal language model"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else None,
)
def test_what_is_no_served_causal_model_is_refused(
    llama: Path, config: PreTrainedConfig, reason: str
) -> None:
    config.save_pretrained(llama)
    assert reason in refusal(llama).reason
    assert "llama, mistral, qwen2, qwen3" in refusal(llama).fix


def test_unknown_architecture_is_refused(llama: Path) -> None:
    edit_json(llama / "config.json", model_type="perpetuum", architectures=["PerpetuumForCausalLM"])
    assert "architecture 'perpetuum'" in refusal(llama).reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_causal": False}, "is_causal=false"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized checkpoint (quantization_config, method gptq), which is not served: its kernels",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "the package accelerate"),
        (
            {"quantization_config": {"quant_method": "new"}},
            "method new), which is not served: it is not known",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers with chunked_attention"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic'",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": "wide"}, "transformers does not accept"),
        ({"num_hidden_layers": 3}, "the first is model.layers.2."),
        ({"tie_word_embeddings": False}, "the first is lm_head.weight"),
        ({"attention_bias": True}, "the first is model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_config_that_cannot_be_served_is_refused(llama: Path, changes: dict[str, Any], reason: str) -> None:
    edit_json(llama / "config.json", **changes)
    assert reason in refusal(llama).reason


def test_attention_that_looks_ahead_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny["gemma3_text"], tmp_path / "m"))
    edit_json(path / "config.json", use_bidirectional_attention=True)
    assert "looks ahead" in refusal(path).reason


def test_rotation_is_checked_for_each_kind_of_layer(tiny: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny["gemma3_text"], tmp_path / "m"))
    ropes = json.loads((path / "config.json").read_text())["rope_parameters"]
    ropes["sliding_attention"] |= {"rope_type": "dynamic", "factor": 2.0}
    edit_json(path / "config.json", rope_parameters=ropes)
    assert "rope_type='dynamic'" in refusal(path).reason


# --- refusals: weights --------------------------------------------------------------------------


def truncate(path: Path, bytes_left: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(bytes_left)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.unlink(), "no *.safetensors weights"),
        (lambda p: p.rename(p.with_name("pytorch_model.bin")), "only pytorch_model.bin"),
        (lambda p: p.rename(p.with_name("weights.safetensors")), "weights.safetensors but neither"),
        (lambda p: truncate(p, p.stat().st_size - 1), "is truncated: the header asks for"),
        (lambda p: truncate(p, 500), "is truncated: its header should have"),
        (lambda p: truncate(p, 3), "does not begin like a safetensors file"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\0"), "longer than its header says"),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda p: p.write_bytes((9).to_bytes(8, "little") + b"{'a': 1}}"), "damaged safetensors header"),
        (
            lambda p: p.write_bytes(
                (50).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[1]}}'[:50]
            ),
            "damaged safetensors header",
        ),
        (
            lambda p: p.with_name("model.safetensors.index.json").write_text("{}") and p.unlink(),
            "not a shard index",
        ),
        (
            lambda p: (
                p.with_name("model.safetensors.index.json").write_text(
                    '{"weight_map": {"a": "../../x.safetensors"}}'
                )
                and p.unlink()
            ),
            "no plain file name",
        ),
    ],
)
def test_damaged_weights_are_refused(llama: Path, spoil: Callable[[Path], object], reason: str) -> None:
    spoil(llama / "model.safetensors")
    assert reason in refusal(llama).reason


def test_missing_tensor_is_refused(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 of the 20 tensors" in refusal(llama).reason
    assert "model.layers.1.mlp.up_proj.weight" in refusal(llama).reason


def test_integer_weights_are_refused(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    assert "is I8: quantized weights" in refusal(llama).reason


# --- refusals: tokenizer ------------------------------------------------------------------------


def test_missing_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(llama).reason
    (llama / "tokenizer.model").write_bytes(b"x")
    assert "only tokenizer.model, no tokenizer.json" in refusal(llama).reason


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"vocab": [[]]}}', '{"model": {"vocab": {}}}'])
def test_damaged_tokenizer_is_refused(llama: Path, content: str) -> None:
    (llama / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refusal(llama).reason


def test_tokenizer_with_ids_beyond_the_embeddings_is_refused(llama: Path) -> None:
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<pad>"})
    (llama / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "'<pad>' the id 512, but the model has only 512 embeddings" in refusal(llama).reason


# --- fingerprint --------------------------------------------------------------------------------


def test_fingerprint_is_of_the_content_alone(llama: Path, tiny: dict[str, Path]) -> None:
    edit_json(llama / "config.json", _name_or_path="elsewhere", transformers_version="9.9", use_cache=False)
    (llama / "README.md").write_text("hello")
    assert inspect_model(llama).fingerprint == inspect_model(tiny["llama"]).fingerprint


@pytest.mark.guarantee("G3", "F13")
def test_models_have_different_fingerprints(tiny: dict[str, Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "seed1", "llama", seed=1)
    prints = {inspect_model(path).fingerprint for path in (*tiny.values(), other)}
    assert len(prints) == len(FAMILIES) + 1


@pytest.mark.guarantee("G3", "F13")
def test_any_change_gives_another_fingerprint(llama: Path) -> None:
    def flip_last_byte() -> None:
        content = bytearray((llama / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (llama / "model.safetensors").write_bytes(content)

    changes: list[Callable[[], object]] = [
        lambda: edit_json(llama / "config.json", rms_norm_eps=1e-4),
        lambda: edit_json(llama / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        lambda: edit_json(llama / "tokenizer_config.json", eos_token="<|endoftext|>"),
        lambda: (llama / "tokenizer.json").write_text((llama / "tokenizer.json").read_text() + " "),
        flip_last_byte,
    ]
    seen = {inspect_model(llama).fingerprint}
    for change in changes:
        change()
        seen.add(inspect_model(llama).fingerprint)
    assert len(seen) == len(changes) + 1


def test_spec_and_refusal_cross_processes(tiny: dict[str, Path]) -> None:
    spec = inspect_model(tiny["llama"])
    assert isinstance(spec, ModelSpec)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 (our own bytes)
    refused = pickle.loads(pickle.dumps(ModelRefused("a is b", "do c")))  # noqa: S301 (our own bytes)
    assert (refused.reason, refused.fix, str(refused)) == ("a is b", "do c", "a is b. Fix: do c.")


def test_g3_the_namespace_holds_what_makes_kv_interchangeable(tiny: dict[str, Path], llama: Path) -> None:
    """float16 and bfloat16 have blocks of the same size: only the name of the dtype tells them apart."""
    spec = inspect_model(llama)
    usual = KvGeometry(2, 16, 2, 16, torch.bfloat16)
    told = {
        model_namespace(spec, replace(usual, dtype=torch.float32)),
        model_namespace(spec, replace(usual, dtype=torch.float16)),
        model_namespace(spec, usual),
        model_namespace(spec, replace(usual, block_tokens=32)),
        model_namespace(spec, replace(usual, groups=2)),
        model_namespace(spec, replace(usual, is_int8=True)),
        model_namespace(spec, replace(usual, groups=2, is_int8=True)),
        model_namespace(spec, usual, "exact cpu"),
        model_namespace(inspect_model(tiny["qwen2"]), usual),
    }
    assert len(told) == 9
    assert model_namespace(spec, usual) in told


# --- what is recommended for sampling -------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (
            {"do_sample": False, "temperature": None, "min_p": 0, "max_new_tokens": 64},
            {"min_p": 0.0, "max_tokens": 64},
        ),
        ({"temperature": 9, "top_p": 0, "top_k": "20", "repetition_penalty": True}, {}),
        ({"repetition_penalty": 1.05, "eos_token_id": 2, "penalty_alpha": 0.6}, {"repetition_penalty": 1.05}),
    ],
)
def test_generation_config_gives_defaults_that_a_request_may_ask_for(
    llama: Path, stated: dict[str, Any], found: dict[str, float]
) -> None:
    (llama / "generation_config.json").write_text(json.dumps(stated))
    assert inspect_model(llama).generation == found


def test_the_default_model_recommends_nothing(smollm2: Path) -> None:
    assert inspect_model(smollm2).generation == {}
