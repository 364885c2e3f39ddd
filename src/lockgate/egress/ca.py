"""A certificate authority for one run, in memory, for the few hosts whose TLS is opened at the gateway.

Rule 1: keys are made in this process and never written: OpenSSL reads them from a sealed memory file that is closed at
        once. They end with the run.
Rule 2: the authority is constrained to the intercepted names (RFC 5280 section 4.2.1.10) and may sign no other
        authority, so that whoever trusts it trusts it for nothing else.
Rule 3: only the confined process of this run is told to trust it.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import ipaddress
import os
import ssl
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from lockgate.contract.errors import ConfigError
from lockgate.policy.host import Host

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_VALID: Final = dt.timedelta(days=30)
_BACK: Final = dt.timedelta(hours=1)
_KEPT: Final = 256
PROTOCOL: Final = "http/1.1"


def require() -> None:
    """Check that certificates can be made here.

    Raises:
        ConfigError: `cryptography` is not installed.

    """
    if find_spec("cryptography") is None:
        raise ConfigError(
            "this policy has endpoint rules, and interception needs certificates",
            next_step="pip install 'lockgate[intercept]'",
        )


class Authority:
    """One run's authority.

    Args:
        names: canonical hosts; for a wildcard its parent.

    Attributes:
        pem: its certificate.

    """

    def __init__(self, names: Iterable[str]) -> None:
        from cryptography import x509  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import NameOID  # noqa: PLC0415

        self._key: ec.EllipticCurvePrivateKey = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lockgate: one run")])
        self._contexts: dict[str, ssl.SSLContext] = {}
        now = dt.datetime.now(dt.UTC)
        self._ends = now + _VALID
        public = self._key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACK)
            .not_valid_after(self._ends)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(
                x509.NameConstraints([_general(name, network=True) for name in sorted(names)], None), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem: str = certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def context(self, host: Host) -> ssl.SSLContext:
        """Return the server side for `host`: its own certificate, TLS 1.2 or newer, HTTP/1.1."""
        found = self._contexts.get(host.text)
        if found is None:
            if len(self._contexts) >= _KEPT:
                self._contexts.clear()
            found = self._contexts[host.text] = self._make(host)
        return found

    def _make(self, host: Host) -> ssl.SSLContext:
        from cryptography import x509  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(dt.datetime.now(dt.UTC) - _BACK)
            .not_valid_after(self._ends)
            .add_extension(x509.SubjectAlternativeName([_general(host.text)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([PROTOCOL])
        _load_chain(context, pem)
        return context


class Trust:
    """How the gateway speaks TLS: as a client to destinations, as a server to a run.

    Args:
        upstream: verifies destinations; None = the system's store (and `ca_file`).
        ca_file: more trust anchors, PEM, for destinations of the operator's own.

    """

    def __init__(self, upstream: ssl.SSLContext | None = None, ca_file: str | None = None) -> None:
        if upstream is None:
            upstream = ssl.create_default_context()
            if ca_file is not None:
                try:
                    upstream.load_verify_locations(ca_file)
                except (OSError, ssl.SSLError) as error:
                    raise ConfigError(
                        f"the trust anchors {ca_file!r} cannot be read ({type(error).__name__})",
                        next_step="name a PEM file that this user can read",
                    ) from None
        upstream.minimum_version = ssl.TLSVersion.TLSv1_2
        upstream.set_alpn_protocols([PROTOCOL])
        self.upstream = upstream


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificate from memory: the ssl module takes file names only (memfd_create(2))."""
    fd = os.memfd_create("lockgate-certificate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, pem)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _general(name: str, *, network: bool = False) -> x509.GeneralName:
    from cryptography import x509  # noqa: PLC0415 - an extra

    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return x509.DNSName(name)
    return x509.IPAddress(ipaddress.ip_network(address) if network else address)


def _usage(*, sign: bool) -> x509.KeyUsage:
    from cryptography import x509  # noqa: PLC0415 - an extra

    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )
