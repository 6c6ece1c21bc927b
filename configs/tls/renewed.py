"""A server's certificate that is taken up again when its files change, without a restart."""

from __future__ import annotations

import logging
import ssl

from samovar.configs.tls.files import CertificateRefused, TlsFiles

logger = logging.getLogger(__name__)


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
