"""Training text out of what is installed here, for `train_selector`: no fetch, no tokenizer to train.

    python -m models.train.installed_text --packages torch sympy transformers     # -> .carry/corpus/train0.u16.xz

A stream as `pack` writes it, smaller. Every path of models/heldout/files.tsv is left out, whatever its version.
Licences and filters are those of `corpus`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from models.train import tokenizer_ids as tok
from models.train.chat import pairs
from models.train.corpus import CAPS, DEFAULT_CAP, clean, key_of, looks_written
from models.train.installed import LISTED, read_list
from models.train.pack import grouped, save, stream
from models.train.sources import Source, header_is_permissive, licence_of, stdlib_files, wanted_path
from models.train.tokenizer import load


def installed_files(package: str) -> Iterator[Source]:
    """The wanted files of an installed package; nothing if its licence is not clearly permissive."""
    found = importlib.metadata.distribution(package)
    licence = licence_of(found.read_text("METADATA") or "")
    if licence is None:
        print(f"{package}: its licence is not clearly permissive", flush=True)
        return
    for file in sorted(found.files or (), key=str):
        path = Path(str(found.locate_file(file)))
        if wanted_path(file.as_posix()) and path.is_file():
            yield Source(package, found.version, licence, file.as_posix(), path.read_text("utf-8", "replace"))


def chosen(packages: list[str], library: Path, heldout: Path) -> Iterator[Source]:
    """Files that pass the filters of `corpus`, capped per package, none of them held out."""
    listed = {entry.path for entry in read_list(heldout)}
    for files in (stdlib_files(library), *map(installed_files, packages)):
        used = 0
        for source in sorted((s for s in files if header_is_permissive(s.text)), key=key_of):
            text = clean(source.text)
            if source.path not in listed and looks_written(text) and used < CAPS.get(source.package, DEFAULT_CAP):
                used += len(text)
                yield Source(source.package, source.version, source.licence, source.path, text)


def chat(encoding: tiktoken.Encoding, sources: list[Source]) -> list[list[int]]:
    """Pairs in Kimi's turn form, as `pack` writes them."""
    user, assistant = (encoding.encode(name) for name in ("user", "assistant"))
    opening = [tok.IM_USER, *user, tok.IM_MIDDLE]
    middle = [tok.IM_END, tok.IM_ASSISTANT, *assistant, tok.IM_MIDDLE, tok.THINK, tok.END_THINK]
    bodies = set[int]()
    found = [pair for source in sources for pair in pairs(source, bodies)]
    requests = encoding.encode_batch([pair["request"] for pair in found], disallowed_special=())
    answers = encoding.encode_batch([pair["answer"] for pair in found], disallowed_special=())
    return [[*opening, *r, *middle, *a, tok.IM_END] for r, a in zip(requests, answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", nargs="*", default=["torch", "sympy", "transformers"])
    parser.add_argument("--lib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--heldout", type=Path, default=LISTED)
    parser.add_argument("--vocabulary", type=Path, default=Path("models/sapling"))
    parser.add_argument("--out", type=Path, default=Path(".carry/corpus"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    encoding = load(args.vocabulary)
    sources = list(chosen(args.packages, args.lib, args.heldout))
    files = encoding.encode_batch([source.text for source in sources], disallowed_special=())
    talk = grouped(chat(encoding, sources))
    print(f"{len(files)} files, {len(talk)} documents of chat", flush=True)
    save(args.out / "train0.u16.xz", stream(files + talk))


if __name__ == "__main__":
    main()
