"""Manages the directory on the user's machine that `samovar up` works from: `~/.samovar/<cluster>/`.

It holds `cluster.yaml` for Ray, and `node/`, which every node gets as `~/samovar`: settings, the NVMe script
and, for a rack, the secrets, which are drawn once and then kept. All of it is for the owner only.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from samovar.cluster.launch.aws import new_token
from samovar.cluster.launch.cluster_file import ClusterFile
from samovar.cluster.launch.settings import CONFIG_FILE, NVME_SCRIPT, SECRETS_FILE, TOKEN_FILE
from samovar.cluster.serve.secrets import DIR_OWNER_ONLY, write_private
from samovar.configs.fields import Tree, public_tree
from samovar.configs.settings import Settings

CLUSTER_FILE = "cluster.yaml"
SERVER_SECRET_FILE = "server-secret"
NODE_DIR = "node"
RUNNING_FILE = "running"
PUBLIC = 0o644
HEADER = "# Written by `samovar up`. All settings that hold on this cluster but the secrets.\n"


@dataclass(frozen=True, slots=True)
class ClusterHome:
    """Files of one cluster, in the directory `root` on the machine that runs `samovar up`."""

    root: Path

    @property
    def cluster_file(self) -> Path:
        return self.root / CLUSTER_FILE

    @property
    def node_dir(self) -> Path:
        return self.root / NODE_DIR

    def write_cluster_file(self, file: ClusterFile, header: str) -> None:
        write_private(self.cluster_file, file.text(header))

    def write_node_files(self, on_nodes: Settings) -> None:
        """Write `node/`, without secrets. `on_nodes`: its settings. Raises `OSError` without the wheel."""
        self._make()
        for old in self.node_dir.glob("*.whl"):
            old.unlink()
        if (wheel := on_nodes.launch.wheel) is not None:
            shutil.copyfile(wheel, self.node_dir / wheel.name)
        config = self.node_dir / CONFIG_FILE
        write_private(config, HEADER + yaml.safe_dump(public_tree(on_nodes), sort_keys=False))
        config.chmod(PUBLIC)
        write_private(self.node_dir / NVME_SCRIPT, nvme_script())

    def write_secrets(self, token: str, secrets: Tree) -> None:
        """Write the secrets for a rack, whose nodes get them by SSH."""
        self._make()
        write_private(self.node_dir / TOKEN_FILE, token + "\n")
        write_private(self.node_dir / SECRETS_FILE, yaml.safe_dump(secrets, sort_keys=True))

    def forget_secrets(self) -> None:
        """Delete secrets left by an earlier rack of this name: in AWS they come from SSM."""
        for name in (TOKEN_FILE, SECRETS_FILE):
            (self.node_dir / name).unlink(missing_ok=True)

    def runs(self, file: ClusterFile, secrets: Tree) -> bool:
        """Whether the last `samovar up` succeeded with these, and no `samovar down` has run since."""
        try:
            return hmac.compare_digest(self._running.read_text().strip(), _digest(file, secrets))
        except FileNotFoundError:
            return False

    def note_running(self, file: ClusterFile, secrets: Tree) -> None:
        write_private(self._running, _digest(file, secrets) + "\n")

    def forget_running(self) -> None:
        self._running.unlink(missing_ok=True)

    @property
    def _running(self) -> Path:
        return self.root / RUNNING_FILE

    def token(self) -> str:
        """Return Ray's token, drawn at the first call."""
        return self._drawn(TOKEN_FILE)

    def server_secret(self) -> str:
        """Return `auth.server_secret`, drawn at the first call: blocks survive a new `samovar up`."""
        return self._drawn(SERVER_SECRET_FILE)

    def _drawn(self, name: str) -> str:
        path = self.root / name
        self._make()
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            write_private(path, new_token() + "\n")
            return path.read_text().strip()

    def _make(self) -> None:
        for path in (self.root, self.node_dir):
            path.mkdir(mode=DIR_OWNER_ONLY, parents=True, exist_ok=True)
            path.chmod(DIR_OWNER_ONLY)


def _digest(file: ClusterFile, secrets: Tree) -> str:
    """Return a digest of all that nodes must restart for. Keyed, so that API keys cannot be tried on it."""
    key = str(secrets.get("auth", {}).get("server_secret", "")).encode()
    text = file.text("") + yaml.safe_dump(secrets, sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def cluster_home(name: str, home: Path) -> ClusterHome:
    """Return the directory of cluster `name`. `home`: the user's."""
    return ClusterHome(home / ".samovar" / name)


def nvme_script() -> str:
    return (resources.files("samovar.cluster") / "scripts" / NVME_SCRIPT).read_text()
