"""Certificates on disk: what is refused, in which words, and files that change."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hedgerow.certificates import Tls, Watched, hint, read
from hedgerow.errors import InvalidRequest
from tests.certificates import Authority, Files, copied, put


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> Files:
    return authority.issue("good")


def refused(tls: Tls) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(tls)
    return caught.value


def tls_of(files: Files) -> Tls:
    return Tls(files.ca, files.cert, files.key)


def test_good_files_are_read_as_they_are(good: Files) -> None:
    pem = read(tls_of(good))
    assert (pem.ca, pem.cert, pem.key) == tuple(path.read_bytes() for path in (good.ca, good.cert, good.key))
    assert pem.expires is not None
    assert read(Tls(good.ca)) == (pem.ca, None, None, None)


def test_a_missing_file_is_named(good: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # errors cut what is long, as the path of a test may be
    for field in ("ca", "cert", "key"):
        nowhere = Path(f"no-{field}")
        error = refused(Tls(**{"ca": good.ca, "cert": good.cert, "key": good.key, field: nowhere}))
        assert (error.field, error.limit) == (field, "a file that can be read: No such file or directory")
        assert str(nowhere) in str(error)


def test_a_certificate_without_its_key_is_refused(good: Files) -> None:
    assert str(refused(Tls(None, good.cert))) == "key: None is not allowed: a file, because cert is given"
    assert refused(Tls(None, None, good.key)).field == "cert"


def test_the_key_of_another_certificate_is_refused(good: Files, authority: Authority) -> None:
    error = refused(Tls(good.ca, good.cert, authority.issue("other").key))
    assert error.field == "key"
    assert error.limit == f"the key of the certificate in {good.cert}"


def test_an_expired_certificate_is_refused_with_its_dates(authority: Authority) -> None:
    error = refused(tls_of(authority.issue("old", days=-1)))
    assert error.field == "cert"
    assert re.search(r"valid now: it is valid from \d{4}-\d\d-\d\d .* to \d{4}-\d\d-\d\d", error.limit), error.limit


@pytest.mark.parametrize("text", ["", "nothing", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_refused(good: Files, tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.pem"
    path.write_text(text)
    for field in ("ca", "cert"):
        error = refused(Tls(**{"ca": good.ca, "cert": good.cert, "key": good.key, field: path}))
        assert error.field == field
        assert "certificates in PEM" in error.limit


def test_a_key_with_a_passphrase_is_refused_and_none_is_asked_for(good: Files, tmp_path: Path) -> None:
    path = tmp_path / "locked.key"
    path.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    error = refused(Tls(good.ca, good.cert, path))
    assert (error.field, error.limit) == ("key", "a private key without a passphrase")


def test_changed_files_are_taken_and_bad_ones_told_once(authority: Authority, good: Files, tmp_path: Path) -> None:
    files, complaints = copied(good, tmp_path), list[InvalidRequest]()
    watched = Watched(tls_of(files), complaints.append)
    first = watched.current()
    assert watched.current() == first == (1, read(tls_of(good)))
    second = authority.issue("second")
    files.cert.write_bytes(second.cert.read_bytes())  # its key is not there yet
    assert [watched.current() for _ in range(3)] == [first] * 3
    assert [each.field for each in complaints] == ["key"]
    files.key.write_bytes(second.key.read_bytes())
    assert watched.current() == (2, read(tls_of(second)))
    files.cert.unlink()
    assert watched.current()[0] == 2
    assert [each.field for each in complaints] == ["key", "cert"]
    put(second, files)
    assert watched.current()[0] == 2, "the same files again are no change"


def test_a_link_to_the_folder_that_is_turned_is_a_change(authority: Authority, good: Files, tmp_path: Path) -> None:
    """So does Kubernetes change a Secret's files, each of them a link through `..data`."""
    copied(good, tmp_path / "one")
    copied(authority.issue("two"), tmp_path / "two")
    (tmp_path / "now").symlink_to("one")
    here = tmp_path / "now"
    watched = Watched(Tls(here / "ca.crt", here / "tls.crt", here / "tls.key"))
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", here)
    assert watched.current()[0] == 2


def test_grpcs_words_are_explained() -> None:
    def text(said: str) -> str:
        found = hint(f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: {said}")
        return found.text if found else ""

    assert text("error:1000007d:SSL routines:CERTIFICATE_VERIFY_FAILED: certificate has expired").endswith(
        "has expired"
    )
    assert "no authority" in text("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate")
    assert "not for its address" in text("Custom verification check failed: Hostname Verification Check failed.")
    assert "no TLS" in text("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER")
    assert "another certificate" in text("Secure read failed (Socket closed)")
    assert text("Connection refused") == ""
    assert hint("Socket closed") is None, "a connection that was made, and broke later"


def test_the_documented_commands_make_files_that_are_taken(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith(("openssl ", "printf "))]
    assert len(commands) == 4
    Authority(tmp_path)  # skips where there is no openssl
    done = subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read(Tls(tmp_path / "ca.crt", tmp_path / "tls.crt", tmp_path / "tls.key")).expires is not None
