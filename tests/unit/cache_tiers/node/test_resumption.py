"""A node that sees turns begin and end: what it forecasts, whom it ranks how, and what it brings up when."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Address, ChainMarks, Clear, Placement, marks_of, session_of
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog.types import ExtentInfo
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import (
    BINS,
    COLD,
    EDGES,
    Curves,
    Forecast,
    Hint,
    Opening,
    SessionKey,
    Turn,
    curve_of,
)
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Fetch, FetchFailed, Lookup, TurnEnded
from samovar.cache_tiers.node.resumption import runs_of
from samovar.configs.sections import PolicySettings, PredictorSettings, PrefetchSettings, TierSettings
from tests.support.clock import Clock
from tests.support.constants import tuned
from tests.support.inside import idle_in, learner_of, state_of
from tests.support.nodes.node_harness import MIB, SESSION, SHAPE, TENANT, Bench, Sample, bench, nvme, sample

LOW = Placement(first="nvme", write_behind=())
OWNER = TENANT + SESSION
NO_HOLDOUT = tuned(PrefetchSettings(by_hazard=True), holdout_share=0.0)


class Foretells:
    """A predictor that says what it is told to, and remembers what it heard."""

    def __init__(self, hazard: float = 0.0) -> None:
        self.hazard = hazard
        self.heard: list[object] = []
        self.changed: tuple[tuple[SessionKey, Curves], ...] = ()

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
        self.heard.append(("arrived", session, at_s))

    def ended(self, turn: Turn) -> Curves:
        self.heard.append(turn)
        return curve_of(np.full(BINS, self.hazard))

    def others(self, session: SessionKey, at_s: float) -> tuple[tuple[SessionKey, Curves], ...]:
        return self.changed

    left_share: float | None = None

    def hint(self, hint: Hint) -> Curves | None:
        self.heard.append(hint)
        return curve_of(np.full(BINS, 0.0 if hint.event == "closed" else 0.9))

    def forget(self, session: SessionKey) -> None:
        self.heard.append(("forget", session))

    def check_integrity(self) -> None:
        pass


def low_bench(path: Path, foretells: object = None, **settings: object) -> Bench:
    """Main memory, and files below it."""
    given = TierSettings.model_validate({"prefetch": NO_HOLDOUT, **settings})
    make = None if foretells is None else (lambda: foretells)
    return bench([HeapTier(4 * MIB), nvme(path)], settings=given, make_predictor=make)


def begin(node: Bench, wanted: Sample, *, is_queued: bool = False, is_checked: bool = True) -> None:
    header = wanted.header
    node.node.lookup(
        Lookup(
            *(header.namespace, wanted.chain, header.tenant, header.session),
            starts_turn=True,
            is_queued=is_queued,
        )
    )
    if is_checked:
        node.node.check_integrity()


def over(wanted: Sample, *, marks: ChainMarks | None = None, inputs: int = 12, **more: object) -> TurnEnded:
    header = wanted.header
    marks = marks_of(header.keys) if marks is None else marks
    fields = {"service_s": 2.0, "output_tokens": 3, "block_tokens": SHAPE.block_tokens, **more}
    return TurnEnded(
        tenant=header.tenant,
        session=header.session,
        input_tokens=inputs,
        marks=marks,
        **fields,  # type: ignore[arg-type]
    )


def test_what_a_request_has_said_of_the_next_one_is_heard_at_its_end(tmp_path: Path) -> None:
    foretells = Foretells(0.5)
    node, wanted = low_bench(tmp_path, foretells), sample(1)
    node.store(wanted)
    returns, sessions = node.node.resumption, idle_in(node.node.resumption)
    for told, event, seconds in (
        ({"returns_s": 30.0}, None, 30.0),
        ({"is_final": True}, "closed", None),
        ({"is_final": True, "returns_s": 5.0}, "closed", 5.0),
    ):
        begin(node, wanted)
        forecast = returns.turn_over(over(wanted, **told))
        (hint,) = [one for one in foretells.heard if isinstance(one, Hint)]
        foretells.heard.clear()
        assert (hint.session, hint.event, hint.expected_return_s) == (OWNER, event, seconds)
        assert hint.reading is not None
        hinted = curve_of(np.full(BINS, 0.0 if event == "closed" else 0.9))
        assert forecast is not None
        assert (forecast.curve == hinted).all()
        assert (sessions.curves[sessions.slot(OWNER)] == hinted).all()
    assert returns.stats().hints["closed:received"] == 2
    returns.turn_over(over(wanted))
    assert not [one for one in foretells.heard if isinstance(one, Hint)]


def test_a_turn_begins_and_ends_and_the_tiers_know(tmp_path: Path) -> None:
    foretells = Foretells(0.5)
    node, wanted = low_bench(tmp_path, foretells), sample(1)
    node.store(wanted)
    returns = node.node.resumption
    sessions = returns._sessions
    begin(node, wanted)
    assert sessions.running[sessions.slot(OWNER)] == 1
    node.clock.now_s += 5.0
    forecast = returns.turn_over(over(wanted, ago_s=1.0, stop="length", role="other", profile="agent"))
    assert forecast is not None
    curve = forecast.curve
    assert curve.shape == (EDGES,)
    slot = sessions.slot(OWNER)
    assert sessions.running[slot] == 0
    assert sessions.ended_s[slot] == 1004.0
    assert sessions.tokens[slot] == 15
    assert np.array_equal(sessions.curves[slot], curve)
    arrived, turn = foretells.heard
    assert arrived == ("arrived", OWNER, 1000.0)
    assert turn == Turn(OWNER, 1002.0, 1004.0, 12, 3, 0, "length", "other", "", "agent")
    assert returns.stats().turns == 1
    node.node.check_integrity()


def test_what_a_turn_has_used_is_not_left_behind_and_what_it_has_not_is(tmp_path: Path) -> None:
    """However little time is between the lookup and what it touches."""

    class Ticking(Clock):
        def __call__(self) -> float:
            self.now_s += 1e-3
            return self.now_s

    budgets: dict[TierName, int] = {"cpu": 2 * sample(1, 8).record.nbytes}
    foretells = Foretells(0.5)
    node = bench([HeapTier(4 * MIB)], clock=Ticking(), budgets=budgets, make_predictor=lambda: foretells)
    used, edited = sample(1, 8), sample(2, 8)
    for wanted in (edited, used):
        begin(node, wanted)
        node.store(wanted)
        node.node.resumption.turn_over(over(wanted))
    begin(node, used)
    node.node.resumption.turn_over(over(used))
    foretells.hazard = 0.01
    for number in (3, 4):
        wanted = sample(number, 8, session=b"session%d" % number * 2)
        begin(node, wanted)
        node.store(wanted)
        node.node.resumption.turn_over(over(wanted))
        assert not node.look(edited).spans, "the branch that was edited away stayed"
    assert node.look(used).spans, "the session's own chain was pushed out"


def test_what_a_turn_kept_of_its_session_s_chain(tmp_path: Path) -> None:
    foretells = Foretells()
    node, first, other = low_bench(tmp_path, foretells), sample(1, 8), sample(2, 8)
    for wanted in (first, first, other):  # the last one is an edit
        begin(node, wanted)
        node.node.resumption.turn_over(over(wanted, inputs=32))
    kept = [turn.kept_tokens for turn in foretells.heard if isinstance(turn, Turn)]
    assert kept == [0, 32, 0]


def test_lookups_of_other_kinds_begin_no_turn(tmp_path: Path) -> None:
    foretells = Foretells()
    node, wanted = low_bench(tmp_path, foretells), sample(1)
    node.look(wanted)
    node.node.lookup_here(Lookup(wanted.header.namespace, wanted.chain, TENANT, SESSION, starts_turn=True))
    assert not foretells.heard, "another node asked"
    assert len(idle_in(node.node.resumption)) == 0


def test_a_likely_session_comes_up_and_its_return_is_counted(tmp_path: Path) -> None:
    node, wanted = (
        low_bench(tmp_path, Foretells(0.5), prefetch=NO_HOLDOUT.model_copy(update={"at_pause": False})),
        sample(1, placement=LOW),
    )
    node.store(wanted)
    assert node.copies(wanted) == ("nvme",)
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    node.node.tick()
    node.work()
    assert node.copies(wanted) == ("cpu", "nvme")
    begin(node, wanted)
    stats = node.node.stats().returns.prefetch
    assert stats.started == {"hazard": wanted.record.nbytes}
    assert (stats.used, stats.wasted, stats.late) == (wanted.record.nbytes, 0, 0)


def test_an_unlikely_session_stays_where_it_is(tmp_path: Path) -> None:
    node, wanted = (
        low_bench(tmp_path, Foretells(0.0), prefetch=NO_HOLDOUT.model_copy(update={"at_pause": False})),
        sample(1, placement=LOW),
    )
    node.store(wanted)
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    node.node.tick()
    node.work()
    assert node.copies(wanted) == ("nvme",)


def test_at_pause_what_lies_below_comes_up(tmp_path: Path) -> None:
    node, wanted = low_bench(tmp_path, Foretells(0.0)), sample(1, placement=LOW)
    node.store(wanted)
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    node.work()
    assert node.copies(wanted) == ("cpu", "nvme")
    assert node.node.stats().returns.prefetch.started == {"pause": wanted.record.nbytes}


def test_a_request_that_waits_is_brought_up_at_once(tmp_path: Path) -> None:
    node, wanted = low_bench(tmp_path, Foretells()), sample(1, placement=LOW)
    node.store(wanted)
    begin(node, wanted, is_queued=True)
    node.work()
    assert node.copies(wanted) == ("cpu", "nvme")
    fetched = node.fetch(wanted, node.look(wanted).spans[0])
    assert not isinstance(fetched, FetchFailed)
    low = Fetch(wanted.header.namespace, TENANT, wanted.header.extent_id, 0, 3, "nvme", 5.0)
    found = node.node.fetch(low)
    assert not isinstance(found, FetchFailed)
    assert found.tier == "cpu", "whoever asked before it came up gets it from there"


def test_guesses_give_way_to_demand_and_are_called_off_when_the_session_returns(tmp_path: Path) -> None:
    node, wanted = low_bench(tmp_path, Foretells(0.5)), sample(1, placement=LOW)
    node.store(wanted)
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    state_of(node.node).fetches += 1
    assert not node.node.work(), "a request waits for a load"
    other = sample(2, placement=LOW, session=b"session2" * 2)
    node.store(other)
    begin(node, other)
    node.node.resumption.turn_over(over(other))
    assert node.node.stats().returns.prefetch.moving == wanted.record.nbytes, "nothing new"
    begin(node, wanted)
    state_of(node.node).fetches -= 1
    assert not node.node.work(), "it came back: demand loads it"
    stats = node.node.stats().returns.prefetch
    assert (stats.moving, stats.late) == (0, wanted.record.nbytes)
    assert node.copies(wanted) == ("nvme",)


@pytest.mark.parametrize("how", ["closed", "cleared", "tenant cleared"])
def test_closed_and_cleared_sessions_are_not_brought_up(tmp_path: Path, how: str) -> None:
    foretells = Foretells(0.5)
    node, wanted = low_bench(tmp_path, foretells), sample(1, placement=LOW)
    node.store(wanted)
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    if how == "closed":
        assert node.node.resumption.hint(TENANT, SESSION, "closed", None)
    else:
        node.node.clear(Clear(TENANT, None if how == "tenant cleared" else SESSION))
        node.node.resumption.work()
        assert foretells.heard[-1] == ("forget", OWNER)
        assert OWNER not in idle_in(node.node.resumption)
    assert not node.node.work()
    node.node.tick()
    assert not node.node.work()
    assert node.node.stats().returns.prefetch.moving == 0


def test_a_hint_changes_the_curve(tmp_path: Path) -> None:
    node, wanted = low_bench(tmp_path), sample(1)
    assert not node.node.resumption.hint(TENANT, SESSION, "typing", None), "nobody knows it"
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    sessions = idle_in(node.node.resumption)
    assert np.array_equal(sessions.curves[sessions.slot(OWNER)], COLD)
    node.clock.now_s += 60
    assert node.node.resumption.hint(TENANT, SESSION, "typing", 5.0)
    slot = sessions.slot(OWNER)
    assert sessions.ended_s[slot] == node.clock.now_s
    assert sessions.probabilities(np.array([slot]), node.clock.now_s, 30.0)[0] > 0.8


def test_what_is_pushed_out_unused_is_wasted(tmp_path: Path) -> None:
    node, wanted = low_bench(tmp_path, Foretells(0.5)), sample(1, placement=LOW)
    node.store(wanted)
    begin(node, wanted)
    node.node.resumption.turn_over(over(wanted))
    node.work()
    state_of(node.node).lost(wanted.header.address, "cpu")
    node.node.tick()
    assert node.node.stats().returns.prefetch.wasted == wanted.record.nbytes
    node.node.check_integrity()


@pytest.mark.parametrize(("policy", "kind"), [("learned", "cold"), ("type-km", "cold"), ("lru", "cold")])
def test_each_policy_has_its_predictor(tmp_path: Path, policy: str, kind: str) -> None:
    node = low_bench(tmp_path, policy=PolicySettings.model_validate({"name": policy}))
    begin(node, sample(1))
    forecast = node.node.resumption.turn_over(over(sample(1)))
    assert forecast is not None
    assert np.array_equal(forecast.curve, COLD)
    assert isinstance(learner_of(node.node.resumption).predictor, Predictor) == (policy != "type-km")
    assert node.node.stats().returns.predictor == kind


def test_the_clock_may_run_faster(tmp_path: Path) -> None:
    foretells = Foretells()
    node = low_bench(tmp_path, foretells, predictor=PredictorSettings(clock_rate=60.0))
    begin(node, sample(1))
    node.clock.now_s += 10.0
    node.node.resumption.turn_over(over(sample(1)))
    turn = foretells.heard[-1]
    assert isinstance(turn, Turn)
    assert (turn.started_s, turn.ended_s) == (60 * 1008.0, 60 * 1010.0)


def test_what_was_learned_outlives_the_node(tmp_path: Path) -> None:
    path = tmp_path / "predictor.bin"
    settings = TierSettings(predictor=tuned(PredictorSettings(), save_s=10.0))
    node = bench([HeapTier(MIB)], settings=settings, predictor_path=path)
    for number in range(40):
        begin(node, sample(number))
        node.node.resumption.turn_over(over(sample(number)))
    assert not path.exists()
    node.clock.now_s += 11.0
    node.node.resumption.work()
    assert path.exists()
    steps = _steps(node)
    assert steps > 0
    path.unlink()
    node.node.close()
    again = bench([HeapTier(MIB)], settings=settings, predictor_path=path)
    begin(again, sample(1))
    again.node.resumption.turn_over(over(sample(1)))
    assert again.node.stats().returns.restored == "restored"
    assert _steps(again) >= steps


def test_with_threads_the_curve_comes_back_and_close_saves(tmp_path: Path) -> None:
    node = bench([HeapTier(MIB)], workers=1, predictor_path=tmp_path / "predictor.bin")
    curves: list[Forecast | None] = []

    def serve(number: int) -> None:
        for _ in range(5):
            begin(node, sample(number))
            curves.append(node.node.resumption.turn_over(over(sample(number))))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(curves) == 20
    assert all(curve is not None for curve in curves)
    node.node.check_integrity()
    node.node.close()
    assert (tmp_path / "predictor.bin").exists()
    assert node.node.resumption.turn_over(over(sample(1))) is None, "closed"


def _steps(node: Bench) -> int:
    predictor = learner_of(node.node.resumption).predictor
    assert isinstance(predictor, Predictor)
    return predictor.learned_steps


def lineages(*names: str) -> list[bytes]:
    """Tags of lineages of one session."""
    return [SESSION[:8] + name.encode().ljust(8, b"-") for name in names]


def test_the_learner_hears_which_session_a_lineage_is_of_and_how_it_begins(tmp_path: Path) -> None:
    openings: list[Opening | None] = []

    class Hears(Foretells):
        def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
            openings.append(opening)

    node = low_bench(tmp_path, Hears())
    chat, title = lineages("chat", "title")
    begin(node, sample(1, 9, session=chat))
    begin(node, sample(1, 3, session=title))
    begin(node, sample(2, 9, session=title))
    node.node.resumption.work()
    first, shorter, other = openings
    assert first is not None
    assert shorter is not None
    assert other is not None
    assert first.whole == shorter.whole == other.whole == TENANT + session_of(SESSION)
    assert len(first.roots) == 4
    assert shorter.roots == first.roots[:2]
    assert not set(other.roots) & set(first.roots)


def test_two_turns_of_one_lineage_at_once_keep_each_its_own(tmp_path: Path) -> None:
    foretells = Foretells()
    node, whole = low_bench(tmp_path, foretells), sample(1, 8)
    begin(node, whole)
    node.node.resumption.turn_over(over(whole, inputs=32))
    for blocks in (8, 4):  # a further turn, and one that repeats the front only
        part = Lookup(whole.header.namespace, whole.chain[: 32 * blocks], TENANT, SESSION, starts_turn=True)
        node.node.lookup(part)
    for blocks in (8, 4):
        inputs = blocks * SHAPE.block_tokens
        node.node.resumption.turn_over(over(whole, inputs=inputs, marks=marks_of(whole.header.keys[:blocks])))
    kept = [turn.kept_tokens for turn in foretells.heard if isinstance(turn, Turn)]
    assert kept == [0, 8 * SHAPE.block_tokens, 4 * SHAPE.block_tokens]


def test_a_forecast_that_changes_another_lineage_s_changes_its_rank_here(tmp_path: Path) -> None:
    foretells = Foretells(0.5)
    node = low_bench(tmp_path, foretells)
    before, after = (sample(number, session=tag) for number, tag in enumerate(lineages("before", "after")))
    begin(node, before)
    node.node.resumption.turn_over(over(before))
    foretells.changed = ((TENANT + before.header.session, curve_of(np.zeros(BINS))),)
    foretells.left_share = 0.4
    node.clock.now_s += 9.0
    begin(node, after)
    told = node.node.resumption.turn_over(over(after))
    assert told is not None
    assert (told.others, told.left_share) == (foretells.changed, 0.4)
    sessions = idle_in(node.node.resumption)
    slots = np.array([sessions.slot(TENANT + one.header.session) for one in (before, after)])
    silent, likely = sessions.probabilities(slots, node.clock.now_s, 600.0)
    assert silent == 0.0 < likely
    assert sessions.left_share == 0.4
    node.node.check_integrity()


def test_a_cleared_session_takes_all_its_lineages_along(tmp_path: Path) -> None:
    foretells = Foretells()
    node = low_bench(tmp_path, foretells)
    other = b"another session!"
    for number, tag in enumerate([*lineages("chat", "title"), other]):
        begin(node, sample(number, session=tag))
    node.node.clear(Clear(TENANT, lineages("title")[0]))
    node.node.resumption.work()
    forgotten = {heard[1] for heard in foretells.heard if isinstance(heard, tuple) and heard[0] == "forget"}
    assert forgotten == {TENANT + tag for tag in lineages("chat", "title")}
    assert idle_in(node.node.resumption).sessions() == [TENANT + other]
    assert list(node.node.resumption._chains) == [TENANT + other]


@pytest.mark.parametrize("how", ["nothing else to do", "others wait", "a request loads", "no room"])
def test_what_is_never_expected_back_is_copied_down_only_if_there_is_nothing_better_to_do(
    tmp_path: Path, how: str
) -> None:
    behind = Placement(first="cpu", write_behind=("nvme",))
    one = sample(1, placement=behind)
    below = 4 * MIB if how != "no room" else one.record.nbytes
    foretells = Foretells(0.0)
    node = (
        low_bench(tmp_path, foretells)
        if how != "no room"
        else bench(
            [HeapTier(4 * MIB), nvme(tmp_path)],
            budgets={"cpu": 4 * MIB, "nvme": below},
            make_predictor=lambda: foretells,
        )
    )
    begin(node, one)
    node.node.resumption.turn_over(over(one))
    state_of(node.node).fetches += how == "a request loads"
    node.offer(one)
    if how == "others wait":
        foretells.hazard = 0.5
        likely = sample(2, placement=behind, session=b"session2" * 2)
        begin(node, likely)
        node.node.resumption.turn_over(over(likely))
        node.offer(likely)
    while node.node.work():
        node.node.check_integrity()
    is_copied = how == "nothing else to do"
    assert node.copies(one) == (("cpu", "nvme") if is_copied else ("cpu",))
    if how == "others wait":
        assert node.copies(likely) == ("cpu", "nvme")


def test_a_glance_tells_where_a_lineage_s_blocks_are_and_when_it_is_expected(tmp_path: Path) -> None:
    node = low_bench(tmp_path, Foretells(0.5))
    first, later = sample(1), sample(2, placement=LOW, session=b"session2" * 2)
    stranger = TENANT + b"session9" * 2
    begin(node, first)
    running = node.node.glance([OWNER], [60.0], with_stats=False).lineages[OWNER]
    assert (running.is_running, running.survival) == (True, ()), "its first turn: nothing is expected yet"
    node.store(first)
    node.store(later)
    node.node.resumption.turn_over(over(first))
    node.clock.now_s += 10.0
    glance = node.node.glance(
        [OWNER, TENANT + later.header.session, stranger], [0.0, 2.0, 1e9], with_stats=True
    )
    assert glance.stats is not None
    assert glance.stats.node_id
    one = glance.lineages[OWNER]
    assert (one.nbytes, one.blocks) == ({"cpu": first.record.nbytes}, {"cpu": 3})
    assert one.runs == (("cpu", 3),)
    assert one.survival[:2] == (1.0, 0.5)
    assert one.survival[2] < 0.001
    assert (one.since_ago_s, one.is_running) == (10.0, False)
    below = glance.lineages[TENANT + later.header.session]
    assert (below.blocks, below.runs, below.survival) == ({"nvme": 3}, (("nvme", 3),), ())
    assert stranger not in glance.lineages
    assert node.node.sessions.tenant_bytes(TENANT) == {
        "cpu": first.record.nbytes,
        "nvme": later.record.nbytes,
    }


def test_runs_are_the_cheapest_places_of_the_chain_and_its_gaps() -> None:
    info = ExtentInfo(
        Address(TENANT, b"n" * 32, b"e" * 16), SHAPE, b"", 0, 4, 64, LOW, frozenset(), 0.0, 1, ("cpu", "nvme")
    )
    chain = [
        info,
        replace(info, first_block=4, blocks=2, tiers=("cpu",)),
        replace(info, first_block=4, blocks=3, tiers=("s3",)),  # a branch beside it, a block longer
        replace(info, first_block=9, blocks=1, tiers=("nvme",)),
    ]
    assert runs_of(chain) == (("cpu", 6), ("s3", 1), ("none", 2), ("nvme", 1))
    assert runs_of([]) == ()
