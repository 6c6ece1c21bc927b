"""What was forgotten since a turn began: never too little, and by sessions as far as is remembered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from samovar.router.prompt.reply_memory import ForgetCount

TENANTS, SESSIONS = ("a", "b", "c"), (b"1", b"2", b"3")

ACTS = st.lists(
    st.tuples(
        st.sampled_from([*TENANTS, *TENANTS, *TENANTS, None]),
        st.one_of(st.none(), st.lists(st.sampled_from(SESSIONS), max_size=3)),
    ),
    max_size=20,
)


def is_hit(act: tuple[str | None, list[bytes] | None], tenant: str, session: bytes) -> bool:
    of, sessions = act
    return of is None or (of == tenant and (sessions is None or session in sessions))


@given(ACTS, st.integers(1, 9))
def test_g12_what_was_forgotten_is_never_taken_for_kept(
    acts: list[tuple[str | None, list[bytes] | None]], sessions_max: int
) -> None:
    forgotten, counts = ForgetCount(sessions_max), [0]
    for act in acts:
        forgotten.add(*act)
        forgotten.check_integrity()
        counts.append(forgotten.count)
    for at, count in enumerate(counts):
        for tenant in TENANTS:
            for session in SESSIONS:
                truth = any(is_hit(act, tenant, session) for act in acts[at:])
                told = forgotten.since(count, tenant, session)
                assert told or not truth
                if sessions_max == len(TENANTS) * len(SESSIONS):
                    assert told == truth, "there is room for all"


def test_a_tenant_that_forgets_much_costs_no_other_one() -> None:
    forgotten = ForgetCount(8)
    forgotten.add("b", [b"1"])
    begun = forgotten.count
    for number in range(1000):
        forgotten.add("a", [b"%d" % number])
    assert forgotten.since(begun, "a", b"0")
    assert forgotten.since(begun, "a", b"another one"), "it is not known any more"
    assert not forgotten.since(begun, "b", b"1")
    assert not forgotten.since(forgotten.count, "a", b"0")
