"""Each planted fault of a machine is said, with what to do; a sound machine is told so; no check blocks."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.pricing import PrefillPrice, TierPrice
from samovar.cluster.doctor import doctor, media, safety
from samovar.cluster.doctor.check import CheckState, MachineCheck, Result, run_check
from samovar.cluster.engines.environment import STAMP, recipe_for
from samovar.cluster.launch.authority import certify, new_authority
from samovar.configs.sections import GIB, MIB
from samovar.configs.settings import Settings
from samovar.replicas.model.device import why_no_gpu
from samovar.replicas.start.machine_prices import FILE, MachinePrices, keep_prices, kept_prices
from tests.support.engines.fake_python import fake_python

PRICES = MachinePrices("a/model", "cpu", "bfloat16", 50_000, PrefillPrice(0.01, 1e-3, 1e-8, 512))
FAST, SLOW = TierPrice(1e-4, 3e9), TierPrice(1e-2, 10e6)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        yield port


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Settings]:
    """Settings whose files are all below a folder of the test."""

    def settings(**sections: Any) -> Settings:
        sections.setdefault("model", {})["cache_dir"] = str(tmp_path / "cache")
        return Settings.model_validate(sections)

    return settings


def certified(folder: Path) -> Path:
    """A node's directory of `cluster.tls_dir`."""
    certify(new_authority("tea"), ("127.0.0.1",), folder)
    return folder


def no_package(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


Planted = Callable[[Callable[..., Settings], Path], Result]
S3: dict[str, Any] = {"tiers": {"s3": {"bucket": "b", "endpoint": "http://127.0.0.1:1"}}}
JOINED: dict[str, Any] = {"cluster": {"ray_address": "127.0.0.1:6379"}}


def open_file(path: Path, mode: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("0" * 64 + "\n")
    path.chmod(mode)
    return path


def used(settings: Settings) -> str | None:
    return None


def _headers(folder: Path, content: str) -> Path:
    (folder / "Python.h").write_text(f"{content}\n")
    return folder


def _with_vllm(settings: Settings, digest: str = "older", **said: str) -> Settings:
    python = fake_python(settings.engines_dir / "vllm" / "bin" / "python", **said)
    (python.parents[1] / STAMP).write_text(digest)
    return settings


def _too_old(memory: mmap.mmap) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _sockets(folder: Path) -> Path:
    """Write what the system says of a machine of two sockets with eight CPUs each."""
    for node, cpus in enumerate(("0-7", "8-15")):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    return folder


def refused(settings: Settings) -> None:
    raise PermissionError("put: AccessDenied")


PLANTED: dict[str, tuple[Planted, CheckState, str, str]] = {
    "an old Python": (lambda make, tmp: doctor.python((3, 10, 1)), "error", "3.10.1", "3.11"),
    "not Linux": (lambda make, tmp: doctor.python((3, 12, 0), "darwin"), "warning", "3.12.0", "Linux"),
    "a missing package": (
        lambda make, tmp: doctor.packages(make(), ["nothing>=1"], no_package),
        *("error", "nothing is not installed", "install again"),
    ),
    "vLLM that is wanted and not there": (
        lambda make, tmp: doctor.vllm(make(engine={"kind": "vllm"})),
        *("error", "has no environment", "samovar engines add vllm"),
    ),
    "vLLM for another Ray": (
        lambda make, tmp: doctor.vllm(_with_vllm(make(engine={"kind": "vllm"}), ray="1.0")),
        *("error", "has Ray 1.0", "samovar engines add vllm"),
    ),
    "vLLM for another Ray that is not wanted": (
        lambda make, tmp: doctor.vllm(_with_vllm(make(), ray="1.0")),
        *("warning", "has Ray 1.0", "samovar engines add vllm"),
    ),
    "vLLM that was made by another version": (
        lambda make, tmp: doctor.vllm(_with_vllm(make())),
        *("warning", "not what this version locks", "samovar engines add vllm"),
    ),
    "an old package": (
        lambda make, tmp: doctor.packages(make(), ["a==2", "b>=1; extra == 'x'"], lambda name: "1"),
        *("error", "a is 1, not ==2", "install again"),
    ),
    "no model": (
        lambda make, tmp: doctor.model(make(model={"path": str(tmp / "none")})),
        *("error", "none", ""),
    ),
    "no compiler": (
        lambda make, tmp: doctor.native_step(make(), {"PATH": str(tmp)}),
        *("warning", "no C++ compiler", "g++"),
    ),
    "no compiler for the native step that is asked for": (
        lambda make, tmp: doctor.native_step(make(engine={"step": "native"}), {"PATH": str(tmp)}),
        *("error", "no C++ compiler", "g++"),
    ),
    "no GPU where one is asked for": (
        lambda make, tmp: doctor.gpu(make(engine={"device": "cuda"}), lambda: "2.13.0+cpu", why_no_gpu),
        *("error", "without CUDA", "engine.device"),
    ),
    "a driver that torch cannot use": (
        lambda make, tmp: doctor.gpu(make(), lambda: "2.13.0+cu126", lambda version: None, lambda: 0),
        *("warning", "torch sees no GPU", "driver"),
    ),
    "a driver that is too old for torch's CUDA": (
        lambda make, tmp: doctor.gpu(
            make(), lambda: "2.13.0", lambda version: None, lambda: 0, lambda: ("H200", "570.1"), lambda: 13
        ),
        *("warning", "its CUDA 13 needs driver 580 or later, and this is 570.1", "driver 580"),
    ),
    "a driver that is new enough, and no GPU": (
        lambda make, tmp: doctor.gpu(
            make(), lambda: "2.13.0", lambda version: None, lambda: 0, lambda: ("H200", "590.2"), lambda: 13
        ),
        *("warning", "torch sees no GPU", "a driver that fits torch's CUDA build"),
    ),
    "no C compiler for kernels": (
        lambda make, tmp: doctor.gpu_kernels(make(), used, {"PATH": str(tmp)}),
        *("error", "no C compiler on the PATH (gcc, clang, cc)", "gcc python3-dev"),
    ),
    "no headers for kernels": (
        lambda make, tmp: doctor.gpu_kernels(make(), used, headers=lambda: tmp),
        *("error", "headers are not in", "gcc python3-dev"),
    ),
    "headers that do not compile": (
        lambda make, tmp: doctor.gpu_kernels(
            make(), used, headers=lambda: _headers(tmp, "#error no headers")
        ),
        *("error", "fails:", "gcc python3-dev"),
    ),
    "a kernel before 5.14": (
        lambda make, tmp: doctor.gpu_memory(make(), used, _too_old, tmp),
        *("warning", "Invalid argument", "Linux 5.14"),
    ),
    "CPUs of another socket than the GPU's": (
        lambda make, tmp: doctor.gpu_node(
            make(), used, lambda: [1, 1], lambda: frozenset({0, 9}), _sockets(tmp)
        ),
        *("warning", "at NUMA node 1 of 2, and this process may run at node 0, too", "--cpunodebind=1"),
    ),
    "a small /dev/shm": (
        lambda make, tmp: doctor.shared_memory(make(), lambda: 64 * MIB),
        *("warning", "/dev/shm has 64 MiB free", "shm-size"),
    ),
    "sizes that contradict each other": (
        lambda make, tmp: doctor.shared_memory(
            make(cluster={"object_store_bytes": GIB}, tiers={"cpu": {"bytes_max": GIB}}), lambda: 64 * GIB
        ),
        *("error", "leaves 644245094 bytes", "Lower the second"),
    ),
    "a disk with too little room": (
        lambda make, tmp: media.disk_tier(make(), lambda: FAST, lambda place: GIB),
        *("warning", "may take 8.0 GiB", "lower tiers.nvme.bytes_max to 966,367,642"),
    ),
    "a slow disk": (
        lambda make, tmp: media.disk_tier(make(), lambda: SLOW, lambda place: 99 * GIB),
        *("warning", "reads 0.01 GB/s", "local SSD"),
    ),
    "a bucket that may not be written": (
        lambda make, tmp: media.s3_tier(make(**S3), refused, lambda url: 5.0, lambda: 6.0),
        *("error", "bucket b: put: AccessDenied", "s3:PutObject"),
    ),
    "a clock that is wrong by minutes": (
        lambda make, tmp: media.s3_tier(make(**S3), lambda settings: None, lambda url: 0.0, lambda: 120.0),
        *("warning", "differ by 120 s", "NTP"),
    ),
    "a clock that S3 refuses": (
        lambda make, tmp: media.s3_tier(make(**S3), lambda settings: None, lambda url: 0.0, lambda: 1e4),
        *("error", "differ by 10,000 s", "NTP"),
    ),
    "no S3 server": (
        lambda make, tmp: media.s3_tier(make(**S3)),
        *("error", "does not answer", "tiers.s3.endpoint"),
    ),
    "no NIXL": (
        lambda make, tmp: safety.nixl(make(**JOINED), lambda: {"ok": False, "why": "no plugin UCX"}),
        *("warning", "no plugin UCX", "samovar[nixl]"),
    ),
    "no files for TLS between nodes": (
        lambda make, tmp: safety.nixl(
            make(cluster={"ray_address": "127.0.0.1:6379", "tls_dir": str(tmp / "no")})
        ),
        *("warning", str(Path("no") / "tls.crt"), "TLS between nodes"),
    ),
    "an open token": (
        lambda make, tmp: safety.ray_cluster(
            make(), {"RAY_AUTH_TOKEN_PATH": str(open_file(tmp / "t", 0o644))}
        ),
        *("warning", "mode 0644", "chmod 600"),
    ),
    "no token for a cluster": (
        lambda make, tmp: safety.ray_cluster(make(**JOINED), {"RAY_AUTH_TOKEN_PATH": str(tmp / "none")}),
        *("error", "there is no Ray token", "chmod 600"),
    ),
    "a cluster without a token": (
        lambda make, tmp: safety.ray_cluster(make(**JOINED), {"RAY_AUTH_TOKEN": "t"}, lambda address: False),
        *("error", "requires no token", "RAY_AUTH_MODE=token"),
    ),
    "no certificate for a node": (
        lambda make, tmp: safety.ray_cluster(make(cluster={"tls_dir": str(tmp)}), {"RAY_AUTH_TOKEN": "t"}),
        *("error", "cluster.tls_dir: ", "ca.crt"),
    ),
    "Ray open to the network": (
        lambda make, tmp: safety.open_binds(make(), lambda: [("raylet", "0.0.0.0", 10001, False)]),
        *("error", "raylet on 0.0.0.0:10001", "ray stop"),
    ),
    "an API open to the network": (
        lambda make, tmp: safety.open_binds(
            make(server={"host": "0.0.0.0"}, auth={"api_keys": {"a": "0123456789abcdef"}}), lambda: []
        ),
        *("warning", "0.0.0.0 without TLS", "proxy with TLS"),
    ),
    "an API open to the network by HTTPS": (
        lambda make, tmp: safety.open_binds(
            make(
                server={"host": "0.0.0.0", "tls_certificate": "/c.pem", "tls_key": "/k.pem"},
                auth={"api_keys": {"a": "0123456789abcdef"}},
            ),
            lambda: [],
        ),
        *("ok", "0.0.0.0 with TLS", ""),
    ),
    "a server's secret that others can read": (
        lambda make, tmp: safety.secrets_files(
            _with(make(), lambda: open_file(tmp / "cache" / "server-secret", 0o640))
        ),
        *("error", "readable by other users (mode 0640)", "Delete it"),
    ),
    "API keys that others can read": (
        lambda make, tmp: safety.secrets_files(make(), [open_file(tmp / "secrets.yaml", 0o604)]),
        *("error", "mode 0604", "chmod 600"),
    ),
    "media slower than computing": (
        lambda make, tmp: media.prices(make(), lambda: SLOW, lambda folder: PRICES, lambda: FAST),
        *("warning", "disk, 0.01 GB/s", "disk: computing is quicker"),
    ),
}


def _with(settings: Settings, do: Callable[[], object]) -> Settings:
    do()
    return settings


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_said_with_what_to_do(
    name: str, make: Callable[..., Settings], tmp_path: Path
) -> None:
    plant, wanted, said, fix = PLANTED[name]
    state, says, does = plant(make, tmp_path)
    assert (state, said in says, fix in does) == (wanted, True, True), (state, says, does)


def test_a_port_in_use_is_an_error_unless_samovar_itself_serves_there(
    taken: int, make: Callable[..., Settings]
) -> None:
    settings = make(server={"port": taken})
    state, says, fix = doctor.port(settings)
    assert (state, "--port" in fix) == ("error", True), says
    state, says, _ = doctor.port(settings, [f"http://127.0.0.1:{taken}"])
    assert (state, "Samovar itself" in says) == ("ok", True)


def test_a_disk_in_use_is_a_warning_unless_the_service_that_runs_uses_it(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = "the disk tier is off for now: pid 5 uses it. Choose another tiers.nvme.dir"
    monkeypatch.setattr(media.preflight, "disk_warnings", lambda settings: [used])
    settings = make(server={"port": 8123})
    state, says, fix = media.disk_tier(settings, lambda: FAST, lambda place: 99 * GIB)
    assert (state, "pid 5 uses it" in says, fix) == ("warning", True, "Choose another tiers.nvme.dir")
    ours = ["http://127.0.0.1:8123"]
    state, says, fix = media.disk_tier(settings, lambda: FAST, lambda place: 99 * GIB, ours)
    assert (state, "used by the service that runs" in says, fix) == ("ok", True, "")


SOUND: dict[str, Planted] = {
    "python": lambda make, tmp: doctor.python((3, 12, 1), "linux"),
    "packages": lambda make, tmp: doctor.packages(make()),
    "vLLM not used": lambda make, tmp: doctor.vllm(make()),
    "vLLM": lambda make, tmp: doctor.vllm(
        make(engine={"kind": "vllm", "vllm": {"python": fake_python(tmp / "python")}})
    ),
    "made vLLM": lambda make, tmp: doctor.vllm(
        _with_vllm(make(engine={"kind": "vllm", "device": "cpu"}), recipe_for("cpu").digest)
    ),
    "gpu": lambda make, tmp: doctor.gpu(make(), lambda: "2.13.0+cpu", why_no_gpu),
    "kernels": lambda make, tmp: doctor.gpu_kernels(
        make(), used, headers=lambda: _headers(tmp, "int Py_IsInitialized(void);")
    ),
    "kernels not used": lambda make, tmp: doctor.gpu_kernels(make(engine={"device": "cpu"})),
    "memory": lambda make, tmp: doctor.gpu_memory(
        make(),
        used,
        lambda memory: memory.madvise(mmap.MADV_WILLNEED),
        tmp,  # any kernel knows it
    ),
    "one socket": lambda make, tmp: doctor.gpu_node(make(), used, lambda: [0], system=tmp),
    "bound to the GPU's socket": lambda make, tmp: doctor.gpu_node(
        make(), used, lambda: [1, -1], lambda: frozenset({9}), _sockets(tmp)
    ),
    "gpu not used": lambda make, tmp: doctor.gpu(make(engine={"device": "cpu"})),
    "shm": lambda make, tmp: doctor.shared_memory(make(), lambda: 64 * GIB),
    "shm elsewhere": lambda make, tmp: doctor.shared_memory(make(), lambda: None),
    "cache": lambda make, tmp: doctor.cache_dir(make()),
    "disk": lambda make, tmp: media.disk_tier(make(), lambda: FAST, lambda place: 99 * GIB),
    "no disk": lambda make, tmp: media.disk_tier(make(tiers={"nvme": {"bytes_max": 0}}), lambda: None),
    "s3": lambda make, tmp: media.s3_tier(make(**S3), lambda settings: None, lambda url: 5.0, lambda: 6.0),
    "no s3": lambda make, tmp: media.s3_tier(make()),
    "nixl": lambda make, tmp: safety.nixl(make(**JOINED), lambda: {"ok": True}),
    "one machine": lambda make, tmp: safety.nixl(make()),
    "nodes that speak TLS": lambda make, tmp: safety.nixl(
        make(cluster={"ray_address": "127.0.0.1:6379", "tls_dir": str(certified(tmp))})
    ),
    "no token yet": lambda make, tmp: safety.ray_cluster(make(), {"RAY_AUTH_TOKEN_PATH": str(tmp / "none")}),
    "a private token": lambda make, tmp: safety.ray_cluster(
        make(), {"RAY_AUTH_TOKEN_PATH": str(open_file(tmp / "t", 0o600))}
    ),
    "a cluster with a token": lambda make, tmp: safety.ray_cluster(
        make(**JOINED), {"RAY_AUTH_TOKEN": "t"}, lambda address: True
    ),
    "Ray with a token": lambda make, tmp: safety.open_binds(make(), lambda: [("raylet", "::", 1, True)]),
    "no Ray": lambda make, tmp: safety.open_binds(make(), lambda: []),
    "secrets": lambda make, tmp: safety.secrets_files(make()),
    "kept secret": lambda make, tmp: safety.secrets_files(
        _with(make(), lambda: open_file(tmp / "cache" / "server-secret", 0o600))
    ),
    "prices": lambda make, tmp: media.prices(make(), lambda: FAST, lambda folder: PRICES, lambda: FAST),
    "no prices yet": lambda make, tmp: media.prices(make(), lambda: FAST),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_machine_is_told_so(name: str, make: Callable[..., Settings], tmp_path: Path) -> None:
    state, says, fix = SOUND[name](make, tmp_path)
    assert (state, fix) == ("ok", ""), says
    assert says


def test_the_real_checks_of_this_machine_all_answer_and_change_nothing(
    make: Callable[..., Settings], tmp_path: Path
) -> None:
    """But for the one that imports torch. No service runs: the port is any that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    settings = make(server={"port": free})
    environ = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "PATH": os.environ["PATH"]}
    checks = doctor.checks_of(settings, environ=environ)
    assert len({check.name for check in checks}) == len(checks) == 19
    found = {check.name: run_check(check) for check in checks if check.name not in ("native", "binds")}
    assert {one.name for one in found.values() if one.state == "error"} == set()
    assert {
        one.name for one in found.values() if "cannot be checked" in one.says or "did not end" in one.says
    } == set()
    assert "GB/s after" in found["disk"].says
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_hangs_or_fails_is_a_warning_and_not_the_end() -> None:
    release = threading.Event()

    def hang() -> Result:
        release.wait(30)
        return "ok", "", ""

    def fail() -> Result:
        raise ValueError("what\nnext")

    hung, failed = run_check(MachineCheck("h", "h", hang, 0.05)), run_check(MachineCheck("f", "f", fail))
    release.set()
    assert (hung.state, hung.says) == ("warning", "did not end within 0.05 s")
    assert (failed.state, failed.says) == ("warning", "cannot be checked: ValueError: what")


def test_the_prices_of_a_start_are_kept_and_a_broken_file_is_none(tmp_path: Path) -> None:
    assert kept_prices(tmp_path) is None
    keep_prices(tmp_path / "new", PRICES)
    assert kept_prices(tmp_path / "new") == PRICES
    for text in ("", "{}", "[1]", '{"model_name": 1}'):
        (tmp_path / FILE).write_text(text)
        assert kept_prices(tmp_path) is None
    keep_prices(tmp_path / FILE / "no folder", PRICES)  # costs nothing


def test_a_ram_tier_that_is_smaller_than_the_pool_it_backs_is_said(make: Callable[..., Settings]) -> None:
    settings = make(tiers={"cpu": {"bytes_max": GIB}})
    state, says, _ = doctor.shared_memory(
        settings, lambda: 64 * GIB, lambda folder: replace(PRICES, pool_bytes=24 * GIB)
    )
    assert state == "ok"
    assert "1.0 GiB of it the cpu tier, less RAM than the 24.00 GiB of pool in front of it" in says
    assert "less RAM" not in doctor.shared_memory(settings, lambda: 64 * GIB, lambda folder: PRICES)[1]


def test_prices_are_told_by_length_and_medium(make: Callable[..., Settings]) -> None:
    _, says, _ = media.prices(make(), lambda: SLOW, lambda folder: PRICES, lambda: FAST)
    of, computing, memory, disk = says.splitlines()
    assert of == "a/model on cpu, 50,000 bytes of KV a token (bfloat16)"
    assert computing.startswith("computing, 1,100 us a token of 8k: 2k 2.13 s, 8k ")
    assert memory.startswith("RAM, 3 GB/s, 16.7 us a token after 0.1 ms: 2k 34.2 ms")
    assert memory.endswith("wins always")
    assert disk.startswith("disk, 0.01 GB/s, 5,000 us a token after 10 ms: 2k 10.25 s")
