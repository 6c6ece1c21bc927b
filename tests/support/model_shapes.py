"""Configurations of models whose KV sizes are known from their papers."""

from __future__ import annotations

from typing import Any

QWEN_32B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "torch_dtype": "bfloat16",
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 64,
}
MHA_7B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "torch_dtype": "float16",
}
