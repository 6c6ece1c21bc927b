"""Which models are accepted where vLLM computes: by configs of its families, with small random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused, SamplingParams
from samovar.replicas.model import ModelCard, ModelSpec, describe_model, inspect_model, refuse_early, served
from samovar.router.ingress.app import open_prompts
from samovar.router.openai import ApiError, ChatMessage, InvalidValue, ParsedChat, RequestParser
from tests.house import ROOT
from tests.support.engines.tiny_models import EOS_ID, make_tiny_model, make_tiny_tokenizer

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/support/engines/vllm_families.json").read_text(encoding="utf-8")
)
REFUSED = ("t5", "bert", "reranker", "embedder")
STATES = ("qwen3_next", "mamba2")
ACCEPTED = [name for name in CONFIGS if name not in REFUSED]
QUANTIZED = {
    "deepseek_v3": "fp8",
    "llama_fp8": "compressed-tensors",
    "mixtral_awq": "awq",
    "gpt_oss": "mxfp4",
    "llama_gptq": "gptq",
}
SIZES = {
    "deepseek_v3": (129_280, 163_840),
    "qwen3_next": (151_936, 262_144),
    "gemma3": (262_208, 131_072),
    "llama_fp8": (128_256, 131_072),
    "mixtral_awq": (32_000, 32_768),
    "gpt_oss": (201_088, 131_072),
    "gpt_neox": (50_304, 2048),
    "mamba2": (50_288, 8192),
    "llama_gptq": (32_000, 4096),
    "of_next_year": (200_000, 1 << 20),
    "vl_of_next_year": (100_000, 65_536),
}
"""Vocabulary and context; that of Mamba 2 is given by the settings."""


def settings(tmp_path: Path, name: str = "", **sections: Any) -> Settings:
    """For vLLM; without tiers where a model keeps states."""
    given: dict[str, Any] = {"engine": {"kind": "vllm"}, "model": {"cache_dir": str(tmp_path / "cache")}}
    if name in STATES:
        given["tiers"] = {"enabled": False}
    if name == "mamba2":
        given["model"]["context_tokens_max"] = 8192
    for section, values in sections.items():
        given[section] = {**given.get(section, {}), **values}
    return Settings.model_validate(given)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def family(request: pytest.FixtureRequest, tokenizer: Path, tmp_path: Path) -> Path:
    return made(tmp_path, tokenizer, request.param)


def made(tmp_path: Path, tokenizer: Path, name: str, **changes: Any) -> Path:
    """A directory of a family, whose weights are of the kinds that quantised checkpoints hold."""
    path = Path(shutil.copytree(tokenizer, tmp_path / name))
    (path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(8, 8, generator=generator)
    tensors = {
        "model.embed_tokens.weight": values.to(torch.bfloat16),
        "model.layers.0.mlp.weight": values.to(torch.float8_e4m3fn),
        "model.layers.0.mlp.qweight": values.to(torch.int32),
        "model.layers.0.mlp.blocks": values.to(torch.uint8),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@contextmanager
def refusal(words: str) -> Iterator[None]:
    with pytest.raises(ModelRefused, match=words) as caught:
        yield
    assert caught.value.fix


@pytest.mark.parametrize("family", ACCEPTED, indirect=True)
def test_a_family_of_vllms_is_described_without_numbers_that_it_lacks(family: Path, tmp_path: Path) -> None:
    name = family.name
    card = describe_model(settings(tmp_path, name), family)
    assert type(card) is ModelCard
    assert (card.vocab, card.context_tokens_max) == SIZES[name]
    assert card.model_type == CONFIGS[name]["model_type"]
    assert card.quantization == QUANTIZED.get(name, "")
    assert EOS_ID in card.eos_token_ids
    assert card.has_chat_template
    assert card.weights_bytes == 8 * 8 * (2 + 1 + 4 + 1)
    refuse_early(settings(tmp_path, name), family)


@pytest.mark.parametrize("family", [*ACCEPTED, *REFUSED], indirect=True)
def test_our_own_engine_refuses_each_of_them_and_names_the_other(family: Path, tmp_path: Path) -> None:
    ours = settings(tmp_path, engine={"kind": "samovar"})
    with pytest.raises(ModelRefused) as caught:
        describe_model(ours, family)
    assert ("--engine vllm" in caught.value.fix) == (family.name in ACCEPTED)
    with pytest.raises(ModelRefused):
        refuse_early(ours, family)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("t5", r"is an encoder-decoder model \(t5\)"),
        ("bert", "is BertForMaskedLM, which does not generate text"),
        ("reranker", "is Qwen3ForSequenceClassification, which does not generate"),
        ("embedder", "is Qwen3Model, which does not generate"),
        ("qwen3_next", r"keep a state instead of K and V \(full_attention_interval\), which no cache tier"),
        ("mamba2", r"keep a state instead of K and V \(state_size\)"),
    ],
    indirect=["family"],
)
def test_what_vllm_does_not_serve_through_our_front_is_refused_at_once(
    family: Path, words: str, tmp_path: Path
) -> None:
    with refusal(words):
        describe_model(settings(tmp_path), family)
    with refusal(words):
        refuse_early(settings(tmp_path), family)


def test_a_context_that_nobody_states_is_asked_for(tokenizer: Path, tmp_path: Path) -> None:
    path = made(tmp_path, tokenizer, "mamba2")
    without = settings(tmp_path, tiers={"enabled": False})
    with refusal("has no max_position_embeddings, and transformers knows none for the type 'mamba2'"):
        describe_model(without, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "perpetuum"}))
    with refusal(r"knows none for the type 'perpetuum' \(transformers does not accept .*perpetuum"):
        describe_model(without, path)


@pytest.mark.parametrize(
    ("stated", "context"), [(1024, 1024), (10**30, 2048), (1e30, 2048), (None, 2048), (True, 2048)]
)
def test_a_tokenizer_bounds_the_context_as_in_vllm(
    tokenizer: Path, tmp_path: Path, stated: object, context: int
) -> None:
    path = made(tmp_path, tokenizer, "gpt_neox")
    told = json.loads((path / "tokenizer_config.json").read_text()) | {"model_max_length": stated}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    card = describe_model(settings(tmp_path), path)
    assert card.context_tokens_max == context
    assert card.context_tokens(None) == context
    assert (card.context_tokens(17), card.context_tokens(1 << 20)) == (17, context)


def test_transformers_is_asked_only_for_what_a_config_leaves_out_and_once(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, nested = made(tmp_path, tokenizer, "llama_fp8"), made(tmp_path, tokenizer, "gemma3")
    first = describe_model(settings(tmp_path), nested)
    monkeypatch.setattr(served, "_ask_transformers", lambda path: pytest.fail("asked"))
    assert describe_model(settings(tmp_path), nested) == first
    assert describe_model(settings(tmp_path), plain).vocab == SIZES["llama_fp8"][0]


@pytest.mark.parametrize(
    ("architecture", "generates"),
    [
        ("Qwen2_5_VLForConditionalGeneration", True),
        ("GPT2LMHeadModel", True),
        ("InternVLChatModel", True),
        ("ChatGLMModel", True),
        ("PanguEmbeddedForCausalLM", True),
        ("MiniCPMV", True),
        ("Qwen2ForProcessRewardModel", False),
        ("BgeM3EmbeddingModel", False),
        ("LlamaModel", False),
        ("JinaVLForRanking", False),
        ("ColPaliForRetrieval", False),
        ("RobertaForTokenClassification", False),
    ],
)
def test_architectures_that_write_text_are_told_by_their_names(
    tokenizer: Path, tmp_path: Path, architecture: str, generates: bool
) -> None:
    path = made(tmp_path, tokenizer, "llama_fp8", architectures=[architecture])
    if generates:
        refuse_early(settings(tmp_path), path)
        return
    with refusal(f"is {architecture}, which does not generate text"):
        refuse_early(settings(tmp_path), path)


def test_what_else_is_no_model_to_chat_with_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    path = made(tmp_path, tokenizer, "llama_fp8")
    pooling = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (path / "modules.json").write_text(json.dumps(pooling))
    with refusal("it is a model for embeddings"):
        refuse_early(settings(tmp_path), path)
    (path / "modules.json").unlink()
    config = CONFIGS["llama_fp8"]
    (path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with refusal("does not generate text"):
        refuse_early(settings(tmp_path), path)
    (path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with refusal("names no architectures"):
        refuse_early(settings(tmp_path), path)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").unlink()
    with refusal(r"has no tokenizer\.json"):
        describe_model(settings(tmp_path), path)


def test_a_model_without_weights_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    path = made(tmp_path, tokenizer, "mixtral_awq")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with refusal(r"no \*\.safetensors weights, only pytorch_model\.bin"):
        describe_model(settings(tmp_path), path)


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layers_block_type": ["mamba", "attention"]},
        {"hybrid_override_pattern": "M-M*"},
        {"attn_layer_period": 8, "mamba_d_state": 16},
        {"text_config": {"linear_attn_config": {"kda_layers": [1]}, "max_position_embeddings": 4096}},
    ],
)
def test_states_are_seen_in_a_config(tokenizer: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    path = made(tmp_path, tokenizer, "of_next_year", **config)
    with refusal("keep a state instead of K and V"):
        refuse_early(settings(tmp_path), path)
    refuse_early(settings(tmp_path, tiers={"enabled": False}), path)


def test_layers_that_are_named_go_before_fields_of_states(tokenizer: Path, tmp_path: Path) -> None:
    """Granite 4's plain sizes have the type of the hybrid ones, and their fields."""
    plain = {"layer_types": ["attention", "attention"], "mamba_d_state": 256}
    refuse_early(settings(tmp_path), made(tmp_path, tokenizer, "of_next_year", **plain))


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_a_checkpoint_that_quantises_its_kv_is_refused_beside_tiers(
    tokenizer: Path, tmp_path: Path, file: str
) -> None:
    stated = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    path = made(tmp_path, tokenizer, "of_next_year")
    if file == "config.json":
        (path / file).write_text(json.dumps(CONFIGS["of_next_year"] | {"quantization_config": stated}))
    else:
        told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        told["quantization"]["kv_cache_quant_algo"] = "FP8"
        (path / file).write_text(json.dumps(told))
    with refusal("quantises its KV cache, whose scales lie outside of the pages"):
        refuse_early(settings(tmp_path), path)
    refuse_early(settings(tmp_path, tiers={"enabled": False}), path)
    in_16_bits = {"vllm": {"options": {"kv_cache_dtype": "bfloat16"}}}
    card = describe_model(settings(tmp_path, engine=in_16_bits), path)
    assert card.quantization == ("compressed-tensors" if file == "config.json" else "NVFP4")


@pytest.mark.guarantee("G3")
def test_how_weights_are_quantised_is_in_the_fingerprint(tokenizer: Path, tmp_path: Path) -> None:
    path = made(tmp_path, tokenizer, "mixtral_awq")
    seen = {describe_model(settings(tmp_path), path).fingerprint}
    config = CONFIGS["mixtral_awq"]
    for quantization in (config["quantization_config"] | {"group_size": 64}, None):
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        seen.add(describe_model(settings(tmp_path), path).fingerprint)
    for name in ("hf_quant_config.json", "quantize_config.json"):
        (path / name).write_text('{"quant_method": "gptq", "bits": 8}')
        seen.add(describe_model(settings(tmp_path), path).fingerprint)
    assert len(seen) == 5


def test_both_engines_see_the_same_model(tmp_path: Path) -> None:
    """So that a rollout from one to the other is of one model, by name and by digest."""
    path = make_tiny_model(tmp_path / "m", "llama")
    ours, card = inspect_model(path), describe_model(settings(tmp_path), path)
    assert isinstance(describe_model(settings(tmp_path, engine={"kind": "samovar"}), path), ModelSpec)
    assert ours.parts() == card.parts()


@pytest.mark.parametrize("family", ACCEPTED, indirect=True)
async def test_the_front_builds_prompts_for_any_family(family: Path, tmp_path: Path) -> None:
    card, prompts = open_prompts(settings(tmp_path, family.name), str(family))
    asked = ParsedChat(model="m", sampling=SamplingParams(), messages=(ChatMessage("user", "Hello"),))
    try:
        prompt = await prompts.chat("tenant", asked)
        assert prompts.vocabulary.text(prompt.token_ids).count("Hello") == 1
        with pytest.raises(InvalidValue, match=f"this model's ids end at {card.vocab - 1}"):
            prompts.vocabulary.refuse_unknown([card.vocab], "prompt")
    finally:
        prompts.close()


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_images_are_refused_with_the_field_also_where_the_model_takes_them(
    family: Path, tmp_path: Path
) -> None:
    asked = settings(tmp_path)
    card = describe_model(asked, family)
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    parser = RequestParser(asked.limits, card.context_tokens_max, card.generation)
    with pytest.raises(ApiError, match="only 'text' parts are") as caught:
        parser.chat(json.dumps(body).encode())
    assert caught.value.param == "messages[0].content[1].type"
