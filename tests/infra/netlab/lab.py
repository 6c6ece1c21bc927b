"""A network of hosts on this machine: boots them, and makes and mends faults between them.

Everything hangs on processes that the kernel ends with the tests' own process: network and mount namespaces
go with them, and so do loop devices. Only files and control groups can be left; see `leftovers.py`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.infra.netlab import leftovers
from tests.infra.netlab.host import Host
from tests.infra.netlab.relay import Relay, tcp_listener
from tests.infra.netlab.shell import BIN, CLEAN_ENV, LabError, ip_batch, network_of, sh, wait_for

MIB = 1024 * 1024
NETWORK = ipaddress.ip_network("10.77.0.0/16")
GATEWAY = "10.77.255.254"
FIRST_HOST = 10
READY_S = 20.0
# What of /root the hosts see: Python, when it is installed there, and models that were converted before.
KEPT_OF_ROOT = ("/root/.pyenv", "/root/.cache/samovar")
# A host has its own of these; what of our code lies below one is put back.
OWN_OF_A_HOST = ("/root", "/tmp", "/mnt", "/run", "/dev/shm", "/var/log")
CHECKOUT = Path(__file__).resolve().parents[3]
WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")


def hidden_code(*places: str) -> list[str]:
    """Those of `places` (checkout, Python) that a host, with its own /tmp and /root, would not see."""

    def is_below(place: Path, tops: tuple[str, ...]) -> bool:
        return any(place.is_relative_to(top) for top in tops)

    paths = sorted({Path(place) for place in places})
    hidden = [path for path in paths if is_below(path, OWN_OF_A_HOST) and not is_below(path, KEPT_OF_ROOT)]
    return [str(path) for path in hidden if not any(path.is_relative_to(up) for up in hidden if up != path)]


class Lab:
    """A bridge and hosts on it. `shared`: a directory that is /mnt/lab on all hosts. Use it with `with`."""

    def __init__(self, name: str = "lab") -> None:
        leftovers.sweep()
        self.name = f"{leftovers.owner_mark()}.{name}"
        self.dir = leftovers.LABS / self.name
        self.shared = self.dir / "shared"
        self.shared.mkdir(parents=True)
        self._hosts_file = self.dir / "hosts"
        self._hosts_file.write_text("127.0.0.1 localhost\n")
        self.hosts: dict[str, Host] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._is_open = True
        # Hosts end with the thread that started them, so they are started by one that the lab ends itself.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="netlab")
        try:
            self._bridge = self._start_bridge()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- hosts ---------------------------------------------------------------------------------

    def boot(
        self,
        name: str,
        ip: str | None = None,
        *,
        nvme_bytes: int | None = None,
        memory_bytes: int | None = None,
        shm_bytes: int = 4096 * MIB,
    ) -> Host:
        """A host that is up when this returns. Names and addresses of hosts that were killed are free again.

        `nvme_bytes`: an ext4 of that size at /mnt/kv. `memory_bytes`: its processes are killed beyond
        (control groups v1). Raises LabError, also for a name or address in use.
        """
        with self._lock:
            if not self._is_open:
                raise LabError(f"the lab {self.name} is closed")
            number = next(self._numbers)
            address = ip or str(NETWORK[FIRST_HOST + number])
            up = [host for host in self.hosts.values() if host.is_up]
            if ipaddress.ip_address(address) not in NETWORK:
                raise LabError(f"{address} is not in {NETWORK}")
            if any(name == host.name or address == host.ip for host in up):
                raise LabError(f"a host {name} or {address} is up already")
            host = self._boot(name, address, number, nvme_bytes, memory_bytes, shm_bytes)
            self.hosts[name] = host
            return host

    def _boot(
        self,
        name: str,
        ip: str,
        number: int,
        nvme_bytes: int | None,
        memory_bytes: int | None,
        shm_bytes: int,
    ) -> Host:
        directory = self.dir / f"{number}-{name}"
        directory.mkdir()
        cgroup = self._cgroup(f"{number}-{name}", memory_bytes)
        process = self._start_process(name, directory, nvme_bytes, cgroup, shm_bytes)
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise LabError(f"host {name} did not boot: {(directory / 'boot.log').read_text()}")
            # Process 1 of its namespace is the only child of `unshare`.
            init_pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text(str(init_pid))
            port = f"port{number}"
            ip_batch(
                self._bridge.pid,
                [
                    f"link add {port} type veth peer name eth0 netns {init_pid}",
                    f"link set {port} master br0 up",
                ],
            )
            ip_batch(
                init_pid,
                [
                    "link set lo up",
                    f"addr add {ip}/{NETWORK.prefixlen} dev eth0",
                    "link set eth0 up",
                    f"route add default via {GATEWAY}",  # Ray finds its address by the default route
                ],
            )
        except BaseException:
            process.kill()
            process.wait()
            raise
        with self._hosts_file.open("a") as hosts:
            hosts.write(f"{ip} {name}\n")
        return Host(name, ip, directory, port, self._bridge.pid, process, init_pid, cgroup)

    def _start_process(
        self, name: str, directory: Path, nvme_bytes: int | None, cgroup: Path | None, shm_bytes: int
    ) -> subprocess.Popen[str]:
        env = {
            **CLEAN_ENV,
            "DIR": str(directory),
            "SHARED": str(self.shared),
            "HOSTS": str(self._hosts_file),
            "NAME": name,
            "BIN": str(BIN),
            "GATEWAY": GATEWAY,
            "SHM_BYTES": str(shm_bytes),
            "KEEP": ":".join(KEPT_OF_ROOT),
            "CODE": ":".join(hidden_code(str(CHECKOUT), sys.prefix, sys.base_prefix)),
            "CGROUP": str(cgroup or ""),
        }
        if nvme_bytes is not None:
            image = directory / "nvme.img"
            with image.open("wb") as file:
                file.truncate(nvme_bytes)
            sh(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1", str(image)])
            env["NVME"] = str(image)
        unshare = ["unshare", "-m", "-u", "-p", "-i", "-n", "--fork", "--kill-child", "--mount-proc"]
        script = Path(__file__).with_name("boot.sh")
        with (directory / "boot.log").open("w") as log:
            return self._spawn([*unshare, "bash", str(script)], env, stdout=subprocess.PIPE, stderr=log)

    def _cgroup(self, name: str, memory_bytes: int | None) -> Path | None:
        if memory_bytes is None:
            return None
        if not (leftovers.CGROUPS / "memory.limit_in_bytes").exists():
            raise LabError(f"memory_bytes needs control groups v1 at {leftovers.CGROUPS}")
        group = leftovers.CGROUPS / f"{leftovers.CGROUP_PREFIX}{self.name}.{name}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
        return group

    # -- faults, and the way in ------------------------------------------------------------------

    def cut(self, host: Host) -> None:
        """Pulls its cable."""
        host.plug(False)

    def mend(self, host: Host) -> None:
        """Puts it back."""
        host.plug(True)

    def part(self, a: Host, b: Host) -> None:
        """These two no longer reach each other; all others do."""
        a.blackhole(b.ip, True)
        b.blackhole(a.ip, True)

    def join(self, a: Host, b: Host) -> None:
        """The end of `part`."""
        a.blackhole(b.ip, False)
        b.blackhole(a.ip, False)

    def forward(self, host: Host, port: int, *, to: str = "127.0.0.1", local_port: int = 0) -> int:
        """A port of the machine's 127.0.0.1 that leads to `to`:`port`, as `host` reaches it.

        By default a client on the host itself, which no cut disturbs; with `to` the address of another
        host, a client on `host` that talks to it over the network. It ends with the host.
        """

        async def there() -> tuple[str, int]:
            return to, port

        relay = Relay(host.init_pid, there, tcp_listener(port=local_port))
        host.relays.append(relay)
        return relay.port

    # -- begin and end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all hosts and removes all files. Again: nothing."""
        with self._lock:
            self._is_open = False
            failures = []
            for host in self.hosts.values():
                try:
                    host.kill()
                except (LabError, subprocess.TimeoutExpired) as error:  # the others must end all the same
                    failures.append(f"{host.name}: {error}")
            bridge = getattr(self, "_bridge", None)
            if bridge is not None:
                bridge.kill()
                bridge.wait()
            self._starter.shutdown()
            shutil.rmtree(self.dir, ignore_errors=bool(failures))
            if failures:
                raise LabError("; ".join(failures))
            with contextlib.suppress(OSError):  # other labs are open
                leftovers.LABS.rmdir()

    def _start_bridge(self) -> subprocess.Popen[str]:
        process = self._spawn(["unshare", "-n", "sleep", "infinity"], CLEAN_ENV)
        ours = network_of("self")
        wait_for("the bridge's namespace", lambda: network_of(process.pid) not in ("", ours), READY_S)
        ip_batch(
            process.pid,
            [
                "link set lo up",
                "link add br0 type bridge",
                f"addr add {GATEWAY}/{NETWORK.prefixlen} dev br0",
                "link set br0 up",
                "route add unreachable default",
            ],
        )
        enter = ["nsenter", "-t", str(process.pid), "-n", "sh", "-c"]
        # A gateway tells hosts what is unreachable; not only sometimes.
        sh([*enter, "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv4/icmp_ratelimit"])
        return process

    def _spawn(
        self,
        argv: list[str],
        env: dict[str, str],
        stdout: int | None = None,
        stderr: IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [*WITH_ITS_PARENT, *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,  # Ctrl-C is the tests'; they end the lab in order
            )

        return self._starter.submit(start).result()
