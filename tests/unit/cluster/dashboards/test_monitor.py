"""`samovar monitor`: what Prometheus and Grafana are started with, and that they end with Ray."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from samovar.cluster.dashboards.monitor import Monitor, keep_running, monitors, write_files
from samovar.configs.optional_sections import MonitoringSettings
from samovar.configs.settings import AuthSettings, ServerSettings, Settings
from tests.support.launch_examples import rendered_aws, rendered_rack
from tests.support.services.service import until

ADMIN_KEY = "sk-admin-0123456789"
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def test_prometheus_is_given_the_admin_key_in_a_file_of_the_owner_only(tmp_path: Path) -> None:
    auth = AuthSettings.model_validate({"api_keys": {"a": "sk-0123456789abcdef"}, "admin_key": ADMIN_KEY})
    write_files(Settings(auth=auth, server=ServerSettings(port=8123)), tmp_path)
    config = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())
    ours = config["scrape_configs"][0]
    assert ours["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    key_file = Path(ours["authorization"]["credentials_file"])
    assert key_file.read_text() == ADMIN_KEY
    assert key_file.stat().st_mode & 0o077 == 0
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path != key_file]
    assert [path for path in others if ADMIN_KEY in path.read_text()] == []
    assert (tmp_path / config["rule_files"][0]).exists()
    (board,) = (tmp_path / "dashboards").iterdir()
    assert board.name == "dashboard.json"


def test_without_keys_there_is_no_authorization(tmp_path: Path) -> None:
    write_files(Settings(), tmp_path)
    assert "authorization" not in (tmp_path / "prometheus.yaml").read_text()


def test_keys_without_an_admin_key_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auth = AuthSettings.model_validate({"api_keys": {"a": "sk-0123456789abcdef"}})
    write_files(Settings(auth=auth), tmp_path)
    assert "auth.admin_key is empty" in caplog.text


def test_both_listen_on_loopback_only_and_keep_a_bounded_amount(tmp_path: Path) -> None:
    settings = MonitoringSettings(prometheus_port=9191, grafana_port=3131, retention_days=2)
    prometheus, grafana = monitors(settings, tmp_path, lambda name: f"/usr/bin/{name}")
    assert "--web.listen-address=127.0.0.1:9191" in prometheus.command
    assert "--storage.tsdb.retention.time=2d" in prometheus.command
    assert any(word.startswith("--storage.tsdb.retention.size=") for word in prometheus.command)
    assert grafana.environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert grafana.environment["GF_SERVER_HTTP_PORT"] == "3131"


def test_what_is_not_installed_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert monitors(MonitoringSettings(), tmp_path, lambda name: None) == []
    assert "apt-get install prometheus" in caplog.text
    assert "grafana is not installed" in caplog.text


def test_programs_run_as_long_as_ray_does_and_are_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ray = subprocess.Popen(SLEEP)
    started = tmp_path / "started"
    note = f"open({str(started)!r}, 'a').write(str(__import__('os').getpid()) + '\\n')"
    wanted = Monitor("x", (sys.executable, "-c", f"import time; {note}; time.sleep(600)"), {})
    keeper = threading.Thread(target=keep_running, args=([wanted], ray.pid))
    keeper.start()

    def pids() -> list[int]:
        return [int(line) for line in started.read_text().split()] if started.exists() else []

    try:
        until("started", lambda: len(pids()) == 1)
        psutil.Process(pids()[0]).kill()
        until("started again", lambda: len(pids()) == 2)
    finally:
        ray.kill()
        ray.wait()
        keeper.join(20)
    assert not keeper.is_alive()
    assert not psutil.pid_exists(pids()[1])
    assert "Ray has ended here" in caplog.text


@pytest.mark.parametrize("rendered", [rendered_aws, rendered_rack], ids=["aws", "rack"])
def test_the_head_starts_them_only_if_asked_to(rendered: Any) -> None:
    off, on = rendered().tree(), rendered("--launch.monitoring.enabled=true").tree()
    assert "monitor" not in str(off)
    assert "GRAFANA" not in str(off)
    assert on["head_start_ray_commands"][-1].startswith(
        "setsid nohup samovar monitor --config ~/samovar/config.yaml --secrets ~/samovar/secrets.yaml >> "
    )
    (start,) = (line for line in on["head_start_ray_commands"] if "ray start" in line)
    assert "RAY_PROMETHEUS_HOST=http://127.0.0.1:9090 " in start
    assert "RAY_GRAFANA_HOST=http://127.0.0.1:3000 " in start
    assert on["worker_start_ray_commands"] == off["worker_start_ray_commands"]
