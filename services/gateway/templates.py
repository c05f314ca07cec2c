"""The chat template that a model folder is served with, as the setting HEDGEROW_CHAT_TEMPLATE says."""

from __future__ import annotations

from pathlib import Path

from services.gateway.chat import KimiTemplate, Template, markers
from services.gateway.members import AUTO, FOLDER, MEMBERS, member_of
from services.gateway.sandbox import FolderTemplate
from services.gateway.tokenizer import Tokenizer, TokenizerError, read_json


def template_of(folder: Path, tokenizer: Tokenizer, choice: str = AUTO) -> Template:
    """`auto`: the template of the member that the folder is; a member's name: that one; `folder`: the folder's own.

    Raises TokenizerError with the file and what is wrong.
    """
    thinks = default_thinking(folder)
    if choice == FOLDER:
        return FolderTemplate.from_folder(folder, tokenizer, thinks)
    member = member_of(folder) if choice == AUTO else MEMBERS[choice]
    known = frozenset(tokenizer.special_names)
    if missing := [marker for marker in markers(member) if marker not in known]:
        why = f"no token {missing[0]}, which the template of {member.name} writes; see HEDGEROW_CHAT_TEMPLATE"
        raise TokenizerError(folder / "tokenizer_config.json", why)
    return KimiTemplate(member, tokenizer, thinks)


def default_thinking(folder: Path) -> bool:
    """The key `thinking` of the folder's `generation_config.json`; K2.6's own default where there is none."""
    path = folder / "generation_config.json"
    return bool(read_json(path).get("thinking", True)) if path.exists() else True
