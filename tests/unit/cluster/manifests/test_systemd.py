"""`samovar render --systemd`: a unit that systemd accepts, and that stops Samovar in order."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from samovar.cluster.cli.main import EXIT_REFUSED, app
from samovar.cluster.launch.settings import RenderFailed
from samovar.cluster.manifests.systemd import render_tiers_unit, render_unit, stop_seconds
from samovar.cluster.serve.app import EXIT_INTERRUPTED
from samovar.configs.loader import load
from samovar.configs.settings import Settings

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here: apt-get install systemd")
KEYS = {"SAMOVAR_AUTH__API_KEYS": '{"my-team": "a-key-of-sixteen-characters"}'}
EXPOSURE_MAX = 3.0
"""systemd's own score of a unit's freedom, 0 to 10; "OK" begins below 4, a unit without hardening has 9.6."""

EXAMPLES = pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--engine.device=cpu", "--port=80", "--model=/srv/models/a b\"c'd$e%f\\g"),
        ("--tiers.nvme.dir=/mnt/kv one", "--record=/var/log/samovar/traffic.jsonl", "--model=/home/me/m"),
        ('--server.allowed-hosts=["tea.example"]', "--engine.exact=true", "--tiers.s3.bucket="),
    ],
    ids=["plain", "odd", "directories", "structured"],
)


VLLM = "--engine.kind=vllm"
FURTHER = '--models={{"small": {{"model": {{"path": "/srv/small"}}, "{}": {}}}}}'


def unit(*flags: str, config: str | None = None) -> str:
    return render_unit(load(config, KEYS, flags), Path("/bin/true"), config)


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def verify(text: str, path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    command = [str(ANALYZE), *words, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@needs_systemd
@EXAMPLES
def test_systemd_accepts_the_unit(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = verify(unit(*flags), tmp_path / "samovar.service", "verify", "--man=no")
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_would_have_noticed(tmp_path: Path) -> None:
    text = unit().replace("KillMode=mixed", "KillMode=mixd").replace("/bin/true", "/bin/no-such-program")
    done = verify(text, tmp_path / "samovar.service", "verify", "--man=no")
    assert "mixd" in done.stderr
    assert "no-such-program" in done.stderr


@needs_systemd
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_service_may_little(tmp_path: Path, device: str) -> None:
    words = ("security", "--offline=true", f"--threshold={int(EXPOSURE_MAX * 10)}")
    done = verify(unit(f"--engine.device={device}"), tmp_path / "samovar.service", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.parametrize("flags", [(), ("--server.graceful-shutdown-s=120",), ("--tiers.enabled=false",)])
def test_systemd_waits_for_an_orderly_stop(flags: tuple[str, ...]) -> None:
    """Running answers, the flush of main memory, and only then a kill; `samovar serve` ends its children."""
    settings = load(None, {}, flags).settings
    text = unit(*flags)
    assert values(text, "TimeoutStopSec") == [str(stop_seconds(settings))]
    tiers_s = settings.tiers.flush_s + settings.tiers.settle_s if settings.tiers.enabled else 0
    assert stop_seconds(settings) > settings.server.graceful_shutdown_s + tiers_s
    assert (values(text, "KillMode"), values(text, "KillSignal")) == (["mixed"], ["SIGTERM"])
    assert values(text, "ExecReload") == ["/bin/kill -HUP $MAINPID"]
    assert values(text, "Type") == ["exec"]


def test_exit_codes_are_those_of_serve() -> None:
    text = unit()
    assert values(text, "SuccessExitStatus") == [str(EXIT_INTERRUPTED)]
    assert (values(text, "Restart"), values(text, "RestartPreventExitStatus")) == (["on-failure"], ["2"])


@pytest.mark.parametrize(
    ("flags", "key", "wanted"),
    [
        ((), "AmbientCapabilities", [""]),
        (("--port=443",), "AmbientCapabilities", ["CAP_NET_BIND_SERVICE"]),
        ((), "PrivateDevices", []),
        (("--engine.device=cpu",), "PrivateDevices", ["yes"]),
        ((), "ProtectHome", ["yes"]),
        (("--model=/home/me/m",), "ProtectHome", ["read-only"]),
        (('--engine.vllm.adapters={"a": "/home/me/a"}', VLLM), "ProtectHome", ["read-only"]),
        (
            (FURTHER.format("engine", '{"vllm": {"python": "/root/v/bin/python"}}'),),
            "ProtectHome",
            ["read-only"],
        ),
        ((FURTHER.format("cluster", '{"replicas": 1}'),), "ProtectHome", ["yes"]),
        (("--tiers.nvme.dir=/mnt/kv", "--record=/srv/t/x.jsonl"), "ReadWritePaths", ["/srv/t", "/mnt/kv"]),
        (("--tiers.nvme.dir=/var/lib/samovar/kv",), "ReadWritePaths", []),
        (("--auth.audit-file=/var/log/s/audit.jsonl",), "ReadWritePaths", ["/var/log/s"]),
        (("--auth.keys-file=/srv/keys/k.json",), "ReadWritePaths", ["/srv/keys"]),
        (("--knowledge.dir=/srv/kb", "--compaction.dir=/srv/s"), "ReadWritePaths", ["/srv/kb", "/srv/s"]),
    ],
)
def test_only_what_the_settings_need_is_allowed(flags: tuple[str, ...], key: str, wanted: list[str]) -> None:
    assert values(unit(*flags), key) == wanted


def test_keys_in_a_database_are_no_file_and_paths_may_be_in_a_table(tmp_path: Path) -> None:
    database = str(tmp_path / "database.yaml")
    Path(database).write_text("knowledge: {enabled: true, postgres: {url: 'postgresql://db/x'}}\n")
    text = unit("--auth.keys-file=postgres:", config=database)
    assert values(text, "ReadWritePaths") == []
    (start,) = values(unit('--engine.vllm.adapters={"a":"/srv/a"}', "--engine.kind=vllm"), "ExecStart")
    assert r"{\"a\": \"/srv/a\"}" in start


def test_the_words_arrive_as_they_were_given() -> None:
    """systemd expands % and $, splits at blanks and takes quotes away."""
    (start,) = values(unit("--model=/srv/a b%c$d", "--port=9000"), "ExecStart")
    assert start == '/bin/true serve --server.port=9000 "--model.path=/srv/a b%%c$$d"'


def test_a_file_of_settings_is_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("server: {port: 9000}\n")
    assert values(unit(config="my.yaml"), "ExecStart") == [f"/bin/true serve --config {tmp_path}/my.yaml"]
    assert values(unit(config="local-cpu"), "ExecStart") == ["/bin/true serve --config local-cpu"]


SOCKET = Path("/run/samovar/tiers.sock")


def tiers_unit(*flags: str, socket: Path = SOCKET) -> str:
    return render_tiers_unit(load(None, KEYS, flags), Path("/bin/true"), None, socket)


@needs_systemd
@EXAMPLES
def test_systemd_accepts_the_unit_of_the_tiers(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "samovar-tiers.service"
    done = verify(tiers_unit(*flags), path, "verify", "--man=no")
    assert (done.returncode, done.stderr) == (0, "")
    words = ("security", "--offline=true", f"--threshold={int(EXPOSURE_MAX * 10)}")
    assert verify(tiers_unit(*flags), path, *words).returncode == 0


def test_the_unit_of_the_tiers() -> None:
    """Stopped in order, with a file for each record, and no more than the other unit may."""
    text = tiers_unit("--tiers.nvme.dir=/mnt/kv")
    flag = "--tiers.nvme.dir=/mnt/kv"
    assert values(text, "ExecStart") == [f"/bin/true tiers --socket {SOCKET} {flag}"]
    flush_s = load(None, {}, ()).settings.tiers.flush_s
    assert int(values(text, "TimeoutStopSec")[0]) > flush_s
    assert values(text, "ReadWritePaths") == ["/mnt/kv"]
    assert values(tiers_unit(socket=Path("/srv/a/t.sock")), "ReadWritePaths") == ["/srv/a"]
    assert (values(text, "PrivateDevices"), values(text, "LimitNOFILE")) == (["yes"], ["524288"])
    fences = re.findall(
        r"^(?:Protect|Restrict|System|No|Lock|Private)\w+=.*$", unit("--engine.device=cpu"), re.M
    )
    assert set(fences) - set(text.splitlines()) == set()
    with pytest.raises(RenderFailed, match="whole path"):
        tiers_unit(socket=Path("t.sock"))


@pytest.fixture
def render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *flags, env=None: CliRunner().invoke(app, ["render", "--systemd", *flags], env=env or {})


@pytest.mark.parametrize(
    ("flags", "env", "text"),
    [
        (["--model=models"], {}, "model.path=models depends on who starts it and where"),
        (["--tiers.nvme.dir=~/kv"], {}, "tiers.nvme.dir=~/kv depends on"),
        ([VLLM, '--engine.vllm.adapters={"a": "models"}'], {}, "engine.vllm.adapters.a=models depends on"),
        (["--models.small.model.path=models"], {}, "models.small.model.path=models depends on"),
        (
            [FURTHER.format("engine", '{"kind": "vllm", "vllm": {"python": "~/v/bin/python"}}')],
            {},
            "models.small.engine.vllm.python=~/v/bin/python depends on",
        ),
        ([], {"SAMOVAR_SERVER__PORT": "9000"}, "SAMOVAR_SERVER__PORT is set in this shell"),
        (["--auth.admin-key=an-admin-key-of-sixteen"], {}, "auth.admin_key is a secret"),
        (["--secrets", "secrets.yaml"], {}, "--secrets is for --kuberay only"),
        (["--model=/a\nb"], {}, "holds a character that a unit cannot hold"),
    ],
)
def test_what_would_differ_under_systemd_is_refused(
    render: Callable[..., Result], tmp_path: Path, flags: list[str], env: dict[str, str], text: str
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "secrets.yaml").touch()
    done = render(*flags, env=env)
    assert done.exit_code == 2
    assert text in done.stderr
    assert "an-admin-key-of-sixteen" not in done.output


def test_keys_of_this_shell_are_not_in_the_unit(render: Callable[..., Result]) -> None:
    done = render("--host=0.0.0.0", env=KEYS)
    assert done.exit_code == 0, done.output
    assert "a-key-of-sixteen" not in done.output
    assert values(done.stdout, "EnvironmentFile") == ["-/etc/samovar/environment"]
    assert stop_seconds(Settings()) > 0


def test_the_command_renders_the_unit_of_the_tiers(render: Callable[..., Result]) -> None:
    done = render("--tiers", str(SOCKET))
    assert done.exit_code == 0, done.output
    assert " tiers --socket /run/samovar/tiers.sock" in values(done.output, "ExecStart")[0]
    assert CliRunner().invoke(app, ["render", "--tiers", str(SOCKET)]).exit_code == EXIT_REFUSED
