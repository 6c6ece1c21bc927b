"""Defines the `samovar` command: reads flags, prints results, turns known errors into one clear message.

Commands import what they need when they run, so that `samovar --help` is fast.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, cast

import typer

from cluster.cli.plan import plan

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

    Run it on the head node, with the token that Ray was started with; `samovar up` does. Run again with
    other settings, it changes what is served, without a failed request.
    """
    from rich.console import Console

    from cluster.deploy.deploy import deploy as deploy_now
    from cluster.serve.preflight import StartFailed
    from configs.loader import ConfigError, load
    from replicas.messages import ModelRefused

    errors = Console(stderr=True)
    try:
        settings = load(config, os.environ, ctx.args, secrets.expanduser()).settings
        url = deploy_now(settings, secrets, errors)
    except (ConfigError, StartFailed, ModelRefused) as error:
        errors.print(f"samovar: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, StartFailed) else 2) from error
    Console().print(f"Samovar is ready: {url}", highlight=False, soft_wrap=True)


if TYPE_CHECKING:
    from cluster.launch.terraform import CloudOutputs
    from cluster.launch.up import Launch
    from configs.settings import Settings

EXIT_FAILED = 1
EXIT_REFUSED = 2
ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}

ClusterFileOption = Annotated[
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
    """Add the cluster commands to `samovar`."""
    app.command("render", context_settings=ANY_SETTING)(render_command)
    app.command("up", context_settings=ANY_SETTING)(up_command)
    app.command("down", context_settings=ANY_SETTING)(down_command)
    app.command("node-setup")(node_setup_command)
    app.command("keep-gcs", hidden=True)(keep_gcs_command)


def render_command(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="a YAML file or a preset")
    ] = None,
    terraform: TerraformOption = None,
    secrets: SecretsOption = None,
    kuberay: Annotated[
        bool, typer.Option("--kuberay", help="a RayService for Kubernetes instead; needs --secrets")
    ] = False,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="a unit that runs `samovar serve` on this machine instead")
    ] = False,
) -> None:
    """Print the file that `ray up` reads. Also takes --section.key VALUE. It holds no secrets."""
    from cluster.launch.render import header, render
    from cluster.manifests.command import ray_service, systemd_unit

    with _known_errors():
        if kuberay + systemd + (terraform is not None) > 1:
            _exit("--kuberay, --systemd and --terraform are for three different files", EXIT_REFUSED)
        if secrets is not None and not kuberay:
            _exit("--secrets is for --kuberay only: this file holds no secrets", EXIT_REFUSED)
        if kuberay or systemd:
            text = (
                ray_service(config, secrets, os.environ, ctx.args)
                if kuberay
                else systemd_unit(config, os.environ, ctx.args)
            )
            typer.echo(text, nl=False)
            return
        if config is None:
            _exit("render needs --config FILE, a YAML file or a preset (aws, rack)", EXIT_REFUSED)
        launch = _launch(config, terraform, None, ctx.args)
        file = render(launch.settings, launch.outputs, str(launch.files.node_dir))
        typer.echo(file.text(header(file, launch.sources)), nl=False)


def up_command(
    ctx: typer.Context,
    config: ClusterFileOption,
    terraform: TerraformOption = None,
    secrets: SecretsOption = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="restart Ray on the head even if it runs with these settings")
    ] = False,
) -> None:
    """Start the machines of a cluster, Ray on them and Samovar on Ray; wait until it serves.

    Run again with other settings, it changes what runs. Also takes --section.key VALUE.
    """
    from cluster.launch.up import READY, up

    with _known_errors():
        launch = _launch(config, terraform, secrets, ctx.args)
        typer.echo(f"{READY}{up(launch, restart=restart)}")


def down_command(ctx: typer.Context, config: ClusterFileOption, terraform: TerraformOption = None) -> None:
    """Stop a cluster: all its machines in AWS, all its processes on a rack. Prints what is left.

    The bucket and everything else that Terraform made stays: `terraform destroy` removes that.
    """
    from cluster.launch.up import down

    with _known_errors():
        launch = _launch(config, terraform, None, ctx.args)
        left = down(launch)
    for line in left:
        typer.echo(f"left: {line}", err=True)
    if left:
        raise typer.Exit(EXIT_FAILED)
    typer.echo("All machines and processes of the cluster have ended.")


def node_setup_command(
    region: Annotated[str | None, typer.Option(help="of AWS")] = None,
    ssm_prefix: Annotated[str | None, typer.Option(help="prefix of the cluster's secrets in SSM")] = None,
    target_group: Annotated[str | None, typer.Option(help="ARN of the load balancer's target group")] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="port that the load balancer sends requests to")
    ] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="on a rack: file of Ray's token, with the secrets beside it")
    ] = None,
) -> None:
    """Fetch secrets and join the load balancer's targets; `samovar up` runs it on every node before Ray."""
    from cluster.launch.node_setup import join_targets, setup_from_file, setup_from_ssm

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
    """Restart Ray's GCS when it dies; `samovar up` leaves this running on the head."""
    from cluster.launch.keep_gcs import main

    raise typer.Exit(main(["--port", str(port)]))


def _launch(config: str, terraform: Path | None, secrets: Path | None, rest: list[str]) -> Launch:
    from cluster.launch.terraform import read_outputs
    from cluster.launch.up import Launch
    from configs.loader import load

    settings = _absolute_paths(load(config, os.environ, rest, secrets).settings)
    outputs: CloudOutputs | None = None if terraform is None else read_outputs(terraform)
    sources = [config, *([] if terraform is None else [terraform.name])]
    region = "" if outputs is None else outputs.region
    return Launch(settings, outputs, sources, Path.home(), dict(os.environ), _clients(region), typer.echo)


def _absolute_paths(settings: Settings) -> Settings:
    """Make the paths of the ssh key and the wheel absolute: Ray and ssh run in other directories."""
    ssh, wheel = settings.launch.ssh, settings.launch.wheel
    key = ssh.private_key and ssh.private_key.expanduser().absolute()
    update = {
        "ssh": ssh.model_copy(update={"private_key": key}),
        "wheel": wheel and wheel.expanduser().absolute(),
    }
    return settings.model_copy(update={"launch": settings.launch.model_copy(update=update)})


def _clients(region: str) -> Callable[[str], Any]:
    """Return a factory of AWS clients by service; boto3 honours AWS_ENDPOINT_URL and similar variables."""
    from configs.extras import require

    def client(service: str) -> Any:
        require("boto3", f"AWS's {service}")
        import boto3

        return boto3.session.Session(region_name=region or None).client(service)  # type: ignore[call-overload]

    return client


@contextmanager
def _known_errors() -> Iterator[None]:
    from cluster.launch.aws import AwsRefused
    from cluster.launch.node_setup import NodeSetupFailed
    from cluster.launch.settings import RenderFailed
    from cluster.launch.terraform import OutputsRefused
    from cluster.launch.up import CommandFailed, UpFailed
    from configs.extras import ExtraMissing
    from configs.loader import ConfigError

    try:
        yield
    except (ConfigError, ExtraMissing, RenderFailed, OutputsRefused) as error:
        _exit(str(error), EXIT_REFUSED)
    except (NodeSetupFailed, AwsRefused, CommandFailed, UpFailed) as error:
        _exit(str(error), EXIT_FAILED)


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(f"samovar: {message}", err=True)
    raise typer.Exit(code)


if TYPE_CHECKING:
    from configs.loader import LoadedSettings
    from configs.settings import Settings

HIDDEN = "***"

SPELLING = (
    "Every setting has a key such as engine.block_tokens and can be given in a YAML file "
    "(--config FILE, or a preset: local-cpu, local-gpu), by the environment "
    "(SAMOVAR_ENGINE__BLOCK_TOKENS=32) and by a flag (--engine.block-tokens 32). Flags win over the "
    "environment, the environment wins over the file. `samovar config --keys` lists all settings."
)

app = typer.Typer(
    name="samovar",
    help="LLM chat on Ray Serve with a paged KV cache. " + SPELLING,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[str | None, typer.Option("--config", metavar="FILE", help="a YAML file or a preset")]
HostOption = Annotated[str | None, typer.Option("--host", metavar="HOST", help="the same as --server.host")]
PortOption = Annotated[str | None, typer.Option("--port", metavar="N", help="the same as --server.port")]
ReplicasOption = Annotated[
    str | None, typer.Option("--replicas", metavar="N", help="the same as --cluster.replicas")
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="SAMOVAR_API_KEY",
        show_default=False,
        help="better set by the environment variable: other users of this machine can see flags",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="organisation/name of the Hugging Face hub, a directory or a .gguf file; also --model.path",
    ),
]


class _ServeForever(Protocol):
    def __call__(self, settings: Settings, *, with_s3_demo: bool, reload: Callable[[], Settings]) -> int: ...


@app.command(context_settings=ANY_SETTING, epilog=SPELLING)
def serve(
    ctx: typer.Context,
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    replicas: ReplicasOption = None,
    model: ModelOption = None,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="record the traffic for `samovar plan`: the same as --server.record"
        ),
    ] = None,
    with_s3_demo: Annotated[
        bool,
        typer.Option(
            "--with-s3-demo", help="also run a local S3 server (rclone) as the s3 tier, for a trial"
        ),
    ] = False,
) -> None:
    """Serve a model on this machine until Ctrl-C: `samovar serve Qwen/Qwen3-0.6B`.

    MODEL is organisation/name of the Hugging Face hub (with @revision, if not the newest), a directory or a
    .gguf file; without it a small default model is served. Also takes --section.key VALUE for any setting.
    SIGHUP rereads the configuration file: another model or number of replicas is applied while the service
    runs.
    """
    model, args = _with_model(model, ctx.args)
    rest = [*([] if record is None else [f"--record={Path(record).absolute()}"]), *args]
    loaded = _load_or_exit(config, host, port, replicas, model, rest)

    def reload() -> Settings:
        return _load(config, host, port, replicas, model, rest).settings

    from replicas.messages import ModelRefused

    # Ray reads this at import: a private cluster then binds to 127.0.0.1 only, as on Windows and macOS.
    # Without it Ray's own servers listen on every interface.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Also read at import: a Serve thread that reports on an autoscaled handle would otherwise start another
    # cluster when ours is shut down.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    serve_forever = cast(_ServeForever, importlib.import_module("cluster.serve.app").serve_forever)
    try:
        code = serve_forever(loaded.settings, with_s3_demo=with_s3_demo, reload=reload)
    except ModelRefused as error:
        _refuse(f"the model cannot be served: {error}")
    raise typer.Exit(code)


@app.command("config", context_settings=ANY_SETTING, epilog=SPELLING)
def show_config(
    ctx: typer.Context,
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    replicas: ReplicasOption = None,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="list every setting: flag, variable, what is allowed")
    ] = False,
) -> None:
    """Print the effective settings and where each comes from. Also takes --section.key VALUE."""
    if keys:
        _print_keys(as_json)
        return
    loaded = _load_or_exit(config, host, port, replicas, model, ctx.args)
    rows = config_rows(loaded)
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    lines = [
        (
            key,
            _in_words(row["value"]),
            row["origin"] if row["source"] != "default" else "",
            row["description"],
        )
        for key, row in rows.items()
    ]
    _print_table(("setting", "value", "set by (empty = default)", "what it is"), lines)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="the server's address")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="the model's name; empty = the first one served")] = None,
    api_key: ApiKeyOption = None,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    temperature: Annotated[
        float,
        typer.Option(min=0, max=2, help="0 = always the most likely token; small models ramble above 0.5"),
    ] = 0.2,
) -> None:
    """Chat in the terminal. Also reads lines from a pipe: `echo hi | samovar chat`."""
    from cluster.cli.chat import run_chat

    raise typer.Exit(run_chat(url, model, api_key, system, temperature))


@app.command()
def status(
    url: Annotated[str, typer.Option(help="the server's address")] = "http://127.0.0.1:8000",
    api_key: ApiKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Show a running server's replicas and cache tiers. With API keys it needs the administrator's."""
    from cluster.cli import status as shown

    try:
        answer = shown.ask(url, api_key)
    except shown.StatusFailed as error:
        _refuse(str(error))
    if as_json:
        typer.echo(json.dumps(answer.json(), indent=2, ensure_ascii=False))
        return
    detail = answer.health.get("detail")
    typer.echo(f"{url}: {answer.health.get('status', 'unknown')}{f' ({detail})' if detail else ''}\n")
    _print_table(shown.REPLICA_HEAD, shown.replica_rows(answer))
    typer.echo("")
    _print_table(shown.TIER_HEAD, shown.tier_rows(answer))
    peers = shown.peer_rows(answer)
    if peers:
        typer.echo("")
        _print_table(shown.PEER_HEAD, peers)
    returns = shown.returns_rows(answer)
    if returns:
        typer.echo("")
        _print_table(shown.RETURNS_HEAD, returns)
    for line in shown.draining_lines(answer):
        typer.echo(f"\n{line}")


@app.command(context_settings=ANY_SETTING, add_help_option=False)
def bench(ctx: typer.Context, name: Annotated[str, typer.Argument()] = "engine") -> None:
    """Measure this machine, from a git checkout: `samovar bench engine --help`."""
    checkout = Path(__file__).resolve().parents[2]
    names = bench_names(checkout)
    args = list(ctx.args)
    if name.startswith("-"):  # `samovar bench --help`: no name, so the first flag was taken for it
        name, args = "engine", [name, *args]
    if not names:
        _refuse(
            f"the measurements are not part of the installed package (there is no {checkout / 'bench'}). "
            "Run them in a git checkout: `make bench`"
        )
    if name not in names:
        _refuse(f"there is no measurement {name!r}. Available: {', '.join(names)}")
    # First on the path: other packages are named `bench`, too.
    sys.path.insert(0, str(checkout))
    raise typer.Exit(importlib.import_module(f"bench.{name}").main(args))


app.command()(plan)
app.command("deploy", context_settings=ANY_SETTING, epilog=SPELLING)(deploy)
register(app)


@app.command()
def version() -> None:
    """Print the versions that matter in a bug report."""
    for name in ("samovar", "ray", "torch", "transformers"):
        try:
            typer.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{name} is not installed")
    typer.echo(f"python {sys.version.split()[0]}")


def config_rows(loaded: LoadedSettings) -> dict[str, dict[str, Any]]:
    """Return `value` (plain JSON), `source`, `origin`, `description` by dotted key. Hides secrets."""
    from configs.fields import setting_fields

    tree = loaded.settings.model_dump(mode="json")
    rows = {}
    for key, field in setting_fields().items():
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        rows[key] = {
            "value": _hidden(value) if field.secret else value,
            "source": loaded.source[key],
            "origin": loaded.origin[key],
            "description": field.description,
        }
    return rows


def bench_names(checkout: Path) -> list[str]:
    """Return the names of the measurements in a checkout; none if Samovar was installed from a wheel."""
    return sorted(path.stem for path in (checkout / "bench").glob("[a-z]*.py"))


def _load_or_exit(
    config: str | None,
    host: str | None,
    port: str | None,
    replicas: str | None,
    model: str | None,
    rest: list[str],
) -> LoadedSettings:
    from configs.loader import ConfigError

    try:
        return _load(config, host, port, replicas, model, rest)
    except ConfigError as error:
        _refuse(str(error))


def _load(
    config: str | None,
    host: str | None,
    port: str | None,
    replicas: str | None,
    model: str | None,
    rest: list[str],
) -> LoadedSettings:
    """Load the settings with the short flags applied. Raises `ConfigError`."""
    from configs.loader import load

    short = {"--host": host, "--port": port, "--replicas": replicas, "--model": model}
    flags = [f"{flag}={value}" for flag, value in short.items() if value is not None]
    return load(config, os.environ, [*flags, *rest])


def _with_model(model: str | None, args: list[str]) -> tuple[str | None, list[str]]:
    """Return the model and the flags, if the model is given as a word: the first one, `serve MODEL --flags`.

    Behind flags a word may be part of a value that the shell has split, and some values are secrets.
    """
    if not args or args[0].startswith("-"):
        return model, args
    if model is not None:
        _refuse(f"the model is given twice: {args[0]!r} and --model {model!r}. Leave one of them out")
    return args[0], args[1:]


def _refuse(message: str) -> NoReturn:
    typer.echo(f"samovar: {message}", err=True)
    raise typer.Exit(EXIT_REFUSED)


def _print_keys(as_json: bool) -> None:
    from configs.fields import setting_fields

    if as_json:
        spelled = {
            key: {
                "flag": field.flag,
                "env": field.env,
                "allowed": field.allowed,
                "description": field.description,
            }
            for key, field in setting_fields().items()
        }
        typer.echo(json.dumps(spelled, indent=2, ensure_ascii=False))
        return
    lines = [(field.flag, field.env, field.allowed, field.description) for field in setting_fields().values()]
    _print_table(("flag", "variable", "allowed", "what it is"), lines)


def _print_table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> None:
    """Print a table on a terminal, tab-separated lines in a pipe, for `grep` and `cut`."""
    if not sys.stdout.isatty():
        for line in (head, *lines):
            typer.echo("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*(Text(cell, overflow="fold") for cell in line))
    Console().print(table)


def _hidden(value: Any) -> Any:
    """Return a secret's shape only: which tenants there are, or whether there is a secret."""
    if isinstance(value, dict):
        return dict.fromkeys(value, HIDDEN)
    return value if value is None else HIDDEN


def _in_words(value: Any) -> str:
    if value is None:
        return "(empty)"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, dict, list)) else str(value)
