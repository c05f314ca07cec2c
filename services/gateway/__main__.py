"""`python -m services.gateway`: the process, configured by HEDGEROW_* variables. See `service.py`."""

from __future__ import annotations

import os
import sys

from hedgerow.rpc import ending


def main() -> None:
    """A signal ends it from here on, so everything else is imported after that."""
    ending.from_the_start()
    from hedgerow.errors import HedgerowError, InvalidRequest
    from hedgerow.rpc.config import from_env_or_exit
    from hedgerow.rpc.logs import get_log, set_up_logging
    from hedgerow.rpc.work import run_service
    from services.gateway.config import GatewayConfig, addresses
    from services.gateway.service import run
    from services.gateway.templates import template_of
    from services.gateway.tokenizer import Tokenizer

    config = from_env_or_exit(GatewayConfig, os.environ)
    set_up_logging("gateway", config.log_level, config.log_format)
    try:
        for field, given in (("verifier", config.verifier), ("kvstore", config.kvstore)):
            if not addresses(given):
                raise InvalidRequest(field, given, "at least one address")
        template = template_of(config.model_path, Tokenizer.from_folder(config.model_path), config.chat_template)
        if not config.tenant_secret:
            get_log(__name__).info(
                "no HEDGEROW_TENANT_SECRET: an idempotency key joins its session within this process only"
            )
    except HedgerowError as error:
        sys.exit(f"{error.reason}: {error}")
    run_service(run(config, template))


if __name__ == "__main__":
    main()
