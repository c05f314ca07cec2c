"""Where the training text comes from: wheels of listed packages and the interpreters' libraries.

A file is taken only if the licence of its package is permissive according to the package's own
METADATA, if it does not lie in a vendored sub-folder (those carry other people's licences, which
METADATA does not tell), and if its own header names no copyleft or proprietary terms.
"""

from __future__ import annotations

import email
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PERMISSIVE = {
    "MIT", "MIT-0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSD-3-Clause-Clear", "Apache-2.0", "PSF-2.0",
    "Python-2.0", "ISC", "0BSD", "Zlib", "CC0-1.0", "Unlicense", "HPND", "MIT-CMU", "ZPL-2.1", "BSL-1.0",
}  # fmt: skip
CLASSIFIER = "License :: OSI Approved :: "
CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
    "Zope Public License": "ZPL-2.1",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
}
FREE_TEXT = [
    (r"apache[ -]*(software )?(license)?[, -]*(version|v)?[ .]*2", "Apache-2.0"),
    (r"^(the )?mit( license)?$", "MIT"),
    (r"^(new |modified |3-clause |2-clause )?bsd", "BSD"),
    (r"^isc", "ISC"),
    (r"^(psf|python software foundation)", "PSF-2.0"),
]
VENDORED = re.compile(
    r"(^|/)(_?vendor(ed|ized)?(_packages)?|third_?party[^/]*|_?externals?|extern|_distutils|site-packages"
    r"|_bundled|bundled|compat/_?backports|lib2to3)(/|$)",
    re.I,
)
SKIPPED = re.compile(
    r"(^|/)(tests?|testing|_tests?|__tests__|conftest|idle_test|sample_test[^/]*|locale|migrations)(/|\.py$|$)"
    r"|(^|/)test_[^/]*$|_test\.py$|_pb2(_grpc)?\.py$|(^|/)dummy_|/antlr|_lextab|_parsetab|unicodedata_db",
    re.I,
)
HEADER_REFUSED = re.compile(
    r"\bL?A?GPL|GNU (Lesser |Library |Affero )?General Public|Mozilla Public|\bMPL[- ]?[12]|Creative Commons"
    r"|CC[- ]BY|EUPL|CeCILL|proprietary|confidential|Server Side Public|Elastic License|Commons Clause",
    re.I,
)
STDLIB_SKIPPED = re.compile(r"(^|/)(site-packages|test|tests|ensurepip|pydoc_data|lib2to3|encodings|turtledemo)(/|$)")


@dataclass(frozen=True)
class Source:
    """One file with the package, version and licence that it came under."""

    package: str
    version: str
    licence: str
    path: str
    text: str


def expression_is_permissive(expression: str) -> bool:
    """SPDX: every AND operand must be permissive; of an OR, one operand is enough."""
    clauses = re.split(r"\s+AND\s+", expression.replace("(", "").replace(")", ""), flags=re.I)
    return all(
        any(term.split(" WITH ")[0].strip() in PERMISSIVE for term in re.split(r"\s+OR\s+", clause, flags=re.I))
        for clause in clauses
    )


def licence_of(metadata: str) -> str | None:
    """The licence that METADATA declares, or None if it is missing, unclear or not permissive."""
    message = email.message_from_string(metadata)
    expression = message.get("License-Expression")
    if expression:
        return expression if expression_is_permissive(expression) else None
    classified = [c[len(CLASSIFIER) :] for c in message.get_all("Classifier", []) if c.startswith(CLASSIFIER)]
    if classified:
        names = [CLASSIFIERS.get(c) for c in classified]
        return " OR ".join(n for n in names if n) if all(names) else None
    text = (message.get("License") or "").strip()
    if expression_is_permissive(text):
        return text
    if len(text) > 100 or HEADER_REFUSED.search(text):
        return None
    return next((name for pattern, name in FREE_TEXT if re.search(pattern, text, re.I)), None)


def wanted_path(path: str) -> bool:
    """Whether a file inside a package is ordinary source: no tests, no vendored or generated code."""
    return path.endswith(".py") and not VENDORED.search(path) and not SKIPPED.search(path)


def wheel_files(wheel: Path) -> Iterator[Source]:
    """The wanted files of one wheel; nothing if its licence is not clearly permissive."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = archive.read(metadata_name).decode("utf-8", "replace")
        licence = licence_of(metadata)
        if licence is None:
            return
        message = email.message_from_string(metadata)
        for name in sorted(names):
            if wanted_path(name):
                text = archive.read(name).decode("utf-8", "replace")
                yield Source(str(message["Name"]), str(message["Version"]), licence, name, text)


def stdlib_files(lib: Path) -> Iterator[Source]:
    """The wanted files of one interpreter's standard library (`.../lib/python3.13`)."""
    version = lib.name.removeprefix("python")
    for path in sorted(lib.rglob("*.py")):
        name = path.relative_to(lib).as_posix()
        if not STDLIB_SKIPPED.search(name) and wanted_path(name):
            yield Source("CPython", version, "PSF-2.0", name, path.read_text("utf-8", "replace"))


def header_is_permissive(text: str) -> bool:
    """Refuse a file whose first lines name other terms than the package's licence."""
    return not HEADER_REFUSED.search(text[:3000])
