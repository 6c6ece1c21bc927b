"""The instance metadata of the one-machine EC2, at 169.254.169.254 as on AWS: version 2 only.

It tells callers apart by their address. It knows no instances but those it is told of.
"""

from __future__ import annotations

import http.server
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tests.infra.netlab import Host
from tests.infra.netlab.enter import on_network
from tests.infra.netlab.shell import ip_batch

ADDRESS = "169.254.169.254"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
OK, BAD_REQUEST, UNAUTHORIZED, NOT_FOUND = 200, 400, 401, 404


@dataclass
class Known:
    """One instance. `ends_at`: set when AWS wants it back."""

    instance_id: str
    instance_type: str
    region: str
    zone: str
    ip: str
    role: str
    ends_at: datetime | None = None

    def pages(self) -> dict[str, str]:
        """Path below /latest -> text."""
        now = datetime.now(UTC)
        credentials = {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": f"ASIA{self.instance_id[2:].upper():0<16}"[:20],
            "SecretAccessKey": "of-a-fake-instance",
            "Token": "of-a-fake-instance",
            "LastUpdated": _stamp(now),
            "Expiration": _stamp(now + timedelta(hours=6)),
        }
        document = {"instanceId": self.instance_id, "region": self.region, "privateIp": self.ip}
        pages = {
            "meta-data/instance-id": self.instance_id,
            "meta-data/instance-type": self.instance_type,
            "meta-data/local-ipv4": self.ip,
            "meta-data/placement/region": self.region,
            "meta-data/placement/availability-zone": self.zone,
            "meta-data/iam/security-credentials/": self.role,
            f"meta-data/iam/security-credentials/{self.role}": json.dumps(credentials),
            "dynamic/instance-identity/document": json.dumps(document),
        }
        if self.ends_at is not None:
            action = {"action": "terminate", "time": _stamp(self.ends_at)}
            pages["meta-data/spot/instance-action"] = json.dumps(action)
        return pages


class Metadata:
    """`by_ip`: the instances that may ask."""

    def __init__(self) -> None:
        self.by_ip: dict[str, Known] = {}
        self._token = secrets.token_urlsafe(32)

    def answer(self, method: str, path: str, ip: str, headers: dict[str, str]) -> tuple[int, str]:
        """(status, text). Header names are in lower case."""
        known = self.by_ip.get(ip)
        if known is None:
            return NOT_FOUND, "no instance has this address"
        if method == "PUT" and path == "/latest/api/token":
            return (OK, self._token) if TTL_HEADER.lower() in headers else (BAD_REQUEST, "no ttl")
        if headers.get(TOKEN_HEADER.lower()) != self._token:
            return UNAUTHORIZED, "no token"
        text = known.pages().get(path.removeprefix("/latest/")) if method == "GET" else None
        return (NOT_FOUND, "no such page") if text is None else (OK, text)


@contextmanager
def serving(metadata: Metadata, host: Host) -> Iterator[None]:
    """All hosts of the lab reach it; `host` lends it its network."""
    ip_batch(host.init_pid, [f"addr add {ADDRESS}/32 dev eth0"])
    ip_batch(host.bridge_pid, [f"route add {ADDRESS}/32 via {host.ip}"])

    class Handler(http.server.BaseHTTPRequestHandler):
        def _reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text = metadata.answer(self.command, self.path, self.client_address[0], headers)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _reply

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = on_network(host.init_pid, lambda: http.server.ThreadingHTTPServer((ADDRESS, 80), Handler))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metadata", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
