"""TLS of the HTTP endpoint, of 1.2 at least: certificates from files, taken up again when these change.

Needs `ssl` alone.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

PROTOCOL = "http/1.1"
REVOKED = b"BEGIN X509 CRL"
Stamp = tuple[int, int, int]


class CertificateRefused(Exception):
    """Files that no connection could be made with; the text says which and why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a certificate with its chain, its key, and those who may certify clients.

    `client_ca`: None: clients need no certificate. It may hold lists of revoked ones beside the authorities.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def open(self) -> ssl.SSLContext:
        """Return a server's context. Raises `CertificateRefused`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([PROTOCOL])
        try:
            context.load_cert_chain(self.certificate, self.key, password="")  # never asks a terminal for one
        except (OSError, ValueError) as error:
            raise CertificateRefused(f"{self.certificate} with {self.key}: {error}") from error
        if self.client_ca is not None:
            self._ask_clients(context, self.client_ca)
        return context

    def _ask_clients(self, context: ssl.SSLContext, client_ca: Path) -> None:
        # A wrong certificate ends the handshake; without one, probes alone are answered (`http_guard`).
        context.verify_mode = ssl.CERT_OPTIONAL
        # A resumed session is not verified again: one that was revoked would go on for hours.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        try:
            context.load_verify_locations(client_ca)
            if REVOKED in client_ca.read_bytes():
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        except (OSError, ValueError) as error:
            raise CertificateRefused(f"{client_ca}: {error}") from error

    def pin(self) -> ssl.SSLContext:
        """Return a client's context that trusts this very certificate, under whichever name it is reached.

        For who has the files: it shows the certificate as its own as well, should the server want one.
        Raises `CertificateRefused`.
        """
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is what is trusted
        try:
            context.load_verify_locations(self.certificate)
            if self.client_ca is not None:
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise CertificateRefused(f"{self.certificate}: {error}") from error
        return context

    def check(self) -> None:
        """Shake hands with ourselves. Raises `CertificateRefused`, for an expired certificate, too."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.open().wrap_bio(there, back, server_side=True)
        client = self.pin().wrap_bio(back, there)
        for end in (client, server, client, server, client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                if end is client:
                    raise CertificateRefused(f"{self.certificate}: {error}") from error
                return  # the client's certificate: it need not be one that clients may have

    def stamps(self) -> tuple[Stamp, ...]:
        """Return what tells these files from later ones; empty while one of them is away."""
        paths = (self.certificate, self.key, *([] if self.client_ca is None else [self.client_ca]))
        try:
            return tuple((found.st_mtime_ns, found.st_size, found.st_ino) for found in map(Path.stat, paths))
        except OSError:
            return ()


class RenewedContext:
    """A server's context, whose handshakes have what the files hold by then.

    Files that do not fit together, as while both are being replaced, leave the former ones in use.
    Raises `CertificateRefused` if there are none to begin with.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = files.stamps()
        self.context = self._current = files.open()
        # Asked in each handshake before a certificate is sent, also where the client names no host.
        self.context.sni_callback = self._renew

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
        stamps = self._files.stamps()
        if stamps != self._seen:
            self._seen = stamps  # also of files that do not fit: they are tried again when they change
            try:
                self._current = self._files.open()
                logger.info("the certificate %s is taken up as it is now", self._files.certificate)
            except CertificateRefused as error:
                logger.warning("the former certificate stays in use: %s", error)
        connection.context = self._current
        if context.verify_flags == self._current.verify_flags:
            return None
        # Lists of revoked ones came or went, and how clients are verified was set as this handshake began.
        context.verify_flags = self._current.verify_flags
        return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
