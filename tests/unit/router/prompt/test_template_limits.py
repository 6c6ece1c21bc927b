"""A hostile chat template ends: at the start with a reason, in a request with an error of the API."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.reply import ReplyReading, declared_format, formats, patterns, read_reply
from samovar.replicas.templates import rendering as template_limits
from samovar.replicas.templates.rendering import TemplateLimit, within_limits
from samovar.router.prompt import PromptBuilder
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer
from tests.support.inside import thread_of
from tests.support.router import chat_templates
from tests.support.router.router_harness import House, chat, error_of

PLAIN = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "two loops": LOOPS,
    "two loops of output": LOOPS.replace("{% endfor %}", "x{% endfor %}", 1),
    "text doubles": "{% set n = namespace(s='ab' * 999) %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "text doubles by a sum": "{% set n = namespace(s='ab' * 999) %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "text doubles by a block": "{% set n = namespace(s='ab' * 999) %}{% for i in range(60) %}"
    "{% set b %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = b %}{% endfor %}",
    "text doubles by replacing": "{% set n = namespace(s='a' * 999) %}{% for i in range(60) %}"
    "{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
    "text doubles by names": "{% set n = namespace(s='a' * 999) %}{% for i in range(60) %}"
    "{% set n.s = n.s | replace(new=n.s, old='a') %}{% endfor %}",
    "text doubles by a method": "{% set n = namespace(s='a' * 999) %}{% for i in range(60) %}"
    "{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
    "list doubles": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "many of a text": "{{ ['a' * 10**6] * 10**6 }}",
    "joined": "{{ (['a' * 10**6] * 10**3) | join('b' * 10**6) }}",
    "joined by a method": "{{ ('b' * 10**6).join(['a' * 10**6] * 10**3) }}",
    "product": "{{ 'a' * 10**11 }}",
    "product the other way": "{{ 10**11 * 'a' }}",
    "product that fits": "{{ 'a' * (200 * 2**20) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "width": "{{ 'a'.center(10**11) }}",
    "width of a filter": "{{ 'a' | center(10**11) }}",
    "indent": "{{ [[1]] | tojson(indent=10**11) }}",
    "width in a format": "{{ '%99999999999d' % 1 }}",
    "width of a format": "{{ '%*d' % (10**11, 1) }}",
    "width of format": "{{ '{:99999999999}'.format(1) }}",
    "width given to format": "{{ '{:{}}'.format(1, 10**11) }}",
    "fields of a format": "{{ ('{0}' * 2000).format('a' * 50000) }}",
    "fields of a percent format": "{{ ('%(a)s' * 2000) % {'a': 'a' * 50000} }}",
    "fields of the filter": "{{ ('%(a)s' * 2000) | format(a='a' * 50000) }}",
    "range joined": "{{ range(2000) | join('a' * 50000) }}",
    "text joined": "{{ ('a' * 2000) | join('a' * 50000) }}",
    "text joined by a method": "{{ ('a' * 50000).join('a' * 2000) }}",
    "iterator joined": "{{ range(2000) | map('string') | join('a' * 50000) }}",
    "iterator joined by a method": "{{ ('a' * 50000).join(range(2000) | map('string')) }}",
    "keys joined": "{{ dict.fromkeys(range(2000), 1).keys() | join('a' * 50000) }}",
    "tabs": "{{ ('\t' * 10001).expandtabs(10000) }}",
    "tabs by name": "{{ ('\t' * 10001).expandtabs(tabsize=10000) }}",
    "width of bytes": "{{ '%99999999d'.encode() % 1 }}",
    "bytes replaced": "{{ ('a' * 10000).encode().replace('a'.encode(), ('a' * 10000).encode()) }}",
    "wrapped": "{{ ('a' * 10000) | wordwrap(1, true, 'a' * 10000) }}",
    "lines indented": "{{ ('a\n' * 10001) | indent(10000) }}",
    "lines indented by a text": "{{ ('a\n' * 10001) | indent('a' * 10000) }}",
    "translated": "{{ ('a' * 10000).translate({97: 'a' * 10000}) }}",
    "width in the argument": "{{ '{:{}}'.format(1, '99999999') }}",
    "width in a mapping": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 99999999}) }}",
    "width behind a key": "{{ '%(a key of more than forty characters, which is long)99999999d'"
    " % {'a key of more than forty characters, which is long': 1} }}",
    "width behind a bracket": "{{ '{0[}]:99999999}'.format({'}': 1}) }}",
    "separators": "{{ range(5000) | list | tojson(separators=('a' * 50000, ':')) }}",
    "lists summed": "{{ ([[1] * 1000] * 10000) | sum(start=[]) | length }}",
    "list doubles as a text": "{% set n = namespace(s=[1]) %}{% for i in range(40) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "list doubles in a filter": "{% set n = namespace(s=[1]) %}{% for i in range(40) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | string | length }}",
    "list doubles in a title": "{% set n = namespace(s=[1]) %}{% for i in range(40) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | title | length }}",
    "number doubles": "{% set n = namespace(s=3) %}{% for i in range(40) %}"
    "{% set n.s = n.s * n.s %}{% endfor %}",
    "date": "{{ strftime_now('%c' * 10**6) }}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "RENDER_CPU_S_MAX", 0.3)


def builder(template: str) -> PromptBuilder:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return PromptBuilder(
        tokenizer, vocab_tokens=512, context_tokens_max=4096, eos_token_ids=[EOS_ID], settings=Settings()
    )


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_template_is_refused_at_the_start(what: str) -> None:
    with pytest.raises(ModelRefused, match="chat template"):
        builder(HOSTILE[what] + PLAIN)


def test_a_step_that_would_fit_into_memory_is_refused_before() -> None:
    for text, count in (("a", 200 << 20), ("a" * 50000, 2000)):
        with pytest.raises(TemplateLimit, match="a product"):
            template_limits._times(text, count)


@pytest.mark.parametrize("what", ["two loops", "text doubles by a block", "product", "recursion"])
async def test_what_it_does_later_is_an_error_of_that_request(what: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = f"{{% if messages | length > 3 %}}{HOSTILE[what]}{{% endif %}}" + PLAIN
    house = House(tokenizer=tokenizer)
    async with house.client() as client:
        body = chat()
        body["messages"] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}] * 2
        body["messages"].append({"role": "user", "content": "and?"})
        for _ in range(3):
            refused = await client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, error_of(refused)["code"]) == (400, "chat_template_error")
            assert error_of(refused)["param"] == "messages"
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize("name", [name for name in dir(chat_templates) if name.isupper()])
def test_honest_templates_render_the_same_text(name: str) -> None:
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    template = getattr(chat_templates, name)
    if not isinstance(template, str) or "{%" not in template:
        pytest.skip("no template")
    messages = [
        {"role": "user", "content": "a" * 3000},
        {"role": "assistant", "content": "b", "tool_calls": []},
        {"role": "user", "content": "c"},
    ]
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    plain = _cached_compile_jinja_template(template).render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **tokenizer.special_tokens_map,
    )
    limited = within_limits(
        lambda: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )
    assert limited == plain


def test_what_honest_templates_do_is_no_large_step() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ 'a' * 100 }}{{ '%05d|%-10s' % (12345678, 'x') }}{{ '{:>8}|{}'.format('x', 123456789) }}"
        "{{ ['a', 'b'] | join(', ') }}{{ messages | tojson(indent=4) }}{{ 'x' | center(20) }}{{ 2 ** 20 }}"
        "{{ 'a-b' | replace('-', '+') }}{{ messages | selectattr('role', 'equalto', 'x') | list | length }}"
        "{{ '12345678 %s' % 'x' }}{{ 'a b'.split(' ', 100000) }}"
    )
    with pytest.raises(TemplateLimit):  # a number that no template needs there
        within_limits(
            lambda: tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        )
    tokenizer.chat_template = tokenizer.chat_template.replace("100000", "10000")
    made = within_limits(
        lambda: tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    )
    assert "12345678|x         " in made
    assert "       x|123456789" in made


def test_an_interrupt_hits_its_rendering_and_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renderings that end as they are interrupted, in four threads: each ends one way, and none later."""
    monkeypatch.setattr(template_limits, "LOOK_S", 0.001)
    monkeypatch.setattr(template_limits, "RENDER_CPU_S_MAX", 0.003)
    outcomes: list[str] = []

    def render(spend_s: float) -> str:
        until_s = time.thread_time() + spend_s
        while time.thread_time() < until_s:
            pass
        return "done"

    def work(seed: int) -> None:
        for number in range(60):
            try:
                outcomes.append(within_limits(partial(render, 0.001 * ((number + seed) % 7))))
            except TemplateLimit:
                outcomes.append("limit")
            sum(range(2000))  # would be hit by what comes late

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(outcomes) == 240
    assert set(outcomes) == {"done", "limit"}
    assert not template_limits._WATCHDOG._armed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_watchdog_outlives_a_thread_that_ends_and_is_replaced_if_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clock_of_none(*_: object) -> str:
        raise OSError("no such thread")

    def broken(*_: object) -> str:
        raise RuntimeError("a fault of the watchdog")

    def spend() -> None:
        while True:
            pass

    watchdog = template_limits._Watchdog()
    with monkeypatch.context() as patched:
        patched.setattr(template_limits, "_fault_of", clock_of_none)
        gone = template_limits._Armed()
        watchdog._armed[10**9] = gone
        watchdog._wake()
        assert thread_of(watchdog) is not None
        while watchdog._armed and thread_of(watchdog).is_alive():
            time.sleep(0.01)
        assert thread_of(watchdog).is_alive()
    with pytest.raises(TemplateLimit, match="CPU seconds"):
        watchdog.run(spend)
    first = thread_of(watchdog)
    with monkeypatch.context() as patched:
        patched.setattr(template_limits, "_fault_of", broken)
        watchdog.run(lambda: first.join(60))
        assert not first.is_alive()
    with pytest.raises(TemplateLimit, match="CPU seconds"):
        watchdog.run(spend)


def test_what_a_rendering_raises_itself_is_passed_on() -> None:
    with pytest.raises(KeyError):
        within_limits(lambda: dict[str, int]()["x"])


# -- patterns of a response template -------------------------------------------------------------


def declared(open_pattern: str, close_pattern: str = "</c>", **content: Any) -> Any:
    field = {"open_pattern": open_pattern, "close_pattern": close_pattern, "repeats": True, **content}
    return declared_format({"start_anchor": "<s>", "fields": {"tool_calls": field, "content": {}}})


@pytest.mark.parametrize("marks", [("(?:a|aa)+[0-9]", "</c>"), ("<c>", "(?:a|aa)+[0-9]")])
def test_a_pattern_of_the_model_that_does_not_end_finds_nothing(
    marks: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "PATTERN_S_MAX", 0.05)
    reading = ReplyReading(declared(*marks), tools=("f",))
    for _ in range(50):  # after a few strikes it is not tried any more
        text = "<c>" + "a" * 3000
        said = read_reply(reading, text).content
        assert said is not None


def test_a_pattern_within_a_pattern_is_refused() -> None:
    inner = {"name": "xml-inline", "args": {"tag_pattern": "(?P<key>a+)+"}}
    with pytest.raises(ValueError, match="within a pattern"):
        declared(
            "<c>", content="xml-inline", content_args={"tag_pattern": "(?P<key>a)", "value_parser": inner}
        )


def test_what_stands_between_tags_is_looked_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATTERN_S_MAX", 0.05)
    assert patterns.without_tags("<(?P<key>b)>", "a<b>c") == "ac"
    with pytest.raises(ValueError, match="takes longer"):
        patterns.without_tags("(?:a|aa)+[0-9]", "a" * 3000)


class Robbed:
    """A pattern whose search is said to be late, which it is not by its own thread's clock."""

    groupindex: dict[str, int] = {}
    pattern = "robbed"

    def __init__(self, late: int) -> None:
        self.late = late

    def search(self, text: str, pos: int = 0, timeout: float = 0.0) -> str:
        self.late -= 1
        if self.late >= 0:
            raise TimeoutError
        return text


def test_what_other_threads_take_is_no_fault_of_a_pattern() -> None:
    pattern = Robbed(0)
    timed = patterns.TimedPattern(pattern)
    for _ in range(5):
        pattern.late = 2
        assert timed.search("a") == "a"
    pattern.late = 1000
    for _ in range(5):
        assert timed.search("a") is None
    pattern.late = 0
    assert timed.search("a") == "a"


def test_strikes_end_with_a_search_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATTERN_S_MAX", -1.0)  # each late search was its own fault
    pattern = Robbed(0)
    timed = patterns.TimedPattern(pattern)
    for _ in range(5):
        pattern.late = 1
        assert timed.search("a") is None
        assert timed.search("a") == "a"
    pattern.late = 3
    assert [timed.search("a") for _ in range(4)] == [None] * 4


def test_tags_are_looked_for_again_when_other_threads_took_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import regex

    whole, late = regex.sub, iter([True, True])

    def sub(*args: Any, **how: Any) -> Any:
        if next(late, False):
            raise TimeoutError
        return whole(*args, **how)

    monkeypatch.setattr(regex, "sub", sub)
    assert patterns.without_tags("<b>", "a<b>c") == "ac"


def test_every_pattern_that_a_model_declares_is_timed() -> None:
    field = {"open_pattern": "<c>|<d>", "close_pattern": "</c>|</d>", "repeats": True}
    made = formats._compiled({"start_anchor": "<s>", "fields": {"tool_calls": field, "content": {}}})
    timed = made.fields["tool_calls"]
    assert isinstance(timed.open_re, patterns.TimedPattern)
    assert isinstance(timed.close_re, patterns.TimedPattern)
