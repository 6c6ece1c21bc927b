"""A model of Llama 8B's shape with random weights, made on the device, and engines that serve it.

Its directory has what a model's has, but the weights file is a header and a hole: nothing reads the weights,
and 16 GB of them need be neither written nor read.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from bench._gpu_device import Device
from samovar.cache_tiers.blocks import Placement
from samovar.replicas.engine import Engine
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    GenerateRequest,
    Receipt,
    Refused,
    SamplingParams,
)
from samovar.replicas.model import ModelSpec
from samovar.replicas.start.build import BuiltEngine
from tests.support.engines.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_MIN, make_tiny_tokenizer

FIRST_ID = 3
"""The first token id that is not special."""
IDLE_S_MAX = 60.0
"""An engine that waits longer for anything is stuck."""
POLL_S = 0.01
"""The node does not say when it has taken what was offered."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama."""

    name: str
    dtype: torch.dtype
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    inner: int
    vocab: int
    context: int
    block_tokens: int = 16

    @property
    def head_dim(self) -> int:
        return self.hidden // self.q_heads

    @property
    def token_bytes(self) -> int:
        """Return the bytes of K and V of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def prefill_flop(self, tokens: int) -> float:
        """Return the floating-point operations of a prompt: all matrices but the embeddings, attention."""
        kv = self.kv_heads * self.head_dim
        matrices = self.layers * (2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.inner)
        attention = self.layers * 2 * self.hidden * tokens**2  # half of all pairs, 2 products, 2 operations
        return 2 * matrices * tokens + attention + 2 * self.hidden * self.vocab

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.q_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            max_position_embeddings=self.context,
            rope_theta=500000.0,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            tie_word_embeddings=False,
            dtype=self.dtype,
        )


LLAMA_8B = Shape("Llama 8B", torch.bfloat16, 4096, 32, 32, 8, 14336, 128256, 131072)
TINY = Shape("tiny Llama", torch.float32, 64, 2, 4, 2, 128, 512, 4096)

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def write_hollow_model(folder: Path, shape: Shape) -> Path:
    """Write the directory of a model of this shape, whose weights are a hole of the right size."""
    _write_model(folder, shape, lambda name, tensor: None)
    return folder


def write_random_model(folder: Path, shape: Shape, device: torch.device) -> Path:
    """Write the directory of a model of this shape with random weights, made on `device`.

    Layers have the same weights: so each is drawn once. Only letters are ever the best token, so that each
    token of a stream is text at once.
    """
    tokenizer = make_tiny_tokenizer(VOCAB_MIN + 200)
    texts = [(token, tokenizer.decode([token])) for token in range(VOCAB_MIN + 200)]
    letters = [token for token, text in texts if text.isascii() and text.isalpha()]
    drawn: dict[tuple[str, torch.Size], memoryview] = {}
    torch.manual_seed(8)

    def draw(name: str, like: torch.Tensor) -> memoryview:
        key = ".".join(part for part in name.split(".") if not part.isdigit()), like.shape
        if key not in drawn:
            made = torch.ones(like.shape, dtype=shape.dtype, device=device)
            if like.dim() > 1:
                made = torch.randn(like.shape, dtype=shape.dtype, device=device) * 0.02
            if name == "lm_head.weight":
                others = torch.ones(len(made), dtype=torch.bool, device=device)
                others[letters] = False
                made[others] = 0
            drawn[key] = made.cpu().view(torch.uint8).numpy().data.cast("B")
        return drawn[key]

    _write_model(folder, shape, draw)
    return folder


def _write_model(
    folder: Path, shape: Shape, weights: Callable[[str, torch.Tensor], memoryview | None]
) -> None:
    """Write configuration, tokenizer and weights; None: a hole in their place."""
    config = shape.config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    make_tiny_tokenizer(VOCAB_MIN + 200).save_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=shape.dtype).state_dict()
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in state.items():
        begin, end = end, end + tensor.numel() * shape.dtype.itemsize
        header[name] = {"dtype": _NAMES[shape.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb", buffering=0) as file:
        file.write(len(written).to_bytes(8, "little") + written)
        for name, tensor in state.items():
            made = weights(name, tensor)
            if made is not None:
                file.write(made)
        file.truncate(8 + len(written) + end)


def random_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Make the model of `spec` with random weights on the device, for `load_model`."""
    from samovar.replicas.forward.attention import ATTENTION_NAME, register

    register()
    config = AutoConfig.from_pretrained(spec.path, local_files_only=True)
    torch.manual_seed(8)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    made: torch.nn.Module = model.to(device).eval().requires_grad_(False)
    return made


def tokens_of(count: int, seed: int, shape: Shape) -> list[int]:
    """Return `count` random token ids that are not special, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, shape.vocab) for _ in range(count)]


@dataclass(slots=True)
class Asked:
    """One request: when it was submitted, when its first token came, and what came of it."""

    at_s: float
    first_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    receipt: Receipt | None = None
    failed: str = ""
    is_over: bool = False

    @property
    def ttft_s(self) -> float:
        if self.first_s is None:
            raise RuntimeError(f"there was no first token: {self.failed or 'it is still waited for'}")
        return self.first_s - self.at_s


TENANT = b"bench-tenant-tag"
ANYWHERE = Placement("cpu", (), "cpu")


class Caller:
    """Submits requests to an engine and steps it by hand."""

    def __init__(self, built: BuiltEngine, device: Device, shape: Shape) -> None:
        self.engine: Engine = built.engine
        self.info = built.info
        self.device = device
        self.shape = shape
        self.asked: dict[int, Asked] = {}
        self._keys = itertools.count(1)
        self._woken = threading.Event()
        self.engine.on_wake(self._woken.set)

    @property
    def is_idle(self) -> bool:
        return all(asked.is_over for asked in self.asked.values())

    def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        session: bytes | None = None,
        salt: bytes = b"",
        **params: Any,
    ) -> int:
        """Submit a request, greedy by default. `session`: 16 bytes; None: the tiers are not asked.

        Raises `RuntimeError` if it is refused.
        """
        key = next(self._keys)
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
        placement = None if session is None else ANYWHERE
        request = GenerateRequest(
            f"bench-{key}", prompt, sampling, 1, salt, TENANT, session or bytes(16), placement
        )
        self.asked[key] = Asked(time.perf_counter())
        refused = self.engine.requests.add(key, request)
        if refused is not None:
            self.asked[key].is_over = True
            raise RuntimeError(f"refused: {refused.message}")
        return key

    def step(self) -> float:
        """Run one step, or wait for what it needs; return its seconds, until its tokens are here."""
        self._woken.clear()
        if not self.engine.has_work:
            wake_in_s = self.engine.wake_in_s
            if not self._woken.wait(IDLE_S_MAX if wake_in_s is None else wake_in_s) and wake_in_s is None:
                raise TimeoutError(f"nothing came for {IDLE_S_MAX} s, and nothing can be computed")
        started_s = time.perf_counter()
        events = self.engine.step()
        now_s = time.perf_counter()
        for key, event in events:
            self._take(self.asked[key], event, now_s)
        return now_s - started_s

    @staticmethod
    def _take(asked: Asked, event: Event, now_s: float) -> None:
        if isinstance(event, Admitted):
            asked.receipt = event.receipt
        elif isinstance(event, Delta):
            asked.tokens.extend(event.token_ids)
            asked.first_s = asked.first_s or now_s
            asked.is_over = event.finish_reason is not None
        elif isinstance(event, (Failed, Refused)):
            asked.failed, asked.is_over = event.message, True

    def drain(self, *keys: int) -> None:
        """Step until these requests (all by default) are over."""
        while any(not self.asked[key].is_over for key in keys or self.asked):
            self.step()

    def settle(self, is_empty: Callable[[], bool]) -> None:
        """Step until what was stored has left the engine, and `is_empty` says that the tiers have it."""
        ends_s = time.monotonic() + IDLE_S_MAX
        while not (self.engine.is_settled and is_empty()):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"after {IDLE_S_MAX} s something is still being stored")
            self._woken.clear()
            if not self.engine.has_arrivals:
                self._woken.wait(POLL_S)
            self.engine.step()

    def decode_all(self, keys: list[int]) -> None:
        """Step until all these requests have their first token. Raises `RuntimeError` if one has failed."""
        while any(not self.asked[key].tokens for key in keys):
            self.step()
            failed = [self.asked[key].failed for key in keys if self.asked[key].failed]
            if failed:
                raise RuntimeError(failed[0])

    def forget(self) -> None:
        """Empty the pool of an engine without requests, once all that is being stored has left it."""
        self.settle(lambda: True)
        self.engine.scheduler.pool.clear_cache()

    def abort(self, keys: list[int]) -> None:
        for key in keys:
            self.engine.requests.abort(key)
            self.asked[key].is_over = True
