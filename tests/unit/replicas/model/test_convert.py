"""gguf_convert: a tiny GGUF written as llama.cpp writes it comes back as the model it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.gguf import convert_gguf
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.model.tokenizer import load_tokenizer
from tests.support.engines.tiny_models import EOS_ID, PAD_ID, make_tiny_model, make_tiny_tokenizer

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
Edit = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The permutation of llama.cpp's convert_hf_to_gguf.py: halves become neighbours."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    )


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = values
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = values
        elif name == "lm_head.weight":
            tensors["output.weight"] = values
        else:
            _, _, layer, rest = name.split(".", 3)
            if model.config.model_type in ("llama", "mistral") and ("q_proj" in rest or "k_proj" in rest):
                values = llama_cpp_order(values, 4 if "q_proj" in rest else 2)
            module, kind = rest.rsplit(".", 1)
            tensors[f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"] = values
    return tensors


def write_gguf(
    path: Path,
    model: Any,
    edit: Edit | None = None,
    arch: str = "llama",
    pre: str = "smollm",
    more: tuple[str, ...] = (),
) -> Path:
    """Write a model with the tiny tokenizer, and `more` tokens that no merge makes."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(4096)
    writer.add_block_count(2)
    writer.add_embedding_length(model.config.hidden_size)
    writer.add_feed_forward_length(2 * model.config.hidden_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(25000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    backend = json.loads(make_tiny_tokenizer().backend_tokenizer.to_str())
    vocab = backend["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(vocab, key=vocab.__getitem__), *more])
    normal = len(vocab) - 3 + len(more)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * normal)
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tensors = gguf_tensors(model)
    rows = tensors["token_embd.weight"]
    tensors["token_embd.weight"] = np.concatenate([rows, rows[: len(more)]])
    if edit is not None:
        edit(writer, tensors)
    for name, values in tensors.items():
        if values.ndim == 2 and "token_embd" in name:
            quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """bf16 values, so that the conversion to bf16 must give them back bit by bit."""
    path = make_tiny_model(tmp_path_factory.mktemp("original"), "llama", dtype=torch.bfloat16)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path)
    return model


def test_weights_come_back_exactly(model: torch.nn.Module, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16
    expected, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        if "embed_tokens" in name:  # kept as Q8_0: one scale for 32 values
            error = (found[name] - parameter).abs().max() / parameter.abs().max()
            assert error < 0.01
        else:
            assert torch.equal(found[name], parameter), name
    config = loaded.config
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (25000.0, 1e-6)
    assert (config.tie_word_embeddings, config.eos_token_id, config.pad_token_id) == (True, EOS_ID, PAD_ID)
    assert loaded.generation_config.eos_token_id == EOS_ID
    assert inspect_model(tmp_path / "out").has_chat_template


def test_tokenizer_comes_back(model: torch.nn.Module, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the hound 你好 🍵\n\tend"
    assert tokenizer(text).input_ids == make_tiny_tokenizer()(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_end|>").input_ids == [EOS_ID]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠĠ", "1", "2"]  # digits alone, as SmolLM was trained
    saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & saved.keys()


def test_untied_output_is_kept(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "original", "mistral", dtype=torch.bfloat16)  # Mistral is Llama, untied
    mistral = AutoModelForCausalLM.from_pretrained(path)
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", mistral), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(loaded.lm_head.weight, mistral.lm_head.weight)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_another_kind_comes_back_exactly(tmp_path: Path, arch: Literal["qwen2", "qwen3"]) -> None:
    path = make_tiny_model(tmp_path / "original", arch, dtype=torch.bfloat16, hidden=96)
    original = AutoModelForCausalLM.from_pretrained(path)

    def sizes(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        writer.add_key_length(24)

    (tmp_path / "out").mkdir()
    source = write_gguf(tmp_path / "m.gguf", original, sizes, arch, "qwen2")
    convert_gguf(source, tmp_path / "out")
    spec = inspect_model(tmp_path / "out")
    assert (spec.model_type, spec.head_dim, spec.kv_heads) == (arch, 24, 2)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected, found = dict(original.named_parameters()), dict(loaded.named_parameters())
    assert expected.keys() == found.keys()
    for name in expected:
        assert "embed_tokens" in name or torch.equal(found[name], expected[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    # "e" and an accent are one letter, and every digit is a piece of its own, as Qwen2 was trained.
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12")
    assert [piece for piece, _ in pieces] == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False)])
def test_a_piece_of_text_that_is_a_token_is_that_one(
    model: torch.nn.Module, tmp_path: Path, pre: str, is_whole: bool
) -> None:
    """Llama 3 has tokens that no merge makes: they were taken apart, and the model read other tokens."""
    (tmp_path / "out").mkdir()
    source = write_gguf(tmp_path / "m.gguf", model, pre=pre, more=("\u0120Vi\u00e1\u00bb\u0129t",))  # " Việt"
    convert_gguf(source, tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = tokenizer.encode("tea Vi\u1ec7t", add_special_tokens=False)
    assert (ids[-1] == len(tokenizer) - 1) is is_whole
    assert tokenizer.decode(ids) == "tea Vi\u1ec7t"


def test_text_that_is_split_in_an_unknown_way_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="splits text as 'exaone'"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", model, pre="exaone"), tmp_path)


def rename(old: str, new: str) -> Edit:
    return lambda writer, tensors: tensors.__setitem__(new, tensors.pop(old))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda w, t: w.add_expert_count(8), "llama.expert_count=8"),
        (lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "llama.rope.scaling.type=yarn"),
        (lambda w, t: w.add_sliding_window(128), "llama.attention.sliding_window=128"),
        (lambda w, t: w.add_rope_dimension_count(8), "rotates 8 of a head's 16 dimensions"),
        (lambda w, t: t.__setitem__("rope_freqs.weight", np.ones(8, np.float32)), "rope_freqs.weight"),
        (lambda w, t: w.add_float32("llama.rope.scaling.attn_factor", 1.5), "scaling.attn_factor=1.5"),
        (lambda w, t: w.add_float32("llama.rope.scaling.yarn_ext_factor", 1), "scaling.yarn_ext_factor=1.0"),
        (lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "scaling.type=longrope"),
        (lambda w, t: w.add_float32("llama.logit_scale", 0.5), "llama.logit_scale=0.5"),
        (lambda w, t: w.add_float32("llama.embedding_scale", 12), "llama.embedding_scale=12.0"),
        (lambda w, t: w.add_float32("llama.attention.scale", 0.5), "llama.attention.scale=0.5"),
        (lambda w, t: w.add_clamp_kqv(1.0), "llama.attention.clamp_kqv=1.0"),
        (lambda w, t: w.add_causal_attention(False), "llama.attention.causal=False"),
        (lambda w, t: w.add_parallel_residual(True), "llama.use_parallel_residual=True"),
        (lambda w, t: w.add_uint32("llama.invented_next_year", 3), "llama.invented_next_year=3"),
        (lambda w, t: w.add_uint32("qwen2.rope.freq_base", 3), "qwen2.rope.freq_base=3"),
        (lambda w, t: w.add_string("adapter.type", "lora"), "adapter.type=lora"),
        (lambda w, t: w.add_remove_extra_whitespaces(True), "tokenizer.ggml.remove_extra_whitespaces=True"),
        (lambda w, t: w.add_key_length(8) or w.add_value_length(16), "values of another size than keys"),
        (
            lambda w, t: w.kv_data[0].pop("llama.attention.head_count_kv") and w.add_head_count_kv([2, 1]),
            "llama.attention.head_count_kv=[2, 1], not one number",
        ),
        (rename("blk.0.attn_q.weight", "blk.0.attn_qkv.weight"), "blk.0.attn_qkv.weight"),
        (rename("blk.1.ffn_up.weight", "blk.2.ffn_up.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda w, t: t.pop("output_norm.weight"), "model.norm.weight has the shape None"),
        (lambda w, t: t.__setitem__("blk.0.ffn_up.weight", np.ones((4, 64), np.float32)), "(4, 64)"),
    ],
)
def test_what_is_no_plain_llama_is_refused(
    model: torch.nn.Module, tmp_path: Path, edit: Edit, reason: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", model, edit)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelRefused) as caught:
        convert_gguf(source, tmp_path / "out")
    assert reason in caught.value.reason
    assert not list((tmp_path / "out").iterdir())


def scaled(kind: str | None, **keys: float) -> Edit:
    def edit(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        if kind is not None:
            writer.add_string("llama.rope.scaling.type", kind)
        for key, value in keys.items():
            writer.add_float32(f"llama.rope.{key.replace('__', '.')}", value)

    return edit


@pytest.mark.parametrize(
    ("edit", "factor"),
    [
        (scaled(None, scale_linear=4), 4),  # as files were written once
        (scaled(None, scaling__factor=4), 4),
        (scaled("linear", scaling__factor=2.5), 2.5),
        (scaled("linear", scaling__factor=4, scale_linear=8), 4),
        (scaled("linear", scaling__factor=1), None),
        (scaled("linear"), None),
        (scaled("none", scaling__factor=4), None),  # llama.cpp does not scale then
        (scaled(None, scaling__attn_factor=1), None),
    ],
)
def test_linear_scaling_is_applied(
    model: torch.nn.Module, tmp_path: Path, edit: Edit, factor: float | None
) -> None:
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", model, edit), tmp_path / "out")
    rope = json.loads(inspect_model(tmp_path / "out").rope)
    assert (rope["rope_type"], rope.get("factor")) == (("linear", factor) if factor else ("default", None))
    ids = torch.arange(3, 40)[None]
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    frequencies = converted.model.rotary_emb.inv_freq * (factor or 1)
    assert torch.allclose(frequencies, 25000.0 ** (-torch.arange(0, 16, 2) / 16), rtol=1e-5)
    assert converted(ids).logits.isfinite().all()


def test_what_changes_nothing_is_taken(model: torch.nn.Module, tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        writer.add_name("a model")
        writer.add_string("general.base_model.0.name", "its base")
        writer.add_string("quantize.imatrix.file", "imatrix.dat")
        writer.add_string("mradermacher.quantized_by", "somebody")
        writer.add_string("tokenizer.chat_template.tool_use", "{{ messages }}")
        writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 1)
        writer.add_bool("tokenizer.ggml.add_bos_token", False)
        writer.add_vocab_size(512)
        writer.add_rope_dimension_count(16)
        writer.add_value_length(16)
        writer.add_expert_count(0)
        writer.add_causal_attention(True)

    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", model, edit), tmp_path / "out")
    assert inspect_model(tmp_path / "out").rope


def test_another_architecture_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="architecture 'gemma3'"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", model, arch="gemma3"), tmp_path)


@pytest.mark.parametrize("bytes_left", [0, 3, 100, 5000, -1])
def test_truncated_file_is_refused(model: torch.nn.Module, tmp_path: Path, bytes_left: int) -> None:
    content = write_gguf(tmp_path / "m.gguf", model).read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:bytes_left] if bytes_left >= 0 else content[:-40_000])
    with pytest.raises(ModelRefused, match="not a complete GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)
