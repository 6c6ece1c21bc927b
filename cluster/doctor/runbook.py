"""Writes the parts of docs/diagnosis.md that are the words of the commands.

`python -m samovar.cluster.doctor.runbook`; a test compares the page with them.
"""

from __future__ import annotations

from samovar import HOME
from samovar.cluster.doctor.doctor import checks_of
from samovar.configs.settings import Settings
from samovar.router.observe.diagnosis import CONDITIONS, Condition

PAGE = HOME / "docs" / "diagnosis.md"
BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"


def runbook() -> str:
    """Return the conditions by symptom, in Markdown."""
    return "\n\n".join(map(_section, CONDITIONS))


def _section(one: Condition) -> str:
    lines = [
        f"### {one.symptom.rstrip('.')}",
        "",
        f"**{one.title}** (`{one.name}`), if {one.holds}.",
        "",
        one.remedy,
    ]
    if one.causes:
        lines += ["", *(f"- `{cause}`: {text}." for cause, text in one.causes.items())]
    return "\n".join(lines)


def check_table() -> str:
    """Return the checks of `samovar doctor` as a Markdown table."""
    lines = ["| check | what it does | at most |", "| --- | --- | --- |"]
    for check in checks_of(Settings()):
        said = (getattr(check.run, "func", check.run).__doc__ or "").strip().splitlines()[0]
        lines.append(f"| {check.title} | {said} | {check.s_max:g} s |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    """Return the page with its generated parts as they are now. Raises `ValueError` if a mark is missing."""
    for name, text in (("runbook", runbook()), ("checks", check_table())):
        begin, end = BEGIN.format(name), END.format(name)
        head, tail = page[: page.index(begin) + len(begin)], page[page.index(end) :]
        page = f"{head}\n\n{text}\n\n{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
