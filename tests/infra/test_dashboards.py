"""Prometheus takes the rules, the scrape config and every query; Grafana's own SDK takes the dashboard.

Prometheus and promtool are Debian's. Grafana is in no package of Debian, PyPI or npm: its SDK, which is made
from Grafana's schemas, reads the dashboard and must know every field of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from samovar.cluster.dashboards.files import FOLDER, dashboard
from samovar.cluster.dashboards.monitor import monitors, write_files
from samovar.cluster.dashboards.panels import ALERTS, RATE, ROWS
from samovar.configs.optional_sections import MonitoringSettings
from samovar.configs.settings import AuthSettings, ServerSettings, Settings
from samovar.router.metrics import CONTENT_TYPE, Metrics
from tests.infra.needs import need, needs_infra
from tests.support.full_metrics import filled_metrics
from tests.support.services.service import free_port, until

pytestmark = needs_infra

ADMIN_KEY = "sk-admin-0123456789"
QUERIES = [query.expr.replace(RATE, "1m") for row in ROWS for panel in row.panels for query in panel.queries]


def promtool(*words: str | Path) -> str:
    need("promtool")
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules_and_the_scrape_config() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", FOLDER / "alerts.yaml")
    assert "is valid prometheus config" in promtool("check", "config", FOLDER / "prometheus.yaml")


def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(QUERIES)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(QUERIES)} rules found" in promtool("check", "rules", path)


def test_each_alert_fires_on_what_it_is_for_and_none_on_a_healthy_service(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "alerts.yaml", tmp_path)
    text = (
        Path(__file__)
        .with_name("alerts-test.yaml")
        .read_text()
        .replace("value: ALL", f"value: {len(ALERTS)}")
    )
    (tmp_path / "test.yaml").write_text(text)
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yaml")


class Exposition(BaseHTTPRequestHandler):
    """/metrics of a service with API keys: for the admin key only."""

    text = filled_metrics().text()

    def do_GET(self) -> None:
        is_known = self.headers.get("authorization") == f"Bearer {ADMIN_KEY}" and self.path == "/metrics"
        self.send_response(200 if is_known else 401)
        self.send_header("content-type", CONTENT_TYPE)
        self.end_headers()
        self.wfile.write(self.text if is_known else b"")

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def service() -> Iterator[int]:
    """A server of the exposition; yields its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Exposition)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus as `samovar monitor` starts it on the head, asked by its HTTP API."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("monitoring")
    monitoring = MonitoringSettings(prometheus_port=free_port())
    auth = AuthSettings.model_validate({"api_keys": {"a": "sk-0123456789abcdef"}, "admin_key": ADMIN_KEY})
    with service() as port:
        settings = Settings(auth=auth, server=ServerSettings(port=port))
        write_files(settings, folder)
        config = yaml.safe_load((folder / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (program,) = (one for one in monitors(monitoring, folder) if one.name == "prometheus")
        log = (folder / "log").open("w")
        child = subprocess.Popen(program.command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{monitoring.prometheus_port}") as client:
                yield client
        finally:
            child.terminate()
            child.wait(20)
            log.close()


def answer(prometheus: httpx.Client, path: str, **params: str) -> Any:
    try:
        got = prometheus.get(f"/api/v1/{path}", params=params).json()
    except (httpx.HTTPError, json.JSONDecodeError):  # it is starting
        return None
    return got["data"] if got["status"] == "success" else None


def results(prometheus: httpx.Client, query: str) -> list[Any]:
    data = answer(prometheus, "query", query=query)
    return [] if data is None else data["result"]


def test_a_real_prometheus_scrapes_all_metrics_and_answers_every_query(prometheus: httpx.Client) -> None:
    until("scraped", lambda: results(prometheus, 'up{job="samovar"} == 1'))
    until("scraped twice", lambda: results(prometheus, "rate(samovar_tokens_total[1m])"))
    names = set(answer(prometheus, "label/__name__/values"))
    declared = {name for one in Metrics().declared() for name in one.samples}
    assert sorted(declared - names) == []
    # A query without a result is a panel without a line: all have one here, as every metric has a sample.
    assert [query for query in QUERIES if not results(prometheus, query)] == []


def test_a_real_prometheus_evaluates_the_alerts(prometheus: httpx.Client) -> None:
    def rules() -> list[dict[str, Any]]:
        data = answer(prometheus, "rules")
        found: list[dict[str, Any]] = [] if data is None else data["groups"][0]["rules"]
        return found if all(rule["health"] == "ok" for rule in found) else []

    until("scraped", lambda: results(prometheus, 'up{job="samovar"} == 1'))
    assert {rule["name"] for rule in until("evaluated", rules)} == {alert.name for alert in ALERTS}


def test_grafanas_own_sdk_knows_every_field_of_the_dashboard() -> None:
    need("grafana sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard())))
    assert lost(dashboard(), read) == []


def lost(given: Any, read: Any, path: str = "") -> list[str]:
    """Where `read` is without what was given, or has it otherwise."""
    if isinstance(given, dict) and isinstance(read, dict):
        missing = [f"{path}.{key}" for key in given if key not in read]
        return missing + [
            one for key in given if key in read for one in lost(given[key], read[key], f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = enumerate(zip(given, read, strict=True))
        return [one for at, (a, b) in pairs for one in lost(a, b, f"{path}[{at}]")]
    return [] if given == read else [path]
