"""`python -m services.kvstore`: the commit log. Configuration: HEDGEROW_* variables, see `config.py`."""

import os

from hedgerow.rpc import ending


def main() -> None:
    """A signal ends it from here on, so everything else is imported after that."""
    ending.from_the_start()
    from hedgerow.rpc.config import from_env_or_exit
    from hedgerow.rpc.logs import set_up_logging
    from hedgerow.rpc.work import run_service
    from services.kvstore.config import KvStoreConfig
    from services.kvstore.service import run

    config = from_env_or_exit(KvStoreConfig, os.environ)
    set_up_logging("kvstore", config.log_level, config.log_format)
    run_service(run(config))


if __name__ == "__main__":
    main()
