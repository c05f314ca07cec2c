"""python -m services.drafter, configured by HEDGEROW_* variables."""

import os

from hedgerow.rpc import ending


def main() -> None:
    """A signal ends it from here on, so everything else is imported after that. What torch reads from the environment
    when it loads is fixed before it is loaded."""
    ending.from_the_start()
    from hedgerow.model.blas import pin_blas
    from hedgerow.rpc.config import from_env_or_exit
    from hedgerow.rpc.logs import set_up_logging
    from hedgerow.rpc.work import run_service
    from services.drafter.config import DrafterServiceConfig

    config = from_env_or_exit(DrafterServiceConfig, os.environ)
    set_up_logging("drafter", config.log_level, config.log_format)
    pin_blas(os.environ)
    from services.drafter.service import run

    run_service(run(config))


if __name__ == "__main__":
    main()
