"""Defines the `samovar` command: reads flags, prints results, turns known errors into one clear message.

Commands import what they need when they run, so that `samovar --help` is fast.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Protocol, cast

import typer

from samovar import HOME
from samovar.cluster.cli import diagnose
from samovar.cluster.cli.config import show_config
from samovar.cluster.cli.kb import kb
from samovar.cluster.cli.keys import keys
from samovar.cluster.cli.options import (
    ANY_SETTING,
    EXIT_FAILED,
    EXIT_REFUSED,
    HELP_NAMES,
    SPELLING,
    ApiKeyOption,
    Command,
    ConfigOption,
    EngineOption,
    Group,
    HostOption,
    ModelOption,
    PortOption,
    ReplicasOption,
    UrlOption,
    load_or_exit,
    refuse,
    settings_anew,
    short_flags,
)
from samovar.cluster.cli.plan import plan

if TYPE_CHECKING:
    from samovar.cluster.launch.terraform import CloudOutputs
    from samovar.cluster.launch.up import Launch
    from samovar.cluster.serve.stages import StartStages
    from samovar.configs.settings import Settings

SECRETS_FILE = Path("~/samovar/secrets.yaml")


def deploy(
    ctx: typer.Context,
    config: ConfigOption = None,
    secrets: Annotated[
        Path, typer.Option(metavar="FILE", help="API keys and the server's secret; the same on every node")
    ] = SECRETS_FILE,
) -> None:
    """Deploy to the Ray cluster that runs here, and wait until it serves. Also takes --section.key VALUE.

    Run it on the head node, with the token that Ray was started with; `samovar up` does. Run again with
    other settings, it changes what is served, without a failed request.
    """
    from samovar.cluster.deploy.deploy import deploy as deploy_now
    from samovar.cluster.errors import StartFailed
    from samovar.cluster.serve.stages import console_of
    from samovar.configs.loader import ConfigError, load
    from samovar.replicas.messages import ModelRefused

    errors = console_of(stderr=True)
    try:
        settings = load(config, os.environ, ctx.args, secrets.expanduser()).settings
        url = deploy_now(settings, secrets, errors)
    except (ConfigError, StartFailed, ModelRefused) as error:
        errors.print(f"samovar: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, StartFailed) else 2) from error
    console_of().print(f"Samovar is ready: {url}", highlight=False, soft_wrap=True)


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
    app.command("render", cls=Command, context_settings=ANY_SETTING)(render_command)
    app.command("up", cls=Command, context_settings=ANY_SETTING)(up_command)
    app.command("down", cls=Command, context_settings=ANY_SETTING)(down_command)
    app.command("node-setup", cls=Command)(node_setup_command)
    app.command("keep-gcs", cls=Command, hidden=True)(keep_gcs_command)
    app.command("monitor", cls=Command, hidden=True)(monitor_command)


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
    tiers: Annotated[
        Path | None,
        typer.Option("--tiers", metavar="SOCKET", help="with --systemd: a unit of `samovar tiers` there"),
    ] = None,
) -> None:
    """Print the file that `ray up` reads. Also takes --section.key VALUE. It holds no secrets."""
    from samovar.cluster.launch.render import header, render

    with _known_errors():
        if kuberay + systemd + (terraform is not None) > 1:
            _exit("--kuberay, --systemd and --terraform are for three different files", EXIT_REFUSED)
        if secrets is not None and not kuberay:
            _exit("--secrets is for --kuberay only: this file holds no secrets", EXIT_REFUSED)
        if tiers is not None and not systemd:
            _exit("--tiers is for --systemd only", EXIT_REFUSED)
        if kuberay or systemd:
            if kuberay:
                from samovar.cluster.manifests.kuberay import kuberay_file

                text = kuberay_file(config, secrets, os.environ, ctx.args)
            else:
                from samovar.cluster.manifests.systemd import systemd_unit

                text = systemd_unit(config, os.environ, ctx.args, tiers)
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
    from samovar.cluster.launch.up import READY, up

    with _known_errors():
        launch = _launch(config, terraform, secrets, ctx.args)
        typer.echo(f"{READY}{up(launch, restart=restart)}")


def down_command(ctx: typer.Context, config: ClusterFileOption, terraform: TerraformOption = None) -> None:
    """Stop a cluster: all its machines in AWS, all its processes on a rack. Prints what is left.

    The bucket and everything else that Terraform made stays: `terraform destroy` removes that.
    """
    from samovar.cluster.launch.up import down

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
    tls_dir: Annotated[
        Path | None, typer.Option(help="cluster.tls_dir: make this node's certificate, or check it")
    ] = None,
) -> None:
    """Fetch secrets and join the load balancer's targets; `samovar up` runs it on every node before Ray."""
    from samovar.cluster.launch.node_setup import join_targets, set_up_tls, setup_from_file, setup_from_ssm

    with _known_errors():
        if tls_dir is not None:
            set_up_tls(tls_dir.expanduser(), Path.home())
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
    from samovar.cluster.launch.keep_gcs import main

    raise typer.Exit(main(["--port", str(port)]))


def monitor_command(
    config: Annotated[Path, typer.Option(metavar="FILE")],
    secrets: Annotated[Path, typer.Option(metavar="FILE")] = SECRETS_FILE,
) -> None:
    """Run Prometheus and Grafana beside Ray; `samovar up` leaves this running on the head, if asked to."""
    from samovar.cluster.dashboards.monitor import monitor
    from samovar.configs.loader import load

    with _known_errors():
        monitor(load(config.expanduser(), os.environ, (), secrets.expanduser()).settings)


def _launch(config: str, terraform: Path | None, secrets: Path | None, rest: list[str]) -> Launch:
    from samovar.cluster.launch.terraform import read_outputs
    from samovar.cluster.launch.up import Launch
    from samovar.configs.loader import load

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
    from samovar.configs.extras import require

    def client(service: str) -> Any:
        require("boto3", f"AWS's {service}")
        import boto3

        return boto3.session.Session(region_name=region or None).client(service)  # type: ignore[call-overload]

    return client


@contextmanager
def _known_errors() -> Iterator[None]:
    from samovar.cluster.launch.aws import AwsRefused
    from samovar.cluster.launch.node_setup import NodeSetupFailed
    from samovar.cluster.launch.settings import RenderFailed
    from samovar.cluster.launch.terraform import OutputsRefused
    from samovar.cluster.launch.up import CommandFailed, UpFailed
    from samovar.configs.extras import ExtraMissing
    from samovar.configs.loader import ConfigError

    try:
        yield
    except (ConfigError, ExtraMissing, RenderFailed, OutputsRefused) as error:
        _exit(str(error), EXIT_REFUSED)
    except (NodeSetupFailed, AwsRefused, CommandFailed, UpFailed) as error:
        _exit(str(error), EXIT_FAILED)


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(f"samovar: {message}", err=True)
    raise typer.Exit(code)


app = typer.Typer(
    name="samovar",
    cls=Group,
    context_settings=HELP_NAMES,
    help="LLM chat on Ray Serve with a paged KV cache. " + SPELLING,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"samovar {metadata.version('samovar')}")
        raise typer.Exit


@app.callback()
def samovar(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="print the version and leave"
        ),
    ] = False,
) -> None:
    # No docstring: the help of `samovar` is the text above.
    return


class _ServeForever(Protocol):
    def __call__(
        self,
        settings: Settings,
        *,
        with_s3_demo: bool,
        reload: Callable[[], Settings],
        stages: StartStages,
        on_ready: Callable[[str], object],
        on_end: Callable[[], object],
    ) -> int: ...


@app.command(cls=Command, context_settings=ANY_SETTING, epilog=SPELLING)
def serve(
    ctx: typer.Context,
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    replicas: ReplicasOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
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
    fast_start: Annotated[
        bool,
        typer.Option("--fast-start", help="start without probe and measuring: --engine.fast-start true"),
    ] = False,
) -> None:
    """Serve a model on this machine until Ctrl-C: `samovar serve Qwen/Qwen3-0.6B`.

    MODEL is organisation/name of the Hugging Face hub (with @revision, if not the newest), a directory or a
    .gguf file; without it a small default model is served. Also takes --section.key VALUE for any setting.
    SIGHUP rereads the configuration file: another model or number of replicas is applied while the service
    runs.
    """
    model, args = _with_model(model, ctx.args)
    flags = [
        *short_flags(host, port, replicas, model),
        *(["--engine.fast-start=true"] if fast_start else []),
        *([] if engine is None else [f"--engine={engine}"]),
        *([] if record is None else [f"--record={Path(record).absolute()}"]),
        *args,
    ]
    loaded = load_or_exit(config, flags)

    stages = _look_first(loaded.settings, with_s3_demo)
    from samovar.cluster.cli.running import RunningServers
    from samovar.configs.imports import collector_paused, keep_bytecode
    from samovar.replicas.messages import ModelRefused

    keep_bytecode(loaded.settings.model.cache_dir.expanduser() / "bytecode", os.environ)
    # Ray reads this at import: a private cluster then binds to 127.0.0.1 only, as on Windows and macOS.
    # Without it Ray's own servers listen on every interface.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Also read at import: a Serve thread that reports on an autoscaled handle would otherwise start another
    # cluster when ours is shut down.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    servers = RunningServers.of_user(os.environ)
    with stages, collector_paused():
        stages.begin("libraries")
        serve_forever = cast(
            _ServeForever, importlib.import_module("samovar.cluster.serve.app").serve_forever
        )
    try:
        code = serve_forever(
            loaded.settings,
            with_s3_demo=with_s3_demo,
            reload=functools.partial(settings_anew, config, flags),
            stages=stages,
            on_ready=functools.partial(servers.announce, tls=loaded.settings.server.tls),
            on_end=servers.withdraw,
        )
    except ModelRefused as error:
        refuse(f"the model cannot be served: {error}")
    raise typer.Exit(code)


def _look_first(settings: Settings, with_s3_demo: bool) -> StartStages:
    """Exit if the start cannot succeed, before anything heavy is imported; return what shows its stages."""
    from samovar.cluster.errors import StartFailed
    from samovar.cluster.serve.preflight import first_look
    from samovar.cluster.serve.stages import StartStages, console_of
    from samovar.replicas.messages import ModelRefused

    errors = console_of(stderr=True)
    try:
        for warning in first_look(settings, with_s3_demo=with_s3_demo):
            errors.print(f"samovar: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    except ModelRefused as error:
        refuse(f"the model cannot be served: {error}")
    except StartFailed as error:
        errors.print(f"samovar: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error
    return StartStages(errors)


@app.command(cls=Command, context_settings=ANY_SETTING, epilog=SPELLING)
def tiers(
    ctx: typer.Context,
    socket: Annotated[Path, typer.Option(metavar="PATH", help="the Unix socket to serve at")],
    config: ConfigOption = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="of /health and /metrics on 127.0.0.1; 0 = any free one"),
    ] = None,
) -> None:
    """Serve cache tiers to other engines on this machine, such as vLLM: docs/vllm.md. Needs no Ray."""
    settings = load_or_exit(config, ctx.args).settings
    from samovar.cache_tiers.socket.process import serve_tiers

    say = functools.partial(print, flush=True)
    raise typer.Exit(serve_tiers(settings, socket, port=metrics_port, say=say))


@app.command(cls=Command)
def chat(
    question: Annotated[str | None, typer.Argument(help="ask this, print the answer and leave")] = None,
    url: UrlOption = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="the model's name; empty = the first one served")
    ] = None,
    api_key: ApiKeyOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="the system message")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=2,
            help="0 = always the most likely token; empty = the model's own, and 0 for the default model",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 512,
    plain: Annotated[
        bool, typer.Option("--plain", help="print answers as they are, not as Markdown")
    ] = False,
) -> None:
    """Chat in the terminal. Also reads lines from a pipe: `echo hi | samovar chat`."""
    from samovar.cluster.cli.chat import run_chat
    from samovar.cluster.cli.conversation import Sampling
    from samovar.cluster.cli.running import server_url

    sampling = Sampling(temperature, max_tokens)
    address = server_url(url)
    raise typer.Exit(run_chat(address, model, api_key, system, sampling, question=question, plain=plain))


@app.command(cls=Command)
def status(
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    every: Annotated[bool, typer.Option("--all", help="all tables: tiers, peers, forecasts")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again and again, until Ctrl-C")] = False,
    every_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.2, max=3600, help="of --watch")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    tiers: Annotated[
        Path | None, typer.Option("--tiers", metavar="PATH", help="of `samovar tiers` at this socket instead")
    ] = None,
) -> None:
    """Show a running server's replicas and cache tiers. With API keys it needs the administrator's."""
    from samovar.cluster.cli import status as shown
    from samovar.cluster.cli.running import server_url

    try:
        if tiers is not None:
            shown.show_tiers(tiers, as_json=as_json)
            return
        address = server_url(url)
        shown.show(address, api_key, as_json=as_json, every=every, watch_s=every_s if watch else None)
    except shown.StatusFailed as error:
        refuse(str(error))


@app.command(cls=Command, context_settings=ANY_SETTING, add_help_option=False)
def bench(ctx: typer.Context, name: Annotated[str, typer.Argument()] = "engine") -> None:
    """Measure this machine, from a git checkout: `samovar bench engine --help`."""
    names = bench_names(HOME)
    args = list(ctx.args)
    if name.startswith("-"):  # `samovar bench --help`: no name, so the first flag was taken for it
        name, args = "engine", [name, *args]
    if not names:
        refuse(
            f"the measurements are not part of the installed package (there is no {HOME / 'bench'}). "
            "Run them in a git checkout: `make bench`"
        )
    if name not in names:
        refuse(f"there is no measurement {name!r}. Available: {', '.join(names)}")
    # First on the path: other packages are named `bench`, too.
    sys.path.insert(0, str(HOME))
    raise typer.Exit(importlib.import_module(f"bench.{name}").main(args))


engines = typer.Typer(
    name="engines",
    cls=Group,
    context_settings=HELP_NAMES,
    help="Environments of other engines, beside Samovar's own: `vllm`, for engine.kind=vllm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
EngineArgument = Annotated[Literal["vllm"], typer.Argument(metavar="ENGINE", help="vllm")]


@engines.command("add", cls=Command, context_settings=ANY_SETTING)
def add_engine(ctx: typer.Context, engine: EngineArgument, config: ConfigOption = None) -> None:
    """Make the environment that an engine lives in, as it is locked; takes minutes and gigabytes.

    Needs uv (extra `engines`) and the package index. engine.device says for which device: without a GPU some
    3 GB are installed below model.cache_dir. One that is there stays. Also takes --section.key VALUE.
    """
    from samovar.cluster.engines.environment import EnvironmentFailed, add
    from samovar.cluster.engines.interpreter import environment_dir, python_of
    from samovar.cluster.serve.stages import StartStages, console_of

    settings = load_or_exit(config, ctx.args).settings
    stages = StartStages(console_of(stderr=True))
    try:
        with stages:
            found, is_new = add(settings, stages)
            stages.end()
    except EnvironmentFailed as error:
        _exit(str(error), EXIT_FAILED)
    said = f"was made in {stages.total_s:.0f} s" if is_new else "is there"
    typer.echo(f"{engine} {found.vllm} with Ray {found.ray} {said}: {python_of(environment_dir(settings))}")


@engines.command("remove", cls=Command, context_settings=ANY_SETTING)
def remove_engine(ctx: typer.Context, engine: EngineArgument, config: ConfigOption = None) -> None:
    """Remove the environment of an engine. Also takes --section.key VALUE."""
    from samovar.cluster.engines.environment import EnvironmentFailed, remove

    settings = load_or_exit(config, ctx.args).settings
    try:
        was_there = remove(settings)
    except EnvironmentFailed as error:
        _exit(str(error), EXIT_FAILED)
    typer.echo(f"{engine} was removed." if was_there else f"There is no {engine} in {settings.engines_dir}.")


@engines.command("list", cls=Command, context_settings=ANY_SETTING)
def list_engines(ctx: typer.Context, config: ConfigOption = None) -> None:
    """Show the environments of engines, and whether they fit the Ray and the Python that run here.

    Tab-separated in a pipe. Also takes --section.key VALUE.
    """
    from samovar.cluster.cli.options import print_table
    from samovar.cluster.engines.environment import environments

    settings = load_or_exit(config, ctx.args).settings
    lines = [("vllm", *found, why or "yes", str(python)) for python, found, why in environments(settings)]
    if not lines:
        refuse(f"there is none in {settings.engines_dir}: `samovar engines add vllm` makes one")
    print_table(("engine", "version", "python", "ray", "fits", "interpreter"), lines)


app.add_typer(kb)
app.add_typer(keys)
app.add_typer(engines)
app.command(cls=Command)(plan)
app.command("config", cls=Command, context_settings=ANY_SETTING, epilog=SPELLING)(show_config)
app.command("deploy", cls=Command, context_settings=ANY_SETTING, epilog=SPELLING)(deploy)
register(app)
diagnose.register(app)


@app.command(cls=Command)
def version(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Print the versions that matter in a bug report."""
    versions: dict[str, str | None] = {}
    for name in ("samovar", "ray", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["python"] = sys.version.split()[0]
    if as_json:
        typer.echo(json.dumps(versions))
        return
    for name, found in versions.items():
        typer.echo(f"{name} {found or 'is not installed'}")


def bench_names(checkout: Path) -> list[str]:
    """Return the names of the measurements in a checkout; none if Samovar was installed from a wheel."""
    return sorted(path.stem for path in (checkout / "bench").glob("[a-z]*.py"))


def _with_model(model: str | None, args: list[str]) -> tuple[str | None, list[str]]:
    """Return the model and the flags, if the model is given as a word: the first one, `serve MODEL --flags`.

    Behind flags a word may be part of a value that the shell has split, and some values are secrets.
    """
    if not args or args[0].startswith("-"):
        return model, args
    if model is not None:
        refuse(f"the model is given twice: {args[0]!r} and --model {model!r}. Leave one of them out")
    return args[0], args[1:]


def main() -> None:
    """Run the `samovar` command."""
    # A process that ends gives all back; to collect 500,000 objects once more took seconds of a stop.
    atexit.register(gc.freeze)
    app(prog_name="samovar")
