"""Tiny random models for tests: the real families, with weights that nobody trained.

Each is a directory as `save_pretrained` writes it: config, safetensors, generation config, and a
byte-level BPE tokenizer with a chat template. Same arguments, same bytes. This module knows
nothing of Samovar.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "smollm3",
    "granite",
    "olmo2",
    "phi3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
]
TIED = ("llama", "qwen2", "smollm3", "gemma2", "gemma3_text")

# What a family has besides the sizes that all have; windows and caps so small that a few tokens see them.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "phi3": {"sliding_window": None},
    "gemma2": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "mixtral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 24},
    "smollm3": {"use_sliding_window": True, "sliding_window": 24},
}
"""Families whose members may attend in a window, or not."""

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, BOS_TOKEN, EOS_TOKEN)
PAD_ID, BOS_ID, EOS_ID = range(3)
VOCAB_MIN = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_tokenizer(vocab: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab` ids: 3 special tokens, 256 bytes, then merged pairs.

    Any text survives encode and decode, and every id stands for some bytes. Raises ValueError
    for fewer ids than the special tokens and bytes need.
    """
    if vocab < VOCAB_MIN:
        raise ValueError(f"vocab={vocab}: the special tokens and the 256 bytes alone need {VOCAB_MIN}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    letters = "etaoinshrdlu"
    common = [("Ġ", letter) for letter in letters] + [(a, b) for a in letters for b in letters]
    every_pair = ((a, b) for a in alphabet for b in alphabet)
    merges: list[tuple[str, str]] = []
    for pair in (*common, *every_pair):
        if len(ids) >= vocab:
            break
        if "".join(pair) not in ids:
            ids["".join(pair)] = len(ids)
            merges.append(pair)
    if len(ids) < vocab:
        raise ValueError(f"vocab={vocab}: byte pairs give no more than {len(ids)}")
    backend = Tokenizer(BPE(vocab=ids, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_fallback() -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer in the style of Llama 2, and its vocabulary."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    ids = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend, ids


def tiny_config(
    family: Family,
    *,
    layers: int = 2,
    hidden: int = 64,
    q_heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    context: int = 4096,
    dtype: torch.dtype = torch.float32,
    window: bool = False,
    bias: bool = False,
) -> PreTrainedConfig:
    """The config of a tiny model. `window`: layers see the last 24 tokens only, of families that may.

    `bias`: all projections of attention have one, of families that may.
    """
    common = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // q_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": family in TIED,
        "dtype": dtype,
    }
    if family in ("qwen2", "olmo2", "granite", "smollm3", "phi3", "qwen2_moe"):
        del common["head_dim"]  # they have no such field: it is hidden / heads
    if bias:
        common["attention_bias"] = True
    own = _OWN.get(family, {}) | (WINDOWED[family] if window else {})
    # What it says of each layer, it says of two.
    common |= {name: (of * layers)[:layers] if isinstance(of, list) else of for name, of in own.items()}
    return AutoConfig.for_model(family, **common)


def make_tiny_model(
    dir: Path | str,
    family: Family = "llama",
    *,
    seed: int = 0,
    **shape: Any,
) -> Path:
    """Write a tiny model to `dir` (made if missing) and return it. `shape`: as `tiny_config` takes it.

    The weights are drawn wide enough that logits differ by whole units, biases and norms included:
    greedy tokens are then no toss-up, and a forgotten bias changes them. The global random state
    is left as it was.
    """
    path = Path(dir)
    config: Any = tiny_config(family, **shape)
    dtype = config.dtype  # `from_config` sets its own
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.2 * noise if name.endswith("bias") else 1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False
    )
    model.to(dtype).save_pretrained(path)
    make_tiny_tokenizer(config.vocab_size).save_pretrained(path)
    return path
