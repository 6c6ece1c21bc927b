"""Draws tokens from rows of logits, many at a time, on the device where the logits are.

Arrays in, tokens out: no sequences, no grammars, no state. What a step needs goes to the device in one
transfer and comes back in one. On CPU each token is, bit for bit, the one that the row alone would give:
every sum is taken in the order in which a row alone takes it, or is far enough from where the order matters.
On a device all rows of a step are cut by the same launches, whatever they hold (`nucleus_of`): only their
numbers say which of them its best tokens do not decide, and asking for those would be a wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.replicas.messages import Sampled, SamplingParams

TEMPERATURE_MIN = 1e-5
"""Below this, dividing logits overflows float32; sampling is then effectively greedy."""

PREFIX = 1024
"""Tokens among which top-p looks first on a CPU. Where its share is not among the best ones, the whole row is
sorted, which takes a hundred times as long."""

MARGIN = 1e-9
"""Share of a row's mass by which float64 sums in two orders never differ: a million terms make 1e-10."""

UNITS = 2.0**61
"""Of a mass of 1: a row's sum stays below 2^63, and a probability from 2^-37 on is a whole number of them."""

HALF_BITS = 15
"""A probability is at most 1: of its float 30 bits differ, of which each pass finds one half."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Draw:
    """What one token is drawn by.

    `row`: of the logits; several draws may share one. `u`: in [0, 1). `tokens`: prompt and output, int64;
    only penalties need them. `allowed`: bool `[vocab]`, None: all; never empty.
    """

    row: int
    params: SamplingParams
    u: float
    tokens: NDArray[np.int64]
    prompt_tokens: int
    allowed: NDArray[np.bool_] | None

    @property
    def order(self) -> int:
        """Return 0 if it is cut by top-p, 1 if it is drawn from all tokens, 2 if it is the best one."""
        if self.params.temperature < TEMPERATURE_MIN:
            return 2
        return 0 if self.params.top_p < 1 else 1

    def check(self, vocab: int) -> None:
        """Raise `IndexError` for a token id outside of the row: it would reach into another's."""
        biased = np.array([token_id for token_id, _ in self.params.logit_bias], dtype=np.int64)
        for name, ids in (("logit_bias", biased), ("tokens", self.tokens)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise IndexError(f"a token id of {name} is not among the {vocab} of the row")
        if self.allowed is not None and self.allowed.shape != (vocab,):
            raise IndexError(
                f"a mask of {self.allowed.shape[0]} tokens is for another row than one of {vocab}"
            )


def greedy_of(logits: torch.Tensor) -> torch.Tensor:
    """Return int32 `[2, rows]`: the best token of each row, and 1 where the row contains a NaN.

    A NaN counts as the greatest number, so only the best one is looked at.
    """
    if logits.device.type == "cpu":  # numpy's is the same, in a tenth of the time
        rows = logits.numpy()
        best_of = rows.argmax(axis=1)
        has_nan = np.isnan(rows[np.arange(len(rows)), best_of])
        return torch.from_numpy(np.array((best_of, has_nan), dtype=np.int32))
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.cat([best, logits.gather(1, best).isnan()], dim=1).int().t().contiguous()


class BegunDraws:
    """Tokens of a step, under way: what is launched behind this may overwrite `logits` and `greedy`.

    `logits`: float32 `[rows, vocab]`; `greedy`: `greedy_of(logits)`, on their device. What is drawn from a
    row with a NaN means nothing. Takes one transfer each way.

    `tokens`: of the draws, int32, on the device, in the order of `order`, which has their places.
    `is_decided`: not so on a CPU where a whole row has to be sorted; such a token is no token until `read`.
    """

    def __init__(self, logits: torch.Tensor, draws: Listing[Draw], greedy: torch.Tensor) -> None:
        self._rows = logits.shape[0]
        self._drawn: _Drawn | None = None
        self.order = sorted(range(len(draws)), key=lambda place: draws[place].order)
        self.tokens, self.is_decided = greedy[:0], True
        self._back = [greedy]
        if draws:
            batch = _Batch([draws[place] for place in self.order], logits.shape[1])
            with torch.inference_mode():
                self._drawn = _Drawn(batch, logits, upload(batch.arrays, logits.device))
            self.tokens = self._drawn.tensors[0]
            self.is_decided = not _is_on_host(logits) or bool((self.tokens < logits.shape[1]).all())
            self._back += self._drawn.tensors
        flat = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in self._back])
        self._host = flat
        self._event: torch.cuda.Event | None = None
        if flat.device.type == "cuda":
            # Not `.cpu()`, which waits for all that is launched before it is called.
            self._host = torch.empty(flat.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flat.device))

    def read(self) -> tuple[list[int], list[bool], list[Sampled]]:
        """Return the best token of each row, whether it contains a NaN, and what each draw gives.

        Waits for the device. Raises what it reports.
        """
        if self._event is not None:
            self._event.synchronize()
        whole, fetched, start = self._host.numpy(), list[Array](), 0
        for tensor in self._back:
            part = whole[start : start + tensor.numel()]
            fetched.append(part.view(np.float32) if tensor.dtype == torch.float32 else part)
            start += len(part)
        has_nan = fetched[0][self._rows :].astype(bool)
        sampled: list[Sampled] = [Sampled(0)] * len(self.order)
        if self._drawn is not None:
            with torch.inference_mode():
                for place, one in zip(self.order, self._drawn.read(fetched[1:], has_nan), strict=True):
                    sampled[place] = one
        return fetched[0][: self._rows].tolist(), has_nan.tolist(), sampled


class _Batch:
    """The arrays of a step's draws: those that top-p cuts come first, then others at random, then greedy."""

    def __init__(self, draws: Listing[Draw], vocab: int) -> None:
        self.draws = draws
        self.vocab = vocab
        params = [draw.params for draw in draws]
        self.nucleus = sum(draw.order == 0 for draw in draws)
        self.random = sum(draw.order < 2 for draw in draws)
        random = params[: self.random]
        self.arrays: dict[str, Array] = {
            "rows": np.array([draw.row for draw in draws], dtype=np.int64),
            "temperature": np.array([one.temperature for one in random], dtype=np.float32),
            "u": np.array([draw.u for draw in draws[: self.random]], dtype=np.float64),
            "top_p": np.array([one.top_p for one in random[: self.nucleus]], dtype=np.float64),
        }
        top_k = [place for place, one in enumerate(random) if 0 < one.top_k < vocab]
        self.top_k_max = max((random[place].top_k for place in top_k), default=0)
        if top_k:
            self.arrays["top_k_rows"] = np.array(top_k, dtype=np.int64)
            self.arrays["top_k"] = np.array([random[place].top_k for place in top_k], dtype=np.int64)
        if any(one.min_p > 0 for one in random):
            self.arrays["min_p"] = np.array([one.min_p for one in random], dtype=np.float32)
        self._add_changes(params)
        self._add_logprobs(params)

    def _add_changes(self, params: Listing[SamplingParams]) -> None:
        """Add what changes single logits, each by its place in all rows of all draws."""
        arrays, vocab = self.arrays, self.vocab
        seen, output, masked = [], [], []
        for place, (draw, one) in enumerate(zip(self.draws, params, strict=True)):
            if one.repetition_penalty != 1:  # prompt and output, as in CTRL (arXiv 1909.05858)
                seen.append(draw.tokens + place * vocab)
            if (one.presence_penalty or one.frequency_penalty) and len(draw.tokens) > draw.prompt_tokens:
                output.append(draw.tokens[draw.prompt_tokens :] + place * vocab)
            if draw.allowed is not None:
                masked.append(place)
        bias = {
            place * vocab + token_id: value
            for place, one in enumerate(params)
            for token_id, value in one.logit_bias
        }
        if seen:
            arrays["seen"] = np.concatenate(seen)
            arrays["repetition"] = np.array([one.repetition_penalty for one in params], dtype=np.float32)
        if output:
            arrays["output"] = np.concatenate(output)
            arrays["presence"] = np.array([one.presence_penalty for one in params], dtype=np.float32)
            arrays["frequency"] = np.array([one.frequency_penalty for one in params], dtype=np.float32)
        if bias:
            arrays["biased"] = np.array(list(bias), dtype=np.int64)
            arrays["bias"] = np.array(list(bias.values()), dtype=np.float32)
        if masked:
            arrays["masked"] = np.array(masked, dtype=np.int64)
            arrays["refused"] = ~np.stack([one.allowed for one in self.draws if one.allowed is not None])

    def _add_logprobs(self, params: Listing[SamplingParams]) -> None:
        """Add the draws whose log-probabilities are wanted, and those of each number of best ones."""
        self.scored = [place for place, one in enumerate(params) if one.logprobs is not None]
        self.of_top: dict[int, list[int]] = {}  # places among the scored
        for number, place in enumerate(self.scored):
            top = min(params[place].logprobs or 0, self.vocab)
            if top:
                self.of_top.setdefault(top, []).append(number)
        if self.scored:
            self.arrays["scored"] = np.array(self.scored, dtype=np.int64)
            if len(self.of_top) > 1 or sum(map(len, self.of_top.values())) < len(self.scored):
                for top, numbers in self.of_top.items():
                    self.arrays[f"top{top}"] = np.array(numbers, dtype=np.int64)


class _Drawn:
    """A step's draws, on the device: `tensors` are what comes back, `read` makes tokens of them."""

    def __init__(self, batch: _Batch, logits: torch.Tensor, given: Mapping[str, torch.Tensor]) -> None:
        self._batch = batch
        self._vocab = logits.shape[1]
        rows, count, first = given["rows"], len(batch.draws), batch.draws[0].row
        run: torch.Tensor | None = None  # where the rows follow each other, as they are
        if [draw.row for draw in batch.draws] == list(range(first, first + count)):
            run = logits[first : first + count]
        adjusted = _adjusted(logits.index_select(0, rows) if run is None else run.clone(), given)
        parts = []
        if batch.random:
            self._probabilities = _distribution(adjusted[: batch.random], given, batch.top_k_max)
            nucleus, free = self._probabilities[: batch.nucleus], self._probabilities[batch.nucleus :]
            cut_u, free_u = given["u"][: batch.nucleus], given["u"][batch.nucleus :]
            on_host = _is_on_host(logits)
            if len(nucleus) and on_host:
                parts.append(_draw_nucleus(nucleus, cut_u, given["top_p"]))
            elif len(nucleus):
                parts.append(_draw_all(nucleus_of(nucleus, given["top_p"]), cut_u))
            if len(free):
                parts.append(_draw(free, free_u)[:, 0] if on_host else _draw_all(free, free_u))
        if batch.random < len(adjusted):
            parts.append(adjusted[batch.random :].argmax(dim=-1))
        tokens = torch.cat(parts)
        self.tensors = [tokens.int()]
        if not batch.scored:
            return
        if len(batch.scored) < count:
            run, rows, tokens = None, rows[given["scored"]], tokens[given["scored"]]
        self._logprobs = (logits.index_select(0, rows) if run is None else run).log_softmax(dim=-1)
        known = tokens.clamp(max=self._vocab - 1)  # there is no such number as that of an undecided token
        self.tensors.append(self._logprobs.gather(1, known[:, None]))
        for top in batch.of_top:
            some = given.get(f"top{top}")
            best = (self._logprobs if some is None else self._logprobs.index_select(0, some)).topk(
                top, dim=-1
            )
            self.tensors += [best.indices.int(), best.values]

    def read(self, fetched: Listing[Array], has_nan: NDArray[np.bool_]) -> list[Sampled]:
        """Return what the draws gave, from what came back; on a CPU draw those that need their whole row."""
        draws, token_ids = self._batch.draws, fetched[0].tolist()
        undecided = [place for place, token_id in enumerate(token_ids) if token_id >= self._vocab]
        undecided = [place for place in undecided if not has_nan[draws[place].row]]
        for place in undecided:
            draw = draws[place]
            token_ids[place] = _draw_whole(self._probabilities[place], draw.params.top_p, draw.u)
        if not self._batch.scored:
            return [Sampled(token_id) for token_id in token_ids]
        tops: dict[int, tuple[tuple[int, float], ...]] = {}
        for number, (top, places) in enumerate(self._batch.of_top.items()):
            ids = fetched[2 + 2 * number].reshape(-1, top).tolist()
            values = fetched[3 + 2 * number].reshape(-1, top).tolist()
            for place, some, theirs in zip(places, ids, values, strict=True):
                tops[place] = tuple(zip(some, theirs, strict=True))
        own = fetched[1].tolist()
        sampled = [Sampled(token_id) for token_id in token_ids]
        for number, place in enumerate(self._batch.scored):
            token_id = token_ids[place]
            logprob = float(self._logprobs[number, token_id]) if place in undecided else own[number]
            sampled[place] = Sampled(token_id, logprob, tops.get(number, ()))
        return sampled


def _adjusted(rows: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Apply penalties, biases and masks to `[draws, vocab]`, in place, in this order; return it.

    A token that occurs several times gets the same number written several times.
    """
    flat, vocab = rows.view(-1), rows.shape[1]
    if (seen := given.get("seen")) is not None:
        values, penalty = flat[seen], given["repetition"][seen // vocab]
        flat[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (output := given.get("output")) is not None:
        ones = torch.ones_like(output, dtype=torch.int32)
        counts = torch.zeros_like(flat, dtype=torch.int32).index_add_(0, output, ones)[output]
        of = output // vocab
        flat[output] = flat[output] - (given["presence"][of] + given["frequency"][of] * counts)
    if (biased := given.get("biased")) is not None:
        flat[biased] = flat[biased] + given["bias"]
    if (masked := given.get("masked")) is not None:
        refused = given["refused"]
        if len(masked) == len(rows):
            return rows.masked_fill_(refused, -torch.inf)
        rows.index_copy_(0, masked, rows.index_select(0, masked).masked_fill_(refused, -torch.inf))
    return rows


def _distribution(logits: torch.Tensor, given: Mapping[str, torch.Tensor], top_k_max: int) -> torch.Tensor:
    """Return float32 `[draws, vocab]` probabilities after top-k, then min-p; not renormalised."""
    scaled = logits / given["temperature"][:, None]
    if (rows := given.get("top_k_rows")) is not None:
        best = (scaled if len(rows) == len(scaled) else scaled.index_select(0, rows)).topk(top_k_max, dim=-1)
        least = best.values.gather(1, given["top_k"][:, None] - 1)
        if len(rows) < len(scaled):
            least = torch.full_like(scaled[:, :1], -torch.inf).index_copy_(0, rows, least)
        scaled.masked_fill_(scaled < least, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if (min_p := given.get("min_p")) is not None:
        least = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        probabilities.masked_fill_(probabilities < least, 0.0)
    return probabilities


def _draw(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return int64 `[draws, 1]`: the place whose interval of the cumulative distribution contains `u`.

    A place of probability 0 has an empty interval; `right=True` skips it. The number of places if `u` is so
    near 1 that it rounded up.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)


def _draw_all(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw from all that is not 0; return int64 `[draws]`, places of theirs.

    No `u` up to the greatest, 1 - 2^-53, rounds its share of a sum up to the sum: only NaN have no place.
    """
    return _draw(probabilities, u)[:, 0].clamp_(max=probabilities.shape[1] - 1)


def nucleus_of(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return float32 `[draws, vocab]`: the best tokens that have `top_p` of the mass; 0 for all others.

    The probability at which top-p cuts is a quantile: the least whose own mass and that of lesser ones is
    more than what is cut. It is found without a sort, half of its bits at a time, by adding up the masses of
    all tokens with the same ones. Masses are whole numbers, whose sums are the same in any order; no sum of
    floats on a GPU is.

    Of equal tokens the first are the better. The best one stays, whatever `top_p` is. NaN are written to 0.
    Sums of float64 give another one where the cut is within 1e-12 of the mass of a token.
    """
    bits = probabilities.nan_to_num_(0.0, posinf=0.0).view(torch.int32)  # others would be places of no sum
    masses = (probabilities * UNITS).long()
    # What top-k has cut adds nothing, wherever: it is spread, as a place takes one number after the other.
    spread = torch.arange(bits.shape[1], device=bits.device).bitwise_and_((1 << HALF_BITS) - 1)
    places = torch.where(bits > 0, bits, spread * ((1 << HALF_BITS) + 1))
    high = places >> HALF_BITS
    sums = _sums(high, masses)
    total = sums[:, -1:]
    # A token is kept if what is before it is less than this: as whole numbers, less than the next one.
    limit = (total * top_p[:, None]).ceil_().long().clamp_(min=1)
    cut_mass = total - limit  # less than the total: there is a place with more, in both passes
    upper = torch.searchsorted(sums, cut_mass, right=True)
    masses *= high == upper
    to_upper = sums.gather(1, upper)
    sums = _sums(places.bitwise_and_((1 << HALF_BITS) - 1), masses)
    cut_mass += sums[:, -1:] - to_upper
    lower = torch.searchsorted(sums, cut_mass, right=True)
    cut = (upper << HALF_BITS).add_(lower).int()
    # What of the tokens at the cut may still be taken, and how much each of them is.
    left = sums.gather(1, lower) - cut_mass
    each = (cut.view(torch.float32) * UNITS).long().clamp_(min=1)
    equals = (bits == cut).cumsum(dim=-1, dtype=torch.int32)
    is_early = equals <= (left + each - 1) // each
    return probabilities * (bits + is_early > cut)


def _sums(places: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Return int64 `[draws, 2^15]`: the mass at each place and at all lesser ones."""
    zeros = masses.new_zeros((len(masses), 1 << HALF_BITS))
    return zeros.scatter_add_(1, places, masses).cumsum_(dim=-1)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _draw_nucleus(probabilities: torch.Tensor, u: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Draw on a CPU from the best tokens that have `top_p` of the mass; return int64 `[draws]`.

    The size of the vocabulary, where the `PREFIX` best tokens do not decide it.
    """
    vocab = probabilities.shape[1]
    behind = torch.arange(vocab - 1, -1, -1, device=probabilities.device)
    # Positive floats have the order of their bits. Of equal ones the first token is the better, as in a
    # stable sort; a topk of the floats would take any.
    keys = probabilities.view(torch.int32).long().mul_(2**32).add_(behind)
    best = _greatest(keys, min(PREFIX, vocab))
    ordered = (best >> 32).int().view(torch.float32)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered  # mass of strictly better tokens
    mass = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64)
    limit = top_p[:, None] * mass
    kept = before < limit
    undecided = ((before - limit).abs() <= MARGIN * mass)[:, 1:].any(dim=-1)
    if vocab > PREFIX:
        undecided |= kept[:, -1]
    kept[:, 0] = True  # the best one stays, even if `top_p` times the mass rounds to 0
    token_ids, places = (vocab - 1 - (best & 0xFFFFFFFF)).sort(dim=-1)
    place = _draw((ordered * kept).gather(1, places), u)
    undecided |= place[:, 0] >= token_ids.shape[1]
    token = token_ids.gather(1, place.clamp_(max=token_ids.shape[1] - 1))[:, 0]
    return token.masked_fill_(undecided, vocab)


def _greatest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` greatest of each row's keys, int64, of which no two are equal, greatest first.

    They are those of torch's `topk`, in a fifth of its time.
    """
    parted = np.partition(keys.numpy(), keys.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(parted, axis=1)[:, ::-1].copy())


def _draw_whole(probabilities: torch.Tensor, top_p: float, u: float) -> int:
    """Draw from one row `[vocab]`, sorted as a whole where top-p asks for it."""
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.double().cumsum(dim=-1) - ordered
        cut = before >= top_p * float(ordered.double().sum())
        cut[0] = False
        probabilities = probabilities.index_fill(0, order[cut], 0.0)
    place = int(_draw(probabilities[None], probabilities.new_full((1,), u, dtype=torch.float64)))
    return place if place < probabilities.shape[0] else int(probabilities.nonzero()[-1])


ALIGNMENT = 16
"""Bytes at whose multiples arrays begin in a packed buffer: no dtype needs more."""


def upload(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors on the device; they arrive before what is launched next reads them.

    On CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    buffer = torch.from_numpy(packed(arrays)).pin_memory()
    return unpacked(arrays, buffer.to(device, non_blocking=True))


def packed(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return one buffer of all arrays, those of bool as bits."""
    parts = []
    for array in arrays.values():
        flat = np.packbits(array, axis=-1, bitorder="little") if array.dtype == np.bool_ else array
        content = np.ascontiguousarray(flat).reshape(-1).view(np.uint8)
        parts += [content, np.zeros(-len(content) % ALIGNMENT, dtype=np.uint8)]
    return np.concatenate(parts)


def unpacked(arrays: Mapping[str, NDArray[Any]], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arrays as views of a buffer that `packed` made of them, on its device; bools are copies."""
    found, start = {}, 0
    for name, array in arrays.items():
        is_bits = array.dtype == np.bool_
        shape = (*array.shape[:-1], -(-array.shape[-1] // 8)) if is_bits else array.shape
        nbytes = int(np.prod(shape)) * (1 if is_bits else array.itemsize)
        content = buffer[start : start + nbytes]
        if is_bits:
            found[name] = _bools(content.view(shape), array.shape[-1])
        else:
            found[name] = content.view(torch.from_numpy(array[:0]).dtype).view(shape)
        start += nbytes + -nbytes % ALIGNMENT
    return found


def _bools(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return bool `[..., count]` of uint8 `[..., bytes]`, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).flatten(-2)[..., :count].bool()
