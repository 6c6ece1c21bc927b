"""Remembers which servers of this user run on this machine, so that clients find them without an address.

A server writes a small file when it is ready and removes it when it stops. A file whose process has ended is
ignored, and removed: the process may have been killed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samovar.configs.atomic_file import atomic_write
from samovar.configs.json_text import parse_json
from samovar.configs.tls import CertificateRefused, TlsFiles

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

DEFAULT_URL = "http://127.0.0.1:8000"
FILES_MAX = 256
"""Files that are looked at: more were left by something else."""
URL_CHARS_MAX = 512
PORT_MAX = 65_535
_PORT = re.compile(r":?(\d{1,5})")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}(/.*)?")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that was ready at `ready_unix_s`. `pid_started_s` tells it from a later process of its pid.

    `tls`: what it serves HTTPS with.
    """

    url: str
    pid: int
    pid_started_s: float
    ready_unix_s: float
    tls: TlsFiles | None = None


class RunningServers:
    """The files of one user's servers in `folder`. Never raises for a file that cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mine: Path | None = None

    @classmethod
    def of_user(cls, env: Mapping[str, str]) -> RunningServers:
        """Return the servers of the user whose environment this is."""
        state = Path(env.get("XDG_STATE_HOME") or "~/.local/state")
        with suppress(RuntimeError):  # whose home cannot be determined: nothing will be found there
            state = state.expanduser()
        return cls(state / "samovar" / "servers")

    def announce(self, url: str, tls: TlsFiles | None = None) -> None:
        """Write down that this process serves at `url`, with the certificate of `tls`."""
        import psutil

        process = psutil.Process()
        path = self.folder / f"{process.pid}.json"
        note = {"url": url, "pid": process.pid, "pid_started_s": process.create_time()}
        if tls is not None:
            note["tls"] = [str(file) for file in (tls.certificate, tls.key, tls.client_ca) if file]
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(path, json.dumps(note).encode(), durable=False)
        except OSError as error:
            logger.info("clients need the address: %s cannot be written: %s", path, error)
            return
        self._mine = path

    def withdraw(self) -> None:
        """Remove what this process has written."""
        if self._mine is not None:
            with suppress(OSError):
                self._mine.unlink()
            self._mine = None

    def living(self) -> list[RunningServer]:
        """Return the servers whose processes live, the latest first; removes the files of others."""
        try:
            paths = sorted(self.folder.glob("*.json"))[:FILES_MAX]
        except OSError:
            return []
        found = []
        for path in paths:
            server = _read(path)
            if server is None or not _is_alive(server):
                with suppress(OSError):
                    path.unlink()
            else:
                found.append(server)
        return sorted(found, key=lambda server: server.ready_unix_s, reverse=True)


def _read(path: Path) -> RunningServer | None:
    try:
        note: Any = parse_json(path.read_bytes())
        url, pid, started_s = str(note["url"]), int(note["pid"]), float(note["pid_started_s"])
        ready_unix_s = path.stat().st_mtime
        tls = TlsFiles(*map(Path, note["tls"])) if "tls" in note else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if pid <= 0 or len(url) > URL_CHARS_MAX or not url.isprintable():
        return None
    if not url.startswith("http://" if tls is None else "https://"):
        return None
    return RunningServer(url, pid, started_s, ready_unix_s, tls)


def _is_alive(server: RunningServer) -> bool:
    import psutil

    try:
        process = psutil.Process(server.pid)
        is_same = abs(process.create_time() - server.pid_started_s) < 1.0
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # the process is of another user now
        return False


def full_url(given: str) -> str:
    """Return the URL that `host:port`, `:port` or a port stands for; anything else as it is."""
    text = given.strip()
    if match := _PORT.fullmatch(text):
        return f"http://127.0.0.1:{match[1]}"
    return f"http://{text}" if _HOST_PORT.fullmatch(text) else text


def server_url(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the server's URL: as given, else of the server that was ready last, else the default one."""
    if given:
        return full_url(given)
    living = RunningServers.of_user(env).living()
    return living[0].url if living else DEFAULT_URL


def trust_of(url: str, env: Mapping[str, str] = os.environ) -> ssl.SSLContext | bool:
    """Return what a client of `url` verifies by, as httpx takes it.

    A server of this user on this machine by its very certificate, which may be of another name than the
    address here; others by the system's authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR.
    """
    if not url.startswith("https://"):
        return True
    for server in RunningServers.of_user(env).living():
        if server.tls is not None and f"{url}/".startswith(f"{server.url}/"):
            with suppress(CertificateRefused):  # files of before, or that this process may not read
                return server.tls.pin()
    return ssl.create_default_context()


class AccessRefused(ValueError):
    """A server's address or key cannot be used; the message says why."""


def base_of(url: str, api_key: str | None) -> str:
    """Return the root of the server at `url`, which may end in /v1. Raises `AccessRefused`."""
    import httpx  # `samovar serve` needs none

    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = httpx.URL(base)
    except (httpx.InvalidURL, ValueError):
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > PORT_MAX:
        raise AccessRefused(f"--url {url} is not a URL. Write it like {DEFAULT_URL}")
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise AccessRefused("the API key in SAMOVAR_API_KEY holds characters that no HTTP header can carry")
    return base


def client_of(
    url: str, api_key: str | None, timeout_s: float, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """Return an HTTP client of the server at `url`, with the key if there is one. Raises `AccessRefused`."""
    import httpx

    base = base_of(url, api_key)
    # trust_env: a proxy for external addresses cannot reach this machine.
    return httpx.Client(
        base_url=base,
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout_s,
        trust_env=False,
        transport=transport,
        verify=trust_of(base),
    )
