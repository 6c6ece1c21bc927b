"""What becomes of a request's fields that no body model has: refused, or ignored. Plain data.

Fields of OpenAI, vLLM, SGLang, llama.cpp, Anthropic and those who copied them are sent to any server. One
that changes which tokens are computed, or what an answer holds, is refused by name unless its value is what
is served anyway; only what changes neither is ignored, and listed in `x-ignored-fields`. What a route obeys
is in its body's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNBUILT: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "background": (False,),
    "conversation": (),
    "echo": (False,),
    "functions": (),
    "function_call": ("none", "auto"),
    "logprobs": (False, 0),
    "max_completion_tokens": (),
    "modalities": (["text"],),
    "n": (1,),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "bad_words": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "logprob_start_len": (),
    "logprob_token_ids": (),
    "prompt_logprobs": (),
    "repetition_detection": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    # SGLang
    "custom_logit_processor": (),
    "custom_params": (),
    "extra_key": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "separate_reasoning": (True,),
    "session_params": (),
    "stop_regex": (),
    # llama.cpp
    "chat_format": (),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "grammar_triggers": (),
    "input_extra": (),
    "input_prefix": (),
    "input_suffix": (),
    "lora": (),
    "mirostat": (0,),
    "multimodal_data": (),
    "n_indent": (0,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "return_tokens": (False,),
    "samplers": (),
    "t_max_predict_ms": (-1, 0),
    "thinking_forced_open": (False,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    # Samovar, on routes without a conversation
    "compaction": (),
    "documents": (),
    "knowledge": (),
    # Hugging Face, Ollama and others
    "do_sample": (True,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "format": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (-1,),
    "options": (),
    "penalty_alpha": (0,),
    "smoothing_factor": (0,),
    "tfs": (1.0,),
    "tfs_z": (1.0,),
    "top_a": (0,),
    "typical": (1.0,),
    "typical_p": (1.0,),
}
"""Fields that change what is computed or told, with the values that change nothing here; null, and an empty
text, list or object, are never a wish. A route whose body has such a field obeys it."""

HARMLESS = frozenset(
    {
        # on routes without a template or a stream of that kind
        "chat_template_kwargs",
        "enable_thinking",
        "parallel_tool_calls",
        "reasoning_effort",
        "stream_options",
        # OpenAI: storage and bills of its own, hints of speed, a wish about style that no template has
        "context_management",
        "max_tool_calls",
        "moderation",
        "prediction",
        "safety_identifier",
        "store",
        "verbosity",
        # vLLM, SGLang: names for logs, how media are read, how answers are cut into chunks, whose replica
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "request_id",
        "return_cached_tokens_details",
        "rid",
        "spaces_between_special_tokens",  # special tokens are not shown
        "stream_interval",
        "stream_reasoning",
        # llama.cpp: its slots and cache, what else an answer says, and numbers beside switches that are off
        "cache_prompt",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "id_slot",
        "min_keep",
        "mirostat_eta",
        "mirostat_tau",
        "n_discard",
        "n_keep",
        "preserved_tokens",
        "response_fields",
        "return_progress",
        "timings_per_token",
        "xtc_threshold",
        # Anthropic
        "betas",
        "inference_geo",
        "speed",
        # routers between client and server
        "models",
        "plugins",
        "provider",
        "reasoning_split",
        "route",
        "transforms",
    }
)
"""Fields that change no token of a prompt or an answer, and nothing that an answer says."""

INSTEAD: Mapping[str, str] = {
    "do_sample": "Send temperature 0.",
    "extra_key": "Send cache_salt.",
    "format": "Send response_format.",
    "function_call": "Send tools and tool_choice, and in messages tool_calls, in its place.",
    "functions": "Send tools, each {'type': 'function', 'function': ...}, in its place.",
    "input_prefix": "Put it into the prompt.",
    "input_suffix": "Put it into the prompt.",
    "n_probs": "Send logprobs.",
    "num_predict": "Send max_tokens.",
    "options": "Send them as fields of their own, by OpenAI's names.",
    "reasoning_budget": "Send reasoning_effort 'none' to switch reasoning off.",
    "stop_regex": "Send stop.",
    "truncation_side": "The prompt's last tokens are kept.",
}
"""What to send in place of such a field."""

UNBUILT_ERROR = "unbuilt"
"""The type of the error that pydantic raises for such a field."""
