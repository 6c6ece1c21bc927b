"""One trace a request, through ingress, replica and tiers; no text in spans or logs; nothing if off."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.telemetry import NO_SPAN, Tracer, open_tracer, set_up_logs
from samovar.configs.telemetry.logs import JsonFormatter
from samovar.replicas.messages import Admitted, Delta
from samovar.router.routing import load_tracker
from samovar.router.routing.ray_clients import RayReplicaClient
from tests.house import ROOT
from tests.support.constants import tuned
from tests.support.router.router_harness import House, chat, spoken
from tests.support.traced_house import TELEMETRY, BlockedExporter, TracedHouse, words_of
from tests.unit.router.test_parts import REQUEST, FakeHandle

PATH = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SECRET_WORD = "quincunx"
SYSTEM = "You are the keeper of the word quincunx and you tell it to those who ask. " * 8
IN_A_SPAN = {"ingress", "replica", "tiers"}


@pytest.fixture
def house(tiny_llama: Path, tmp_path: Path) -> Iterator[TracedHouse]:
    made = TracedHouse(tiny_llama, tmp_path)
    yield made
    made.close()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def two_turns(house: TracedHouse, *, stream: bool = False) -> list[Any]:
    """A turn that is stored, and the next after the pool has forgotten it: its prefix comes from a tier."""
    answers = []
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Is it {SECRET_WORD}?"}]
    headers = {"traceparent": PARENT, "x-session-id": SECRET_WORD, "x-request-id": "req-7"}
    async with house.client() as client:
        for _ in range(2):
            body = {
                "model": "tiny",
                "messages": messages,
                "max_tokens": 8,
                "temperature": 0,
                "stream": stream,
            }
            answer = await client.post(PATH, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            answers.append(answer)
            house.engine.forget_pool()
            messages = [
                *messages,
                {"role": "assistant", "content": "No."},
                {"role": "user", "content": "Sure?"},
            ]
    return answers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_through_every_process(house: TracedHouse, stream: bool) -> None:
    first, second = await two_turns(house, stream=stream)
    spans = house.spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    by_id = {span.context.span_id: span for span in spans}
    roots = [span for span in spans if span.name == "request"]
    assert len(roots) == 2
    assert {f"{span.parent.span_id:016x}" for span in roots if span.parent} == {PARENT[36:52]}
    for answer, root in zip((first, second), roots, strict=True):
        assert answer.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
        assert answer.headers["x-request-id"] == attributes(root)["samovar.request_id"] == "req-7"
        below = Counter(
            span.name for span in spans if span.parent and span.parent.span_id == root.context.span_id
        )
        wanted = {"tokenize", "queue", "lookup", "prefill", "decode", "store"}
        assert set(below) == (wanted if root is roots[0] else wanted | {"load"})
    tiers = {
        (by_id[span.parent.span_id].name, span.name)
        for span in spans
        if span.name.startswith("tier ") and span.parent
    }
    assert tiers == {("lookup", "tier lookup"), ("load", "tier fetch"), ("store", "tier offer")}
    assert {span.resource.attributes["samovar.process"] for span in spans} == IN_A_SPAN
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


async def test_the_span_of_a_request_has_its_receipt(house: TracedHouse) -> None:
    _, second = await two_turns(house)
    receipt = second.json()["receipt"]
    assert receipt["tokens"]["cpu"] > 0
    assert receipt["request_id"] == "req-7"
    found = attributes([span for span in house.spans() if span.name == "request"][-1])
    for source, count in receipt["tokens"].items():
        assert found[f"samovar.receipt.tokens.{source}"] == count
    for name in ("decision", "load_ms", "recompute_ms_avoided"):
        assert found[f"samovar.receipt.{name}"] == receipt[name]
    usage = second.json()["usage"]
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert found["http.route"] == "/v1/chat/completions"
    assert found["http.response.status_code"] == 200


async def test_no_text_of_a_prompt_is_in_any_span_or_log(
    house: TracedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not of what fails: a refused request, and one whose answer ends in an exception that quotes it."""
    logged, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    set_up_logs(TelemetrySettings(log_format="json", log_level="debug"), logged)
    root.setLevel(logging.DEBUG)
    try:
        await two_turns(house)

        async def broken(*args: Any, **kwargs: Any) -> Any:
            raise ValueError(f"cannot encode {SYSTEM!r}")

        async with house.client() as client:
            refused = await client.post(PATH, json=chat(SECRET_WORD, temperature=SECRET_WORD))
            assert refused.status_code == 400
            monkeypatch.setattr(house.prompts, "chat", broken)
            failed = await client.post(PATH, json=chat(SECRET_WORD))
            assert failed.status_code == 500
    finally:
        root.handlers[:], root.level = before
        for package in ("configs", "cache_tiers", "replicas", "router", "cluster"):
            logging.getLogger(package).setLevel(logging.NOTSET)
    spans = house.spans()
    assert len(spans) > 12
    assert [text for text in words_of(spans) if SECRET_WORD in text or "keeper" in text] == []
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert [line for line in lines if SECRET_WORD in str(line) or "keeper" in str(line)] == []
    (error,) = (line for line in lines if line.get("exception") == "ValueError")
    assert error["request_id"] == failed.headers["x-request-id"]
    assert any("generation.py" in place for place in error["raised_at"])
    done = [line for line in lines if line.get("status") == 200]
    assert [(line["request_id"], line["trace_id"]) for line in done] == [("req-7", TRACE)] * 2


async def test_every_attribute_is_documented(house: TracedHouse) -> None:
    await two_turns(house)
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = re.findall(r"`((?:samovar|http|gen_ai|error)\.[a-z_.]+)(\*?)`", page)
    known = {name for name, star in listed if not star}
    families = tuple(name for name, star in listed if star)
    used = {name for span in house.spans() for name in attributes(span)}
    assert [name for name in used if name not in known and not name.startswith(families)] == []
    assert [name for name in {span.name for span in house.spans()} if f"`{name}`" not in page] == []


async def test_an_answer_of_many_tokens_has_as_many_spans_as_one_of_few(house: TracedHouse) -> None:
    counts = []
    async with house.client() as client:
        for max_tokens in (2, 64):
            house.exported.clear()
            body = chat("hi", max_tokens=max_tokens, temperature=0, ignore_eos=True, stream=True)
            await client.post(PATH, json=body)
            names = (span.name for span in house.spans())
            counts.append(Counter(name for name in names if name not in ("store", "tier offer")))
    assert counts[0] == counts[1]
    assert counts[0]["decode"] == 1


@pytest.mark.parametrize(("given", "status"), [({"model": "other"}, 404), ({"max_tokens": 10**6}, 400)])
async def test_a_refused_request_is_traced_and_has_its_headers(
    house: TracedHouse, given: dict[str, Any], status: int
) -> None:
    async with house.client() as client:
        answer = await client.post(PATH, json=chat("hi", **given), headers={"traceparent": PARENT})
    assert answer.status_code == status
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    root = next(span for span in house.spans() if span.name == "request")
    assert attributes(root)["http.response.status_code"] == status


async def test_a_clients_decision_not_to_trace_holds(house: TracedHouse) -> None:
    async with house.client() as client:
        answer = await client.post(
            PATH, json=chat("hi", max_tokens=2), headers={"traceparent": PARENT[:-1] + "0"}
        )
    assert answer.status_code == 200
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert answer.headers["traceparent"].endswith("-00")
    assert house.spans() == ()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_traced_requests_holds_where_the_client_does_not_say(share: float) -> None:
    tracer = Tracer(BlockedExporter(), TelemetrySettings(sample_ratio=share), "ingress")
    assert bool(tracer.request("request", {}).trace) is bool(share)
    assert tracer.request("request", {"traceparent": PARENT}).trace_id == TRACE
    assert tracer.begin("x", "") is NO_SPAN


async def test_spans_reach_a_collector_by_otlp(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    tracer = open_tracer(TelemetrySettings(otlp_endpoint=url), "ingress")
    house = House(lambda request: spoken("hello"), tracer=tracer)
    try:
        async with house.client() as client:
            await client.post(PATH, json=chat(SECRET_WORD), headers={"traceparent": PARENT})
        assert tracer is not None
        tracer.close()
    finally:
        server.shutdown()
        server.server_close()
    (exported,) = (ExportTraceServiceRequest.FromString(body) for body in got)
    spans = [span for of in exported.resource_spans for scope in of.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"request", "tokenize"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert SECRET_WORD.encode() not in b"".join(got)


@pytest.mark.parametrize("given", ["", "nonsense", "00-0-0-01", PARENT + "," + PARENT])
async def test_a_traceparent_that_is_none_begins_a_new_trace(house: TracedHouse, given: str) -> None:
    async with house.client() as client:
        answer = await client.post(PATH, json=chat("hi", max_tokens=2), headers={"traceparent": given})
    assert answer.status_code == 200
    (trace,) = {f"{span.context.trace_id:032x}" for span in house.spans()}
    assert trace != TRACE
    assert answer.headers["traceparent"][3:35] == trace


async def test_what_is_polled_is_not_traced(house: TracedHouse) -> None:
    async with house.client() as client:
        for path in ("/health", "/metrics", "/v1/models"):
            assert "traceparent" not in (await client.get(path, headers={"traceparent": PARENT})).headers
    assert house.spans() == ()


async def test_off_answers_are_the_same_and_nothing_is_traced(tiny_llama: Path, tmp_path: Path) -> None:
    texts = []
    for is_on in (False, True):
        house = TracedHouse(tiny_llama, tmp_path / str(is_on), is_on=is_on)
        answers = await two_turns(house)
        texts.append([answer.json()["choices"] for answer in answers])
        assert all(("traceparent" in answer.headers) is is_on for answer in answers)
        assert bool(house.spans()) is is_on
        house.close()
    assert texts[0] == texts[1]


def test_off_no_process_imports_opentelemetry_for_it() -> None:
    code = (
        "import sys, samovar.configs.telemetry as telemetry\n"
        "from samovar.configs.optional_sections import TelemetrySettings\n"
        "assert telemetry.open_tracer(TelemetrySettings(), 'x') is None\n"
        "assert telemetry.NO_SPAN.trace == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


async def test_a_collector_that_is_gone_costs_spans_and_no_request() -> None:
    exporter = BlockedExporter()
    settings = tuned(
        TelemetrySettings(queue_max=4, export_interval_s=0.01), batch_max=2, export_timeout_s=0.1
    )
    tracer = Tracer(exporter, settings, "ingress")
    house = House(lambda request: spoken("hello"), tracer=tracer)
    async with house.client() as client:
        for _ in range(20):
            assert (await client.post(PATH, json=chat())).status_code == 200
    assert len(tracer._processor._batch_processor._queue) <= settings.queue_max
    exporter.let_go.set()  # now every export fails
    async with house.client() as client:
        assert (await client.post(PATH, json=chat())).status_code == 200
    tracer.close()


async def test_choosing_a_replica_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    house = TracedTracer()
    tracker = load_tracker.ReplicaLoadTracker()
    monkeypatch.setattr(load_tracker, "BOOK", tracker)

    class Routing(FakeHandle):
        def remote(self, request: Any) -> FakeHandle:
            tracker.routed(request.route.ticket, "replica-1", 0.0, "home")
            return self

    handle = Routing(Admitted("replica-1", 0, 0.0), Delta(0, "", (1,), finish_reason="stop"))
    client = RayReplicaClient(handle, retry_after_s=1.0, tracer=house.tracer)
    with house.tracer.begin("request", PARENT) as span:
        async for _ in client.generate(replace(REQUEST, trace=span.trace), "session"):
            pass
    route, _ = house.spans()
    assert (route.name, attributes(route)) == ("route", {"samovar.replica": "replica-1"})
    house.tracer.close()


class TracedTracer:
    """A tracer of its own, with what it exports."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exported = InMemorySpanExporter()
        self.tracer = Tracer(self.exported, TELEMETRY, "ingress")

    def spans(self) -> Any:
        self.tracer._processor.force_flush()
        return self.exported.get_finished_spans()


def test_a_line_of_json_is_not_lost_to_a_value_that_json_has_not() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "a\n\u2028 %s", ("ü\ud800",), None)
    record.fields = {"of": object()}
    (line,) = JsonFormatter().format(record).split("\n")
    assert json.loads(line)["of"] == "object"
    assert json.loads(line)["message"] == "a\n\u2028 ü\ud800"
