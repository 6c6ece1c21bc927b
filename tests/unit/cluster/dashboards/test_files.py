"""Dashboards, alerts and docs are made from the metrics that there are, and the files are up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from samovar.cluster.dashboards.files import FOLDER, OPERATIONS, dashboard, texts, with_tables
from samovar.cluster.dashboards.panels import ALERTS, ROWS
from samovar.configs.fields import setting_fields
from samovar.router.metrics import FORMER_NAMES, Metrics
from tests.support.full_metrics import filled_metrics

SAMPLES = {name: labels for one in Metrics().declared() for name, labels in one.samples.items()}
OF_PROMETHEUS = {"up": ("job", "instance")}
WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SELECTOR = re.compile(r"(?P<name>\b(?:samovar_\w+|up)\b)(?:\{(?P<labels>[^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\) (?=\()")
LEGEND = re.compile(r"\{\{ ?(?:\$labels\.)?(\w+)\.? ?\}\}")


def problems(expr: str, shown: str = "") -> list[str]:
    """What a query names that is not there. `shown`: text with the labels that its result must have."""
    known = SAMPLES | OF_PROMETHEUS
    found, common = [], None
    for match in SELECTOR.finditer(expr):
        name, labels = match["name"], re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match["labels"] or "")
        if name not in known:
            found.append(f"no metric {name}")
            continue
        own = set(known[name])
        found += [f"{name} has no label {label}" for label in labels if label not in own]
        common = own if common is None else common & own
    if common is None:
        return found or [f"no metric in {expr}"]
    grouped: set[str] = set()
    for match in GROUPING.finditer(expr):
        labels, summed = set(WORD.findall(match[1])), within(expr, match.end())
        have = set.intersection(*(set(known[one["name"]]) for one in SELECTOR.finditer(summed)))
        found += [f"not every metric has the label {label}" for label in labels - have]
        grouped |= labels
    left = grouped if "sum" in expr or "avg" in expr or "min by" in expr else common
    wanted = {label for label in LEGEND.findall(shown) if label != "value"}
    return [*found, *(f"the result has no label {label}" for label in wanted - left)]


def within(expr: str, at: int) -> str:
    """The text from a bracket at `at` to the one that closes it."""
    depth = 0
    for end in range(at, len(expr)):
        depth += {"(": 1, ")": -1}.get(expr[end], 0)
        if depth == 0:
            return expr[at : end + 1]
    raise ValueError(f"a bracket is open in {expr}")


def queries() -> Iterator[tuple[str, str, str]]:
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                yield f"{row.title}: {panel.title}", query.expr, query.legend
    for alert in ALERTS:
        yield alert.name, alert.expr, alert.summary


def test_every_query_names_metrics_and_labels_that_there_are() -> None:
    found = {title: wrong for title, expr, shown in queries() if (wrong := problems(expr, shown))}
    assert found == {}


@pytest.mark.parametrize(
    ("expr", "shown", "problem"),
    [
        ("rate(samovar_nothing_total[5m])", "", "no metric samovar_nothing_total"),
        ("samovar_ttft_seconds > 1", "", "no metric samovar_ttft_seconds"),
        ("samovar_moves_total", "", "no metric samovar_moves_total"),  # a former name
        ('samovar_tokens_total{tier="cpu"}', "", "samovar_tokens_total has no label tier"),
        ("sum by (tier) (rate(samovar_swaps_total[5m]))", "", "not every metric has the label tier"),
        ("sum by (node) (samovar_tier_up)", "{{tier}}", "the result has no label tier"),
        ("vector(1)", "", "no metric in vector(1)"),
    ],
)
def test_a_query_of_what_is_not_there_is_found(expr: str, shown: str, problem: str) -> None:
    assert problems(expr, shown) == [problem]


def test_the_declared_metrics_are_those_that_are_exported() -> None:
    """With a sample of everything: no more metrics, no fewer, and with the same labels."""
    former = tuple(FORMER_NAMES.values())
    parts = tuple(f"{name}_" for name in former)  # _total, _sum, ...
    exported: dict[str, set[tuple[str, ...]]] = {}
    for family in text_string_to_metric_families(filled_metrics().text().decode()):
        for sample in family.samples:
            is_former = sample.name in former or sample.name.startswith(parts)
            if not sample.name.endswith("_created") and not is_former:
                exported.setdefault(sample.name, set()).add(tuple(sorted(sample.labels)))
    declared = {name: {tuple(sorted(labels))} for name, labels in SAMPLES.items()}
    assert {name: labels for name, labels in exported.items() if labels != declared.get(name)} == {}
    assert sorted(declared.keys() - exported.keys()) == []


def test_what_is_committed_is_what_is_generated() -> None:
    again = "run `python -m samovar.cluster.dashboards`"
    for name, text in texts().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, again
    page = OPERATIONS.read_text(encoding="utf-8")
    assert with_tables(page) == page, again


def test_panels_do_not_overlap_and_are_within_the_width() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    json.dumps(panels, allow_nan=False)


def test_alerts_have_a_name_of_their_own_and_name_settings_that_there_are() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    known = setting_fields()
    for alert in ALERTS:
        named = re.findall(r"`((?:[a-z]\w*\.)+[a-z]\w*)[`:]", alert.action)
        assert [key for key in named if key not in known] == []


SIGNED = {"samovar_lru_regretted_tokens_total", "samovar_prefetch_regret"}
"""Metrics whose panels have values below zero: it is a loss."""


def test_panels_show_values_below_zero_where_there_are_any() -> None:
    for panel in dashboard()["panels"]:
        text = " ".join(target["expr"] for target in panel.get("targets", ()))
        is_signed = any(re.search(rf"{name}\b", text) and " by (tier" not in text for name in SIGNED)
        if "fieldConfig" in panel:
            assert ("min" not in panel["fieldConfig"]["defaults"]) == is_signed, panel["title"]


def test_the_bucket_is_counted_once_whatever_the_number_of_nodes() -> None:
    for title, expr, _ in queries():
        for summed in re.findall(r"sum by \(tier\) \((samovar_tier_(?:bytes|tokens)\b[^)]*)\)", expr):
            assert 'tier!="s3"' in summed, title
