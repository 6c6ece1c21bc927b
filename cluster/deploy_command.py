"""`samovar deploy`: its flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

SECRETS_FILE = Path("~/samovar/secrets.yaml")


def deploy(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="a YAML file or a preset")
    ] = None,
    secrets: Annotated[
        Path, typer.Option(metavar="FILE", help="API keys and the server's secret; the same on every node")
    ] = SECRETS_FILE,
) -> None:
    """Deploy to the Ray cluster that runs here, and wait until it serves. Also takes --section.key VALUE.

    Run it on the head node, with the token that Ray was started with; `samovar up` does. Again with other
    settings it changes what is served, without an error to anybody.
    """
    from rich.console import Console

    from cluster.before_start import StartFailed
    from cluster.deploy import deploy as deploy_now
    from configs.loader import load
    from configs.problem import ConfigError
    from replicas.model_refused import ModelRefused

    errors = Console(stderr=True)
    try:
        settings = load(config, os.environ, ctx.args, secrets.expanduser()).settings
        url = deploy_now(settings, secrets, errors)
    except (ConfigError, StartFailed, ModelRefused) as error:
        errors.print(f"samovar: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, StartFailed) else 2) from error
    Console().print(f"Samovar is ready: {url}", highlight=False, soft_wrap=True)
