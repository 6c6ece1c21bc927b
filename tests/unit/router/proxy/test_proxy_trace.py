"""The proxy's span: first of a request's trace, parent of the ingress's; none without telemetry."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Message, Receive, Scope, Send

from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.settings import LimitsSettings, Settings
from samovar.configs.telemetry import Tracer
from samovar.router.proxy import proxy_guard
from samovar.router.proxy.proxy_guard import ProxyGuard, proxy_environment, tracer_from_environment
from tests.house import ROOT

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
NOT_SAMPLED = f"{PARENT[:-1]}0"
OFTEN = TelemetrySettings(export_interval_s=600.0)  # exported when a test asks for it


class Ingress:
    """What is behind the proxy: it answers with `status`, or not at all, and keeps what it was given."""

    def __init__(self, status: int | None = 200, header: bytes = b"") -> None:
        self.status = status
        self.header = header
        self.given: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope["headers"]]
        assert names.count(b"traceparent") <= 1
        self.given.append(dict(scope["headers"]))
        if self.status is None:
            return
        headers = [(b"content-type", b"application/json")]
        headers += [(b"traceparent", self.header)] if self.header else []
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})


class Proxy:
    """The guard with a tracer whose spans stay here."""

    def __init__(self, app: Ingress, settings: TelemetrySettings = OFTEN, *, is_on: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        self._tracer = Tracer(self._exporter, settings, "proxy")
        self.guard = ProxyGuard(
            app,
            limits=LimitsSettings(body_bytes_max=1024),
            tracer=self._tracer if is_on else None,
        )

    def spans(self) -> tuple[ReadableSpan, ...]:
        self._tracer._provider.force_flush()
        return self._exporter.get_finished_spans()

    def close(self) -> None:
        self._tracer.close()

    async def ask(self, method: str = "POST", body: int = 5, **headers: str) -> tuple[int, dict[str, str]]:
        """Send a request of so many bytes; its status and headers."""
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        raw.append((b"content-length", str(body).encode()))
        scope = {"type": "http", "method": method, "path": "/v1/chat/completions", "headers": raw}
        answer: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * body, "more_body": False}

        async def send(message: Message) -> None:
            answer.append(message)

        await asyncio.wait_for(self.guard(scope, receive, send), 30)
        told = {name.decode().lower(): value.decode() for name, value in answer[0]["headers"]}
        return answer[0]["status"], told


@pytest.fixture
def proxies() -> Iterator[list[Proxy]]:
    made: list[Proxy] = []
    yield made
    for proxy in made:
        proxy.close()


def header_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def is_sampled(header: bytes) -> bool:
    return bool(int(header.rpartition(b"-")[2], 16) & 1)


async def test_the_ingress_s_span_stands_below_the_proxy_s_in_the_client_s_trace(
    proxies: list[Proxy],
) -> None:
    app = Ingress(header=b"00-its-own-01")
    proxies.append(proxy := Proxy(app))
    status, answered = await proxy.ask(traceparent=PARENT, tracestate="a=b", x_request_id="req-7")
    (span,) = proxy.spans()
    assert (status, span.name) == (200, "proxy")
    assert span.parent is not None
    assert header_of(span)[3:35] == TRACE
    assert app.given[0][b"traceparent"].decode() == header_of(span)
    assert app.given[0][b"tracestate"] == b"a=b"
    assert answered["traceparent"] == "00-its-own-01"  # the ingress's is the client's to know
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "samovar.request_id": "req-7",
    }
    await proxy.ask()
    assert app.given[1][b"traceparent"].decode() == header_of(proxy.spans()[1])
    assert proxy.spans()[1].parent is None


@pytest.mark.parametrize(("status", "error"), [(503, "503"), (429, None), (None, "503")])
async def test_what_failed_is_marked(proxies: list[Proxy], status: int | None, error: str | None) -> None:
    proxies.append(proxy := Proxy(Ingress(status)))
    answered, _ = await proxy.ask()
    (span,) = proxy.spans()
    assert (span.attributes or {}).get("error.type") == error
    assert (span.attributes or {})["http.response.status_code"] == answered


async def test_an_answer_of_the_proxy_s_own_names_the_proxy_s_span(proxies: list[Proxy]) -> None:
    app = Ingress()
    proxies.append(proxy := Proxy(app))
    status, answered = await proxy.ask(body=1025, traceparent=PARENT)
    (span,) = proxy.spans()
    assert (status, app.given) == (413, [])
    assert answered["traceparent"] == header_of(span)


async def test_what_the_client_does_not_sample_and_what_is_polled_is_not_traced(
    proxies: list[Proxy],
) -> None:
    app = Ingress()
    proxies.append(proxy := Proxy(app))
    await proxy.ask(traceparent=NOT_SAMPLED)
    assert app.given[0][b"traceparent"][:36] == NOT_SAMPLED[:36].encode()
    assert not is_sampled(app.given[0][b"traceparent"])
    await proxy.ask("GET", traceparent=PARENT)
    assert app.given[1][b"traceparent"].decode() == PARENT
    proxies.append(never := Proxy(app, TelemetrySettings(sample_ratio=0, export_interval_s=600)))
    await never.ask()
    assert not is_sampled(app.given[2][b"traceparent"])  # the ingress is not to decide anew
    assert proxy.spans() + never.spans() == ()


async def test_off_the_client_s_header_passes_as_it_is(proxies: list[Proxy]) -> None:
    app = Ingress()
    proxies.append(proxy := Proxy(app, is_on=False))
    _, answered = await proxy.ask(traceparent=PARENT)
    await proxy.ask()
    assert app.given[0][b"traceparent"].decode() == PARENT
    assert b"traceparent" not in app.given[1]
    assert "traceparent" not in answered
    assert proxy.spans() == ()


def test_the_environment_carries_the_telemetry_only_where_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"otlp_endpoint": "http://127.0.0.1:4318/v1/traces", "sample_ratio": 0.25, "queue_max": 7}
    settings = TelemetrySettings.model_validate({**given, "export_interval_s": 1.5})
    opened: list[Any] = []
    monkeypatch.setattr(proxy_guard, "open_tracer", lambda *of: opened.append(of))
    tracer_from_environment(proxy_environment(Settings(telemetry=settings)))
    assert opened == [(settings, "proxy")]
    off = proxy_environment(Settings())
    assert not [name for name in off if "TELEMETRY" in name]
    tracer_from_environment(off)
    assert opened[1] == (TelemetrySettings(), "proxy")  # which opens none


def test_a_node_without_the_extra_serves_without_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*of: object) -> None:
        raise ImportError("No module named 'opentelemetry'")

    monkeypatch.setattr(proxy_guard, "open_tracer", refuse)
    settings = TelemetrySettings.model_validate({"otlp_endpoint": "http://127.0.0.1:4318/v1/traces"})
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert tracer_from_environment(proxy_environment(Settings(telemetry=settings))) is None
    assert "install the extra otel" in caplog.text


def test_off_the_proxy_imports_no_opentelemetry_for_it() -> None:
    code = (
        "import sys\n"
        "from samovar.router.proxy import proxy_guard\n"
        "before = {name for name in sys.modules if name.startswith('opentelemetry')}\n"
        "(guard,) = proxy_guard.install()\n"
        "assert guard.kwargs['tracer'] is None\n"
        "after = {name for name in sys.modules if name.startswith('opentelemetry')}\n"
        "assert after == before, after - before\n"
        "assert not [name for name in after if '.sdk' in name], after\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
