"""The held-out files of models/heldout/files.tsv, found again on this machine: installed packages, wheels, libraries.

A figure on held-out text needs the text, which is not in the repository. The list names every held-out file with a hash
of its cleaned text; a file that is found at its path and has that hash is the one that training never saw.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from models.train.corpus import clean

LISTED = Path("models/heldout/files.tsv")


class Listed(NamedTuple):
    """One held-out file: where it comes from, and the SHA-256 of its cleaned text, 16 digits."""

    package: str
    version: str
    path: str
    digest: str


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_list(records: Iterable[dict[str, str]], path: Path) -> None:
    """`records`: of a split of the corpus, texts cleaned."""
    rows = sorted(Listed(r["package"], r["version"], r["path"], digest_of(r["text"])) for r in records)
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def read_list(path: Path = LISTED) -> list[Listed]:
    return [Listed(*line.split("\t")) for line in path.read_text().splitlines()]


def folders_of_this_python() -> list[Path]:
    """Where packages are installed, and the standard library."""
    paths = sysconfig.get_paths()
    return [Path(paths["purelib"]), Path(paths["platlib"]), Path(paths["stdlib"])]


def in_folders(listed: Listed, folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        if (folder / listed.path).is_file():
            yield (folder / listed.path).read_text("utf-8", "replace")


def from_wheels(wanted: frozenset[str], wheels: Path) -> dict[str, list[str]]:
    """Text by path, of the wanted paths in any wheel."""
    found: dict[str, list[str]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in wanted.intersection(archive.namelist()):
                found.setdefault(name, []).append(archive.read(name).decode("utf-8", "replace"))
    return found


def heldout_texts(listed: list[Listed], folders: Iterable[Path], wheels: Path | None = None) -> list[str]:
    """The cleaned texts of the listed files that are here, unchanged, in the list's order."""
    folders = list(folders)
    packed = from_wheels(frozenset(entry.path for entry in listed), wheels) if wheels else {}
    texts = []
    for entry in listed:
        seen = (clean(text) for text in (*in_folders(entry, folders), *packed.get(entry.path, ())))
        texts += [text for text in seen if digest_of(text) == entry.digest][:1]
    return texts
