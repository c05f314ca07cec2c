"""Writes docs/configuration.md from the services' configuration classes; a house test compares it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hedgerow.rpc.config import describe  # noqa: E402
from services.drafter.config import DrafterServiceConfig  # noqa: E402
from services.gateway.config import GatewayConfig  # noqa: E402
from services.kvstore.config import KvStoreConfig  # noqa: E402
from services.verifier.config import VerifierServiceConfig  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
SERVICES: dict[str, type[object]] = {
    "gateway": GatewayConfig,
    "verifier": VerifierServiceConfig,
    "drafter": DrafterServiceConfig,
    "kvstore": KvStoreConfig,
}
INTRODUCTION = """# Configuration

Each service is one process, `python -m services.<name>`, configured by environment variables. An unknown `HEDGEROW_*`
variable, a missing required one or a value outside its limits stops the start with the variable's name. `hedgerow up`
sets them for the processes that it starts; `--set verifier.engine=torch` sets any other one. Written by
`deploy/configuration.py`.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, config in SERVICES.items():
        parts.append(f"## {name}\n\n| variable | default | meaning |\n|---|---|---|")
        parts += [f"| `{variable}` | {default} | {meaning} |" for variable, default, meaning in describe(config)]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
