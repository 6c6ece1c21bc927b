"""A PostgreSQL 16 with pgvector, from PyPI's `pgserver`: its programs only, on a socket, not as root.

`pgserver`'s own Python would add a user to the machine and open folders up to / to everyone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg

OWNER, PASSWORD = "samovar", "pa:ss@wörd"
PASSWORD_IN_URL = "pa%3Ass%40w%C3%B6rd"
START_S = 120
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
OPTIONS = ("max_connections=60", "shared_buffers=16MB", "autovacuum=off", "listen_addresses=")
HBA = "local all postgres trust\nlocal all all scram-sha-256\n"


def _unprivileged() -> str | None:
    """PostgreSQL refuses to run as root: the user in place of it."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgresServer:
    """One server with a folder of its own, which any user may reach; `close` removes both."""

    def __init__(self, *, durable: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="samovar-pg-", dir="/tmp"))
        self._durable = durable
        self._user = _unprivileged()
        self._process: subprocess.Popen[bytes] | None = None
        found = importlib.util.find_spec("pgserver")
        assert found is not None, "pgserver is not installed: make setup"
        assert found.origin is not None
        shipped = Path(found.origin).parent
        # A copy: the installation may lie where the other user cannot read, and a test takes pgvector away.
        self.installed = self.folder / "pg" / "pginstall"
        for part in ("bin/postgres", "bin/initdb", "lib/postgresql", "share"):
            (self.installed / part).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (shipped / "pginstall" / part).is_dir() else shutil.copy2
            copy(shipped / "pginstall" / part, self.installed / part)
        self._libraries = self.folder / "libs"
        shutil.copytree(shipped.parent / "pgserver.libs", self._libraries)
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        self.folder.chmod(0o755)
        if self._user is not None:
            shutil.chown(self.data, self._user)
        self.sockets = self.data
        command = ["initdb", "-D", self.data, "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run(
            [self.installed / "bin" / command[0], *command[1:]],  # type: ignore[list-item]
            check=True,
            capture_output=True,
            timeout=START_S,
            **self._as_user(),
        )
        (self.data / "pg_hba.conf").write_text(HBA)
        self.start()
        with self.superuser() as db:
            db.execute(f"CREATE ROLE {OWNER} LOGIN PASSWORD '{PASSWORD}'")
            db.execute(f"CREATE DATABASE {OWNER} OWNER {OWNER}")
        with self.superuser(OWNER) as db:
            db.execute("CREATE EXTENSION vector")

    def _as_user(self) -> dict[str, object]:
        env = {
            "LD_LIBRARY_PATH": str(self._libraries),
            "TZ": "UTC",
            "LC_ALL": "C",
            "PATH": os.environ["PATH"],
        }
        own: dict[str, object] = {"env": env, "cwd": self.data}
        if self._user is not None:
            entry = pwd.getpwnam(self._user)
            own |= {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        return own

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = [*OPTIONS, f"unix_socket_directories={self.sockets}"]
        options += ["fsync=on"] if self._durable else ["fsync=off", "full_page_writes=off"]
        program = [str(self.installed / "bin" / "postgres"), "-D", str(self.data)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *(word for option in options for word in ("-c", option))],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGINT),
                **self._as_user(),  # type: ignore[call-overload]
            )
        until = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            try:
                with self.superuser():
                    return
            except psycopg.OperationalError:
                assert time.monotonic() < until, (self.folder / "log").read_text()
                time.sleep(0.02)

    def stop(self, sent: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT ends connections and writes all out; SIGQUIT ends it as a crash does."""
        if self._process is not None:
            children = psutil.Process(self._process.pid).children()
            self._process.send_signal(sent)
            self._process.wait(START_S)
            self._process = None
            _, alive = psutil.wait_procs(children, START_S)  # until they are gone, no other may start
            assert not alive

    def signal_backend(self, pid: int, sent: signal.Signals) -> None:
        """Send a signal to the process of one connection."""
        assert self._process is not None
        assert psutil.Process(pid).ppid() == self._process.pid, "a process of this server"
        os.kill(pid, sent)

    @contextmanager
    def superuser(self, database: str = "postgres") -> Iterator[psycopg.Connection]:
        """A connection that sees all and that no policy binds."""
        with psycopg.connect(
            host=str(self.sockets), user="postgres", dbname=database, autocommit=True
        ) as connection:
            yield connection

    def url(self, password: str = PASSWORD_IN_URL, database: str = OWNER) -> str:
        """The URL of a role without privileges."""
        return f"postgresql://{OWNER}:{password}@/{database}?host={self.sockets}"

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
