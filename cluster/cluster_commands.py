"""The commands of a cluster: their flags, and known errors as one clear message.

They import what they need when they run. Knows nothing of how a cluster is made: `up.py` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from cluster.terraform_outputs import CloudOutputs
    from cluster.up import Launch
    from configs.settings import Settings

EXIT_FAILED = 1
EXIT_REFUSED = 2
ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}

ConfigOption = Annotated[
    str, typer.Option("--config", metavar="FILE", help="a YAML file or a preset: aws, rack")
]
TerraformOption = Annotated[
    Path | None,
    typer.Option("--terraform", metavar="FILE", help="what `terraform output -json` printed; not for a rack"),
]
SecretsOption = Annotated[
    Path | None, typer.Option("--secrets", metavar="FILE", help="YAML with API keys: `auth:`, `api_keys:`")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to `samovar`."""
    app.command("render", context_settings=ANY_SETTING)(render_command)
    app.command("up", context_settings=ANY_SETTING)(up_command)
    app.command("down", context_settings=ANY_SETTING)(down_command)
    app.command("node-setup")(node_setup_command)
    app.command("keep-gcs", hidden=True)(keep_gcs_command)


def render_command(ctx: typer.Context, config: ConfigOption, terraform: TerraformOption = None) -> None:
    """Print the file that `ray up` reads. Also takes --section.key VALUE. It holds no secrets."""
    from cluster.render import header, render

    with _known_errors():
        launch = _launch(config, terraform, None, ctx.args)
        file = render(launch.settings, launch.outputs, str(launch.files.node_dir))
        typer.echo(file.text(header(file, launch.sources)), nl=False)


def up_command(
    ctx: typer.Context,
    config: ConfigOption,
    terraform: TerraformOption = None,
    secrets: SecretsOption = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="start Ray anew on the head even where it runs as wanted")
    ] = False,
) -> None:
    """Start the machines of a cluster, Ray on them and Samovar on Ray; wait until it serves.

    Again, with other settings, it changes what runs. Also takes --section.key VALUE.
    """
    from cluster.up import READY, up

    with _known_errors():
        launch = _launch(config, terraform, secrets, ctx.args)
        typer.echo(f"{READY}{up(launch, restart=restart)}")


def down_command(ctx: typer.Context, config: ConfigOption, terraform: TerraformOption = None) -> None:
    """End a cluster: all its machines in AWS, all its processes on a rack. Says what is left.

    The bucket and what else Terraform made stays: `terraform destroy` removes that.
    """
    from cluster.up import down

    with _known_errors():
        launch = _launch(config, terraform, None, ctx.args)
        left = down(launch)
    for line in left:
        typer.echo(f"left: {line}", err=True)
    if left:
        raise typer.Exit(EXIT_FAILED)
    typer.echo("Nothing of the cluster runs any more.")


def node_setup_command(
    region: Annotated[str | None, typer.Option(help="of AWS")] = None,
    ssm_prefix: Annotated[str | None, typer.Option(help="where the cluster's secrets stand in SSM")] = None,
    target_group: Annotated[str | None, typer.Option(help="ARN: of the load balancer's targets")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="that the load balancer sends to")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="in a rack: Ray's token, the secrets beside it")
    ] = None,
) -> None:
    """What `samovar up` runs on every node before Ray: fetch secrets, join the load balancer's targets."""
    from cluster.node_setup import join_targets, setup_from_file, setup_from_ssm

    with _known_errors():
        if token_file is not None:
            setup_from_file(token_file.expanduser(), Path.home())
            return
        if region is None or ssm_prefix is None:
            _exit("node-setup needs --region and --ssm-prefix, or --token-file", EXIT_REFUSED)
        client = _clients(region)
        setup_from_ssm(client("ssm"), ssm_prefix, Path.home())
        if target_group is not None:
            join_targets(client("elbv2"), target_group, port)


def keep_gcs_command(port: Annotated[int, typer.Option(min=1, max=65535)] = 6379) -> None:
    """What `samovar up` leaves running on the head: starts Ray's GCS again when it dies."""
    from cluster.keep_gcs import main

    raise typer.Exit(main(["--port", str(port)]))


def _launch(config: str, terraform: Path | None, secrets: Path | None, rest: list[str]) -> Launch:
    from cluster.terraform_outputs import read_outputs
    from cluster.up import Launch
    from configs.loader import load

    settings = _absolute_paths(load(config, os.environ, rest, secrets).settings)
    outputs: CloudOutputs | None = None if terraform is None else read_outputs(terraform)
    sources = [config, *([] if terraform is None else [terraform.name])]
    region = "" if outputs is None else outputs.region
    return Launch(settings, outputs, sources, Path.home(), dict(os.environ), _clients(region), typer.echo)


def _absolute_paths(settings: Settings) -> Settings:
    """Ray and ssh look for them from other directories."""
    ssh, wheel = settings.launch.ssh, settings.launch.wheel
    key = ssh.private_key and ssh.private_key.expanduser().absolute()
    update = {
        "ssh": ssh.model_copy(update={"private_key": key}),
        "wheel": wheel and wheel.expanduser().absolute(),
    }
    return settings.model_copy(update={"launch": settings.launch.model_copy(update=update)})


def _clients(region: str) -> Callable[[str], Any]:
    """boto3 honours AWS_ENDPOINT_URL and the like."""
    import boto3

    session = boto3.session.Session(region_name=region or None)
    return lambda service: session.client(service)  # type: ignore[call-overload]


@contextmanager
def _known_errors() -> Iterator[None]:
    from cluster.node_settings import RenderFailed
    from cluster.node_setup import NodeSetupFailed
    from cluster.ray_command import CommandFailed
    from cluster.ssm_parameters import AwsRefused
    from cluster.terraform_outputs import OutputsRefused
    from cluster.up import UpFailed
    from configs.problem import ConfigError

    try:
        yield
    except (ConfigError, RenderFailed, OutputsRefused) as error:
        _exit(str(error), EXIT_REFUSED)
    except (NodeSetupFailed, AwsRefused, CommandFailed, UpFailed) as error:
        _exit(str(error), EXIT_FAILED)


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(f"samovar: {message}", err=True)
    raise typer.Exit(code)
