"""Where the clients are installed: a virtual environment for each of Python, one folder for JavaScript.

Versions of the clients are pinned; what they depend on is the newest that they accept, as people get it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.clients import Client

SCRIPTS = Path(__file__).parent / "scripts"
JAVASCRIPT = SCRIPTS / "js"
INSTALL_S = 900
STAMP = "installed.json"


class InstallError(Exception):
    """A client cannot be installed here; the message says what pip or npm said."""


class Environments:
    """Below `root`. What is installed already in the wanted version stays."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def command(self, client: Client) -> list[str]:
        """Install the client, if it is not yet, and give the command that runs its script."""
        if client.is_javascript:
            return ["node", str(self._javascript() / client.script)]
        return [str(self._python(client)), str(SCRIPTS / client.script)]

    def version(self, client: Client) -> str:
        """The pinned version of the client."""
        if client.is_javascript:
            pinned = json.loads((JAVASCRIPT / "package.json").read_text())["dependencies"]
            return str(pinned[client.package])
        return client.packages[0].partition("==")[2]

    def _python(self, client: Client) -> Path:
        folder = self._root / client.name
        python = folder / "bin" / "python"
        wanted = json.dumps([*client.packages, sys.version])
        if _is_stamped(folder, wanted):
            return python
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *client.packages)
        (folder / STAMP).write_text(wanted)
        return python

    def _javascript(self) -> Path:
        """A copy of the scripts beside their packages: Node looks for packages above the script only."""
        folder = self._root / "js"
        folder.mkdir(parents=True, exist_ok=True)
        for path in JAVASCRIPT.iterdir():
            shutil.copy(path, folder)
        wanted = (JAVASCRIPT / "package.json").read_text()
        if not _is_stamped(folder, wanted):
            if shutil.which("npm") is None:
                raise InstallError("npm is not there. On Debian or Ubuntu: apt install nodejs npm")
            _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder))
            (folder / STAMP).write_text(wanted)
        return folder


def _is_stamped(folder: Path, wanted: str) -> bool:
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text() == wanted


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{' '.join(command)}`: not within {INSTALL_S} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise InstallError(f"`{' '.join(command)}`: {' '.join(said)}")
