"""Renders what Prometheus and Grafana read. Pure; `python -m samovar.cluster.dashboards` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from samovar import HOME
from samovar.cluster.dashboards.panels import ALERTS, ROWS, Alert, DashboardRow, Panel, PanelQuery
from samovar.configs.tls import TlsFiles
from samovar.router.metrics import DeclaredMetric, Metrics

FOLDER = Path(__file__).parent
DASHBOARD_FILE, ALERTS_FILE, SCRAPE_FILE = "dashboard.json", "alerts.yaml", "prometheus.yaml"
JOB = "samovar"
SCRAPE_S = 15
TARGET = "127.0.0.1:8000"
RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"""Ray's own list of its nodes' metrics, on the head."""

NOTE = "Written by `python -m samovar.cluster.dashboards`: do not edit."
COLUMNS, HEIGHT, STAT_HEIGHT = 24, 8, 4
WIDTH, STAT_WIDTH = 8, 4
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
OPERATIONS = HOME / "docs" / "operations.md"


def dashboard(rows: Iterable[DashboardRow] = ROWS) -> dict[str, Any]:
    """Return the Grafana dashboard, below the datasource that its reader chooses."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            width, height = (STAT_WIDTH, STAT_HEIGHT) if panel.kind == "stat" else (WIDTH, HEIGHT)
            if x + width > COLUMNS:
                x, y = 0, y + height
            place = {"h": height, "w": width, "x": x, "y": y}
            panels.append(_panel(len(panels) + 1, panel, place))
            x += width
        y += height
    return {
        "uid": "samovar",
        "title": "Samovar",
        "description": NOTE,
        "tags": ["samovar"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                    "refresh": 1,
                    "regex": "",
                    "options": [],
                    "includeAll": False,
                    "multi": False,
                }
            ]
        },
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": dict(place),
        "targets": [_target(index, query) for index, query in enumerate(panel.queries)],
    }
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.kind == "stat":
        found["options"] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "auto",
        }
    else:
        stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 0,
            "showPoints": "never",
            "stacking": stacking,
        }
        found["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    found["fieldConfig"] = {"defaults": defaults, "overrides": []}
    return found


def _target(index: int, query: PanelQuery) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "editorMode": "code",
        "range": True,
    }


def rules(alerts: Iterable[Alert] = ALERTS) -> dict[str, Any]:
    """Return the alert rules, as Prometheus reads them."""
    return {
        "groups": [
            {
                "name": JOB,
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": f"{alert.for_s}s",
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.action},
                    }
                    for alert in alerts
                ],
            }
        ]
    }


def scrape(
    target: str = TARGET,
    *,
    key_file: str | None = None,
    ray_targets: str = RAY_TARGETS,
    tls: TlsFiles | None = None,
) -> dict[str, Any]:
    """Return Prometheus' configuration: Samovar at `target` (HOST:PORT), Ray's nodes, and the alerts.

    `key_file`: of `auth.admin_key`, which /metrics asks for where there are API keys. `tls`: of Samovar's
    HTTPS on this machine, which is asked by an address, so under a name that its certificate need not have.
    """
    ours: dict[str, Any] = {"job_name": JOB, "metrics_path": "/metrics"}
    if tls is not None:
        trusted = {"ca_file": str(tls.certificate), "insecure_skip_verify": True}
        own = {"cert_file": str(tls.certificate), "key_file": str(tls.key)} if tls.client_ca else {}
        ours |= {"scheme": "https", "tls_config": trusted | own}
    if key_file is not None:
        ours["authorization"] = {"type": "Bearer", "credentials_file": key_file}
    ours["static_configs"] = [{"targets": [target]}]
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [ALERTS_FILE],
        "scrape_configs": [ours, {"job_name": "ray", "file_sd_configs": [{"files": [ray_targets]}]}],
    }


def texts() -> dict[str, str]:
    """Return the text of each file beside this one that is generated, by name."""
    return {
        DASHBOARD_FILE: json.dumps(dashboard(), indent=1) + "\n",
        ALERTS_FILE: yaml_text(rules()),
        SCRAPE_FILE: yaml_text(scrape()),
    }


def yaml_text(tree: Any) -> str:
    """Return YAML below the note that it is generated."""
    return f"# {NOTE}\n" + yaml.safe_dump(tree, sort_keys=False, width=100, allow_unicode=True)


def metrics_table(metrics: Iterable[DeclaredMetric] | None = None) -> str:
    """Return the metrics as a Markdown table."""
    found = Metrics().declared() if metrics is None else metrics
    lines = ["| metric | type | labels | |", "| --- | --- | --- | --- |"]
    for one in found:
        name = f"{one.name}_total" if one.kind == "counter" else one.name
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{name}` | {one.kind} | {labels} | {one.text} |")
    return "\n".join(lines)


def alerts_table(alerts: Iterable[Alert] = ALERTS) -> str:
    """Return the alerts as a Markdown table."""
    lines = ["| alert | after | severity | what to look at, and to change |", "| --- | --- | --- | --- |"]
    for one in alerts:
        after = "at once" if not one.for_s else f"{one.for_s // 60} min"
        lines.append(f"| `{one.name}` | {after} | {one.severity} | {one.action} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the operator's page with its generated tables, which stand between two comments each."""
    for name, table in (("metrics", metrics_table()), ("alerts", alerts_table())):
        begin, end = f"<!-- generated: {name} -->\n", f"\n<!-- end: {name} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(
                f"the page has no place for the table of {name}: {begin.strip()} and {end.strip()}"
            )
        page = before + begin + table + end + after
    return page
