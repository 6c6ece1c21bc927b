"""What "the same" means on this CPU: bit for bit where the product's probe says so, else within its bound.

The bounds are those that G14 states: of the KV what the audit uses (`replicas/engine/audit.py`), of logits
and greedy tokens what the probe's sentence says (`replicas/engine/audit.py`). What was found out about a
model, a dtype and a number of threads is kept for the session, and told at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bench._report import machine
from samovar.replicas.engine.audit import RMS_MAX, Probe, ProbeResult
from samovar.replicas.forward.forward import MakeForward
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.messages import Delta, TokenLogprob

LOGITS_MAX = {torch.float32: 1e-3, torch.bfloat16: 1.0, torch.float16: 1.0, torch.int8: 1.0}
"""By so much may a logit differ. So log-probabilities differ by twice that, and the best two may change
places where they lie no further apart than that (`samovar.replicas.engine.audit.TOLERANCES`)."""
KL_MAX = 0.1

verdicts: dict[tuple[str, str, int], str] = {}
"""(model, dtype, threads) -> the probe's sentence, of all that was probed in this session."""

_results: dict[tuple[str, torch.dtype, bool, int, int], ProbeResult] = {}


def note(model: str, dtype: str, sentence: str) -> None:
    """For the summary at the end."""
    verdicts[model, dtype.removeprefix("torch."), torch.get_num_threads()] = sentence


def probe(
    model: torch.nn.Module,
    geometry: KvGeometry,
    name: str,
    step_tokens_max: int,
    forward: MakeForward | None = None,
) -> ProbeResult:
    """The product's verdict for this many threads as there are now; asked once a session and `name`."""
    key = (name, geometry.dtype, geometry.is_int8, torch.get_num_threads(), step_tokens_max)
    if key not in _results:
        vocab = int(model.config.vocab_size)  # type: ignore[arg-type, union-attr]
        product = Probe(model, geometry, vocab, torch.device("cpu"), forward)
        _results[key] = product.run(step_tokens_max)
        note(name, f"{geometry.dtype}{' kept as int8' * geometry.is_int8}", _results[key].sentence)
    return _results[key]


def cpu_in_words() -> str:
    """Model, what torch uses of it, and what it could: these decide which CPUs are exact."""
    has = {"bf16": torch.cpu._is_avx512_bf16_supported(), "amx": torch.cpu._is_amx_tile_supported()}
    flags = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{machine()['cpu']}; torch {torch.__version__} uses {capability}; {flags}"


def verdicts_in_words() -> list[str]:
    return [
        f"{model} {dtype}, {threads} thread{'s' * (threads != 1)}: {sentence}"
        for (model, dtype, threads), sentence in sorted(verdicts.items())
    ]


Exact = bool | Callable[[], bool]
"""The verdict, or how to get it: a probe of a real model takes seconds, and what is equal needs none."""


def _must_be_equal(exact: Exact) -> bool:
    return exact() if callable(exact) else exact


def assert_same_kv(
    kv: torch.Tensor,
    expected: torch.Tensor,
    exact: Exact,
    what: str = "",
    *,
    stored: torch.dtype | None = None,
) -> None:
    """KV `[layers, 2, tokens, kv_heads, head_dim]` of the same tokens. `stored`: as what, if not as it is."""
    assert kv.shape == expected.shape
    assert kv.dtype == expected.dtype
    if torch.equal(kv, expected):
        return
    assert not _must_be_equal(exact), f"the KV differs {what}"
    for layer, (ours, truth) in enumerate(zip(kv.float(), expected.float(), strict=True)):
        share = float((ours - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())
        assert share <= RMS_MAX[stored or kv.dtype], (
            f"the KV differs by {share:.2g} of its size in layer {layer} {what}"
        )


def assert_same_logits(
    logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, exact: Exact, what: str = ""
) -> None:
    """Logits `[vocab]` of the same token, with KV stored in `dtype`."""
    if torch.equal(logits, expected):
        return
    assert not _must_be_equal(exact), f"the logits differ {what}"
    if dtype == torch.float32:
        apart = float((logits - expected).abs().max())
        assert apart <= LOGITS_MAX[dtype], f"the logits differ by {apart:.2g} {what}"
    else:
        ours, truth = (row.double().log_softmax(-1) for row in (logits, expected))
        kl = float((truth.exp() * (truth - ours)).sum())
        assert kl <= KL_MAX, f"the logits differ: KL {kl:.2g} {what}"
    lost = float(expected.max() - expected[logits.argmax()])
    assert lost <= 2 * LOGITS_MAX[dtype], f"another greedy token, {lost:.2g} below the best {what}"


def assert_same_logprobs(
    ours: Sequence[TokenLogprob],
    expected: Sequence[TokenLogprob],
    dtype: torch.dtype,
    exact: Exact,
    *,
    greedy: bool = False,
) -> None:
    """Of an answer's tokens. Greedy ones may part at a near-tie: behind it all is another answer."""
    if ours == expected:
        return
    assert not _must_be_equal(exact), "the log-probabilities differ"
    assert len(ours) == len(expected)
    bound = 2 * LOGITS_MAX[dtype]
    for place, (one, truth) in enumerate(zip(ours, expected, strict=True)):
        seen = {top.token_id: top.logprob for top in (*truth.top, truth)}
        for top in (*one.top, one):
            # A token that only one of them lists lies at the other's end of the list, or below it.
            other = seen.get(top.token_id, min(seen.values()))
            apart = abs(top.logprob - other)
            assert apart <= bound, f"token {place}: log-probabilities differ by {apart:.2g}"
        if one.token_id != truth.token_id:
            assert greedy, f"token {place} is another one"
            lost = truth.logprob - seen.get(one.token_id, min(seen.values()))
            assert lost <= bound, f"token {place} is another one, {lost:.2g} below the best"
            return


def assert_same_deltas(
    ours: Sequence[Delta], expected: Sequence[Delta], dtype: torch.dtype, exact: Exact
) -> None:
    """What a client hears: the same texts, tokens and ends on any CPU; log-probabilities by the law."""
    if list(ours) == list(expected):
        return
    assert [_without_logprobs(delta) for delta in ours] == [_without_logprobs(delta) for delta in expected]
    assert_same_logprobs(
        [row for delta in ours for row in delta.logprobs],
        [row for delta in expected for row in delta.logprobs],
        dtype,
        exact,
    )


def _without_logprobs(delta: Delta) -> tuple[object, ...]:
    return delta.index, delta.text, delta.token_ids, delta.finish_reason
