"""TLS of what others connect to: the HTTP endpoint, and the processes of a cluster for each other.

Certificates come from files and are taken up as these change. Needs `ssl` alone.
"""

from samovar.configs.tls.files import CertificateRefused, RenewedContext, TlsFiles
from samovar.configs.tls.nodes import NodeTls, node_tls, tls_in

__all__ = ["CertificateRefused", "NodeTls", "RenewedContext", "TlsFiles", "node_tls", "tls_in"]
