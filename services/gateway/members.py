"""The members of the K2 family: which one a model folder is, and in what its chat template differs from the others'.

Sources: the published templates and tokenizers of Kimi-K2-Instruct, K2-Thinking, K2.5 and K2.6; see docs/kimi-k2.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.tokenizer import SPECIAL_TOKENS, TokenizerError, read_json

INSTRUCT_EPS = 1e-6  # of its norms; that of K2-Thinking is 1e-5
GREETING = "You are Kimi, an AI assistant created by Moonshot AI."


class Thinking(enum.Enum):
    """Whether a member thinks before it answers."""

    NEVER = "never"
    ALWAYS = "always"
    CHOICE = "as the request says"


@dataclass(frozen=True)
class Member:
    """One template.

    `typescript`: tools are declared as TypeScript, where that can express them, not as JSON. `greeting`: the body of
    the system turn that is made up where a conversation begins without one; empty: none is. `preserves`: the request
    may keep the reasoning of earlier turns.
    """

    name: str
    thinking: Thinking
    typescript: bool = False
    greeting: str = ""
    after_greeting: str = ""
    preserves: bool = False


MEMBERS = {
    member.name: member
    for member in (
        # Its template leaves a line break behind the turn that it makes up, and only there.
        Member("k2-instruct", Thinking.NEVER, greeting=GREETING, after_greeting="\n"),
        Member("k2-thinking", Thinking.ALWAYS, greeting=GREETING),
        Member("k2.5", Thinking.CHOICE, typescript=True),
        Member("k2.6", Thinking.CHOICE, typescript=True, preserves=True),
    )
}
AUTO, FOLDER = "auto", "folder"


def member_of(folder: Path) -> Member:
    """The member that a model folder is, by its configuration.

    `model_type` tells the generations apart. K2-Thinking has a token `<think>` and a larger epsilon than K2-Instruct;
    the end of sequence is [EOS] in K2.5 and `<|im_end|>` in K2.6. Raises TokenizerError with what was found and the
    names.
    """
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    kind = config.get("model_type")
    if kind == "kimi_k2":
        added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        named = any(isinstance(entry, dict) and entry.get("content") == "<think>" for entry in added.values())
        thinks = named and config.get("rms_norm_eps") != INSTRUCT_EPS
        return MEMBERS["k2-thinking" if thinks else "k2-instruct"]
    if kind == "kimi_k25":
        text = config.get("text_config")
        inner: dict[str, Any] = text if isinstance(text, dict) else {}
        end, size = config.get("eos_token_id", inner.get("eos_token_id")), inner.get("vocab_size")
        if isinstance(end, int) and isinstance(size, int):
            place = end - (size - SPECIAL_TOKENS)  # [EOS] is the second special token, <|im_end|> the third
            if place in (1, 2):
                return MEMBERS["k2.5" if place == 1 else "k2.6"]
        found = f"model_type kimi_k25 with eos_token_id {end!r} and text_config.vocab_size {size!r}"
    else:
        found = f"model_type {kind!r}" if config else "a folder without it"
    names = ", ".join(MEMBERS)
    why = f"{found} is no known member of the family; HEDGEROW_CHAT_TEMPLATE names one of {names}, or {FOLDER}"
    raise TokenizerError(path, why)
