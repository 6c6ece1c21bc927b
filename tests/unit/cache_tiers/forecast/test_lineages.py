"""What becomes of lineages beside a conversation, learned without their text, and forecast from then on."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.forecast.kaplan_meier import TypeKm
from samovar.cache_tiers.forecast.learner import decode, encode
from samovar.cache_tiers.forecast.lineages import LEFT_SHARE, Lineages
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import LAST_S, Curves, Opening, Stop, Turn, resume_within
from samovar.configs.sections import PredictorSettings
from tests.support.constants import tuned

SETTINGS = PredictorSettings()
TITLE, TAGS, AGENT, SYSTEM = ((7, 70 + kind, 700 + kind, 7000 + kind) for kind in range(4))
MAKES: list[Callable[[], Predictor | TypeKm]] = [lambda: Predictor(SETTINGS), lambda: TypeKm(SETTINGS)]


def ever(curve: Curves) -> float:
    return resume_within(curve, 0.0, LAST_S)


@dataclass
class Chat:
    """Sessions told to a forecaster, events in order of time. `said`: forecasts by kind of lineage."""

    forecaster: Predictor | TypeKm
    seed: int = 0
    said: dict[str, list[float]] = field(default_factory=dict)
    demoted: list[tuple[object, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = itertools.count()
        self.now_s = 0.0

    def at(self, at_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at_s, next(self.serial), then))

    def run(self, until_s: float = float("inf")) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.now_s, _, then = heapq.heappop(self.events)
            then()
        self.forecaster.check_integrity()

    def turn(
        self,
        session: int,
        kind: str,
        roots: tuple[int, ...],
        tokens: int,
        *,
        stop: Stop = "stop",
        took_s: float = 1.0,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """A turn that begins now."""
        key, began_s = (session, kind), self.now_s
        self.forecaster.arrived(key, began_s, Opening(session, roots))

        def ends() -> None:
            turn = Turn(key, began_s, self.now_s, tokens, 50, stop=stop)
            self.said.setdefault(kind.rstrip("0123456789"), []).append(ever(self.forecaster.ended(turn)))
            self.demoted += [(other, ever(curve)) for other, curve in self.forecaster.others(key, self.now_s)]
            then()

        self.at(began_s + took_s, ends)

    def conversation(self, session: int, *, returns: float = 0.6, sides: bool = True) -> None:
        """One that goes on with this probability, title and tags asked for after each answer."""
        begins, number = (session, *SYSTEM[1:]), itertools.count()

        def goes_on(tokens: int) -> None:
            self.turn(session, "main", begins, tokens, then=lambda: answered(tokens))

        def answered(tokens: int) -> None:
            for name, roots in (("title", TITLE), ("tags", TAGS)) if sides else ():
                kind = f"{name}{next(number)}"
                at_s = self.now_s + 0.2
                self.at(at_s, lambda kind=kind, roots=roots: self.turn(session, kind, roots, 300))  # type: ignore[misc]
            if self.rng.random() < returns:
                self.at(self.now_s + self.rng.lognormal(4.0, 0.6), lambda: goes_on(tokens + 200))

        self.at(session * 5.0, lambda: goes_on(4000))


@pytest.mark.parametrize("make", MAKES, ids=["learned", "type-km"])
def test_one_shots_are_expected_never_and_their_conversations_as_without_them(
    make: Callable[[], Predictor | TypeKm],
) -> None:
    told = {}
    for sides in (True, False):
        chat = Chat(make())
        for session in range(150):
            chat.conversation(session, sides=sides)
        chat.run()
        told[sides] = {kind: float(np.mean(said[-60:])) for kind, said in chat.said.items()}
        assert not chat.demoted, "nothing was extended but conversations"
    assert max(told[True]["title"], told[True]["tags"]) < 0.02
    assert told[True]["main"] == pytest.approx(told[False]["main"], abs=0.12)
    assert told[True]["main"] > 0.4


@pytest.mark.parametrize("make", MAKES, ids=["learned", "type-km"])
def test_a_few_are_enough_to_expect_little_of_the_next(make: Callable[[], Predictor | TypeKm]) -> None:
    chat = Chat(make())
    for session in range(12):
        chat.conversation(session, returns=0.0)
    chat.run()
    chat.at(5000.0, lambda: chat.conversation(1000, returns=0.0))
    chat.run()
    assert chat.said["title"][0] > 0.2, "nothing was known of it"
    assert chat.said["title"][-1] < 0.25 * chat.said["title"][0]
    assert chat.said["main"][-1] > 3.0 * chat.said["title"][-1]


def agents(chat: Chat, session: int, *, turns: int = 4) -> None:
    """A tool call of the conversation starts two sub-agents; it goes on when they are done."""
    running = {"agent0", "agent1"}

    def works(name: str, left: int) -> None:
        def over() -> None:
            if left:
                chat.at(chat.now_s + 3.0, lambda: works(name, left - 1))
                return
            running.discard(name)
            if not running:
                chat.at(chat.now_s + 1.0, lambda: chat.turn(session, "parent", (session, *SYSTEM[1:]), 9000))

        stop: Stop = "tool_calls" if left else "stop"
        chat.turn(session, name, AGENT, 2000, stop=stop, then=over)

    def start() -> None:
        for name in running:
            chat.at(chat.now_s + 0.5, lambda name=name: works(name, turns))  # type: ignore[misc]

    chat.at(
        session * 20.0,
        lambda: chat.turn(session, "parent", (session, *SYSTEM[1:]), 8000, stop="tool_calls", then=start),
    )


def test_sub_agents_are_expected_though_one_shots_are_not_and_demote_no_parent() -> None:
    chat = Chat(TypeKm(SETTINGS))
    for session in range(60):
        agents(chat, session)
        chat.conversation(1000 + session, returns=0.3)
    chat.run()
    # Of an agent's five turns four are followed by another; the first of them is the one beside others.
    assert np.mean(chat.said["title"][-30:]) < 0.02
    standing_first = chat.said["agent"][-10:]
    assert np.mean(standing_first) > 0.5
    ratios = chat.forecaster.lineages.ratios
    after = {cell: ratios.ratio((cell,)) for cell in ratios.cells.tolist() if 1024 <= cell < 2048}
    assert after
    assert min(after.values()) > 0.8, "a parent that returns is not demoted"


def test_the_first_turn_of_a_known_kind_of_sub_agent_is_expected_to_go_on() -> None:
    chat = Chat(TypeKm(SETTINGS))
    for session in range(40):
        agents(chat, session)
        chat.conversation(1000 + session, returns=0.3)
    chat.run()
    first = []
    for session in (5000, 5001):
        chat.forecaster.arrived((session, "parent"), chat.now_s, Opening(session, SYSTEM))
        chat.forecaster.ended(Turn((session, "parent"), chat.now_s, chat.now_s, 8000, 9, stop="tool_calls"))
        roots = AGENT if session == 5000 else TITLE
        tokens = 2000 if session == 5000 else 300
        chat.forecaster.arrived((session, "beside"), chat.now_s, Opening(session, roots))
        first.append(
            ever(chat.forecaster.ended(Turn((session, "beside"), chat.now_s, chat.now_s, tokens, 9)))
        )
    agent, title = first
    assert agent > 10.0 * title
    assert title < 0.02


def compacts(chat: Chat, session: int) -> None:
    """Two turns, then a new chain that repeats the system prompt; the old one falls silent."""

    def turn(name: str, number: int) -> None:
        chat.turn(session, name, (*SYSTEM[:2], session), 3000, then=lambda: over(name, number))

    def over(name: str, number: int) -> None:
        if number < 5:
            name = "old" if number < 2 else "new"
            chat.at(chat.now_s + chat.rng.lognormal(3.0, 0.5), lambda: turn(name, number + 1))

    chat.at(session * 30.0, lambda: turn("old", 0))


def test_a_compacted_conversation_is_expected_less_once_its_successor_goes_on() -> None:
    chat = Chat(TypeKm(SETTINGS))
    for session in range(40):
        compacts(chat, session)
    chat.run()
    early = [ever_s for (session, _), ever_s in chat.demoted if session < 3]  # type: ignore[misc,has-type]
    late = [(key, ever_s) for key, ever_s in chat.demoted if key[0] >= 35]  # type: ignore[index]
    assert not early, "nothing is demoted before the like has been seen"
    assert len(late) == 5
    assert {key[1] for key, _ in late} == {"old"}  # type: ignore[index]
    assert max(ever_s for _, ever_s in late) < 0.3 * np.mean(chat.said["old"][-10:])


def test_what_is_left_behind_is_worth_what_is_gone_back_to() -> None:
    lineages = Lineages(SETTINGS)
    assert lineages.left_share == LEFT_SHARE
    shares = []
    for regained in (0.0, 0.5):
        for number in range(2000):
            lineages.arrived("main", float(number), Opening("session", branches=2, regained=2 * regained))
            lineages.check_integrity()
        shares.append(lineages.left_share)
    assert shares[0] < 0.001
    assert shares[1] == pytest.approx(0.5, abs=0.1)


def test_attempts_at_one_answer_are_no_extension() -> None:
    """Of n prompts at once the second does not show that the lineage goes on."""
    chat = Chat(TypeKm(SETTINGS))
    chat.turn(1, "main", SYSTEM, 3000)
    chat.run()
    chat.now_s = 10.0
    for _ in range(3):
        chat.turn(1, "title", TITLE, 300)
    chat.run()
    assert not chat.forecaster.lineages._of[1, "title"].returns
    assert not chat.demoted


def test_what_was_learned_is_saved_with_the_predictor() -> None:
    chat = Chat(Predictor(SETTINGS))
    for session in range(60):
        chat.conversation(session)
        compacts(chat, 2000 + session)
    chat.run()
    chat.forecaster.lineages.left[:] = (40.0, 10.0)
    again = Predictor(SETTINGS)
    assert isinstance(chat.forecaster, Predictor)
    again.restore(decode(encode(chat.forecaster)))
    was, now = chat.forecaster.lineages, again.lineages
    assert now.left_share == was.left_share > LEFT_SHARE
    cells = was.ratios.cells.tolist()
    assert cells
    assert [now.ratios.ratio((cell,)) for cell in cells] == [was.ratios.ratio((cell,)) for cell in cells]
    small = Predictor(tuned(PredictorSettings(), roots_max=256))
    small.restore(decode(encode(chat.forecaster)))
    small.check_integrity()


def plain() -> Iterator[Turn]:
    rng = np.random.default_rng(3)
    for number in range(300):
        session = int(rng.integers(0, 60))
        yield Turn(session, 10.0 * number, 10.0 * number + 1.0, int(rng.integers(10, 5000)), 50)


@pytest.mark.parametrize("make", MAKES, ids=["learned", "type-km"])
def test_alone_in_its_session_a_lineage_is_forecast_as_before_there_were_any(
    make: Callable[[], Predictor | TypeKm],
) -> None:
    told, silent = make(), make()
    for turn in plain():
        told.arrived(turn.session, turn.started_s, Opening(turn.session, TITLE, 0, 0.0))
        silent.arrived(turn.session, turn.started_s)
        assert np.array_equal(told.ended(turn), silent.ended(turn))
        assert not told.others(turn.session, turn.ended_s)


TIMES = st.sampled_from([0.0, 1.0, 2.0, 60.0, 1e4, -5.0, float("nan"), float("inf")])


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_whatever_comes_the_tables_are_bounded_and_curves_finite(data: st.DataObject) -> None:
    small = tuned(PredictorSettings(sessions_max=6), lineages_max=3, followed_max=4, roots_max=256)
    forecaster = data.draw(st.sampled_from([Predictor, TypeKm]))(small)
    for _ in range(data.draw(st.integers(1, 50))):
        whole, name = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
        at_s = data.draw(TIMES)
        call = data.draw(st.sampled_from(["arrived", "ended", "others", "forget"]))
        if call == "arrived":
            roots = data.draw(st.sampled_from([(), TITLE, AGENT[:2], SYSTEM]))
            branches = data.draw(st.integers(0, 3))
            regained = data.draw(st.floats(0.0, 5.0))
            forecaster.arrived((whole, name), at_s, Opening(whole, roots, branches, regained))
        elif call == "ended":
            tokens = data.draw(st.sampled_from([0, 500, 10**12, float("nan")]))
            curve = forecaster.ended(Turn((whole, name), at_s, at_s, tokens, 5))  # type: ignore[arg-type]
            assert np.isfinite(curve).all()
        elif call == "others":
            for _, curve in forecaster.others((whole, name), at_s):
                assert np.isfinite(curve).all()
                assert (np.diff(curve) <= 0).all()
        else:
            forecaster.forget((whole, name))
        forecaster.check_integrity()
        assert 0.0 <= forecaster.left_share <= 1.0
