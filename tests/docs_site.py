"""`make docs`: lay out the pages of the site: `python -m tests.docs_site FOLDER`.

The pages of `docs/`, a few from elsewhere, and two that are generated: every setting, and every route of the
OpenAPI document. Links to other files of the repository lead to copies of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from samovar.configs.fields import setting_fields
from samovar.configs.settings import LimitsSettings
from samovar.router.ingress.app import version
from samovar.router.ingress.operations import openapi_document
from tests.support.pages import FENCE, LINK, ROOT

DOCS = ROOT / "docs"
ELSEWHERE = {
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "README.md": "index.md",  # the quickstart says more
    "terraform/README.md": "terraform.md",
}
SETTINGS_PAGE, ROUTES_PAGE = "settings.md", "routes.md"
NAV: dict[str, dict[str, str]] = {
    "Start": {
        "Quickstart": "index.md",
        "Concepts": "concepts.md",
        "Installing": "install.md",
        "Commands": "commands.md",
        "With vLLM": "vllm.md",
        "Which engine": "engines.md",
    },
    "The cache": {
        "How it works": "how-it-works.md",
        "Cache semantics": "guarantees.md",
        "Faults": "faults.md",
        "Isolation": "isolation.md",
        "Sizing": "sizing.md",
        "Knowledge": "knowledge.md",
        "Scale": "scale.md",
        "Documents": "documents.md",
        "Longer than the window": "compaction.md",
        "Limits": "limits.md",
    },
    "Operations": {
        "Live page": "live-page.md",
        "Operations": "operations.md",
        "Runbook": "diagnosis.md",
        "On your own machines": "deploy-onprem.md",
        "In AWS": "deploy-aws.md",
        "On Kubernetes": "kubernetes.md",
        "Health contract": "health.md",
        "Terraform": "terraform.md",
        "Security": "SECURITY.md",
    },
    "Reference": {
        "API": "api.md",
        "Routes": ROUTES_PAGE,
        "Configuration": "configuration.md",
        "Settings": SETTINGS_PAGE,
        "Compatibility": "compatibility.md",
    },
    "Benchmarks": {
        "Measured": "benchmarks/README.md",
        "Beside the peers": "benchmarks/peers.md",
        "On a GPU": "benchmarks/gpu.md",
        **{f"On 2026-11-{day}": f"benchmarks/2026-11-{day}.md" for day in (28, 27, 26, 24, 23, 22, 21)},
    },
    "Inside": {
        "Architecture": "ARCHITECTURE.md",
        "Findings": "findings.md",
        "Contributing": "CONTRIBUTING.md",
        "Changelog": "CHANGELOG.md",
    },
}
"""What is where; a page that is not there has no entry. The decisions (`adr/`) follow by number."""


def pages() -> dict[Path, str]:
    """The Markdown files of the site, and their place in it."""
    told = sorted({*DOCS.rglob("*.md")} - {*(DOCS / "img").glob("*.md")})
    found = {path: path.relative_to(DOCS).as_posix() for path in told}
    return found | {ROOT / path: place for path, place in ELSEWHERE.items() if place != "index.md"}


def navigation(there: set[str]) -> list[dict[str, Any]]:
    """The site's sections with the pages that are there, as MkDocs takes them."""
    made: list[dict[str, Any]] = [
        {title: [{name: page} for name, page in entries.items() if page in there]}
        for title, entries in NAV.items()
    ]
    decisions = sorted(page for page in there if page.startswith("adr/"))
    made.insert(-1, {"Decisions": [{_title(DOCS / page): page} for page in decisions]})
    return made


def _title(page: Path) -> str:
    first = page.read_text(encoding="utf-8").splitlines()[0]
    return re.sub(r"^# (?:ADR )?0*(\d+)[.:]? ", r"\1. ", first)


def with_links(text: str, change: Callable[[str, str], str]) -> str:
    """A page with `change(target, whole link)` in place of each link; blocks are left alone."""
    made, fence = [], ""
    for line in text.splitlines():
        found = FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif found is not None:
            fence = found[2]
        else:
            line = LINK.sub(lambda match: change(match[1], match[0]), line)
        made.append(line)
    return "\n".join(made) + "\n"


def lay_out(folder: Path) -> None:
    """Write the site's pages and settings into a folder, whatever was there before."""
    target = folder / "pages"
    shutil.rmtree(target, ignore_errors=True)
    places = pages()
    known = {**places, ROOT / "README.md": "index.md"}
    for source, place in places.items():
        page = target / place
        page.parent.mkdir(parents=True, exist_ok=True)

        def moved(link: str, whole: str, source: Path = source, page: Path = page) -> str:
            path, mark, anchor = link.partition("#")
            if "://" in link or not path:
                return whole
            linked = (source.parent / path).resolve()
            if linked.is_dir():
                linked = linked / "README.md"
                if linked not in known:
                    return "](" + os.path.relpath(_copied(linked.parent, target), page.parent) + ")"
            place = target / known[linked] if linked in known else _copied(linked, target)
            return "](" + os.path.relpath(place, page.parent) + mark + anchor + ")"

        page.write_text(with_links(source.read_text(encoding="utf-8"), moved), encoding="utf-8")
    document = openapi_document(LimitsSettings(), version())
    (target / "openapi.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    (target / ROUTES_PAGE).write_text(routes_page(document), encoding="utf-8")
    (target / SETTINGS_PAGE).write_text(settings_page(), encoding="utf-8")
    there = {path.relative_to(target).as_posix() for path in target.rglob("*.md")}
    nav = yaml.safe_dump({"nav": navigation(there)}, sort_keys=False, allow_unicode=True)
    (folder / "mkdocs.yml").write_text((DOCS / "site/mkdocs.yml").read_text(encoding="utf-8") + nav)


def _copied(path: Path, target: Path) -> Path:
    """Copy a file to where the site has it, as text, a picture as it is; of a folder a list of its files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        place = target / "files" / f"{name}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(sorted(f"{name}/{one.name}" for one in path.iterdir())) + "\n")
        return place
    is_picture = path.suffix in (".png", ".svg")
    place = target / (path.relative_to(DOCS) if is_picture else Path("files") / f"{name}.txt")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)
    return place


def settings_page() -> str:
    """A page with every setting, as `samovar config --keys` lists them."""
    lines = [
        "# Every setting",
        "",
        "As `samovar config --keys` lists them; [Configuration](configuration.md) says which matter.",
    ]
    section = ""
    for key, field in setting_fields().items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"## {section}", "", "| key | allowed | |", "| --- | --- | --- |"]
        lines.append(f"| `{key}` | {_cell(field.allowed)} | {_cell(field.description)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def routes_page(document: Mapping[str, Any]) -> str:
    """A page with the routes and the schemas of an OpenAPI document."""
    lines = [
        "# Routes",
        "",
        "From the [OpenAPI document](openapi.json), which a service has at `/openapi.json`.",
    ]
    lines += ["", document["info"]["description"]]
    for tag in document["tags"]:
        lines += ["", f"## {tag['name']}"]
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if method != "parameters" and operation["tags"] == [tag["name"]]:
                    lines += _route(method.upper(), path, operation)
    lines += ["", "## Schemas"]
    for name, schema in document["components"]["schemas"].items():
        lines += ["", f"### {name}", *_schema(schema)]
    return "\n".join(lines) + "\n"


def _route(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    summary = f"{operation['summary']}. {operation.get('description', '')}".rstrip()
    yield from ("", f"### {method} {path}", "", summary)
    rows = []
    if "x-needs" in operation:
        rows.append(("needs", f"`{operation['x-needs']}` where there are keys"))
    if operation.get("security") == []:
        rows.append(("needs", "no key"))
    rows += [(f"`?{one['name']}=`", one["description"]) for one in operation.get("parameters", ())]
    if "requestBody" in operation:
        rows.append(("body", _kind(operation["requestBody"]["content"]["application/json"]["schema"])))
    for kind, content in operation["responses"].get("200", {}).get("content", {}).items():
        schema = content["schema"]
        told = _kind(schema) if "$ref" in schema else schema.get("description", schema["type"])
        rows.append((f"`{kind}`", told))
    if rows:
        yield from ("", "| | |", "| --- | --- |", *(f"| {name} | {_cell(told)} |" for name, told in rows))


def _schema(schema: Mapping[str, Any]) -> Iterator[str]:
    if "description" in schema:
        yield from ("", schema["description"])
    required = set(schema.get("required", ()))
    if schema.get("properties"):
        yield from ("", "| field | | |", "| --- | --- | --- |")
    for name, told in schema.get("properties", {}).items():
        needed = " (required)" if name in required else ""
        yield f"| `{name}`{needed} | {_cell(_kind(told))} | {_cell(told.get('description', ''))} |"


def _kind(schema: Any) -> str:
    """A schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = dict.fromkeys(_kind(one) for one in schema["anyOf"])
        return " or ".join(kind for kind in kinds if kind != "null")
    for word in ("enum", "const"):
        if word in schema:
            values = schema[word] if word == "enum" else [schema[word]]
            return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}{_bounds(schema)}"
    return kind + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    named = {
        "minimum": "at least {}",
        "exclusiveMinimum": "more than {}",
        "maximum": "at most {}",
        "minLength": "{} characters or more",
        "maxLength": "{} characters at most",
        "minItems": "{} or more",
        "maxItems": "{} at most",
        "maxProperties": "{} at most",
    }
    told = [words.format(schema[word]) for word, words in named.items() if word in schema]
    return f" ({', '.join(told)})" if told else ""


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
