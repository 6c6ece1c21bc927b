"""Runs Prometheus and Grafana on the head, on loopback, as long as Ray runs there.

`samovar up` leaves `samovar monitor` running if `launch.monitoring.enabled` is true. Both programs come from
the machine's own packages. Ray's `ray metrics launch-prometheus` is not used: it downloads a program, listens
on every address, and knows neither Samovar's metrics nor its alerts. What Ray writes for Grafana is used.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samovar.cluster.dashboards.files import (
    ALERTS_FILE,
    DASHBOARD_FILE,
    SCRAPE_FILE,
    rules,
    scrape,
    texts,
    yaml_text,
)
from samovar.cluster.launch.commands import monitoring_environment
from samovar.cluster.launch.keep_gcs import Restarts, ended, wait_for
from samovar.cluster.serve.secrets import write_private
from samovar.configs.optional_sections import MonitoringSettings
from samovar.configs.settings import Settings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
FOLDER = Path("~/.samovar-monitoring")
"""Not in Samovar's directory on the node: Ray would treat nodes as outdated whenever a sample is written."""

KEY_FILE = "admin-key"
RAY_DASHBOARDS = "/tmp/ray/session_latest/metrics/grafana/dashboards"
GRAFANA_HOME = "/usr/share/grafana"
STOP_S = 10.0
HOW = {
    "prometheus": "Debian: apt-get install prometheus, and stop its own service",
    "grafana": "grafana.com/docs/grafana/latest/setup-grafana",
}


@dataclass(frozen=True, slots=True)
class Monitor:
    """A program to keep running: its command line, and what is added to its environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


def write_files(settings: Settings, folder: Path) -> None:
    """Write what both read into `folder`, for the owner only. Raises `OSError`."""
    monitoring, key = settings.launch.monitoring, settings.auth.admin_key
    key_file = folder / KEY_FILE
    if key is None and settings.auth.has_keys:
        logger.warning("auth.admin_key is empty, and /metrics asks for it: Prometheus will see no metrics")
    if key is not None:
        write_private(key_file, key.get_secret_value())
    config = scrape(
        f"{LOOPBACK}:{settings.server.port}",
        key_file=None if key is None else str(key_file.absolute()),
        tls=settings.server.tls,
    )
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "uid": "samovar-prometheus",
        "access": "proxy",
        "url": monitoring_environment(monitoring)["RAY_PROMETHEUS_HOST"],
        "isDefault": True,
    }
    providers = [
        {"name": name, "folder": name, "type": "file", "options": {"path": path}}
        for name, path in (("Samovar", str((folder / "dashboards").absolute())), ("Ray", RAY_DASHBOARDS))
    ]
    written: dict[str, str] = {
        SCRAPE_FILE: yaml_text(config),
        ALERTS_FILE: yaml_text(rules()),
        f"dashboards/{DASHBOARD_FILE}": texts()[DASHBOARD_FILE],
        "provisioning/datasources/samovar.yaml": yaml_text({"apiVersion": 1, "datasources": [source]}),
        "provisioning/dashboards/samovar.yaml": yaml_text({"apiVersion": 1, "providers": providers}),
    }
    for name, text in written.items():
        write_private(folder / name, text)


def monitors(
    monitoring: MonitoringSettings, folder: Path, which: Callable[[str], str | None] = shutil.which
) -> list[Monitor]:
    """Return the programs that are installed, as they are to be started; says what is not."""
    found = []
    if program := which("prometheus"):
        found.append(Monitor("prometheus", _prometheus(program, monitoring, folder), {}))
    else:
        logger.warning("prometheus is not installed: no metrics are kept. %s", HOW["prometheus"])
    if program := which("grafana"):
        command = (program, "server", "--homepath", GRAFANA_HOME)
        found.append(Monitor("grafana", command, _grafana(monitoring, folder)))
    else:
        logger.warning("grafana is not installed: there are no dashboards. %s", HOW["grafana"])
    return found


def _prometheus(program: str, monitoring: MonitoringSettings, folder: Path) -> tuple[str, ...]:
    return (
        program,
        f"--config.file={folder / SCRAPE_FILE}",
        f"--web.listen-address={LOOPBACK}:{monitoring.prometheus_port}",
        f"--storage.tsdb.path={folder / 'samples'}",
        f"--storage.tsdb.retention.time={monitoring.retention_days}d",
        f"--storage.tsdb.retention.size={monitoring.retention_bytes_max}B",
    )


def _grafana(monitoring: MonitoringSettings, folder: Path) -> dict[str, str]:
    """Return the environment of Grafana: it asks no one outside, and its readers may only look."""
    return {
        "GF_SERVER_HTTP_ADDR": LOOPBACK,
        "GF_SERVER_HTTP_PORT": str(monitoring.grafana_port),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_PATHS_DATA": str(folder / "grafana"),
        "GF_PATHS_LOGS": str(folder / "grafana" / "logs"),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_SECURITY_ALLOW_EMBEDDING": "true",  # Ray's dashboard shows panels
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
    }


def keep_running(wanted: Sequence[Monitor], beside: int) -> None:
    """Run the programs until the process `beside` has ended; restart those that end, ever more slowly."""
    running: dict[int, tuple[Monitor, subprocess.Popen[bytes]]] = {}
    restarts = {one.name: Restarts() for one in wanted}
    due_s = {one.name: time.monotonic() for one in wanted}
    by_name = {one.name: one for one in wanted}
    try:
        while by_name:
            now_s = time.monotonic()
            for name in [name for name, at_s in due_s.items() if at_s <= now_s]:
                del due_s[name]
                child = _start(by_name[name])
                running[child.pid] = by_name[name], child
            wait_s = min(due_s.values()) - now_s if due_s else None
            gone = ended([beside, *running], wait_s)
            if beside in gone:
                logger.info("Ray has ended here, so Prometheus and Grafana end too")
                return
            for pid in gone:
                one, child = running.pop(pid)
                logger.warning("%s has ended, status %d", one.name, child.wait())
                delay_s = restarts[one.name].delay_s(time.monotonic())
                if delay_s is None:
                    logger.error("%s ends again and again: it is not restarted", one.name)
                    del by_name[one.name]
                else:
                    due_s[one.name] = time.monotonic() + delay_s
    finally:
        _stop([child for _, child in running.values()])


def _start(one: Monitor) -> subprocess.Popen[bytes]:
    logger.info("starting %s", one.name)
    return subprocess.Popen(
        one.command, env={**os.environ, **one.environment}, stdin=subprocess.DEVNULL, cwd="/"
    )


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def monitor(settings: Settings) -> None:
    """Write the files and run the programs until Ray's head has ended here. Raises `OSError`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    folder = FOLDER.expanduser()
    write_files(settings, folder)
    wanted = monitors(settings.launch.monitoring, folder)
    if wanted:
        _, raylet = wait_for(settings.launch.gcs_port)
        keep_running(wanted, raylet)
