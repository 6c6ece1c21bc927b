"""Limits of a model's chat template, which is a foreign program: time, memory, and what its faults become.

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
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

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

SIZED_FILTERS = (
    "batch",
    "center",
    "format",
    "indent",
    "join",
    "replace",
    "round",
    "slice",
    "tojson",
    "wordwrap",
)
"""Filters that make much of little."""
_PERCENT_WIDTH = re.compile(r"%[-+ #0(]*[^%]{0,40}?([0-9]{5,}|\*)")
_BRACE_WIDTH = re.compile(r"\{[^{}]*:[^{}]*([0-9]{5,}|\{)")
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
                if not self._called.is_set():
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
            if self._thread is None:
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
                    one.reason = _fault_of(one, now)
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


def _weight(value: Any) -> int:
    """Return how large what is made of a text or list can be."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return len(value) + sum(len(one) for one in value if isinstance(one, str))
    return 0


def _refuse_large(size: int, what: str) -> None:
    if size > STEP_CHARS_MAX:
        raise TemplateLimit(f"{what} of {size} characters is more than one step may make")


def _times(left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int):
            _refuse_large(_weight(value) * count, "a product")
    return operator.mul(left, right)


def _plus(left: Any, right: Any) -> Any:
    made = left + right  # at most twice what is there
    if isinstance(made, str | list | tuple):
        _refuse_large(len(made), "a sum")
    return made


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_large(left.bit_length() * abs(right) * BIT_COST, "a power")
    return operator.pow(left, right)


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str) and _PERCENT_WIDTH.search(left):
        raise TemplateLimit("a format with a large width")
    return operator.mod(left, right)


def _joined(*parts: Any) -> str:
    text = "".join(map(str, parts))  # at most as many times what is there as stand in the source
    if len(text) > STEP_CHARS_MAX:
        _refuse_large(len(text), "a text")
    return text


def _check(name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a method or filter `name` of `target` would make too large."""
    given = (*args, *kwargs.values())
    has_width = any(isinstance(one, int) and abs(one) > WIDTH_MAX for one in given)
    if name in ("format", "format_map"):
        found = isinstance(target, str) and (_BRACE_WIDTH.search(target) or _PERCENT_WIDTH.search(target))
        if found and (has_width or found[1] not in ("{", "*")):
            raise TemplateLimit("a format with a large width")
        return
    if has_width:
        raise TemplateLimit(f"{name} with a number above {WIDTH_MAX}")
    texts = [one for one in given if isinstance(one, str)]
    if name == "replace" and isinstance(target, str) and len(texts) > 1:
        _refuse_large(len(target) + target.count(texts[0]) * len(texts[1]), "a replacement")
    if name == "join":
        for one in (target, *given):
            if isinstance(one, list | tuple):
                between = max((len(text) for text in (target, *given) if isinstance(text, str)), default=0)
                _refuse_large(_weight(one) + between * len(one), "a text")


def _limited_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if getattr(made, "jinja_pass_arg", None) else 0

    @wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check(name, args[first], args[first + 1 :], kwargs)
        return made(*args, **kwargs)

    return limited


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
        if args or kwargs:
            method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
            target = getattr(method, "__self__", None)
            if isinstance(target, str | bytes | list | tuple):
                _check(method.__name__, target, args, kwargs)
        return super().call(context, obj, *args, **kwargs)


@cache
def limit_templates() -> None:
    """Have transformers compile templates with limits, in this process: it has no other place for that."""
    from transformers.utils import chat_template_utils

    plain = chat_template_utils._cached_compile_jinja_template

    @lru_cache(TEMPLATES_MAX)
    def limited(source: str) -> Template:
        environment = plain("").environment
        environment.__class__ = _LimitedEnvironment
        environment.binop_table |= {"*": _times, "+": _plus, "**": _power, "%": _modulo}
        environment.filters |= {
            name: _limited_filter(name, environment.filters[name]) for name in SIZED_FILTERS
        }
        environment.globals.pop("lipsum", None)
        made: Template = environment.from_string(source)
        return made

    chat_template_utils._compile_jinja_template = limited
