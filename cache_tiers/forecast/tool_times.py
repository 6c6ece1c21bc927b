"""How long tools take: when a session comes back whose last answer called some.

Per tool of a tenant it is counted, in the curves' bins of idle time, how many sessions came back in each of
those idle at its beginning (a life table, so quantiles stream), and how many should have by their forecast,
which knows nothing of the tool's time. The quotient, shrunk to that of all the tenant's tools and of all
tools, is a factor on the forecast's hazards, bin by bin (piecewise proportional hazards, a gamma prior): what
the forecast knows already is not counted twice. It is used once forecasts with it have been likelier than
those without.

Calls in parallel are over when the last one is: they are counted as a tool of their own, shrunk to the one
that takes longest. Tools are known by tags, never by name. Pure and bounded; clock values come in.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.cache_tiers.forecast.turns import (
    BINS,
    CALLS_MAX,
    EDGES,
    EDGES_S,
    LAST_S,
    WIDTHS_S,
    Curves,
    Floats,
    SessionKey,
    bin_of,
)

TOOLS_MAX: Final = 2048
"""Tools, and sets of tools, of all tenants: about 1 kB each. The one longest unused is forgotten."""
TENANT_TOOLS_MAX: Final = 256
"""Of one tenant: one that invents names forgets its own."""
WAITING_MAX: Final = 10_000
"""Sessions that are waited for; the oldest is counted as far as it has got."""
WAITS_S: Final = 3600.0
"""After so long a session is counted as away for that time."""
JUDGED_MIN: Final = 8.0
"""Returns by which a factor is judged."""
PRIOR: Final = 2.0
"""Expected returns in a bin that the more general factor counts for."""
FACTOR_MIN, FACTOR_MAX = 0.02, 50.0
_WINDOW: Final = 200.0
"""Sessions after which counts are halved, so that old ones fade."""
_FADE: Final = 0.98
_SETTLED_A_CALL: Final = 4
_RATE_MIN: Final = 1e-7
_ALL: Final = 0

Cells = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Cell:
    """`counts`: `[3, BINS]`, of sessions: came back, stayed away, should have come back by their forecast.

    `judged`, `gain`: how many returns, and the sum of what the factor added to their log likelihood; faded.
    """

    counts: Floats
    sessions: float = 0.0
    judged: float = 0.0
    gain: float = 0.0

    def judge(self, gain: float) -> None:
        self.judged = _FADE * self.judged + 1.0
        self.gain = _FADE * self.gain + gain

    def add(self, counts: Floats) -> None:
        self.counts += counts
        self.sessions += 1.0
        if self.sessions >= 2.0 * _WINDOW:
            self.counts *= 0.5
            self.sessions *= 0.5

    def factor(self, general: Floats | float) -> Floats:
        returned, _, expected = self.counts
        factor: Floats = (returned + PRIOR * general) / (expected + PRIOR)
        return factor


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`without`, `told`: forecasts, f32 `[EDGES]`, without its tools' factor and with it, used or not."""

    tenant: int
    cell: int
    at_s: float
    without: bytes
    told: bytes


class ToolTimes:
    """See the module. `open`: sessions that are waited for. Not thread-safe."""

    def __init__(self, *, tools_max: int = TOOLS_MAX, tenant_tools_max: int = TENANT_TOOLS_MAX) -> None:
        self._tools_max = tools_max
        self._tenant_tools_max = tenant_tools_max
        self.open: OrderedDict[SessionKey, _Waiting] = OrderedDict()
        self._cells: OrderedDict[tuple[int, int], _Cell] = OrderedDict()  # longest unused first
        self._of_tenant: dict[int, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def ended(self, session: SessionKey, tools: str, curve: Curves, now_s: float) -> Curves:
        """Take in that a turn has called `tools` (`tool_tags`); return its forecast with what they add.

        `curve`: the forecast without, from the turn's end on.
        """
        self._settle(now_s)
        self.dropped(session, now_s)
        tenant, cell, general = self._place(session, tools)
        chain = [(_ALL, _ALL), (tenant, _ALL), *((tenant, one) for one in general), (tenant, cell)]
        factor: Floats | float = 1.0
        is_used = False
        for key in chain:
            known = self._cells.get(key)
            if known is None:
                continue
            factor = known.factor(factor)
            if known.judged >= JUDGED_MIN:
                is_used = known.gain > 0.0
        told = curve
        if not isinstance(factor, float):
            told = _with(curve, np.minimum(np.maximum(factor, FACTOR_MIN), FACTOR_MAX))
        self.open[session] = _Waiting(tenant, cell, now_s, curve.tobytes(), told.tobytes())
        if len(self.open) > WAITING_MAX:
            self.dropped(next(iter(self.open)), now_s)
        return told if is_used else curve

    def came_back(self, session: SessionKey, now_s: float) -> None:
        """Count a session's return. No-op if it is not waited for, or clocks jump."""
        one = self.open.pop(session, None)
        if one is None or now_s < one.at_s:
            return
        idle_s = min(now_s - one.at_s, LAST_S)
        gain = _log_likelihood(one.told, idle_s) - _log_likelihood(one.without, idle_s)
        self._count(one, idle_s, is_back=True)
        for key in _keys(one):
            self._cells[key].judge(gain)

    def dropped(self, session: SessionKey, now_s: float) -> None:
        """Count a session as far as it has got, and wait for it no longer. No-op if it is not waited for."""
        one = self.open.pop(session, None)
        if one is not None and now_s > one.at_s:
            self._count(one, min(now_s - one.at_s, WAITS_S), is_back=False)

    def quantile(self, session: SessionKey, tools: str, share: float) -> float | None:
        """Return after how many seconds this share of the sessions was back that had called `tools`.

        Of the tenant of `session`; None: too few are known, or fewer came back.
        """
        tenant, cell, _ = self._place(session, tools)
        return self._quantile((tenant, cell), share)

    def state(self) -> tuple[Cells, Floats, Floats]:
        """Return what was learned, longest unused first: `[n, 2]`, `[n, 3, BINS]`, `[n, 3]`, see `_Cell`.

        The first are numbers of tenants and of their tools.
        """
        cells = list(self._cells.values())
        keys = np.array(list(self._cells), dtype=np.uint64).reshape(-1, 2)
        counts = np.array([cell.counts for cell in cells], dtype=np.float64).reshape(-1, 3, BINS)
        judged = [(cell.sessions, cell.judged, cell.gain) for cell in cells]
        return keys, counts, np.array(judged, dtype=np.float64).reshape(-1, 3)

    def restore(self, keys: Cells, counts: Floats, judged: Floats) -> None:
        """Go on with a `state()` that `check_tools` has passed, with the latest that there is room for."""
        self.open.clear()
        self._cells.clear()
        self._of_tenant.clear()
        for (tenant, cell), each, (sessions, seen, gain) in zip(
            keys.tolist(), counts, judged.tolist(), strict=True
        ):
            self._add((tenant, cell), _Cell(each.copy(), sessions, seen, gain))

    def _place(self, session: SessionKey, tools: str) -> tuple[int, int, list[int]]:
        """Return the tenant's number, that of its tools, and of the one of several that takes longest."""
        tenant = _number(tenant_of(session))
        tags = sorted(tools.encode("utf-8", "replace").split()[:CALLS_MAX])
        if len(tags) < 2:
            return tenant, _number(b" ".join(tags)), []
        times = {one: self._quantile((tenant, one), 0.5) or 0.0 for one in map(_number, tags)}
        return tenant, _number(b" ".join(tags)), [max(times, key=times.__getitem__)]

    def _quantile(self, key: tuple[int, int], share: float) -> float | None:
        cell = self._cells.get(key)
        if cell is None:
            return None
        came_back, stayed, _ = cell.counts
        if came_back.sum() < JUDGED_MIN / 2.0:
            return None
        gone = 1.0 - np.cumprod(1.0 - came_back / np.maximum(came_back + stayed, 1e-9))
        place = int(np.searchsorted(gone, share))
        if place >= BINS:
            return None
        before = float(gone[place - 1]) if place else 0.0
        through = (share - before) / max(float(gone[place]) - before, 1e-9)
        return float(EDGES_S[place] + through * WIDTHS_S[place])

    def _count(self, one: _Waiting, idle_s: float, *, is_back: bool) -> None:
        without = np.frombuffer(one.without, dtype=np.float32).astype(np.float64)
        through = np.minimum(np.maximum((idle_s - EDGES_S[:-1]) / WIDTHS_S, 0.0), 1.0)
        counts = np.zeros((3, BINS))
        counts[1], counts[2] = through, through * (without[:-1] - without[1:])
        if is_back:
            place = bin_of(idle_s)
            counts[0, place], counts[1, place] = 1.0, 0.0
        for key in _keys(one):
            cell = self._cells.get(key)
            if cell is None:
                cell = _Cell(np.zeros((3, BINS)))
                self._add(key, cell)
            self._cells.move_to_end(key)
            if key[0] != _ALL:
                self._of_tenant[key[0]].move_to_end(key[1])
            cell.add(counts)

    def _add(self, key: tuple[int, int], cell: _Cell) -> None:
        tenant, name = key
        self._cells[key] = cell
        if tenant != _ALL:
            own = self._of_tenant.setdefault(tenant, OrderedDict())
            own[name] = None
            if len(own) > self._tenant_tools_max:
                self._forget((tenant, next(iter(own))))
        if len(self._cells) > self._tools_max:
            self._forget(next(iter(self._cells)))

    def _forget(self, key: tuple[int, int]) -> None:
        del self._cells[key]
        own = self._of_tenant.get(key[0])
        if own is not None:
            del own[key[1]]
            if not own:
                del self._of_tenant[key[0]]

    def _settle(self, now_s: float) -> None:
        """Count the sessions that are away for long; the oldest first, a few a call."""
        for session in list(self.open)[:_SETTLED_A_CALL] if self.open else ():
            if now_s - self.open[session].at_s >= WAITS_S:
                self.dropped(session, now_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._cells) <= self._tools_max, "too many tools are remembered"
        assert len(self.open) <= WAITING_MAX, "too many sessions are waited for"
        filed = {(tenant, name) for tenant, own in self._of_tenant.items() for name in own}
        assert filed == self._cells.keys() - {(_ALL, _ALL)}, "a tool is filed under another tenant"
        assert all(len(own) <= self._tenant_tools_max for own in self._of_tenant.values()), "too many of one"
        for cell in self._cells.values():
            assert ((cell.counts >= 0.0) & (cell.counts < _COUNT_MAX)).all(), "a count makes no sense"


def tenant_of(session: SessionKey) -> bytes:
    """Return whose session it is; in a trace all are one tenant's."""
    return session[:TAG_BYTES] if isinstance(session, bytes) else b""


def check_tools(
    keys: npt.NDArray[np.generic], counts: npt.NDArray[np.generic], judged: npt.NDArray[np.generic]
) -> None:
    """Raise `ValueError` saying why these arrays are no `ToolTimes.state()`."""
    count = len(keys) if keys.ndim else -1
    for name, array, shape, dtype in (
        ("tool_keys", keys, (count, 2), np.uint64),
        ("tool_counts", counts, (count, 3, BINS), np.float64),
        ("tool_judged", judged, (count, 3), np.float64),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")
    if len(np.unique(keys, axis=0)) != count:
        raise ValueError("tool_keys: a tool is there twice")
    numbers, told = counts.astype(np.float64), judged.astype(np.float64)
    # NaN fails these checks as well.
    if not ((numbers >= 0.0) & (numbers <= _COUNT_MAX)).all() or not (np.abs(told) <= _COUNT_MAX).all():
        raise ValueError("tool_counts: negative, or beyond reason")
    if not (told[:, :2] >= 0.0).all():
        raise ValueError("tool_judged: negative")


_COUNT_MAX: Final = 1e9


def _keys(one: _Waiting) -> tuple[tuple[int, int], ...]:
    return (_ALL, _ALL), (one.tenant, _ALL), (one.tenant, one.cell)


def _number(name: bytes) -> int:
    """Return a number that is never `_ALL`."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") or 1


def _with(curve: Curves, factor: Floats) -> Curves:
    """Return a curve with these factors on the hazards of its bins."""
    told = np.zeros(EDGES, dtype=np.float32)
    told[1:] = np.cumsum((curve[1:].astype(np.float64) - curve[:-1]) * factor)
    return told


def _log_likelihood(curve: bytes, idle_s: float) -> float:
    """Return that of a return after `idle_s`, less what all curves have in common."""
    log_s = np.frombuffer(curve, dtype=np.float32)
    place = bin_of(idle_s)
    before, after = float(log_s[place]), float(log_s[place + 1])
    through = (idle_s - float(EDGES_S[place])) / float(WIDTHS_S[place])
    return before + (after - before) * through + float(np.log(max(before - after, _RATE_MIN)))
