"""`samovar kb`: a tenant's knowledge base over HTTP, and backups of the store's file.

Imports neither Ray nor anything heavy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from samovar.cluster.cli.options import (
    EXIT_FAILED,
    EXIT_REFUSED,
    HELP_NAMES,
    ApiKeyOption,
    Command,
    ConfigOption,
    Group,
    UrlOption,
    load_or_exit,
)

if TYPE_CHECKING:
    import httpx

    from samovar.router.context.knowledge import KnowledgeStore

ROUTE = "/v1/knowledge"
CANDIDATES = f"{ROUTE}/candidates"
TIMEOUT_S = 300.0
PAGE = 200
PART_BYTES_MAX = 3_000_000
"""Of a file, as JSON: `limits.body_bytes_max` is 4 MiB unless it is set, and questions go along."""
SEED = 18

kb = typer.Typer(
    name="kb",
    cls=Group,
    context_settings=HELP_NAMES,
    help="The knowledge base of a running server: entries that chats get as context.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

WhyOption = Annotated[str, typer.Option("--why", metavar="TEXT", help="kept with the version")]
QuestionsOption = Annotated[
    Path | None,
    typer.Option(
        "--test", metavar="FILE", help="questions (JSONL): nothing lands that breaks one which holds now"
    ),
]


class _Server:
    """The server that a command asks. Its answers are JSON; refusals end the command."""

    def __init__(self, url: str | None, api_key: str | None) -> None:
        from samovar.cluster.cli.running import AccessRefused, client_of, server_url

        try:
            self._client = client_of(server_url(url), api_key, TIMEOUT_S)
        except AccessRefused as error:
            _exit(str(error), EXIT_REFUSED)
        self._base = f"{self._client.base_url}".rstrip("/")

    def ask(self, method: str, path: str, body: Any = None, **params: Any) -> dict[str, Any]:
        """Return the answer of a route."""
        import httpx

        try:
            reply = self._client.request(method, path, json=body, params=params or None)
        except httpx.HTTPError as error:
            _exit(f"{self._base} does not answer: {error or type(error).__name__}", EXIT_FAILED)
        except (httpx.InvalidURL, UnicodeError) as error:
            _exit(f"this cannot be sent, a character in it is no text: {error}", EXIT_REFUSED)
        return self._read(reply)

    def _read(self, reply: httpx.Response) -> dict[str, Any]:
        from samovar.cluster.cli.conversation import error_code, error_message

        try:
            body = reply.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            _exit(f"{self._base} does not answer in JSON: is this a Samovar server?", EXIT_FAILED)
        if reply.status_code < 400:
            return body
        code = error_code(body)
        if code == "unknown_route":
            _exit(
                "the knowledge base of this server is off. Serve with --knowledge.enabled true", EXIT_FAILED
            )
        if code == "entry_not_found" and reply.url.path.startswith(CANDIDATES):
            _exit("the loop of this server is off. Serve with --knowledge.loop.enabled true", EXIT_FAILED)
        _exit(error_message(body) or f"status {reply.status_code}", EXIT_FAILED)

    def items(self, path: str, name: str = "id", **params: Any) -> Iterator[dict[str, Any]]:
        """Return all items of a list, page by page. `name`: the field by which pages go on."""
        while True:
            page = self.ask("GET", path, limit=PAGE, **params)
            yield from page["data"]
            if not page["has_more"]:
                return
            params["after"] = page["data"][-1][name]


@kb.command(cls=Command)
def add(
    files: Annotated[list[Path] | None, typer.Argument(help="Markdown (.md) or JSONL; none: --text")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="one entry")] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="of --text")] = "",
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="of --text, and of Markdown sections that name none")
    ] = "document_chunk",
    why: WhyOption = "",
    test: QuestionsOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Add an entry, or import files: each whole or not at all.

    JSONL of more than 1,000 lines or 3 MB goes in parts, one after another, each whole or not at all.
    """
    if (text is None) == (not files):
        _exit("give --text TEXT, or files", EXIT_REFUSED)
    server, questions = _Server(url, api_key), _questions(test)
    if text is not None:
        line = json.dumps({"kind": kind, "title": title, "text": text})
        _added(server.ask("POST", f"{ROUTE}/import", _import("jsonl", line, kind, why, questions)))
        return
    for path in files or ():
        form = "markdown" if path.suffix.lower() in (".md", ".markdown") else "jsonl"
        given = _text(path)
        for first, part in _parts(given) if form == "jsonl" else [(1, given)]:
            try:
                _added(server.ask("POST", f"{ROUTE}/import", _import(form, part, kind, why, questions)))
            except typer.Exit:
                if first > 1:
                    typer.echo(f"samovar: of {path} only what is above line {first:,} was added", err=True)
                raise


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Yield JSONL in parts that a request can hold, each with the number of its first line."""
    from samovar.configs.optional_sections import KnowledgeSettings

    part: list[str] = []
    first, nbytes = 1, 0
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        size = len(json.dumps(line, ensure_ascii=False).encode())
        if part and (len(part) == KnowledgeSettings.import_entries_max or nbytes + size > PART_BYTES_MAX):
            yield first, "\n".join(part)
            part, first, nbytes = [], number, 0
        part.append(line)
        nbytes += size
    yield first, "\n".join(part)


def _import(form: str, text: str, kind: str, why: str, questions: list[Any]) -> dict[str, Any]:
    return {"format": form, "text": text, "kind": kind, "why": why, "questions": questions}


def _added(answer: dict[str, Any]) -> None:
    for entry in answer["data"]:
        typer.echo(_line(entry))
    _report(answer.get("test"))


@kb.command(cls=Command)
def search(
    query: Annotated[str, typer.Argument(help="what to look for")],
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Show what a question finds, with scores and places in each ranking."""
    found = _Server(url, api_key).ask("POST", f"{ROUTE}/search", {"query": query, "limit": limit})
    if as_json:
        typer.echo(json.dumps(found))
        return
    for entry in found["data"]:
        ranks = ", ".join(f"{name} {rank}" for name, rank in entry["ranks"].items())
        typer.echo(f"{entry['score']:.3f}  {_line(entry)}  ({ranks})")


@kb.command(cls=Command)
def log(
    entry: Annotated[str, typer.Argument(help="id of an entry")],
    diffs: Annotated[bool, typer.Option("--diff", help="with what each version changed")] = False,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Show an entry's versions, the newest first: who, when, why, from which turn."""
    from datetime import UTC, datetime

    server = _Server(url, api_key)
    for one in server.items(f"{ROUTE}/{entry}/history", "version"):
        at = datetime.fromtimestamp(one["created"], UTC).isoformat(timespec="seconds")
        turn = f"  turn {one['turn']}" if one["turn"] else ""
        typer.echo(
            f"v{one['version']}  {at}  {one['operation']}  {one['who']}{turn}  {' '.join(one['why'].split())}"
        )
        if diffs and one["version"] > 1:
            number = one["version"]
            told = server.ask("GET", f"{ROUTE}/{entry}/diff", None, **{"from": number - 1, "to": number})
            typer.echo(told["diff"])


@kb.command(cls=Command)
def revert(
    entry: Annotated[str, typer.Argument(help="id of an entry; or the name of a tag, for all entries")],
    version: Annotated[int | None, typer.Option(min=1, help="of an entry; none: ENTRY is a tag")] = None,
    why: WhyOption = "",
    test: QuestionsOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Make an earlier version the newest, or all entries as a tag names them. History stays."""
    server, body = _Server(url, api_key), {"why": why, "questions": _questions(test)}
    if version is None:
        answer = server.ask("POST", f"{ROUTE}/revert", {"tag": entry, **body})
    else:
        answer = server.ask("POST", f"{ROUTE}/{entry}/revert", {"version": version, **body})
        answer = {**answer, "data": [answer]}
    _added(answer)


@kb.command(cls=Command)
def tag(
    name: Annotated[str | None, typer.Argument(help="none: list them")] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Name the present state of all entries, so that `revert NAME` brings it back."""
    server = _Server(url, api_key)
    if name is not None:
        server.ask("POST", f"{ROUTE}/tags", {"name": name})
    for one in server.ask("GET", f"{ROUTE}/tags")["data"]:
        typer.echo(one["name"])


@kb.command(cls=Command)
def export(url: UrlOption = None, api_key: ApiKeyOption = None) -> None:
    """Print all entries as JSONL, which `samovar kb add` reads."""
    for entry in _Server(url, api_key).items(ROUTE):
        typer.echo(json.dumps(entry, ensure_ascii=False))


@kb.command("test", cls=Command)
def run_questions(
    questions: Annotated[
        Path,
        typer.Argument(help='JSONL: {"question": ..., "checks": [{"contains": ...}, {"retrieves": ...}]}'),
    ],
    answers: Annotated[
        bool, typer.Option("--answers", help='also ask the model, for checks of {"of": "answer"}')
    ] = False,
    before: Annotated[
        Path | None, typer.Option(metavar="FILE", help="an earlier report (--json): show what changed")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Run questions with checks of what is retrieved, and of answers. Fails if one does not hold."""
    asked, server = _questions(questions), _Server(url, api_key)
    report = server.ask("POST", f"{ROUTE}/test", {"questions": asked})
    if answers:
        _ask_model(server, asked, report)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        was = {} if before is None else {one["question"]: one for one in _json(before)["questions"]}
        for one in report["questions"]:
            typer.echo(f"{'ok  ' if one['passed'] else 'FAIL'}  {one['question']}{_change(was, one)}")
            for failure in one["failures"]:
                typer.echo(f"      {failure}")
        typer.echo(f"{report['passed']} hold, {report['failed']} do not")
    if report["failed"]:
        raise typer.Exit(EXIT_FAILED)


def _ask_model(server: _Server, asked: Sequence[Any], report: dict[str, Any]) -> None:
    """Add the failures of checks of answers: each question alone, at temperature 0, always the same seed."""
    from samovar.router.context.knowledge import Check, broken

    model = server.ask("GET", "/v1/models")["data"][0]["id"]
    for question, verdict in zip(asked, report["questions"], strict=True):
        checks = [check for check in question["checks"] if check.get("of") == "answer"]
        if not checks:
            continue
        said = server.ask(
            "POST",
            "/v1/chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": question["question"]}],
                "knowledge": {},
                "temperature": 0,
                "seed": SEED,
            },
        )
        text = said["choices"][0]["message"]["content"] or ""
        failures = [failure for check in checks if (failure := broken(Check(**check), text)) is not None]
        verdict["failures"] += [f"answer {failure}" for failure in failures]
        verdict["passed"] = not verdict["failures"]
    report["passed"] = sum(one["passed"] for one in report["questions"])
    report["failed"] = len(report["questions"]) - report["passed"]


def _change(was: dict[str, Any], now: dict[str, Any]) -> str:
    before = was.get(now["question"])
    if before is None or before["passed"] == now["passed"]:
        return ""
    return "  (held before)" if before["passed"] else "  (did not hold before)"


@kb.command(cls=Command)
def candidates(
    candidate: Annotated[str | None, typer.Argument(help="show this one whole; none: list them")] = None,
    state: Annotated[
        str, typer.Option(metavar="STATE", help="open, confirmed, captured or rejected; of a list")
    ] = "open",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Show what feedback would add to the knowledge base, the newest first. `confirm` or `reject` it."""
    server = _Server(url, api_key)
    if candidate is not None:
        one = server.ask("GET", f"{CANDIDATES}/{candidate}")
        typer.echo(json.dumps(one) if as_json else _whole(one))
        return
    for one in server.items(CANDIDATES, state=state):
        typer.echo(json.dumps(one) if as_json else _short(one))


@kb.command(cls=Command)
def confirm(
    candidate: Annotated[str, typer.Argument(help="id of a candidate")],
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="in place of its own")] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="in place of its own")] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="in place of its own")] = None,
    why: WhyOption = "",
    test: QuestionsOption = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Make a candidate an entry: you have read it, and it is right."""
    given = {"text": text, "title": title, "kind": kind}
    body = {name: value for name, value in given.items() if value is not None}
    server = _Server(url, api_key)
    said = {**body, "why": why, "questions": _questions(test)}
    made = server.ask("POST", f"{CANDIDATES}/{candidate}/confirm", said)
    typer.echo(_line(server.ask("GET", f"{ROUTE}/{made['entry']}")))
    _report(made.get("test"))


@kb.command(cls=Command)
def reject(
    candidate: Annotated[str, typer.Argument(help="id of a candidate")],
    why: WhyOption = "",
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Refuse a candidate: its texts are dropped, and the same one is not made again."""
    done = _Server(url, api_key).ask("POST", f"{CANDIDATES}/{candidate}/reject", {"why": why})
    typer.echo(_short(done))


def _short(one: dict[str, Any]) -> str:
    words = " ".join(one["question"].split())
    told = f"{one['id']}  {one['state']}  {one['kind']}  seen {one['seen']}  {words[:80]}".rstrip()
    return f"{told}  (similar: {', '.join(one['similar'])})" if one["similar"] else told


def _whole(one: dict[str, Any]) -> str:
    lines = [_short(one), *(f"held: {reason}" for reason in one["held"])]
    lines += [f"{name}: {one[name]}" for name in ("turn", "entry", "why", "said", "comment") if one[name]]
    if one["evidence"]:
        lines.append(f"confirmed by a result of {one['evidence']['tool']}")
    return "\n".join([*lines, *([one["preview"]] if one["preview"] else [])])


@kb.command(cls=Command)
def backup(target: Annotated[Path, typer.Argument(help="a new file")], config: ConfigOption = None) -> None:
    """Copy the store that the settings name into a file, while it is in use: all tenants, all versions."""
    _local(config, lambda store: store.backup(target), must_exist=True)


@kb.command(cls=Command)
def restore(
    source: Annotated[Path, typer.Argument(help="a file of `samovar kb backup`")], config: ConfigOption = None
) -> None:
    """Replace all that is in the store that the settings name by a backup, of either kind of store."""
    _local(config, lambda store: store.restore(source))


@kb.command(cls=Command)
def compact(config: ConfigOption = None) -> None:
    """Rewrite the store, so that its files have no byte of what was erased. Others wait meanwhile."""
    _local(config, lambda store: store.compact(), must_exist=True)


def _local(config: str | None, work: Any, must_exist: bool = False) -> None:
    from samovar.configs.extras import ExtraMissing
    from samovar.router.context.knowledge import KnowledgeError, open_store, store_file

    settings = load_or_exit(config, []).settings
    path = store_file(settings.knowledge, settings.model.cache_dir)
    if must_exist and settings.knowledge.postgres.url is None and not path.is_file():
        _exit(f"there is no knowledge base {path}. Give the config of its server (--config)", EXIT_REFUSED)
    try:
        store: KnowledgeStore = open_store(settings.knowledge, settings.model.cache_dir)
        try:
            work(store)
        finally:
            store.close()
    except (KnowledgeError, ExtraMissing) as error:
        _exit(str(error), EXIT_FAILED)


def _questions(path: Path | None) -> list[Any]:
    if path is None:
        return []
    return [_parsed(line, path) for line in _text(path).split("\n") if line.strip()]


def _json(path: Path) -> dict[str, Any]:
    found = _parsed(_text(path), path)
    if not isinstance(found, dict) or "questions" not in found:
        _exit(f"{path} is no report of `samovar kb test --json`", EXIT_REFUSED)
    return found


def _parsed(text: str, path: Path) -> Any:
    from samovar.configs.json_text import parse_json

    try:
        return parse_json(text)
    except ValueError as error:
        _exit(f"{path} is no JSON: {error}", EXIT_REFUSED)


def _text(path: Path) -> str:
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _exit(f"{path} cannot be read: {error}", EXIT_REFUSED)


def _line(entry: dict[str, Any]) -> str:
    words = " ".join((entry["title"] or entry["text"]).split())
    return f"{entry['id']} v{entry['version']}  {entry['kind']}  {words[:80]}"


def _report(report: dict[str, Any] | None) -> None:
    if report is not None:
        typer.echo(f"questions: {report['passed_before']} held before, {report['passed_after']} hold now")


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(f"samovar: {message}", err=True)
    raise typer.Exit(code)
