"""What several commands share: their options, how the help shows them, and how known errors end a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter

    from samovar.configs.loader import LoadedSettings
    from samovar.configs.settings import Settings

EXIT_FAILED = 1
EXIT_REFUSED = 2
ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}
HELP_NAMES = {"help_option_names": ["-h", "--help"]}
PRESETS = "aws, local-cpu, local-gpu, rack"

SPELLING = (
    "Every setting has a key such as engine.block_tokens and can be given in a YAML file "
    f"(--config FILE, or a preset: {PRESETS}), by the environment "
    "(SAMOVAR_ENGINE__BLOCK_TOKENS=32) and by a flag (--engine.block-tokens 32). Flags win over the "
    "environment, the environment wins over the file. `samovar config --keys` lists all settings."
)

ConfigOption = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help=f"a YAML file or a preset: {PRESETS}")
]
HostOption = Annotated[str | None, typer.Option("--host", metavar="HOST", help="the same as --server.host")]
PortOption = Annotated[str | None, typer.Option("--port", metavar="N", help="the same as --server.port")]
ReplicasOption = Annotated[
    str | None, typer.Option("--replicas", metavar="N", help="the same as --cluster.replicas")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="organisation/name of the Hugging Face hub, a directory or a .gguf file; also --model.path",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", metavar="KIND", help="samovar or vllm: the same as --engine.kind"),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="SAMOVAR_API_KEY",
        metavar="KEY",
        show_default=False,
        help="better set by the environment variable: other users of this machine can see flags",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="SAMOVAR_URL",
        metavar="URL",
        show_default=False,
        help="the server's address, or host:port; by default the one that runs on this machine",
    ),
]


def _in_plain_words(params: list[Parameter], ctx: Context) -> None:
    """Name the values of options as people do, where the option itself does not: `N`, not `<int range>`."""
    for param in params:
        if isinstance(param, TyperOption) and param.metavar is None:
            kind = param.display_type(ctx) or ""
            param.metavar = "" if param.is_flag else "N" if kind.startswith(("<int", "<float")) else "TEXT"
        elif isinstance(param, TyperArgument):
            param.metavar = param.metavar or param.display_name_raw
            setattr(param, "display_type_rich", lambda ctx: None)  # noqa: B010 - typer has no other way


class Command(TyperCommand):
    """A command whose help names values in plain words."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the help."""
        _in_plain_words(self.get_params(ctx), ctx)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """`samovar` itself, see `Command`."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the help."""
        _in_plain_words(self.get_params(ctx), ctx)
        super().format_help(ctx, formatter)


def short_flags(host: str | None, port: str | None, replicas: str | None, model: str | None) -> list[str]:
    """Return the short flags that were given, as flags of settings."""
    short = {"--host": host, "--port": port, "--replicas": replicas, "--model": model}
    return [f"{flag}={value}" for flag, value in short.items() if value is not None]


def settings_anew(config: str | None, flags: Sequence[str]) -> Settings:
    """Return the settings as they are found now. Raises `ConfigError`."""
    from samovar.configs.loader import load

    return load(config, os.environ, flags).settings


def load_or_exit(config: str | None, flags: Sequence[str]) -> LoadedSettings:
    """Load the settings, and exit with all problems if there are any."""
    from samovar.configs.loader import ConfigError, load

    try:
        return load(config, os.environ, flags)
    except ConfigError as error:
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    """Print why the command cannot be carried out, and exit."""
    typer.echo(f"samovar: {message}", err=True)
    raise typer.Exit(EXIT_REFUSED)


def print_table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> None:
    """Print a table on a terminal, tab-separated lines in a pipe, for `grep` and `cut`."""
    if not sys.stdout.isatty():
        for line in (head, *lines):
            typer.echo("\t".join(line))
        return
    from rich.table import Table
    from rich.text import Text

    from samovar.cluster.serve.stages import console_of

    table = Table(*head, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*(Text(cell, overflow="fold") for cell in line))
    console_of().print(table)
