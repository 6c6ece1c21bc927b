"""The lab itself: hosts reach each other until kept from it, see only themselves, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.infra.needs import LAB, need, needs_infra
from tests.infra.netlab import Host, Lab, LabError, leftovers
from tests.infra.netlab.sshd import Key, start_sshd
from tests.support.services.service import until

pytestmark = needs_infra

MIB = 1024 * 1024
PORT = 7000
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.5)"


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    need(*LAB)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab("test") as lab:
        yield lab


def serve(host: Host, port: int = PORT) -> None:
    """A web server with what is in /root."""
    host.popen(
        ["python", "-m", "http.server", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until(f"{host.name} serves", lambda: reaches(host, "127.0.0.1", port))


def reaches(host: Host, to: str, port: int = PORT) -> bool:
    return host.run(["python", "-c", CONNECT, to, str(port)], check=False).returncode == 0


def test_a_host_sees_a_checkout_below_the_systems_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a /tmp of its own, in which only that of ours is to be seen."""
    checkout, beside = tmp_path / "checkout", tmp_path / "beside"
    for folder in (checkout, beside):
        folder.mkdir()
        (folder / "file").write_text("ours")
    monkeypatch.setattr("tests.infra.netlab.lab.CHECKOUT", checkout)
    assert tmp_path.is_relative_to("/tmp"), f"pytest makes its directories elsewhere: {tmp_path}"
    with Lab("checkout") as lab:
        host = lab.boot("a")
        assert host.run(["cat", str(checkout / "file")]).stdout == "ours"
        assert host.run(["cat", str(beside / "file")], check=False).returncode != 0


def test_hosts_reach_each_other_by_name_and_nobody_else(lab: Lab) -> None:
    a, b = lab.boot("a"), lab.boot("b", ip="10.77.3.4")
    serve(a)
    assert reaches(b, "a")
    assert reaches(b, a.ip)
    assert not reaches(a, "b"), "nobody listens there"
    with socket.create_server(("0.0.0.0", 0)) as machine:
        assert not reaches(a, "127.0.0.1", machine.getsockname()[1]), "the machine's loopback is not its own"
    began_s = time.monotonic()
    assert not reaches(a, "8.8.8.8")
    assert not reaches(a, "example.com")
    assert time.monotonic() - began_s < 3, "unreachable is said, not waited for"


def test_a_default_route_tells_a_host_its_own_address(lab: Lab) -> None:
    host = lab.boot("a")
    ask = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('8.8.8.8', 80)); "
        "print(s.getsockname()[0])"
    )
    assert host.run(["python", "-c", ask]).stdout.strip() == host.ip


def test_a_cut_host_is_alone_until_it_is_mended(lab: Lab) -> None:
    a, b, c = (lab.boot(name) for name in "abc")
    serve(a)
    lab.cut(a)
    assert not reaches(b, a.ip)
    assert reaches(a, a.ip), "it can talk to itself"
    lab.mend(a)
    until("they talk again", lambda: reaches(b, a.ip) and reaches(c, a.ip))


def test_parted_hosts_reach_only_others(lab: Lab) -> None:
    a, b, c = (lab.boot(name) for name in "abc")
    serve(a)
    lab.part(a, b)
    assert not reaches(b, a.ip)
    assert reaches(c, a.ip)
    lab.join(a, b)
    assert reaches(b, a.ip)


def test_a_slow_cable_is_slow(lab: Lab) -> None:
    a, b = lab.boot("a"), lab.boot("b")
    (a.file("/root/big")).write_bytes(bytes(4 * MIB))
    serve(a)
    fetch = f"curl -sS -o /dev/null -w '%{{time_total}}' http://{a.ip}:{PORT}/big"
    quick_s = float(b.run(fetch).stdout)
    a.slow(16)
    slow_s = float(b.run(fetch).stdout)
    assert 1.6 < slow_s < 4, "2 MB/s"
    a.slow(None)
    assert float(b.run(fetch).stdout) < slow_s / 2
    assert quick_s < slow_s / 2


def test_a_host_sees_only_itself(lab: Lab) -> None:
    a, b = lab.boot("a"), lab.boot("b")
    sleeper = a.popen("exec sleep 1234")
    (found,) = until("it is there", lambda: a.processes("sleep 1234"))
    assert a.run("hostname").stdout == "a\n"
    assert "sleep 1234" in a.run("ps ax").stdout
    assert "sleep 1234" not in b.run("ps ax").stdout
    assert not b.processes("sleep 1234")
    a.run("touch /tmp/x /root/x /etc/x /dev/shm/x /run/x /mnt/x /mnt/lab/x")
    for path in ("/tmp/x", "/root/x", "/etc/x", "/dev/shm/x", "/run/x", "/mnt/x"):
        assert a.file(path).exists()
        assert not b.file(path).exists()
        assert not Path(path).exists()
    assert b.file("/mnt/lab/x").exists()
    assert (lab.shared / "x").exists()
    assert a.run("ls -A /root").stdout.split() == [".cache", ".pyenv", "x"], "nothing of this machine's user"
    found.kill()
    assert Host.stop(sleeper) != 0


def test_its_environment_is_clean_and_has_ray_and_samovar(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    host = lab.boot("a")
    assert "RAY_ADDRESS" not in host.run("env").stdout
    assert host.run("echo $X", {"X": "given"}).stdout == "given\n"
    for shell in (["bash", "-c"], ["bash", "--login", "-c"]):
        assert host.run([*shell, "which ray samovar"]).stdout.count("/bin/") == 2


def test_its_disk_is_full_when_it_is_full(lab: Lab) -> None:
    host = lab.boot("a", nvme_bytes=32 * MIB)
    fill = host.run("dd if=/dev/zero of=/mnt/kv/x bs=1M count=64 oflag=direct", check=False)
    assert "No space left" in fill.stdout
    assert 20 * MIB < host.file("/mnt/kv/x").stat().st_size < 32 * MIB


def test_its_memory_is_limited(lab: Lab) -> None:
    host = lab.boot("a", memory_bytes=64 * MIB)
    other = lab.boot("b")
    eat = ["python", "-c", "print(len(bytearray(200 * 1024 * 1024)))"]
    assert host.run(eat, check=False).returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert other.run(eat).returncode == 0


def test_the_machine_reaches_a_hosts_loopback_and_through_it_others(lab: Lab) -> None:
    a, b = lab.boot("a"), lab.boot("b")
    serve(a)
    near, far = lab.forward(a, PORT), lab.forward(b, PORT, to=a.ip)
    for port in (near, far):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
            assert answer.status == 200
    a.kill()
    with pytest.raises((ConnectionRefusedError, ConnectionResetError)):  # reset: its last breath
        socket.create_connection(("127.0.0.1", near), 1)
    with pytest.raises(ConnectionResetError):  # nobody listens on that port of b: said at once, or later
        read_one(lab.forward(b, PORT))


def read_one(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10) as stream:
        return stream.recv(1)


def test_a_command_that_fails_or_hangs_says_so(lab: Lab) -> None:
    host = lab.boot("a")
    with pytest.raises(LabError, match="exit 3: was here"):
        host.run("echo was here; exit 3")
    with pytest.raises(LabError, match=r"not within 0\.5 s: was here"):
        host.run("echo was here; sleep 4321", timeout_s=0.5)
    until("it was ended", lambda: not host.processes("sleep 4321"))


def test_sshd_lets_the_key_in_and_nobody_else(lab: Lab) -> None:
    need("sshd", "ssh")
    a, b = lab.boot("a"), lab.boot("b")
    key, other = Key.make(lab.shared / "key"), Key.make(lab.shared / "other")
    start_sshd(b, key.public)
    ssh = "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -i /mnt/lab/{} root@b hostname"
    assert a.run(ssh.format(key.path.name)).stdout.splitlines()[-1] == "b"
    assert "Permission denied" in a.run(ssh.format(other.path.name), check=False).stdout


def test_a_name_and_an_address_are_free_after_power_off(lab: Lab) -> None:
    first = lab.boot("a")
    with pytest.raises(LabError, match="up already"):
        lab.boot("a")
    with pytest.raises(LabError, match="up already"):
        lab.boot("b", ip=first.ip)
    with pytest.raises(LabError, match="not in"):
        lab.boot("b", ip="192.168.0.1")
    other = lab.boot("c")
    first.kill()
    with pytest.raises(LabError, match="is off"):
        first.run("true")
    again = lab.boot("a", ip=first.ip)
    serve(again)
    assert reaches(other, first.ip), "no memory of the earlier one's hardware address"


# -- nothing stays -------------------------------------------------------------------------------


def traces(init_pids: list[int], directory: Path) -> list[str]:
    """What is still there of a lab."""
    found = [f"process {pid}" for pid in init_pids if psutil.pid_exists(pid)]
    found += [
        f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(directory) in line
    ]
    loops = subprocess.run(
        ["losetup", "-l", "-n", "-O", "BACK-FILE"], capture_output=True, text=True, check=True
    )
    found += [f"loop {line}" for line in loops.stdout.splitlines() if str(directory) in line]
    found += [str(group) for group in leftovers.CGROUPS.glob(f"*{directory.name}*")]
    if directory.exists():
        found.append(str(directory))
    return found


def test_an_exception_leaves_nothing() -> None:
    pids, directory = [], Path()
    with contextlib.suppress(KeyboardInterrupt), Lab("doomed") as lab:
        host = lab.boot("a", nvme_bytes=32 * MIB, memory_bytes=64 * MIB)
        host.popen("exec sleep 1000")
        until("it runs", lambda: host.processes("sleep 1000"))
        pids = [host.init_pid, host.process.pid, *(process.pid for process in host.processes())]
        directory = lab.dir
        assert len(traces(pids, directory)) >= 5, "this check sees them while they are there"
        raise KeyboardInterrupt
    until("all is gone", lambda: not traces(pids, directory))


def test_killed_tests_leave_no_process_and_the_next_lab_removes_their_files() -> None:
    script = textwrap.dedent(
        f"""
        import time
        from tests.infra.netlab import Lab
        lab = Lab("killed")
        host = lab.boot("a", nvme_bytes={32 * MIB}, memory_bytes={64 * MIB})
        host.popen("exec sleep 1000")
        print(lab.dir, host.init_pid, lab._bridge.pid, flush=True)
        time.sleep(100)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert process.stdout is not None
    name, *numbers = process.stdout.readline().split()
    directory, pids = Path(name), [int(number) for number in numbers]
    with Lab("beside"):
        assert len(traces(pids, directory)) >= 5, "a lab that is in use is left alone"
    process.kill()
    process.wait()
    until("the kernel has ended its hosts", lambda: not any(psutil.pid_exists(pid) for pid in pids))

    def gone() -> bool:
        Lab("next").close()
        return not traces(pids, directory)

    until("all is gone", gone)
