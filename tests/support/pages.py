"""The Markdown pages of the repository: their links, anchors, blocks of code and lines of shell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "terraform/README.md",
    ROOT / "terraform/bootstrap/README.md",
]
MARK = re.compile(r"<!--\s*(not run|body of):\s*(.*?)\s*-->")
FENCE = re.compile(r"^(\s*)(`{3,})(\w*)\s*$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
EXPLICIT_ANCHOR = re.compile(r'<a (?:id|name)="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `mark`: what a comment before it says, (`not run`, reason) or (`body of`, route)."""

    page: Path
    line: int
    language: str
    text: str
    mark: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def why_not(self) -> str | None:
        """Why it is not run; None: it is."""
        return self.mark[1] if self.mark is not None and self.mark[0] == "not run" else None


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises `ValueError` for one that does not end."""
    found: list[Block] = []
    before = ""
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        fence = FENCE.match(line)
        if fence is None:
            before = line if line.strip() else before
            continue
        body = []
        for _, inner in lines:
            if inner.strip() == fence[2]:
                break
            body.append(inner.removeprefix(fence[1]))
        else:
            raise ValueError(f"{page}:{number}: the block does not end")
        mark = MARK.search(before)
        text = "\n".join(body) + "\n"
        found.append(Block(page, number, fence[3], text, (mark[1], mark[2]) if mark else None))
        before = ""
    return found


def prose_of(page: Path) -> str:
    """A page's text without its blocks."""
    kept, open_fence = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        if open_fence is not None:
            open_fence = None if line.strip() == open_fence else open_fence
            continue
        fence = FENCE.match(line)
        if fence is not None:
            open_fence = fence[2]
            continue
        kept.append(line)
    return "\n".join(kept)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", "").lower())
    return text.strip().replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    """Where a link into a page may lead."""
    found: set[str] = set()
    for line in prose_of(page).splitlines():
        heading = re.match(r"#{1,6}\s+(.*)", line)
        if heading is not None:
            base, number = slug(heading[1]), 0
            while (name := base if not number else f"{base}-{number}") in found:
                number += 1
            found.add(name)
        found.update(EXPLICIT_ANCHOR.findall(line))
    return found


def links_of(page: Path) -> list[str]:
    """Links of a page to others and within it, not those to the internet."""
    return [target for target in LINK.findall(prose_of(page)) if "://" not in target]


def broken_links(page: Path) -> list[str]:
    """Links that lead to no file, or to no heading of the page that they name."""
    found = []
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        is_missing = not place.exists()
        if is_missing or (anchor and place.suffix == ".md" and anchor not in anchors_of(place)):
            found.append(target)
    return found


@dataclass(frozen=True, slots=True)
class Command:
    """A logical line of shell; `heredoc`: (its word, its text)."""

    text: str
    heredoc: tuple[str, str] | None = None


def commands_of(text: str) -> list[Command]:
    """The commands of a block: continued lines joined, here-documents apart, comments left out."""
    found: list[Command] = []
    lines = iter(text.splitlines())
    for line in lines:
        while line.rstrip().endswith("\\"):
            line = line.rstrip()[:-1] + " " + next(lines, "").strip()
        while _is_open(line):
            line += "\n" + next(lines)
        heredoc = HEREDOC.search(line)
        body = None
        if heredoc is not None:
            inner = []
            for part in lines:
                if part.strip() == heredoc[2]:
                    break
                inner.append(part)
            body = (heredoc[2], "\n".join(inner) + "\n")
        if line.strip() and not line.lstrip().startswith("#"):
            found.append(Command(line.strip(), body))
    return found


def _is_open(line: str) -> bool:
    """Whether a quote of a line goes on in the next."""
    quote = ""
    for char in line:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#":
            break
    return bool(quote)
