"""Tenants of one service with several replicas: what one of them says must tell the others nothing.

The model is a small random one, of which a long prompt takes a tenth of a second: here it counts how
long an answer takes, not what it says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from tests.support.engines.tiny_models import SPECIAL_TOKENS, make_tiny_model
from tests.support.services.service import for_served_dtype
from tests.support.services.tier_service import ADMIN_KEY, MIB, TierService, flag, tier_service

pytestmark = pytest.mark.timeout(1500)

KEYS = {name: f"key-of-tenant-{name}" for name in ("alice", "bob")}
VOCAB = 512
CONVERSATIONS = 24
AGREE_MIN, AGREE_MAX = 4, 20
"""Of 24 independent choices between two replicas as many agree, but for 3 runs in 10,000."""
PREFIX_TOKENS = 1500
GUESSES = 200
"""With the victim's prefix cached, and as many without: the AUC of guesses in the dark is then within 0.1
of one half but for 1 run in 2,000."""

Ids = list[int]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierService]:
    folder = tmp_path_factory.mktemp("router")
    model = make_tiny_model(folder / "tiny", layers=4, hidden=256, vocab=VOCAB)
    flags = {
        "model.path": model,
        "cluster.replicas": 2,
        "engine.pool-bytes-max": for_served_dtype(64 * MIB),
        "tiers.audit-share": 0,
    }
    env = {"SAMOVAR_AUTH__API_KEYS": flag(KEYS), "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY}
    with tier_service(folder, flags, env=env, key=ADMIN_KEY) as service:
        yield service
        service.check_books()


@dataclass(frozen=True)
class Said:
    """What one answer tells its reader."""

    cached_tokens: int
    replica: str
    header_names: frozenset[str]
    took_s: float


class Tenant:
    """Somebody with a key, on one connection."""

    def __init__(self, service: TierService, name: str) -> None:
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        self.http = httpx.Client(base_url=service.url, headers=headers, timeout=120)

    def ask(self, prompt: Ids, headers: dict[str, str] | None = None, **body: object) -> Said:
        """One token more. `body`: further fields."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
        began_s = time.perf_counter()
        answer = self.http.post("/v1/completions", json=asked, headers=headers)
        took_s = time.perf_counter() - began_s
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Said(cached, answer.headers["x-replica"], frozenset(answer.headers), took_s)


@pytest.fixture
def tenants(service: TierService) -> Iterator[tuple[Tenant, Tenant]]:
    alice, bob = Tenant(service, "alice"), Tenant(service, "bob")
    with ExitStack() as stack:
        stack.enter_context(alice.http)
        stack.enter_context(bob.http)
        yield alice, bob


def words(rng: random.Random, tokens: int) -> Ids:
    return rng.choices(range(len(SPECIAL_TOKENS), VOCAB), k=tokens)


@pytest.mark.slow  # a service more; the gate has test_guarded.py and tests/unit/router/test_parts.py
def test_f14_with_another_tenants_salt_session_and_cache_key_nothing_is_found(
    tenants: tuple[Tenant, Tenant],
) -> None:
    alice, bob = tenants
    rng = random.Random(14)
    agree = 0
    ordinary = bob.ask(words(rng, 100), session_id="his own").header_names
    for number in range(CONVERSATIONS):
        names: dict[str, object] = {
            "session_id": f"session of alice {number}",
            "prompt_cache_key": f"cache key of alice {number}",
            "cache_salt": f"salt of alice {number}",
            "user": f"alice {number}",
        }
        headers = {name: f"{name} of alice {number}" for name in ("x-session-id", "x-session-affinity")}
        # All that Alice sends, or a part of it: whatever of it Bob has got to know.
        sent = {name: names[name] for name in names if number % 3 == 0 or rng.random() < 0.7}
        sent_headers = {name: headers[name] for name in headers if number % 4 == 0}
        prompt = words(rng, 200)
        first = alice.ask(prompt, sent_headers, **sent)
        assert first.cached_tokens == 0
        spied = bob.ask(prompt, sent_headers, **sent)
        assert spied.cached_tokens == 0, "blocks of another tenant"
        assert spied.header_names == ordinary
        agree += spied.replica == first.replica
        # Nothing of what Bob did touches her.
        gone = bob.http.delete(f"/v1/sessions/{names['session_id']}")
        assert gone.status_code in (200, 404), gone.text
        again = alice.ask([*prompt, *words(rng, 20)], sent_headers, **sent)
        assert again.replica == first.replica, "moved by another tenant"
        assert again.cached_tokens >= 192
    assert AGREE_MIN <= agree <= AGREE_MAX, f"{agree} of {CONVERSATIONS} times he was where she was"


def auc(with_cache_s: list[float], without_s: list[float]) -> float:
    """How likely a guess without the cached prefix takes longer than one with it; ties count half."""
    both = np.array([*with_cache_s, *without_s])
    values, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n, m = len(with_cache_s), len(without_s)
    assert len(values) > 0
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def test_auc_is_the_share_of_pairs_in_order() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 1.0], [1.0, 1.0]) == 0.5
    assert auc([1.0, 3.0], [2.0, 4.0]) == 0.75


@pytest.mark.slow
def test_f15_how_long_an_answer_takes_tells_nothing_about_other_tenants(
    tenants: tuple[Tenant, Tenant],
) -> None:
    """Bob guesses what Alice has said; a colleague of hers, who may know, guesses the same after him."""
    alice, bob = tenants
    rng = random.Random(15)
    cases = [True, False] * GUESSES
    rng.shuffle(cases)
    foreign: dict[bool, list[float]] = {True: [], False: []}
    own: dict[bool, list[float]] = {True: [], False: []}
    for number, is_said in enumerate(cases):
        guess, other = words(rng, PREFIX_TOKENS), words(rng, PREFIX_TOKENS)
        session = f"timed {number}"
        alice.ask(guess if is_said else other, session_id=session)
        spied = bob.ask(guess, session_id=session)
        assert spied.cached_tokens == 0
        foreign[is_said].append(spied.took_s)
        known = alice.ask(guess, session_id=session)
        assert (known.cached_tokens > 0) == is_said
        own[is_said].append(known.took_s)
    across, inside = auc(foreign[True], foreign[False]), auc(own[True], own[False])
    seconds = [float(np.median(times[said])) for times in (foreign, own) for said in (True, False)]
    print(f"AUC across tenants {across:.3f}, inside one {inside:.3f}; medians (with, without) {seconds}")
    assert 0.4 <= across <= 0.6
    assert inside > 0.9
