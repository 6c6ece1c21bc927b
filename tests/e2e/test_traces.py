"""A real service sends one trace a request to a collector, and logs JSON with the same ids."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.services.service import MODEL, Service, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SECRET_WORD = "quincunx"


class Collector:
    """An OTLP collector on loopback, which keeps what it was sent."""

    def __init__(self) -> None:
        bodies = self.bodies = list[bytes]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[tuple[str, Any]]:
        """(process, span) of all that came."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [
            (attribute.value.string_value, span)
            for body in list(self.bodies)
            for of in ExportTraceServiceRequest.FromString(body).resource_spans
            for attribute in of.resource.attributes
            if attribute.key == "samovar.process"
            for scope in of.scope_spans
            for span in scope.spans
        ]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def service(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = {
        "--telemetry.otlp-endpoint": f"http://127.0.0.1:{collector.server.server_port}/v1/traces",
        "--telemetry.export-interval-s": "0.2",
        "--telemetry.log-format": "json",
        "--telemetry.log-level": "info",
    }
    words = [word for pair in flags.items() for word in pair]
    with serving(tmp_path_factory.mktemp("traces") / "output", *words) as made:
        yield made


def test_a_request_is_one_trace_from_proxy_ingress_replica_and_tier_actor(
    service: Service, collector: Collector
) -> None:
    text = f"The word is {SECRET_WORD}. " * 40
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True}
    headers = {"traceparent": PARENT, "x-request-id": "req-7"}
    with service.http() as client:
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "req-7"
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert '"request_id": "req-7"' in answer.text or '"request_id":"req-7"' in answer.text

    wanted = {
        ("proxy", "proxy"),
        *(("ingress", name) for name in ("request", "tokenize", "route")),
        *(("replica", name) for name in ("queue", "lookup", "prefill", "decode", "store")),
        *(("tiers", name) for name in ("tier lookup", "tier offer")),
    }

    def came() -> bool:
        return {(process, span.name) for process, span in collector.spans()} >= wanted

    until("all spans came", came)
    found = collector.spans()
    assert {span.trace_id.hex() for _, span in found} == {TRACE}
    assert {(process, span.name) for process, span in found} == wanted
    (root,) = (span for _, span in found if span.name == "proxy")
    (request,) = (span for _, span in found if span.name == "request")
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    assert request.parent_span_id == root.span_id
    assert answer.headers["traceparent"].split("-")[2] == request.span_id.hex()
    assert root.start_time_unix_nano <= request.start_time_unix_nano  # of one machine's clock
    ids = {span.span_id for _, span in found}
    assert all(span.parent_span_id in ids for _, span in found if span is not root)
    assert SECRET_WORD.encode() not in b"".join(collector.bodies)


def test_logs_are_json_with_the_ids_and_without_the_prompt(service: Service) -> None:
    files = {os.readlink(f"/proc/{process.pid}/fd/2") for process in service.processes()}
    texts = {name: Path(name).read_text(errors="replace") for name in files if Path(name).is_file()}
    assert [name for name, text in texts.items() if SECRET_WORD in text] == []
    lines = [json.loads(line) for text in texts.values() for line in text.splitlines() if '"req-7"' in line]
    assert [
        (line["request_id"], line["trace_id"], line["route"], line["status"])
        for line in lines
        if "route" in line
    ] == [("req-7", TRACE, "/v1/chat/completions", 200)]
