"""A verifier whose model is divided among processes: which settings that takes, and what the loss of one does."""

from __future__ import annotations

import torch

from hedgerow.engine.numa import bind, usable
from hedgerow.engine.ranks import RankGroup
from hedgerow.model.config import K2Config
from hedgerow.model.interface import Target
from hedgerow.model.ranked import RankEngine
from hedgerow.model.room import check_room
from hedgerow.model.selfcheck import check_rows
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.work import end_now
from services.verifier.config import VerifierServiceConfig

log = get_log(__name__)


def load_ranks(config: VerifierServiceConfig, layers: tuple[int, ...]) -> Target:
    """The model of `tensor_parallel` ranks, of which this process is the first. Raises HedgerowError."""
    if config.device != "cpu":
        raise ConfigError(variable_of("device"), config.device, "must be cpu, where tensor_parallel is above 1")
    engine: RankEngine = "compiled" if config.engine == "compiled" else "torch"
    check_room(config.model_path, K2Config.from_folder(config.model_path))  # all ranks are on this machine
    threads = max(1, config.threads_used // config.tensor_parallel)
    cores = usable()
    bound = bind(0, config.tensor_parallel, cores)
    torch.set_num_threads(threads)
    group = RankGroup(
        config.model_path, config.tensor_parallel, threads, on_lost=_lost, cores=cores, engine=engine,
        feature_layers=layers,
    )  # fmt: skip
    target = group.load()
    check_rows(target)
    log.info(
        "all ranks are ready", ranks=config.tensor_parallel, threads=threads, law=target.kernel_law, bound=bool(bound)
    )
    return target


def _lost(why: str) -> None:
    """Ends the process as if it had been killed: its sequences go on elsewhere, or here once it is back. A step that
    failed would tell their owners that they are over."""
    log.error("a rank of the group is lost; this process ends", why=why)
    end_now(1)
