"""The verifier process: loads the model, then drives steps until it is told to stop."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from hedgerow.engine.calibration import cost_model, device_name
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.reads import Hidden, Reads
from hedgerow.engine.step import Drafter, NoDrafter
from hedgerow.engine.tree import TreeConfig
from hedgerow.engine.types import StepResult
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import HedgerowError, Internal
from hedgerow.model.config import K2Config
from hedgerow.model.devices import Device
from hedgerow.model.interface import Prepares, experts_of, shards, waited
from hedgerow.model.interface import Target as Model
from hedgerow.model.loader import embedding_and_head_hash
from hedgerow.model.room import cache_pages
from hedgerow.model.select import Engine, load_target
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.ending import calls_until
from hedgerow.rpc.health import Health
from hedgerow.rpc.health_keeper import answered_beside
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.server import serve
from hedgerow.rpc.tls import peer_files
from hedgerow.rpc.work import serve_while
from services.verifier import member
from services.verifier.agreement import Described, Target, Wanted, configured, reads
from services.verifier.config import VerifierServiceConfig
from services.verifier.convert import description
from services.verifier.defaults import read_defaults
from services.verifier.group import split_of
from services.verifier.hosted import HostedDrafter, feed, load_hosted
from services.verifier.loop import StepLoop
from services.verifier.metrics import watch_acceptance, watch_device, watch_drafter, watch_engine
from services.verifier.neighbours import Text, write, writing
from services.verifier.peers import DrafterPeer, Patience, ask_drafter
from services.verifier.probe import AcceptanceProbe
from services.verifier.ranks import growth_of, load_ranks, rows_of
from services.verifier.servicer import Loaded, VerifierServicer
from services.verifier.spans import Attachments
from services.verifier.trial import Hosted, LayerTrial
from services.verifier.vocabulary import read_vocabulary

SERVICE = "hedgerow.v1.VerifierService"
LAST_WORDS = 1.0  # seconds that error updates, and the ends of streams, have to leave a process that is about to end
MOST_ON_CUDA = {"max_budget": 63, "max_sequences": 64}  # a tree and its anchor are 64 rows there
log = get_log(__name__)


class Group(NamedTuple):
    """The model, its engine, and what it says of itself."""

    model: Model
    engine: VerifierEngine
    defaults: dict[str, Any]  # sampling, by the names of SamplingParams
    head_hash: str  # what a drafter's must equal; "" where none is asked
    reads: Reads = Hidden(0)
    wanted: Wanted = Wanted("hidden", ())
    drafter_hash: str = ""  # of the checkpoint whose fc is applied here; "" where none is
    vocabulary: Sequence[bytes] = ()
    texts: Sequence[Text] = ()  # on a device, for a drafter without a card: its layers cannot be changed later


async def run(config: VerifierServiceConfig) -> None:
    """Serves until SIGTERM. Raises what makes going on impossible: a checkpoint that cannot be used, a failed step."""
    split = split_of(config)
    if config.group_host:
        await member.run(config, split)
        return
    torch.set_num_threads(config.threads_used)
    attachments = Attachments(config.trace_steps)
    servicer = VerifierServicer(config.outgoing_messages, config.orphan_ms / 1000, attachments=attachments)
    health = Health([SERVICE], {"engine": servicer.check})
    serving = serve("verifier", servicer.register, config, health)
    serving = answered_beside(serving, "verifier", config.health_listen, config, health)
    await serve_while(serving, _work(config, servicer, health, attachments))


async def _work(
    config: VerifierServiceConfig, servicer: VerifierServicer, health: Health, attachments: Attachments
) -> None:
    wanted = configured(config) or await ask_drafter(config.drafter or "", peer_files(config))
    # first of the two: the target's cache takes what memory is left
    hosted = await asyncio.to_thread(load_hosted, config) if config.hosts_drafter else None
    group = await asyncio.to_thread(load, config, wanted)
    if hosted is not None:
        hosted.check(_target(config, group))
        feeds = await asyncio.to_thread(feed, group.engine, group.model, hosted)
        if config.device == "cuda":
            health.facts["steps"] = "feed each other" if feeds else "wait for each other"
    incarnation = os.urandom(16)
    peer = _peer(config, group, incarnation)
    if peer is not None:
        peer.traced = attachments.traced
    drafter: Drafter = peer or hosted or NoDrafter()
    probe = AcceptanceProbe(group.engine, config.acceptance_least if group.reads.width else 0.0)

    def deliver(result: StepResult) -> None:
        servicer.deliver(result)
        probe.seen(result)
        _said(probe, health)

    steps = StepLoop(group.engine, drafter, deliver, ahead=config.device == "cuda")
    if config.device == "cuda":  # a call of the driver that does not return ends with the process alone
        health.alive = lambda: steps.trouble() is None
    described = description(config.model_name, group.model, group.engine, incarnation, group.defaults)
    watch_engine(group.engine.load)
    watch_device(lambda: waited(group.model) + (hosted.waited() if hosted else 0.0))
    servicer.count_experts(experts_of(group.model))
    if (there := peer or hosted) is not None:
        watch_drafter(there.counters, lambda: there.connected)
        watch_acceptance(lambda: probe.measured)
    trial = None if there is None else _trial(probe, steps, there, group, health)
    if peer is not None:
        peer.arrived = partial(_arrived, probe, trial, steps, health)
    health.facts |= {"model": config.model_name, "fingerprint": described.fingerprint.digest}
    if (ranks := shards(group.model)) > 1:
        health.facts["tensor_parallel"] = str(ranks)
    servicer.loaded = Loaded(described, group.engine, steps.wake, steps.trouble, config.max_budget)
    if hosted is not None:
        _arrived(probe, trial, steps, health, hosted.described)
    others = [] if peer is None else [peer.run()]
    await asyncio.gather(_steps(steps, servicer), _drain(servicer, health, config.grace), *others)


async def _steps(steps: StepLoop, servicer: VerifierServicer) -> None:
    try:
        await steps.run()
    except Exception as error:
        failed = error if isinstance(error, HedgerowError) else Internal(f"the engine failed: {type(error).__name__}")
        log.error("the engine failed; this process ends", exception=error)
        servicer.fail(failed)
        await servicer.flushed(LAST_WORDS)
        raise


async def _drain(servicer: VerifierServicer, health: Health, grace: float) -> None:
    """Streams end before the server cancels their calls: an end with a status is no failure to whoever reads it."""
    await health.draining.wait()
    servicer.drain()
    cancelled = calls_until(grace)
    await asyncio.sleep(max(cancelled / 2, cancelled - LAST_WORDS))
    servicer.leave()


def _arrived(
    probe: AcceptanceProbe, trial: LayerTrial | None, steps: StepLoop, health: Health, drafter: Described
) -> None:
    if probe.connected(drafter):
        steps.wake()
    if trial is not None:
        trial.connected(drafter)
    _said(probe, health)


def _said(probe: AcceptanceProbe, health: Health) -> None:
    if probe.said:
        health.facts["acceptance"] = probe.said


def _trial(
    probe: AcceptanceProbe, steps: StepLoop, drafter: DrafterPeer | HostedDrafter, group: Group, health: Health
) -> LayerTrial:
    asked = Hosted(steps, drafter) if isinstance(drafter, HostedDrafter) else drafter

    def passes(found: list[Text]) -> Iterator[None]:
        if not isinstance(group.model, Prepares):
            return writing(found, group.model, group.reads, group.vocabulary)
        found += group.texts  # written at the start
        return iter(())

    return LayerTrial(probe, steps, asked, passes, partial(_said, probe, health))


def load(config: VerifierServiceConfig, wanted: Wanted) -> Group:
    """Reads the checkpoint. Blocks for as long as that takes; raises HedgerowError with file and field, for the small
    files before the weights are read."""
    _check_limits(config)
    vocabulary = read_vocabulary(config.model_path, K2Config.from_folder(config.model_path).vocab_size)
    defaults = read_defaults(config.model_path)
    model = _model(config, wanted.layers)
    read, drafter_hash = reads(config, wanted, model)
    limits = EngineConfig(
        max_sequences=config.max_sequences,
        max_waiting=config.max_waiting,
        pages=config.cache_pages,
        prefix_cache=config.prefix_cache,
        prefix_feature_bytes=config.prefix_feature_bytes,
        prefill_rows=config.prefill_rows,
        run_ahead=config.run_ahead,
        max_budget=config.max_budget,
        default_budget=min(config.default_budget, config.max_budget) if read.width else 0,
        auto_budget=min(config.auto_budget, config.max_budget) if read.width else 0,
        prefill_factor=config.prefill_factor_used,
    )
    usual = limits.pages_for(model.config.max_position_embeddings)
    here = 1 if config.device == "cuda" else split_of(config).each  # ranks that share a memory, each with all pages
    limits = replace(limits, pages=cache_pages(model, config.cache_pages, usual, here, growth_of(config, model)))
    on_device, texts = isinstance(model, Prepares), list[Text]()
    if on_device and config.acceptance_least and config.drafter is not None and not wanted.has_card:
        texts = write(model, read, vocabulary, math.inf)  # before the cache: a device's caches grow by moving
    kind = FedVerifier if config.hosts_drafter else VerifierEngine
    engine = kind(model, limits, vocabulary, frozenset(model.config.eos_token_ids), read)
    if isinstance(model, Prepares):  # so that no request waits for a compiler
        most = TreeConfig(engine.config.max_budget).q_len
        model.prepare(limits.max_sequences, most, limits.prefill_rows)
    _calibrate(config, model, engine)
    head_hash = "" if config.drafter is None else embedding_and_head_hash(config.model_path)
    return Group(model, engine, defaults, head_hash, read, wanted, drafter_hash, vocabulary, texts)


def _calibrate(config: VerifierServiceConfig, model: Model, engine: VerifierEngine) -> None:
    """The engine's predictions begin with what steps take here, measured now or at an earlier start."""
    if config.calibration_ms:
        seconds, device = config.calibration_ms / 1000, device_name(config.device)
        costs = cost_model(model, engine.cache, engine.config, seconds, device, config.calibration_path)
        if costs is not None:
            engine.pace.times.expect(costs)


def _check_limits(config: VerifierServiceConfig) -> None:
    for field, most in MOST_ON_CUDA.items() if config.device == "cuda" else ():
        value = getattr(config, field)
        if value > most:
            raise ConfigError(variable_of(field), str(value), f"at most {most} where device is cuda")


def _model(config: VerifierServiceConfig, layers: tuple[int, ...]) -> Model:
    engine, device = cast(Engine, config.engine), cast(Device, config.device)
    if config.tensor_parallel > 1:
        return load_ranks(config, layers)
    return load_target(
        config.model_path, layers, engine, config.threads_used, device=device, rows=rows_of(config),
        pages=config.cache_pages,
    )  # fmt: skip


def _peer(config: VerifierServiceConfig, group: Group, incarnation: bytes) -> DrafterPeer | None:
    if config.drafter is None or config.hosts_drafter:
        return None
    patience = Patience(answer=config.draft_timeout_ms / 1000)
    return DrafterPeer(config.drafter, _target(config, group), incarnation, patience, peer_files(config))


def _target(config: VerifierServiceConfig, group: Group) -> Target:
    c, model = group.model.config, group.model
    return Target(
        c.vocab_size, model.feature_layers, group.reads.width, config.max_sequences, group.head_hash,
        group.wanted.features, c.hidden_size, c.num_hidden_layers, c.rope.theta, frozenset(c.eos_token_ids),
        group.drafter_hash,
    )  # fmt: skip
