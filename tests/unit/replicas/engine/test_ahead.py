"""Steps that are launched before the tokens are known with which they begin give the same answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from samovar.replicas.messages import Grammar
from samovar.replicas.sampling import draws
from tests.support.amounts import seeds
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.unit.replicas.forward.test_graphs import with_graphs

CODE = Grammar("regex", "[a-c]{2,6}", "guided_regex")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 0, "min_tokens": 6},
    {"temperature": 1.0, "n": 3},
    {"grammar": CODE, "temperature": 1.0},
    {"ignore_eos": False, "temperature": 2.0},
)


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_is_on_host", lambda tensor: False)


class History:
    """Requests of every kind that come, end and are hung up at any time, on few pages; it is the seed's."""

    def __init__(self, model: Path, seed: int, *, ahead: bool) -> None:
        self.rng = random.Random(seed)
        built = small_engine(
            model, exact=False, step="transformers", pool_tokens=self.rng.choice([320, 2048]), sequences_max=6
        )
        with_graphs(built, self.rng.choice([0, 512]))
        self.engine, self.launched = built.engine, 0
        self.hung_up: set[int] = set()
        self.driver = Driver(self.engine)
        self._watch(ahead)

    def _watch(self, ahead: bool) -> None:
        sound = self.engine.scheduler.behind

        def behind(*given: Any) -> Any:
            found = sound(*given) if ahead else None
            self.launched += found is not None
            return found

        self.engine.scheduler.behind = behind  # type: ignore[method-assign]

    def run(self) -> dict[int, Answer]:
        """Twice as many turns; those of the second half go on with answers of the first."""
        before = [prompt_of(length, seed=length) for length in (3, 17, 40, 70)]
        prompts = self._half(before)
        self._half([prompt + self.driver.answers[key].ids for key, prompt in prompts.items()])
        return self.driver.answers

    def _half(self, prompts: list[list[int]]) -> dict[int, list[int]]:
        """Answer prompts that begin with these; return them, but for those that were hung up."""
        rng, driver, stops, given = self.rng, self.driver, dict[int, int](), dict[int, list[int]]()
        for number in range(8):
            kind = dict(rng.choice(KINDS))
            kind["stop"] = (chr(97 + rng.randrange(26)),) if rng.random() < 0.3 else ()
            prompt = rng.choice(prompts) + prompt_of(rng.choice([0, 1, 9]), seed=number)
            key = driver.submit(prompt, max_tokens=rng.choice([1, 2, 12, 25]), seed=number, **kind)
            if rng.random() < 0.2:  # once it has so many tokens, whenever that is
                stops[key] = rng.randint(1, 8)
            else:
                given[key] = prompt
            for _ in range(rng.choice([0, 1, 5, 12])):
                self._step(stops)
        while self.engine.has_work:
            self._step(stops)
        self.hung_up |= set(stops)
        return given

    def _step(self, stops: dict[int, int]) -> None:
        self.driver.step()
        for key, tokens in stops.items():
            answer = self.driver.answers[key]
            if not answer.finish and sum(map(len, answer.token_ids.values())) >= tokens:
                self.engine.requests.abort(key)


def told(answer: Answer, index: int) -> list[object]:
    """What a choice was told, token by token; log-probabilities as far as float32 gives them."""
    return [
        (
            delta.text,
            delta.token_ids,
            [(one.token_id, Near(one.logprob), len(one.top)) for one in delta.logprobs],
            delta.finish_reason,
        )
        for delta in answer.deltas
        if delta.index == index
    ]


class Near(float):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("seed", seeds(60))
def test_any_history_has_the_same_answers_with_steps_ahead(seed: int, tiny_llama: Path) -> None:
    plain, ahead = (History(tiny_llama, seed, ahead=one) for one in (False, True))
    wanted, given = plain.run(), ahead.run()
    for key, answer in wanted.items():
        assert (given[key].refused, given[key].failed) == (answer.refused, answer.failed)
        assert given[key].texts.keys() == answer.texts.keys()
        for index in answer.texts:
            ours, theirs = told(given[key], index), told(answer, index)
            same = min(len(ours), len(theirs)) if key in plain.hung_up else max(len(ours), len(theirs))
            assert ours[:same] == theirs[:same], f"choice {index} of request {key}"
    assert plain.launched == 0
    assert ahead.launched > 0
    ahead.engine.check_integrity()
