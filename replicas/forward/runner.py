"""Runs a model on the paged pool.

`register_experts` has transformers' mixtures compute their experts in one of two ways: on CPUs so that a
token's bits do not depend on the tokens beside it, on GPUs by grouped products, without a look at a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from samovar.replicas.forward.attention import EXACT_ROWS, AttentionBackend
from samovar.replicas.forward.forward import Forward, MakeForward, TransformersForward
from samovar.replicas.forward.graphs import Capture, Computed, GraphLimits, StepGraphs
from samovar.replicas.forward.inputs import StepInputs, StepPacker, StepShape
from samovar.replicas.kv import KvPool
from samovar.replicas.sampling import greedy_of
from samovar.replicas.scheduling import Chunk


class DeviceTime:
    """The time of one forward pass on a CUDA device, by events around it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record(self._stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def seconds(self) -> float | None:
        """Return the time; None while it still runs."""
        is_over = self._end.query()  # type: ignore[no-untyped-call]
        return float(self._begin.elapsed_time(self._end)) / 1e3 if is_over else None


Score = Callable[[Chunk, int, torch.Tensor], None]
"""Takes a chunk, a slot of it, and the float32 logits `[slots, vocab]` of it and the slots behind it."""


Same = Callable[["Runner", list[int], list[int], int, int], bool]
"""Compares slots of two page tables in the pool of a runner."""


class Runner:
    """Runs one forward pass over a step's chunks, on the paged pool.

    Packs the tokens of all chunks into one row dimension `[1, rows]`, copies pages that a sibling is about to
    write (copy-on-write), and returns the logits of the rows that sample.

    `model`: a transformers causal LM loaded with `ATTENTION_NAME`; None: `forward` needs none. `forward`:
    makes what computes the steps; None: the model's own modules, with `backend`. `exact`: a row's bits do not
    depend on the batch.
    `logit_rows_max`: rows of logits that exist at a time besides those that sample. `took`: the time of the
    last step on the device; None on CPU, where a step is over when `run` returns. `greedy`: what `greedy_of`
    says of the last step's logits; `is_recorded`: a graph has computed it.
    `computes_behind`: `run_behind` may compute something.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        pool: KvPool,
        backend: AttentionBackend,
        *,
        exact: bool,
        logit_rows_max: int = 64,
        forward: MakeForward | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.exact = exact
        if forward is None:
            assert model is not None, "nothing that computes steps"
            self.forward: Forward = TransformersForward(model, pool, backend, exact=exact)
        else:
            self.forward = forward(pool)
        self.logit_rows_max = logit_rows_max
        self.device = pool.data.device
        self.took: DeviceTime | None = None
        self.greedy = torch.empty((2, 0), dtype=torch.int32)
        self.is_recorded = self.computes_behind = False
        self._graphs: StepGraphs | None = None
        self._packer = StepPacker(
            self.device,
            pool.geometry.block_tokens,
            rows_multiple=self.forward.rows_multiple,
            tiling=backend.tiling,
        )

    @torch.inference_mode()
    def record_steps(self, capture: Capture, limits: GraphLimits) -> StepGraphs:
        """Record steps; `run` then replays them.

        Raises `ValueError` if the backend needs to know a step beforehand, and what the recording raises.
        """
        if self.backend.tiling is None:
            raise ValueError(f"{self.backend.name} reads no query tiles: its steps cannot be recorded")
        self._graphs = StepGraphs(
            self._packer,
            self._recorded,
            capture,
            self.backend.tiling,
            limits,
            block_tokens=self.pool.geometry.block_tokens,
        )
        self.computes_behind = True
        return self._graphs

    def forget_graphs(self) -> None:
        """Compute all steps eagerly from now on, and give back the memory of their graphs."""
        if self._graphs is not None:
            self._graphs.forget()
        self._graphs, self.computes_behind = None, False
        self.free_memory()

    def try_out(self, steps: Callable[[], None]) -> None:
        """Run some steps that may fail for want of memory, and no harm done. Raises what they raise."""
        steps()

    @property
    def records_chunks(self) -> bool:
        """Whether steps with a few tokens of prompts are recorded, as decodes are."""
        return self._graphs is not None and bool(self._graphs.chunks)

    @torch.inference_mode()
    def run(
        self, chunks: Listing[Chunk], copies: Listing[tuple[int, int]] = (), score: Score | None = None
    ) -> torch.Tensor:
        """Return float32 logits `[rows that sample, vocab]`, in chunk order, on the pool's device.

        A chunk that samples has one such row, and one for each of its guesses. The next step may overwrite
        them. `score` gets those of the slots that chunks have to score, some at a time, in their order.
        """
        self.took = DeviceTime(self.device) if self.device.type == "cuda" else None
        self._copy(copies)
        computed = None if self._graphs is None else self._replayed(self._graphs, chunks)
        self.is_recorded = computed is not None
        logits = self._computed(chunks, score) if computed is None else computed.logits
        self.greedy = greedy_of(logits) if computed is None else computed.greedy
        if self.took is not None:
            self.took.stop()
        return logits

    def _computed(self, chunks: Listing[Chunk], score: Score | None) -> torch.Tensor:
        """Compute a step eagerly."""
        inputs = self._pack(chunks)
        is_scored = score is not None and any(chunk.scored for chunk in chunks)
        # Padding is looked at with what samples, and is a row that does.
        looked_at = None if is_scored else inputs.sample_rows[: inputs.sampled]
        hidden = self.forward.hidden(inputs, looked_at)
        if score is not None:
            for segment, chunk in zip(inputs.segments, chunks, strict=True):
                wanted, first_row = chunk.scored, segment.row - chunk.start
                for start in range(wanted.start, wanted.stop, self.logit_rows_max):
                    end = min(start + self.logit_rows_max, wanted.stop)
                    score(chunk, start, self._logits_of(hidden, first_row + start, first_row + end))
        return self.forward.logits(hidden, inputs.sample_rows, inputs.sampled)

    def free_memory(self) -> None:
        """Give what torch keeps of the device's memory back, after a step that did not fit."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def agrees(self, same: Same, ours: list[int], fresh: list[int], start: int, end: int) -> bool:
        """Return whether slots `[start, end)` of two page tables are the `same`, wherever the pool lies."""
        return same(self, ours, fresh, start, end)

    @torch.inference_mode()
    def run_behind(self, chunks: Listing[Chunk], token_ids: torch.Tensor) -> torch.Tensor | None:
        """Do what `run` does for decodes behind a step whose tokens only the device knows; None: nothing.

        `token_ids`: int32, one a chunk, on the device. Only what is recorded is computed so: what Python
        launches kernel by kernel is late as it is.
        """
        took = DeviceTime(self.device) if self.device.type == "cuda" else None
        decoded = None if self._graphs is None else self._replayed(self._graphs, chunks, token_ids)
        if decoded is None:
            return None
        self.took, self.greedy, self.is_recorded = took, decoded.greedy, True
        if took is not None:
            took.stop()
        return decoded.logits

    def check(self) -> None:
        """Raise `RuntimeError` if no further step can be computed. Returns at once; for any thread."""

    def close(self) -> None:
        """Give back graphs, and what lies outside of this process. Call when no step runs any more."""
        if self._graphs is not None:
            self._graphs.forget()

    def _logits_of(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Return the logits of rows `[first, end)`; no list of them goes to the device."""
        count = end - first
        padding = -count % self.forward.rows_multiple
        rows = torch.arange(first, end + padding, device=self.device)
        return self.forward.logits(hidden, rows.clamp_(max=end - 1), count)

    def _copy(self, copies: Listing[tuple[int, int]]) -> None:
        for source, target in copies:
            self.pool.copy_page(source, target)

    def _pack(self, chunks: Listing[Chunk], shape: StepShape | None = None) -> StepInputs:
        return self._packer.pack(chunks, shape)

    def _recorded(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute what a graph is recorded of."""
        return self.forward.logits(self.forward.hidden(inputs), inputs.sample_rows, inputs.shape.samples)

    def _replayed(
        self, graphs: StepGraphs, chunks: Listing[Chunk], token_ids: torch.Tensor | None = None
    ) -> Computed | None:
        """Compute a step by its graph; None: it has none, and nothing was done.

        `token_ids`: int32, of its rows, on the device, where the host does not know them yet.
        """
        shape = graphs.shape_of(chunks)
        if shape is None:
            return None
        inputs = self._pack(chunks, shape)
        if token_ids is not None:
            inputs.token_ids[: len(token_ids)].copy_(token_ids)
        return graphs.replay(inputs)


EXPERTS_NAME, GROUPED_NAME = "samovar_experts", "samovar_grouped_experts"
"""Names of the ways to compute experts: by rows, one after the other, and all at once (after `quicken`)."""

GROUPED_CAPABILITIES = (9, 10)
"""Of GPUs whose grouped product torch has a kernel for (`GroupedBlas.cpp`, 2.11 to 2.13). On others, and in
other numbers than bfloat16, it reads on the host where each group ends, which is a wait."""

PIECE_BYTES = 256 << 20
"""Of what the experts of some tokens take at a time: a whole step of prompts is computed in pieces."""


def why_by_rows(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why experts are computed one after the other; None: they are by grouped products."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped product"
    if dtype != torch.bfloat16:
        return f"torch has no grouped product in {str(dtype).removeprefix('torch.')} that needs no wait"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in GROUPED_CAPABILITIES:
        return f"torch has no grouped product for compute capability {major}.{minor} that needs no wait"
    return None


def groups_experts(model: torch.nn.Module) -> bool:
    """Return whether the model's experts are computed by grouped products: such steps can be recorded."""
    return getattr(model.config, "_experts_implementation", None) == GROUPED_NAME


def _experts_in_groups(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum `[tokens, hidden]` of each token's experts, by grouped products.

    No number is looked at, and none is another's: what a token gives depends on its neighbours by the shapes
    of products alone. torch adds in float32 up to the end.
    """
    into = self.gate_up_proj if self.has_gate else self.up_proj
    hidden, inner = hidden_states.shape[1], into.shape[2 if self.is_transposed else 1]
    token_bytes = top_k_index.shape[1] * (5 * hidden + 2 * inner) * into.itemsize
    rows_max = max(1, PIECE_BYTES // token_bytes)
    parts = (torch.split(one, rows_max) for one in (hidden_states, top_k_index, top_k_weights))
    found = [_piece_in_groups(self, *piece) for piece in zip(*parts, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _piece_in_groups(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    tokens, choices = top_k_index.shape
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(experts, self.numbers, right=True, out_int32=True)
    rows = hidden_states.index_select(0, order // choices)
    inner = _grouped(self, "gate_up_proj" if self.has_gate else "up_proj", rows, experts, ends)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    found = _grouped(self, "down_proj", inner, experts, ends)
    chosen = torch.empty_like(found).index_copy_(0, order, found).view(tokens, choices, -1)
    return torch.bmm(top_k_weights[:, None].to(chosen.dtype), chosen)[:, 0]


def quicken(model: torch.nn.Module) -> torch.nn.Module:
    """Have a mixture that computes `GROUPED_NAME` launch less around its experts; return it.

    Norms are torch's one kernel, not eight; queries and keys are turned together. Both round less often than
    the families' own code.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif "apply_rotary_pos_emb" in getattr(kind.forward, "__code__", _norm.__code__).co_names:
            # Its own code, with another name for one thing: no module of transformers is changed.
            own, known = kind.forward, {**kind.forward.__globals__, "apply_rotary_pos_emb": _turned}
            forward = FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
            module.forward = partial(forward, module)
        elif hasattr(module, "num_experts") and hasattr(module, "down_proj"):
            numbers = torch.arange(module.num_experts, device=module.down_proj.device)
            module.register_buffer("numbers", numbers, persistent=False)
    return model


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _turned(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn `[1, heads, rows, head_dim]` by `[1, rows, head_dim]`; some families give half of that."""
    both, half = torch.cat([query, key], dim=1), query.shape[-1] // 2
    halves = both.view(*both.shape[:-1], 2, half)
    cos, sin = (one[:, None, :, None, :half] for one in (cos, sin))
    crossed = torch.cat([-halves[..., 1:, :], halves[..., :1, :]], dim=-2)
    turned = torch.addcmul(halves * cos, crossed, sin).flatten(-2)
    return turned[:, : query.shape[1]], turned[:, query.shape[1] :]


def _grouped(
    of: Any, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    weight = getattr(of, name)
    out = F.grouped_mm(rows, weight if of.is_transposed else weight.transpose(-2, -1), offs=ends)
    return out.add_(getattr(of, f"{name}_bias").index_select(0, experts)) if of.has_bias else out


def _experts_by_rows(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum `[tokens, hidden]` of each token's experts.

    How many tokens an expert gets depends on the batch; rows are padded to a multiple of `EXACT_ROWS`, at
    which GEMM libraries give a row the same bits. A token's sum is over its own choices in their order.
    """
    chosen = torch.zeros(
        (*top_k_index.shape, hidden_states.shape[-1]), dtype=torch.float32, device=hidden_states.device
    )
    for expert in torch.unique(top_k_index).tolist():
        tokens, places = torch.nonzero(top_k_index == expert, as_tuple=True)
        rows = hidden_states[F.pad(tokens, (0, -len(tokens) % EXACT_ROWS))]
        inner = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", expert, rows)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        out = _linear(self, "down_proj", expert, inner)[: len(tokens)]
        chosen[tokens, places] = (out * top_k_weights[tokens, places, None]).float()
    total = chosen[:, 0]
    for place in range(1, chosen.shape[1]):
        total = total + chosen[:, place]
    return total.to(hidden_states.dtype)


def _linear(experts: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(rows, weight.T if experts.is_transposed else weight, bias)


def register_experts() -> None:
    """Make both values of `experts_implementation` known to transformers. Call before loading a model."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_by_rows)
    ALL_EXPERTS_FUNCTIONS.register(GROUPED_NAME, _experts_in_groups)
