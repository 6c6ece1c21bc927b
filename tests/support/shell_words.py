"""What a line of shell on a page names, checked without running it: targets, commands, flags, files."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import typer

from samovar.cluster.cli.main import app
from samovar.configs.loader import ConfigError, load

ROOT = Path(__file__).resolve().parents[2]
SEPARATORS = {"|", "||", "&&", ";", "(", ")", "&"}
REDIRECTIONS = {">", ">>", "<", "<<"}
HARMLESS = {"cat", "cd", "echo", "export", "umask", "cp", "tail"}
PYTHONS = {"python", "python3"}
CONFIGURED = {"serve", "config", "deploy", "render", "up", "down"}
"""Commands that take every setting as a flag."""


@cache
def targets() -> frozenset[str]:
    """The targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


@cache
def _commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(app)
    return dict(group.commands)  # type: ignore[attr-defined]


def parts(line: str) -> Iterator[list[str]]:
    """The simple commands of a line, each as words, without redirections and leading assignments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    skips = False
    for word in lexer:
        if word in SEPARATORS or set(word) <= set("();|&"):
            yield from _named(words)
            words = []
        elif set(word) <= set("<>&"):
            skips = True
        elif skips:
            skips = False
        else:
            words.append(word)
    yield from _named(words)


def _named(words: list[str]) -> Iterator[list[str]]:
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.S):
        words = words[1:]
    if words:
        yield words


def problem(words: Sequence[str]) -> str | None:
    """What is wrong with a simple command; None: nothing. An unknown program is a problem."""
    name, *rest = words
    name = name.rpartition("/")[2] if "/bin/" in name else name
    if name == "make":
        return _make(rest)
    if name == "samovar":
        return _samovar(rest)
    if name in PYTHONS:
        return _python(rest)
    if name == "bash":
        return None if rest and (ROOT / rest[0]).is_file() else f"there is no file {rest[:1]}"
    if name == "pip":
        return _pip(rest)
    if name == "curl":  # the requests are sent: tests/unit/repository/test_snippets.py
        return None
    return None if name in HARMLESS else f"{name}: nothing checks this program; say `<!-- not run: why -->`"


def _make(words: Sequence[str]) -> str | None:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    for target in (word for word in words if "=" not in word):
        if target not in targets():
            return f"the Makefile has no target {target}"
        said = given.get("ARGS", "")
        if said and (found := _arguments(target, said)):
            return found
    return None


def _arguments(target: str, arguments: str) -> str | None:
    """What is wrong with the ARGS of a target."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    if "samovar serve" in recipe[1]:
        return _samovar(["serve", *shlex.split(arguments)])
    module = re.search(r"-m ((?:bench|tests)[.\w]*)", recipe[1])
    words = shlex.split(arguments)
    if module is None:
        missing = [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
        return f"there is no {missing[0]}" if missing else None
    return _flags_of_module(module[1], words)


def _flags_of_module(module: str, words: Sequence[str]) -> str | None:
    path = ROOT / (module.replace(".", "/") + ".py")
    path = path if path.is_file() else ROOT / module.replace(".", "/") / "__main__.py"
    if not path.is_file():
        return f"there is no module {module}"
    beside = [path, *path.parent.glob("_*.py")]
    source = "\n".join(one.read_text(encoding="utf-8") for one in beside)
    unknown = [
        word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source
    ]
    return f"{module} has no {unknown[0]}" if unknown else None


def _python(words: Sequence[str]) -> str | None:
    if words[:1] == ["-m"] and words[1] in ("venv", "pip"):
        return None
    if words[:1] == ["-m"]:
        return _flags_of_module(words[1], words[2:])
    return f"{list(words)}: only `python -m MODULE` is checked"


def _pip(words: Sequence[str]) -> str | None:
    for extras in re.findall(r"samovar\[([\w,]+)\]", " ".join(words)):
        unknown = set(extras.split(",")) - set(_extras())
        if unknown:
            return f"there is no extra {sorted(unknown)}"
    return None


@cache
def _extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def _samovar(words: Sequence[str]) -> str | None:
    if not words or words[0].startswith("-"):
        return (
            None if list(words) in ([], ["--version"], ["--help"], ["--install-completion"]) else str(words)
        )
    command = _commands().get(words[0])
    if command is None:
        return f"there is no command samovar {words[0]}"
    given = [word.replace("sha256:...", "sha256:" + "0" * 64) for word in words[1:]]
    try:
        left = command.make_context(words[0], given, resilient_parsing=False).args
    except Exception as refused:  # noqa: BLE001 - of the click inside typer, which has no public name
        return f"samovar {' '.join(words)}: {getattr(refused, 'message', refused)}"
    if words[0] in CONFIGURED:
        while left and not left[0].startswith("-"):  # a model, `get KEY`
            left = left[1:]
        try:
            load(None, {}, left)
        except ConfigError as refused:
            return f"samovar {' '.join(words)}: {refused}"
    return None


def inline_problem(code: str) -> str | None:
    """What is wrong with a command between backticks: its target or command, and the names of its flags."""
    try:
        simple = list(parts(code.replace("[", " ").replace("]", " ").replace("...", " ")))
    except ValueError:
        return None  # a part of a line
    for name, *rest in simple:
        if name == "make" and rest and rest[0] not in targets() and "=" not in rest[0]:
            return f"the Makefile has no target {rest[0]}"
        if name != "samovar" or not rest or rest[0].startswith("-"):
            continue
        command = _commands().get(rest[0])
        if command is None:
            return f"there is no command samovar {rest[0]}"
        known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        known |= {"--help"}
        flags = [word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)]
        unknown = [
            flag for flag in flags if flag not in known and not ("." in flag and rest[0] in CONFIGURED)
        ]
        if unknown:
            return f"samovar {rest[0]} has no {unknown[0]}"
    return None
