"""Renders a conversation with a model's chat template, a foreign program, within limits.

transformers renders templates in a sandbox that lets nothing out, and lets it take all time and memory. Here:

- Time: one watchdog of the process looks at the CPU seconds of a thread that renders, and interrupts it.
- Memory: it looks at the process, too. What one step can make at once (`'a' * 10**11`) is refused before.
- Faults: also deep recursion and a lack of memory are a `TemplateLimit`.

Per template the watchdog costs about two microseconds, the sandbox's own checks nothing that can be measured.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, lru_cache, wraps
from pathlib import Path
from string import Formatter
from typing import Any, Protocol

from jinja2 import Template as JinjaTemplate
from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from samovar.replicas.messages import ModelRefused

Json = dict[str, Any]

TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""How a template's own code fails."""


class Template(Protocol):
    """The part of a transformers tokenizer that renders."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[Json], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any: ...


def rendered(
    tokenizer: Template, conversation: list[Json], *, add_generation_prompt: bool, **variables: Any
) -> str:
    """Return what the template makes of a conversation, within limits. Raises `TEMPLATE_FAULTS`.

    Texts are given as parts where the template, one of a model that takes images, reads nothing else.
    """
    source = str(tokenizer.chat_template)
    if source not in _known_readers:
        _look_for_parts(tokenizer, source)
    if _known_readers.get(source):
        conversation = [_in_parts(message) for message in conversation]

    def render() -> str:
        return str(
            tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        )

    text: str = within_limits(render)
    return text


PROBE: Json = {"role": "user", "content": "probe4parts"}
PARTED = re.compile(r"\btype\b")
"""What a template says that looks at the parts of a message."""
_known_readers: dict[str, bool] = {}
"""Templates that were asked, and whether they leave out a text that is not in parts."""


def _look_for_parts(tokenizer: Template, source: str) -> None:
    if len(_known_readers) >= TEMPLATES_MAX:
        _known_readers.clear()
    _known_readers[source] = False  # while it is asked
    if PARTED.search(source) and not _shows_probe(tokenizer, PROBE):
        _known_readers[source] = _shows_probe(tokenizer, _in_parts(PROBE))


def _shows_probe(tokenizer: Template, message: Json) -> bool:
    try:
        return PROBE["content"] in rendered(tokenizer, [message], add_generation_prompt=False)
    except TemplateLimit:
        raise
    except TEMPLATE_FAULTS:
        return False


def _in_parts(message: Json) -> Json:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def refused_model(limit: TemplateLimit) -> ModelRefused:
    """Return why a model is not served whose template does not end."""
    return ModelRefused(
        f"the model's chat template does not render a short conversation: {limit}",
        "Do not serve it unless you know who made it; a good template renders in a millisecond",
    )


RENDER_CPU_S_MAX = 5.0
"""CPU seconds of one rendering. The longest prompt that a body may carry takes a tenth of it."""
GROWTH_BYTES_MAX = 512 << 20
"""What the process may grow by while a template renders: many times the largest prompt."""
STEP_CHARS_MAX = 64 << 20
"""Characters of what one step of a template makes."""
BIT_COST = 1000
"""Characters that take as long as a bit of a power."""
WIDTH_MAX = 10_000
"""Of what a template pads, repeats or indents by a method or filter."""
TEMPLATES_MAX = 64
"""Compiled templates that are kept."""
LOOK_S = 0.05
"""How often the watchdog looks."""
INTERRUPT_S = 5.0
"""How long a rendering that is over waits for an interrupt that is on its way."""

FREE_METHODS = frozenset(
    str.split(
        "capitalize casefold count decode encode endswith escape find fromhex hex index isalnum isalpha"
        " isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper"
        " lower lstrip maketrans partition removeprefix removesuffix rfind rindex rpartition rsplit"
        " rstrip split splitlines startswith strip striptags swapcase title unescape upper"
    )
)
"""Methods of texts that make no more than the text, but for escapes."""
PADDING = frozenset({"batch", "center", "ljust", "rjust", "round", "slice", "truncate", "zfill"})
"""Methods and filters that add at most their number, or what they are given."""
FREE_FILTERS = frozenset(
    str.split(
        "abs attr count d default dictsort first float groupby int items last length list map max min random"
        " reject rejectattr reverse safe select selectattr sort unique"
    )
)
"""Filters that pass on what is there."""
TEXT_FILTERS = frozenset(
    str.split(
        "capitalize e escape filesizeformat forceescape lower string striptags title trim upper urlencode"
        " wordcount xmlattr"
    )
)
"""Filters that write their value as a text, but for escapes."""
_PERCENT_WIDTH = re.compile(r"%[-+ #0]*(?:\d*\.)?(\*|\d{5,})")
_KEYED_WIDTH = re.compile(r"[%)][-+ #0]*(?:\d*\.)?(\*|\d{5,})")
_NUMBER = re.compile(r"\d+")
_PAGE_BYTES = 4096


class TemplateLimit(TemplateError):
    """A template took more time or memory than a rendering may."""


class _Interrupted(BaseException):
    """Raised in a thread that renders for too long. No `Exception`: no code in between may keep it."""


class _Armed:
    """A rendering that is watched. `resident_bytes`: of the process when the watchdog first saw it."""

    __slots__ = ("clock_id", "cpu_s", "reason", "resident_bytes", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.clock_id = time.pthread_getcpuclockid(self.thread)
        self.cpu_s = time.clock_gettime(self.clock_id)
        self.resident_bytes: int | None = None
        self.reason = ""


class _Watchdog:
    """Interrupts renderings; its thread runs while there is one."""

    def __init__(self) -> None:
        self._armed: dict[int, _Armed] = {}
        self._numbers = itertools.count()
        self._called = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns. Raises `TemplateLimit`."""
        armed, number, is_interrupted = _Armed(), next(self._numbers), False
        try:
            try:
                self._armed[number] = armed
                if not (self._called.is_set() and self._thread and self._thread.is_alive()):
                    self._wake()
                return work()
            except _Interrupted:
                is_interrupted = True
                raise
            finally:
                # This thread takes it out, or the watchdog has: then the interrupt comes here.
                if self._armed.pop(number, None) is None and not is_interrupted:
                    time.sleep(INTERRUPT_S)
        except _Interrupted:
            raise TemplateLimit(armed.reason) from None
        except (MemoryError, RecursionError) as fault:
            raise TemplateLimit(f"it fails with {type(fault).__name__}") from None

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="template-limits", daemon=True)
                self._thread.start()
            self._called.set()

    def _watch(self) -> None:
        while True:
            self._called.wait()
            before = _resident_bytes()
            while self._armed:
                time.sleep(LOOK_S)
                now = _resident_bytes()
                for number, one in list(self._armed.items()):
                    if one.resident_bytes is None:
                        one.resident_bytes = before
                    try:
                        one.reason = _fault_of(one, now)
                    except OSError:  # the thread has ended since, and its clock with it
                        self._armed.pop(number, None)
                        continue
                    if one.reason and self._armed.pop(number, None) is not None:
                        _interrupt(one.thread)
                before = now
            self._called.clear()
            if self._armed:  # one came between the two
                self._called.set()


def _fault_of(one: _Armed, resident_bytes: int) -> str:
    """Return why a rendering must end, in words; empty if it may go on."""
    assert one.resident_bytes is not None
    spent_s = time.clock_gettime(one.clock_id) - one.cpu_s
    if spent_s > RENDER_CPU_S_MAX:
        return f"it takes more than {RENDER_CPU_S_MAX:g} CPU seconds"
    # What runs for a moment only is not what has grown.
    if resident_bytes - one.resident_bytes > GROWTH_BYTES_MAX and spent_s > LOOK_S:
        return f"it takes more than {GROWTH_BYTES_MAX >> 20} MiB of memory"
    return ""


_WATCHDOG = _Watchdog()


def _interrupt(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interrupted))


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def within_limits(work: Callable[[], Any]) -> Any:
    """Return what `work`, a rendering, returns. Raises `TemplateLimit`, and what `work` raises."""
    limit_templates()
    return _WATCHDOG.run(work)


# -- what one step may make ------------------------------------------------------------------------


def _refuse_large(size: int, what: str) -> None:
    if size > STEP_CHARS_MAX:
        raise TemplateLimit(f"{what} of {size} characters is more than one step may make")


def _measure(*values: Any) -> tuple[int, int, int]:
    """Return the characters, the parts and the depth of values as a text, before escapes.

    A part that is there many times counts as often. In Python, so that the watchdog can end it.
    """
    size, parts, depth = 0, 0, 0
    left = [(value, 1) for value in values]
    while left:
        value, level = left.pop()
        parts, depth = parts + 1, max(depth, level)
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, int | float):
            size += value.bit_length() // 3 + 2 if isinstance(value, int) else 24
        elif isinstance(value, range):
            size, parts = size + 8 * len(value), parts + len(value)
        elif isinstance(value, Namespace):
            left.append((object.__getattribute__(value, "_Namespace__attrs"), level + 1))
        elif isinstance(value, Collection):
            if isinstance(value, Mapping):
                left.extend((one, level + 1) for one in value.values())
            left.extend((one, level + 1) for one in value)
        else:
            size += 64  # something's short name
        if size + parts > STEP_CHARS_MAX:
            _refuse_large(size + parts, "a text")
    return size + 2 * parts, parts, depth


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        _measure(value)
    return str(value)


def _shown(value: Any) -> Any:
    """Return what is to be written, if it is no large list."""
    if not isinstance(value, str | int | float):
        _measure(value)
    return value


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_large((left.bit_length() + right.bit_length()) * BIT_COST, "a product")
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            _refuse_large(_measure(value)[0] * count, "a product")
    return operator.mul(left, right)


def _plus(left: Any, right: Any) -> Any:
    made = left + right  # at most twice what is there
    if isinstance(made, str | bytes | list | tuple):
        _refuse_large(len(made), "a sum")
    return made


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_large(left.bit_length() * abs(right) * BIT_COST, "a power")
    return operator.pow(left, right)


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        _check_percent(_as_text(left), right)
    return operator.mod(left, right)


def _check_percent(pattern: str, *given: Any) -> None:
    if (_KEYED_WIDTH if "%(" in pattern else _PERCENT_WIDTH).search(pattern):
        raise TemplateLimit("a format with a large width")
    width = max((int(one) for one in _NUMBER.findall(pattern) if len(one) < 5), default=0)
    _refuse_large(len(pattern) + pattern.count("%") * (_measure(*given)[0] + width), "a format")


def _check_braces(pattern: str, *given: Any) -> None:
    size, longest = len(pattern), _measure(*given)[0]
    for _, field, spec, _ in Formatter().parse(pattern):
        numbers = _NUMBER.findall(spec or "")
        if "{" in (spec or "") or any(len(one) >= 5 for one in numbers):
            raise TemplateLimit("a format with a large width")
        size += (field is not None) * (longest + max(map(int, numbers), default=0))
    _refuse_large(size, "a format")


def _joined(*parts: Any) -> str:
    text = "".join(
        [str(_shown(one)) for one in parts]
    )  # at most as many times what is there as stand in the source
    if len(text) > STEP_CHARS_MAX:
        _refuse_large(len(text), "a text")
    return text


def _check(name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a method of a text, or a filter, `name` would make of `target`, if that is too large."""
    given = (*args, *kwargs.values())
    texts = [_as_text(one) for one in given if isinstance(one, str | bytes)]
    longest = max(map(len, texts), default=0)
    if name in ("format", "format_map"):
        return _check_braces(_as_text(target), *given)
    number = max((abs(one) for one in given if isinstance(one, int)), default=8)
    if number > WIDTH_MAX:
        raise TemplateLimit(f"{name} with a number above {WIDTH_MAX}")
    if name in TEXT_FILTERS or name in PADDING:
        _shown(target)
        return None
    if name in FREE_METHODS:
        return None
    elif name == "replace":
        named = dict(zip(("old", "new"), args, strict=False)) | kwargs
        text, old, new = _as_text(target), _as_text(named.get("old", "")), _as_text(named.get("new", ""))
        size = len(text) + text.count(old) * len(new)
    elif name == "join":  # the filter's items, and the method's
        between = max([longest, *(len(one) for one in (target,) if isinstance(one, str | bytes))])
        items = [one for one in (target, *given) if isinstance(one, Collection)]
        size = sum(
            _measure(*one)[0] + len(one) * between for one in items if not isinstance(one, str | bytes)
        )
        size += len(target) * longest if isinstance(target, str | bytes) else 0
    elif name == "sum":
        size, parts, _ = _measure(*target)
        size *= parts if any(not isinstance(one, int | float | str) for one in given) else 1
    elif name in ("tojson", "pprint"):
        size, parts, depth = _measure(target)
        indent = longest + number * any(isinstance(one, int) for one in given)
        size += parts * (depth * indent + sum(len(str(_shown(one))) for one in given))
    elif name in ("indent", "expandtabs"):
        text = _as_text(target)
        lines = text.count("\t") if name == "expandtabs" else len(text.splitlines()) + 1
        size = len(text) + lines * max(number, longest)
    elif name in ("wordwrap", "urlize", "translate"):  # something for each character, at most
        longest = max(longest, _measure(*given)[0] if name == "translate" else 1)
        size = len(_as_text(target)) * (1 + longest)
    else:  # what this does not know
        size = _measure(target, *given)[0] * (STEP_CHARS_MAX // WIDTH_MAX)
    return _refuse_large(size, name)


def _limited_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if getattr(made, "jinja_pass_arg", None) else 0

    @wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        target, given = args[first], args[first + 1 :]
        if name in ("join", "sum"):
            target = _counted(target)
        if name == "format":
            _check_percent(_as_text(target), *given, *kwargs.values())
        else:
            _check(name, target, given, kwargs)
        return made(*args[:first], target, *given, **kwargs)

    return limited


def _counted(value: Any) -> Any:
    """Return what is iterated over once as a list, so that it can be measured."""
    return list(value) if isinstance(value, Iterator) else value


class _LimitedGenerator(CodeGenerator):
    """Writes `~` as a call that looks at the length."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment, whose steps are bounded."""

    intercepted_binops = frozenset({"*", "+", "**", "%"})
    code_generator_class = _LimitedGenerator
    joined = staticmethod(_joined)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
        target = getattr(method, "__self__", None)
        if isinstance(target, str | bytes):
            args = tuple(map(_counted, args))
            _check(method.__name__, target, args, kwargs)
        elif getattr(obj, "__name__", "") == "strftime_now":  # makes up to 256 times its format
            _refuse_large(_measure(*args, *kwargs.values())[0] * 256, "a date")
        return super().call(context, obj, *args, **kwargs)


@cache
def limit_templates() -> None:
    """Have transformers compile templates with limits, in this process: it has no other place for that."""
    from transformers.utils import chat_template_utils

    plain = chat_template_utils._cached_compile_jinja_template

    @lru_cache(TEMPLATES_MAX)
    def limited(source: str) -> JinjaTemplate:
        environment = plain("").environment
        environment.__class__ = _LimitedEnvironment
        environment.binop_table |= {"*": _times, "+": _plus, "**": _power, "%": _modulo}
        environment.filters |= {
            name: _limited_filter(name, made)
            for name, made in environment.filters.items()
            if name not in FREE_FILTERS
        }
        environment.finalize = _shown
        environment.globals.pop("lipsum", None)
        made: JinjaTemplate = environment.from_string(source)
        return made

    chat_template_utils._compile_jinja_template = limited
