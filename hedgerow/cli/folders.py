"""What a stack finds on disk: its data folder and the checkpoints, looked at before anything is started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest, Unavailable

IMAGES = ("vision_tower.", "mm_projector.")  # tensors of a target that nothing here reads


def make_data_folder(path: Path) -> None:
    """Raises InvalidRequest for a folder that cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "lock").touch()
    except OSError as error:
        raise InvalidRequest("data", str(path), f"a folder that can be written to: {error.strerror}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file: two stores in one folder would destroy each other's log."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(str(path.parent), "another stack uses this folder; choose another with --data") from None
        yield


def secret(path: Path) -> str:
    """The secret behind session ids, made once: with another one, idempotency keys would not find their sessions.

    Written aside and renamed, so that a full disk leaves none rather than an empty one. Raises InvalidRequest for a
    file that holds nothing.
    """
    if not path.exists():
        aside = path.with_name(f"{path.name}.new")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    found = path.read_text(errors="replace").strip()
    if not found:
        raise InvalidRequest("data", str(path), "not empty; without the file a new secret is made")
    return found


def check_target(folder: Path) -> None:
    """Raises InvalidRequest for what cannot be a target's checkpoint; what only its loading shows is said there."""
    _check_checkpoint("--model", folder)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise InvalidRequest("--model", str(folder), f"a checkpoint: {name} is missing there")


def check_drafter(folder: Path) -> None:
    """As `check_target`, for a DFlash drafter."""
    _check_checkpoint("--drafter", folder)
    feature_layers(folder)


def feature_layers(drafter: Path) -> list[int]:
    """The target's layers that a DFlash checkpoint reads; with them the verifier need not wait for the drafter.

    Where they are not named, they follow from the target's depth by the package `dflash`'s own rule.
    """
    path = drafter / "config.json"
    try:
        top = strict_json.loads(path.read_bytes())
        inner = top.get("dflash_config") or {}
        ids = inner.get("target_layer_ids") or top.get("target_layer_ids")
        if not ids:
            depth = int(inner.get("num_target_layers") or top["num_target_layers"])
            return default_layers(depth, int(top["num_hidden_layers"]))
        return [int(layer) for layer in (ids if isinstance(ids, list) else [ids])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        limit = "a DFlash config.json with dflash_config.target_layer_ids, or with num_target_layers"
        raise InvalidRequest("drafter", str(path), limit) from error


def default_layers(depth: int, layers: int) -> list[int]:
    """Of a target of `depth` layers, for a drafter of `layers`."""
    if layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers)]


def _check_checkpoint(option: str, folder: Path) -> None:
    def refuse(why: str) -> InvalidRequest:
        return InvalidRequest(option, str(folder), f"a checkpoint: {why}")

    if not folder.is_dir():
        raise refuse("there is no such folder")
    for name in ("config.json", "model.safetensors.index.json"):
        path = folder / name
        if not path.is_file():
            if name == "config.json":
                raise refuse(f"{name} is missing there")
            continue
        try:
            read: Any = strict_json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise refuse(f"{name} cannot be read: {error}") from error
        if not isinstance(read, dict):
            raise refuse(f"{name} holds no JSON object")
        names = read.get("weight_map") or {}
        if not isinstance(names, dict):
            raise refuse(f"weight_map of {name} is no JSON object")
        for shard in sorted({str(shard) for name, shard in names.items() if not name.startswith(IMAGES)}):
            if not (folder / shard).is_file():
                raise refuse(f"{shard} is missing there, and {name} names it")
    if not any(folder.glob("*.safetensors")):
        raise refuse("its weights (*.safetensors) are missing there")
