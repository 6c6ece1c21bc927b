"""TLS between the processes of a cluster: one authority, and a certificate for each node. Needs `ssl` alone.

Ray's own variables say where the files are. So what Ray encrypts and what we do cannot differ: where Ray
speaks TLS (`RAY_USE_TLS`), our connections do, by the same files; elsewhere neither does.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samovar.configs.tls.files import (
    CertificateRefused,
    Stamp,
    shake_hands,
    show_certificate,
    stamps_of,
    trust,
    verify_each_time,
)

SWITCH = "RAY_USE_TLS"
CA_VARIABLE = "RAY_TLS_CA_CERT"
CERTIFICATE_VARIABLE, KEY_VARIABLE = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
"""As in a Secret of Kubernetes."""


@dataclass(frozen=True, slots=True)
class NodeTls:
    """PEM files of a node: who certifies nodes (with lists of revoked ones), its certificate, and its key.

    Both ends of a connection show a certificate of that authority, and a caller wants one for the address
    that it has called. TLS 1.3 alone.
    """

    ca: Path
    certificate: Path
    key: Path

    def environment(self) -> dict[str, str]:
        """Return the variables of all Ray's processes, which ours read, too."""
        return {
            SWITCH: "1",
            CA_VARIABLE: str(self.ca),
            CERTIFICATE_VARIABLE: str(self.certificate),
            KEY_VARIABLE: str(self.key),
        }

    def open(self) -> ssl.SSLContext:
        """Return the context of one that listens. Raises `CertificateRefused`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        verify_each_time(context)
        return self._mutual(context)

    def calling(self) -> ssl.SSLContext:
        """Return the context of one that calls, as the files are now. Raises `CertificateRefused`."""
        return self._mutual(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def check(self, address: str = "") -> None:
        """Shake hands with ourselves, at `address` if one is given. Raises `CertificateRefused`."""
        caller = self.calling()
        caller.check_hostname = bool(address)
        _, error = shake_hands(self.open(), caller, address or None)
        if error is not None:
            raise CertificateRefused(f"{self.certificate} of {self.ca}: {error}") from error

    def stamps(self) -> tuple[Stamp, ...]:
        """Return what tells these files from later ones; empty while one of them is away."""
        return stamps_of((self.ca, self.certificate, self.key))

    def _mutual(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        show_certificate(context, self.certificate, self.key)
        trust(context, self.ca)
        return context


def tls_in(folder: Path) -> NodeTls:
    """Return the files of a node in a directory (`cluster.tls_dir`)."""
    return NodeTls(folder / CA_FILE, folder / CERTIFICATE_FILE, folder / KEY_FILE)


def node_tls(environ: Mapping[str, str] = os.environ) -> NodeTls | None:
    """Return the files by which this process speaks to others of its cluster; None: it speaks without TLS.

    Raises `CertificateRefused` if TLS is on and a file is not named, as Ray itself would.
    """
    if environ.get(SWITCH, "0").lower() not in ("1", "true"):
        return None
    try:
        return NodeTls(
            Path(environ[CA_VARIABLE]), Path(environ[CERTIFICATE_VARIABLE]), Path(environ[KEY_VARIABLE])
        )
    except KeyError as missing:
        raise CertificateRefused(f"{SWITCH} is set, and {missing.args[0]} names no file") from None
