"""TLS of the HTTP endpoint, of 1.2 at least: certificates from files, taken up again when these change."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

PROTOCOL = "http/1.1"
REVOKED = b"BEGIN X509 CRL"
CERTIFICATE = re.compile(rb"-----BEGIN ((?:X509 |TRUSTED )?CERTIFICATE)-----.*?-----END \1-----", re.DOTALL)
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
        show_certificate(context, self.certificate, self.key)
        if self.client_ca is not None:
            self._ask_clients(context, self.client_ca)
        return context

    def _ask_clients(self, context: ssl.SSLContext, client_ca: Path) -> None:
        # A wrong certificate ends the handshake; without one, probes alone are answered (`http_guard`).
        context.verify_mode = ssl.CERT_OPTIONAL
        verify_each_time(context)
        trust(context, client_ca)

    def pin(self) -> ssl.SSLContext:
        """Return a client's context that trusts this very certificate, under whichever name it is reached.

        For who has the files: it shows the certificate as its own as well, should the server want one.
        Raises `CertificateRefused`.
        """
        # Not `create_default_context`: it trusts the authorities of the system, too, and no name is checked.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is what is trusted
        try:
            context.load_verify_locations(cadata=first_certificate(self.certificate))
            if self.client_ca is not None:
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise CertificateRefused(f"{self.certificate}: {error}") from error
        return context

    def check(self) -> None:
        """Shake hands with ourselves. Raises `CertificateRefused`, for an expired certificate, too."""
        is_client, error = shake_hands(self.open(), self.pin())
        if is_client:  # a client's certificate need not be one that clients may have
            raise CertificateRefused(f"{self.certificate}: {error}") from error

    def stamps(self) -> tuple[Stamp, ...]:
        """Return what tells these files from later ones; empty while one of them is away."""
        own = [self.certificate, self.key]
        return stamps_of(own if self.client_ca is None else [*own, self.client_ca])


def first_certificate(path: Path) -> str:
    """Return the first certificate of a PEM file: the server's own. Raises `OSError`, `ValueError`.

    Those after it are its authorities: who trusted them would trust all that they certify.
    """
    found = CERTIFICATE.search(path.read_bytes())
    if found is None:
        raise ValueError("it has no certificate")
    return found[0].decode("ascii")


def show_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Have a context show a certificate. Raises `CertificateRefused`."""
    try:
        context.load_cert_chain(certificate, key, password="")  # never asks a terminal for one
    except (OSError, ValueError) as error:
        raise CertificateRefused(f"{certificate} with {key}: {error}") from error


def trust(context: ssl.SSLContext, authorities: Path) -> None:
    """Have a context trust authorities, but for those on lists of revoked ones beside them in the file.

    Raises `CertificateRefused`.
    """
    try:
        context.load_verify_locations(authorities)
        if REVOKED in authorities.read_bytes():
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (OSError, ValueError) as error:
        raise CertificateRefused(f"{authorities}: {error}") from error


def verify_each_time(context: ssl.SSLContext) -> None:
    """Have a server resume no session: it is not verified again, and one that was revoked would go on."""
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str | None = None
) -> tuple[bool, ssl.SSLError | None]:
    """Return whether it is the client that refuses, and why one of them does. `host`: whom it has called."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    listener = server.wrap_bio(there, back, server_side=True)
    caller = client.wrap_bio(back, there, server_hostname=host)
    for end in (caller, listener, caller, listener, caller, listener):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return end is caller, error
    return False, None


def stamps_of(paths: Iterable[Path]) -> tuple[Stamp, ...]:
    """Return what tells these files from later ones; empty while one of them is away."""
    try:
        return tuple((found.st_mtime_ns, found.st_size, found.st_ino) for found in map(Path.stat, paths))
    except OSError:
        return ()


class Renewable(Protocol):
    """Files of a server that may be replaced."""

    @property
    def certificate(self) -> Path: ...

    def open(self) -> ssl.SSLContext: ...

    def stamps(self) -> tuple[Stamp, ...]: ...


class RenewedContext:
    """A server's context, whose handshakes have what the files hold by then.

    Files that do not fit together, as while both are being replaced, leave the former ones in use.
    Raises `CertificateRefused` if there are none to begin with.
    """

    def __init__(self, files: Renewable) -> None:
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
