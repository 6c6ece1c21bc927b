"""Key pairs, and a real sshd on a host that lets one of them in as root."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.infra.netlab.host import Host
from tests.infra.netlab.shell import BIN, LabError, sh, wait_for

CONFIG = """\
HostKey /root/.sshd/key
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Key:
    """An SSH key pair. `path`: the private half, beside it `.pub`."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Key:
        sh(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "netlab", "-f", str(path)])
        return cls(path)

    @property
    def public(self) -> str:
        return self.path.with_name(self.path.name + ".pub").read_text().strip()


def start_sshd(host: Host, public_key: str) -> None:
    """Ready when this returns. Commands over ssh find `ray` and `samovar`, in login shells and others."""
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    config = CONFIG + f"SetEnv PATH={path}\n"
    host.run(
        "mkdir -p ~/.ssh ~/.sshd && chmod 700 ~/.ssh ~/.sshd && "
        f"printf %s {shlex.quote(config)} >~/.sshd/config && "
        f"printf '%s\\n' {shlex.quote(public_key)} >~/.ssh/authorized_keys && "
        "chmod 600 ~/.ssh/authorized_keys && "
        "ssh-keygen -q -t ed25519 -N '' -f ~/.sshd/key"
    )
    log = host.file("/var/log/sshd.log")
    with log.open("w") as stream:
        server = host.popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", "/root/.sshd/config"],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )

    def listens() -> bool:
        if server.poll() is not None:
            raise LabError(f"sshd of {host.name} ended: {log.read_text()}")
        return "Server listening on 0.0.0.0" in log.read_text()

    wait_for(f"sshd of {host.name} listens", listens)
