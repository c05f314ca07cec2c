"""TLS for every hop: what a service shows, whom it believes, and files that may change while streams are open.

    tls_cert, tls_key             its port speaks TLS, and so does its admin port, health and metrics (`tls_admin`)
    tls_client_certs              ... with clients that show a certificate of `tls_ca`
    tls_ca                        it calls its peers over TLS, and believes certificates of these authorities
    tls_peer_cert, tls_peer_key   what it shows them; if not given, tls_cert and tls_key

Files are looked at before each handshake and each call. A change takes effect for connections made from then on; those
that are open go on. Changed files that do not fit are named in the log, and the ones before stay in use.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from hedgerow.certificates import Pem, Tls, Watched, client_context, contexts, hint, server_context
from hedgerow.errors import InvalidRequest
from hedgerow.rpc import telemetry
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.logs import get_log

EXPIRY = "hedgerow_tls_expiry_seconds"
log = get_log(__name__)
_authorities: dict[str, str] = {}  # per field of Tls: the variable and file that peers are called with


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """What every service takes of TLS; all of it is off unless it is given."""

    tls_cert: Path | None = field(
        default=None, metadata={"help": "certificate chain (PEM) that the service shows; empty: no TLS"}
    )
    tls_key: Path | None = field(default=None, metadata={"help": "its private key (PEM, no passphrase)"})
    tls_ca: Path | None = field(
        default=None,
        metadata={
            "help": "authorities (PEM) of peers, and of clients that show a certificate; empty: peers without TLS"
        },
    )
    tls_client_certs: bool = field(
        default=True, metadata={"help": "with tls_cert: clients must show a certificate of tls_ca"}
    )
    tls_peer_cert: Path | None = field(
        default=None, metadata={"help": "certificate chain that is shown to peers; empty: tls_cert"}
    )
    tls_peer_key: Path | None = field(default=None, metadata={"help": "its private key; empty: tls_key"})
    tls_admin: bool = field(
        default=True, metadata={"help": "TLS on the admin port and for metrics too, where tls_cert is given"}
    )


def own_files(config: TlsConfig) -> Watched | None:
    """What the service's port shows; None: it is plain. Raises ConfigError with the variable and the file."""
    if config.tls_cert is None and config.tls_key is None:
        if config.tls_client_certs and config.tls_ca is not None:
            raise _missing("tls_cert", "tls_ca")
        return None
    if config.tls_client_certs and config.tls_ca is None:
        raise ConfigError(variable_of("tls_ca"), "nothing", "it must be set, or HEDGEROW_TLS_CLIENT_CERTS to false")
    return _watched(
        "tls_ca" if config.tls_client_certs else None,
        "tls_cert",
        "tls_key",
        Tls(config.tls_ca if config.tls_client_certs else None, config.tls_cert, config.tls_key),
    )


@functools.lru_cache(maxsize=1)
def peer_files(config: TlsConfig) -> Watched | None:
    """What peers are called with; None: without TLS. Raises ConfigError with the variable and the file.

    The same for all peers of a process: the files are read once.
    """
    named = config.tls_peer_cert is not None or config.tls_peer_key is not None
    if config.tls_ca is None:
        if named:
            raise _missing("tls_ca", "tls_peer_cert")
        return None
    cert, key = ("tls_peer_cert", "tls_peer_key") if named else ("tls_cert", "tls_key")
    files = Tls(config.tls_ca, getattr(config, cert), getattr(config, key))
    for name, variable, path in (("ca", "tls_ca", files.ca), ("cert", cert, files.cert)):
        _authorities[name] = f"{variable_of(variable)}, {path or 'which is not set'}"
    return _watched("tls_ca", cert, key, files)


def explained(text: str) -> str:
    """gRPC's words for a connection that TLS did not let come about, and what they mean here."""
    meaning = hint(text)
    return text if meaning is None else f"{meaning.text} ({_authorities.get(meaning.field, 'no TLS here')}): {text}"


def watch_expiry(files: Watched) -> None:
    """Exports when the certificate that is in use now expires, so that somebody is woken before."""
    what = "When the service's certificate expires, in Unix seconds."
    telemetry.watch(EXPIRY, what, lambda: files.current()[1].expires or 0.0, goes_down=True)


def server_credentials(files: Watched, client_certs: bool) -> grpc.ServerCredentials:
    """For `Server.add_secure_port`. gRPC asks for new files at each handshake, in a thread of its own."""
    told, first = files.current()
    sent = [told]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        version, pem = files.current()
        if version == sent[0]:
            return None
        sent[0] = version
        return _configuration(pem)

    return grpc.dynamic_ssl_server_credentials(_configuration(first), fetch, client_certs)  # type: ignore[arg-type]


def http_context(files: Watched | None, client_certs: bool) -> ssl.SSLContext | None:
    """For `asyncio.start_server`, with the files of the moment in each handshake; None: without TLS."""
    if files is None:
        return None
    newest = contexts(files, lambda tls: server_context(tls, client_certs))

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = newest()

    context = server_context(files.tls, client_certs)
    context.sni_callback = choose  # called without a name, too
    return context


def mutual_contexts(config: TlsConfig, called: bool) -> Callable[[], ssl.SSLContext] | None:
    """For connections of our own, not gRPC's, on which both ends show certificates: TLS 1.3. None: without TLS.

    `called`: of the end that is called, which shows what the service's port does; else what peers are shown.
    Raises ConfigError with the variable and the file.
    """
    if config.tls_cert is None:
        return None
    if config.tls_ca is None:
        why = f"it must be set, because {variable_of('tls_cert')} is and hosts of a group show each other certificates"
        raise ConfigError(variable_of("tls_ca"), "nothing", why)
    if called:
        files = _watched("tls_ca", "tls_cert", "tls_key", Tls(config.tls_ca, config.tls_cert, config.tls_key))
        return contexts(files, lambda tls: _newest_version(server_context(tls)))
    peers = peer_files(config)
    assert peers is not None
    return contexts(peers, lambda tls: _newest_version(client_context(tls)))


def _newest_version(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.cert is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)


def _watched(ca: str | None, cert: str, key: str, files: Tls) -> Watched:
    names = {"ca": ca or "tls_ca", "cert": cert, "key": key}

    def complain(why: InvalidRequest) -> None:
        log.error(
            "changed certificates are not taken; those before stay in use",
            variable=variable_of(names[why.field]),
            file=why.value,
            must_be=why.limit,
        )

    try:
        watched = Watched(files, complain)
    except InvalidRequest as why:
        raise ConfigError(variable_of(names[why.field]), str(why.value), why.limit) from None
    _, pem = watched.current()
    log.info("certificates", ca=files.ca or "", cert=files.cert or "", expires=round(pem.expires or 0))
    return watched


def _missing(name: str, because: str) -> ConfigError:
    return ConfigError(variable_of(name), "nothing", f"it must be set, because {variable_of(because)} is")
