"""A verifier whose model is divided among processes: which settings that takes, and what the loss of one does."""

from __future__ import annotations

import os
import signal

import torch

from hedgerow.engine.numa import bind, device_node, usable
from hedgerow.engine.rank_door import Door, Split
from hedgerow.engine.rank_target import CudaGroupTarget
from hedgerow.engine.ranks import RankGroup
from hedgerow.engine.tree import TreeConfig
from hedgerow.model.config import K2Config
from hedgerow.model.devices import cuda_device, pci_address
from hedgerow.model.interface import Target
from hedgerow.model.ranked import RankEngine
from hedgerow.model.room import check_room
from hedgerow.model.selfcheck import SelfCheckFailed, check_rows
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.tls import mutual_contexts
from hedgerow.rpc.work import end_now
from services.verifier.config import VerifierServiceConfig
from services.verifier.group import split_of

log = get_log(__name__)


def load_ranks(config: VerifierServiceConfig, layers: tuple[int, ...]) -> Target:
    """The model of `tensor_parallel` ranks, of which this process is the first. Raises HedgerowError."""
    split = split_of(config)
    engine, device = _engine(config, split)
    _check_room(config, split, device, len(layers))
    threads = max(1, config.threads_used // split.each)
    cores = usable()
    wanted = None if device is None else device_node(pci_address(0))
    bound = bind(0, split.each, cores, wanted)
    torch.set_num_threads(threads)
    group = RankGroup(
        config.model_path, split.ranks, threads, on_lost=_lost, cores=cores, engine=engine, feature_layers=layers,
        hosts=split.hosts, door=_door(config, split), on_leaving=_left, address=config.group_address or "",
        room=(rows_of(config), config.cache_pages),
    )  # fmt: skip
    target = group.load()
    _check(target)
    log.info(
        "all ranks are ready",
        ranks=split.ranks,
        hosts=split.hosts,
        threads=threads,
        law=target.kernel_law,
        bound=bool(bound),
    )
    return target


def rows_of(config: VerifierServiceConfig) -> int:
    """Of the largest step that is warmed up."""
    return config.max_sequences * TreeConfig(config.max_budget).q_len + config.prefill_rows


def growth_of(config: VerifierServiceConfig, model: Target) -> int:
    """Bytes by which steps' buffers on each device grow when all shapes are prepared, behind the cache."""
    if config.device != "cuda":
        return 0
    from hedgerow.model.cuda_memory import growth  # its kernels need triton

    return growth(model.config, len(model.feature_layers), rows_of(config), config.tensor_parallel)


def _check_room(config: VerifierServiceConfig, split: Split, device: torch.device | None, taps: int) -> None:
    """Raises ConfigError, CheckpointError; no rank has been started."""
    folder, c = config.model_path, K2Config.from_folder(config.model_path)
    if device is None:
        check_room(folder, c, here=split.each, ranks=split.ranks)
        return
    from hedgerow.model.cuda_memory import Asked, check_device  # its kernels need triton

    check_device(folder, c, device, Asked(rows_of(config), config.cache_pages), taps, split.ranks)


def _check(target: Target) -> None:
    """Raises SelfCheckFailed. Ranks that read each other's memory gather their parts where those have other bits."""
    try:
        check_rows(target)
    except SelfCheckFailed as error:
        if not (isinstance(target, CudaGroupTarget) and target.direct):
            raise
        log.warning("the ranks do not read each other's memory: it gives other bits", why=str(error))
        target.gather()
        check_rows(target)


def _engine(config: VerifierServiceConfig, split: Split) -> tuple[RankEngine, torch.device | None]:
    """What computes every rank, and the device of the first. Raises ConfigError, InvalidRequest."""
    if config.device == "cpu":
        return ("compiled" if config.engine == "compiled" else "torch"), None
    if config.engine != "auto":
        raise ConfigError(variable_of("engine"), config.engine, "must be auto where device is cuda: it has one engine")
    if split.hosts > 1:
        raise ConfigError(variable_of("group_hosts"), str(split.hosts), "must be 1 where device is cuda")
    device, there = cuda_device(), torch.cuda.device_count()
    if there < split.each:
        limit = f"at most {there}, the CUDA devices of this host: each rank takes one"
        raise ConfigError(variable_of("tensor_parallel"), str(split.each), limit)
    return "cuda", device


def _door(config: VerifierServiceConfig, split: Split) -> Door | None:
    if split.hosts == 1:
        return None
    assert config.group_listen is not None
    tls = mutual_contexts(config, called=True)
    try:
        return Door(config.group_listen, config.group_secret.encode(), split, tls)
    except OSError as error:
        why = f"cannot listen there: {error.strerror}"
        raise ConfigError(variable_of("group_listen"), repr(config.group_listen), why) from None


def _left(who: str) -> None:
    """A host of the group is about to end: this process drains as if it had been told to itself, unless it was."""
    log.info("a host of the group leaves; this process drains", who=who)
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


def _lost(why: str) -> None:
    """Ends the process as if it had been killed: its sequences go on elsewhere, or here once it is back. A step that
    failed would tell their owners that they are over."""
    log.error("a rank of the group is lost; this process ends", why=why)
    end_now(1)
