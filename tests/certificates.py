"""Authorities and certificates for tests, made by the `openssl` command: no dependency, and what operators use."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

HOSTS = "IP:127.0.0.1,DNS:localhost"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Files(NamedTuple):
    """A certificate, its key, and the authority that signed it."""

    cert: Path
    key: Path
    ca: Path

    def settings(self) -> dict[str, object]:
        """As HEDGEROW_* settings of a service."""
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}


class Authority:
    """Signs certificates; its files are in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, name
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl("req", "-x509", *CURVE, "-keyout", self._key, "-out", self.cert, "-days", "30", "-subj", f"/CN={name}")

    def issue(self, name: str, *, hosts: str = HOSTS, days: int = 30) -> Files:
        """A certificate for clients and servers; `days` below zero: one that has expired."""
        cert, key, request = (self.folder / f"{name}.{suffix}" for suffix in ("crt", "key", "csr"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *CURVE, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", str(days), "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, "-out", cert, *signed)
        return Files(cert, key, self.cert)


def put(source: Files, target: Files) -> None:
    """Lays the files of one over those of another, each at once, as an operator's tool does."""
    for new, old in zip(source, target, strict=True):
        aside = old.with_name(f"{old.name}.new")
        shutil.copyfile(new, aside)
        aside.replace(old)


def copied(source: Files, folder: Path) -> Files:
    """The same in files of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Files(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    put(source, made)
    return made


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
