"""Compiles the grammars of one tokenizer, within limits, and keeps some of them."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from samovar.configs.json_text import parse_json
from samovar.configs.sections import KIB, GrammarSettings
from samovar.replicas.grammar.json_schema import followed_text, json_defaults, lark_of
from samovar.replicas.grammar.state import GrammarRefused, GrammarState, reason_of
from samovar.replicas.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK_BYTES = 4 * KIB
"""Of stack for a byte of text: llguidance 1.9.1 descends into a grammar by recursion, without a limit, and
overflows a stack of 8 MiB with a chain of 1,100 `$ref`s, which ends the process."""

LARK_START = re.compile(r"[ \t]*(%llguidance\b|start[ \t]*:(?!:=))")
"""A line of Lark that GBNF does not have. `start ::=` is GBNF."""

CLASS_SIGNS = ("[", "&&", "--", "~~")
"""Within a class these join classes in Rust's regexes, and are characters in others'."""

Result = TypeVar("Result")

_STACK_LOCK = threading.Lock()
"""Held while `threading.stack_size` is another than the process's own."""


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    `tokenizer`: returns its tokenizer.json; called for the first grammar. `vocab`: tokens of a row of logits.
    `eos_token_ids`: the ids that may end an answer.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab: int,
        eos_token_ids: Sequence[int],
        settings: GrammarSettings,
    ) -> None:
        self._read_tokenizer = tokenizer
        self._vocab = vocab
        self._eos_token_ids = list(eos_token_ids)
        self._settings = settings
        # `check`, on a thread of its tenant's, has made what `lark` then finds.
        self._source = lru_cache(settings.kept_max)(partial(_source, settings=settings))
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of `_kept`
        self._masks = ThreadPoolExecutor(settings.threads, thread_name_prefix="grammar")

    @property
    def kept(self) -> int:
        """Return how many compiled grammars are kept."""
        return len(self._kept)

    def check(self, grammar: Grammar) -> None:
        """Raise `GrammarRefused` if `grammar` cannot be served, or not within `grammar.compile_s_max`."""
        self._matcher(grammar, cpu_s_max=self._settings.compile_s_max)

    def lark(self, grammar: Grammar) -> str:
        """Return a grammar as Lark in llguidance's form, for who compiles it elsewhere.

        Raises `GrammarRefused`.
        """
        source = self._source(grammar)
        if not source.startswith("{"):
            return source
        (only,) = parse_json(source)["grammars"]
        lark: str = only.get("lark_grammar") or f"start: %json {json.dumps(only['json_schema'])}"
        return lark

    def open(self, grammar: Grammar) -> GrammarState:
        """Return the state of an answer without tokens. Raises `GrammarRefused`."""
        build = partial(self._build, grammar)
        return GrammarState(
            grammar, build, self._masks, vocab=self._vocab, mask_s_max=self._settings.mask_s_max
        )

    def _build(self, grammar: Grammar, is_renewed: bool) -> LLMatcher:
        return self._matcher(grammar, is_renewed=is_renewed)

    def _matcher(
        self, grammar: Grammar, *, is_renewed: bool = False, cpu_s_max: float = math.inf
    ) -> LLMatcher:
        """Return a matcher at the beginning of the grammar: a copy of the one that is kept."""
        key = (grammar.kind, grammar.text)
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is not None and not is_renewed:
                self._kept[key] = kept  # used last
        if kept is None or is_renewed:
            kept = self._compiled(grammar, cpu_s_max)
            with self._lock:
                self._kept[key] = kept
                while len(self._kept) > self._settings.kept_max:
                    self._kept.popitem(last=False)
        return kept.deep_copy()

    def _compiled(self, grammar: Grammar, cpu_s_max: float) -> LLMatcher:
        """Compile a grammar, and find its first tokens: some that compile quickly are slow or empty there.

        Time is that of this thread's CPU: a busy machine refuses nothing.
        """
        from llguidance import LLMatcher, LLParserLimits

        settings = self._settings
        spec_bytes = len(grammar.text.encode())
        if spec_bytes > settings.spec_bytes_max:
            limit = f"{settings.spec_bytes_max} (grammar.spec_bytes_max)"
            raise GrammarRefused(grammar.field, f"it has {spec_bytes} bytes, more than {limit}")
        tokenizer = self._tokenizer_for(grammar)
        limits = LLParserLimits(
            max_lexer_states=settings.lexer_states_max,
            max_grammar_size=settings.symbols_max,
            verbose_errors=False,
        )

        def compile_it() -> tuple[LLMatcher, float]:
            started_s = time.thread_time()
            source = self._source(grammar)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            return matcher, time.thread_time() - started_s

        matcher, spent_s = _on_deep_stack(compile_it, STACK_BYTES * settings.spec_bytes_max)
        if matcher.is_error():
            raise GrammarRefused(grammar.field, reason_of(matcher.get_error()))
        if spent_s > cpu_s_max:
            limit = f"{cpu_s_max:g} s (grammar.compile_s_max)"
            raise GrammarRefused(grammar.field, f"compiling it takes {spent_s:.1f} s, more than {limit}")
        return matcher

    def _tokenizer_for(self, grammar: Grammar) -> LLTokenizer:
        """Return llguidance's form of the tokenizer, made for the first grammar (0.5 s)."""
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._read_tokenizer(), n_vocab=self._vocab, eos_token=self._eos_token_ids or None
                    )
                except ValueError as error:
                    reason = f"this model's tokenizer is not supported ({reason_of(str(error))})"
                    raise GrammarRefused(grammar.field, reason) from None
            return self._tokenizer


def _on_deep_stack(work: Callable[[], Result], stack_bytes: int) -> Result:
    """Run `work` in a thread of its own with a stack of `stack_bytes`; only what it uses takes memory."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed on to the waiter
            future.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(stack_bytes)
        try:
            threading.Thread(target=run, name="grammar-compiler", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return future.result()


def _source(grammar: Grammar, settings: GrammarSettings) -> str:
    """Return a grammar as llguidance takes it. Raises `GrammarRefused`."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    text = grammar.text
    try:
        if grammar.kind == "json_schema":
            chars_max = 2 * settings.spec_bytes_max  # what a schema stands for may be more than its text
            if exact := lark_of(text, chars_max):
                return f"start: {exact}"
            return LLMatcher.grammar_from_json_schema(
                followed_text(text, chars_max), defaults=json_defaults(parse_json(text))
            )
        if grammar.kind == "regex":
            # \d means 0-9: what follows matches in the client's dialect too, whatever digits that knows.
            if sign := _odd_sign(text):
                raise GrammarRefused(grammar.field, f"{sign} in a class has two meanings; write \\{sign}")
            pattern = regex_to_lark(text, "d").replace("\n", r"\n")
            return f"start: /{pattern}/"
        if grammar.kind == "choice":
            choices = [json.dumps(choice, ensure_ascii=False) for choice in parse_json(text)]
            if not choices:
                raise GrammarRefused(grammar.field, "there is nothing to choose from")
            return "start: " + " | ".join(choices).replace(
                "\x7f", r"\u007f"
            )  # Lark does not take it as it is
        # Detected here: llguidance's own way takes quadratic time for blank lines, as its translation does.
        lines = [line for line in text.splitlines() if line.strip()]
        if grammar.kind == "lark" or any(LARK_START.match(line) for line in lines):
            return text
        if len(text.encode()) > settings.gbnf_bytes_max:
            limit = f"{settings.gbnf_bytes_max} bytes (grammar.gbnf_bytes_max)"
            raise GrammarRefused(
                grammar.field, f"as a grammar in GBNF it may have {limit}; Lark may have more"
            )
        return grammar_from("grammar", "\n".join(lines))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(grammar.field, reason_of(str(error))) from None


def _odd_sign(pattern: str) -> str:
    """Return the first sign within a class of a regex that means another thing elsewhere; empty: none."""
    at, begin = 0, -1  # of the class
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif begin < 0 and pattern[at] == "[":
            at += pattern.startswith("^", at + 1)
            begin = at
        elif begin >= 0 and pattern[at] == "]" and at > begin + 1:
            begin = -1
        elif begin >= 0 and (sign := next((one for one in CLASS_SIGNS if pattern.startswith(one, at)), "")):
            return sign
        at += 1
    return ""
