"""TLS of the HTTP endpoint: of 1.2 at least, by certificates from files. Needs `ssl` alone."""

from samovar.configs.tls.files import CertificateRefused, TlsFiles
from samovar.configs.tls.renewed import RenewedContext

__all__ = ["CertificateRefused", "RenewedContext", "TlsFiles"]
