"""hedgerow.v1 messages <-> the engine's nouns."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hedgerow import digest
from hedgerow.engine.types import (
    DraftAnswer,
    DraftBatch,
    DraftTree,
    EngineLoad,
    Finish,
    Sampling,
    Start,
    StepStats,
    StepTimings,
    TreeNodes,
    Update,
)
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import HedgerowError, Internal, InvalidRequest, Unsupported
from hedgerow.model.card import AcceptanceCard
from hedgerow.model.interface import Target, shards
from hedgerow.rpc import tracing
from hedgerow.v1 import common_pb2, drafter_pb2, verifier_pb2
from services.verifier.agreement import Described
from services.verifier.config import MOST_BUDGET

# Fields that this version does not serve, and the values that mean "not asked for".
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (0.0, 1.0),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n": (0, 1),
}
_SCALARS = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "max_tokens", "min_tokens", "ignore_eos")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")  # as the store takes them
_EXACT = (common_pb2.EXECUTION_MODE_UNSPECIFIED, common_pb2.EXECUTION_MODE_EXACT)


def start_from(message: verifier_pb2.StartSequence, owner: bytes, max_budget: int) -> Start:
    """One attachment. Raises InvalidRequest for what contradicts itself or `max_budget`, and Unsupported for what this
    version cannot do; the engine checks prompt and sampling.
    """
    _check_start(message, max_budget)
    deadline = time.monotonic() + message.deadline_ms / 1000 if message.deadline_ms else None
    speculation = message.speculation
    return Start(
        session_id=message.session_id,
        epoch=message.epoch,
        attempt=message.attempt,
        prompt=tuple(message.prompt),
        sampling=sampling_from(message.sampling),
        committed=tuple(message.committed),
        budget=speculation.budget if speculation.HasField("budget") else None,
        topk_cap=speculation.topk_cap,
        priority=message.priority,
        deadline=deadline,
        want_trees=message.return_trees,
        owner=owner,
        trace=tracing.trace_id(message.trace.traceparent),
        tenant=message.tenant,
    )


def _check_start(message: verifier_pb2.StartSequence, max_budget: int) -> None:
    if not _ID.fullmatch(message.session_id):
        raise InvalidRequest("session_id", message.session_id, "1 to 128 of A-Z a-z 0-9 _ . : -")
    for field, number in (("epoch", message.epoch), ("attempt", message.attempt)):
        if number < 1:
            raise InvalidRequest(field, number, "at least 1")
    if message.mode not in _EXACT:
        raise Unsupported("mode", f"{message.mode} is not served by this version; EXACT is")
    # One that goes on was admitted under another group's limit; its budget is cut, for no token depends on it.
    most = max_budget if message.epoch == message.attempt == 1 else MOST_BUDGET
    if message.speculation.budget > most:
        raise InvalidRequest("speculation.budget", message.speculation.budget, f"at most {most}")
    if message.digest:
        formed = digest.extend(digest.first(message.session_id, message.prompt), message.committed)
        if formed != message.digest:
            limit = f"{formed.hex()}, of the session id, prompt and committed tokens that came with it"
            raise InvalidRequest("digest", message.digest.hex(), limit)


def sampling_from(message: common_pb2.SamplingParams) -> Sampling:
    """Sampling parameters as resolved; what is unset takes the engine's neutral value."""
    for name, neutral in _UNSERVED.items():
        if message.HasField(name) and getattr(message, name) not in neutral:
            raise Unsupported(f"sampling.{name}", "not served by this version")
    if message.bad_words or message.HasField("grammar"):
        raise Unsupported(
            "sampling.bad_words" if message.bad_words else "sampling.grammar", "not served by this version"
        )
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return Sampling(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
    )


def update_to(update: Update) -> verifier_pb2.SequenceUpdate:
    """What a step did for one sequence."""
    message = verifier_pb2.SequenceUpdate(
        session_id=update.session_id,
        epoch=update.epoch,
        attempt=update.attempt,
        offset=update.offset,
        tokens=update.tokens,
        finish_reason=int(update.finish),  # type: ignore[arg-type]
        matched_stop=update.matched_stop,
        matched_token=update.matched_token,
    )
    if update.usage is not None:
        message.usage.CopyFrom(common_pb2.Usage(**update.usage._asdict()))
    if update.stats is not None:
        message.stats.CopyFrom(stats_to(update.stats))
    if update.error is not None:
        message.error.CopyFrom(error_to(update.error))
    if update.timings is not None:
        message.timings.CopyFrom(common_pb2.Timings(**vars(update.timings)))
    message.cached_prompt_tokens = update.cached_prompt_tokens
    message.chunks.extend(verifier_pb2.PrefillChunk(**chunk._asdict()) for chunk in update.chunks)
    return message


def stats_to(stats: StepStats) -> common_pb2.StepStats:
    """One step of one sequence."""
    return common_pb2.StepStats(**stats._asdict())


def timings_to(timings: StepTimings) -> common_pb2.Timings:
    """Where a step's time went."""
    return common_pb2.Timings(**timings._asdict())


def response_to(step_id: int, updates: Sequence[Update], timings: StepTimings | None) -> verifier_pb2.AttachResponse:
    """One message to a gateway."""
    response = verifier_pb2.AttachResponse(step_id=step_id, updates=[update_to(update) for update in updates])
    if timings is not None:
        response.timings.CopyFrom(timings_to(timings))
    return response


def load_to(load: EngineLoad, held: int, sent: int, draining: bool) -> verifier_pb2.GetLoadResponse:
    """The engine's load; `held` counts what the whole process holds, `sent` its messages to gateways."""
    return verifier_pb2.GetLoadResponse(
        running=load.running,
        waiting=load.waiting,
        waiting_limit=load.waiting_limit,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        steps=load.steps,
        tokens=load.tokens,
        refused_trees=load.refused_trees,
        missed_drafts=load.missed_drafts,
        held_sequences=held,
        draining=draining,
        messages_sent=sent,
    )


def refusal(message: verifier_pb2.StartSequence, error: HedgerowError) -> Update:
    """The update that answers a start which was not accepted."""
    return Update(
        owner=b"",
        session_id=message.session_id,
        epoch=message.epoch,
        attempt=message.attempt,
        offset=len(message.committed),
        tokens=(),
        finish=Finish.ERROR,
        error=error,
    )


def error_to(error: Exception) -> verifier_pb2.SequenceError:
    """Why a sequence was refused or failed. An exception that is not ours tells its kind and nothing else."""
    if not isinstance(error, HedgerowError):
        error = Internal(f"the engine failed: {type(error).__name__}")
    return verifier_pb2.SequenceError(
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        retry_after_ms=int(1000 * error.retry_after) if error.retry_after is not None else 0,
        held_epoch=int(error.metadata.get("held", 0)),
        held_attempt=int(error.metadata.get("held_attempt", 0)),
    )


def draft_request(
    batch: DraftBatch, release: Sequence[int], verifier: bytes, max_budget: int
) -> drafter_pb2.DraftRequest:
    """One step's work, features of all sequences in one tensor, no budget above the drafter's `max_budget`."""
    request = drafter_pb2.DraftRequest(step_id=batch.step_id, release=release, verifier=verifier, drafter=batch.drafter)
    for work in batch.works:
        request.sequences.add(
            sequence=work.sequence,
            feature_position=work.feature_position,
            feature_rows=len(work.features),
            anchor=work.anchor,
            anchor_position=work.anchor_position,
            budget=min(work.budget, max_budget),
            topk_cap=work.topk_cap,
        )
    parts = [work.features for work in batch.works if len(work.features)]
    if parts:
        features = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        request.features.dtype = common_pb2.TENSOR_TYPE_FLOAT32
        request.features.shape.extend(features.shape)
        request.features.data = features.numpy().tobytes()
    return request


def draft_answer(response: drafter_pb2.DraftResponse) -> DraftAnswer:
    """One step's trees. Nothing in them is trusted: the engine validates each before it uses it."""
    trees = [
        DraftTree(tree.sequence, TreeNodes(tree.tokens, tree.parents, tree.logprobs), tree.features_from)
        for tree in response.trees
    ]
    return DraftAnswer(response.step_id, trees, response.incarnation, response.forward_ns, response.build_ns)


FEATURES = {
    drafter_pb2.FEATURE_KIND_UNSPECIFIED: "hidden",
    drafter_pb2.FEATURE_KIND_HIDDEN: "hidden",
    drafter_pb2.FEATURE_KIND_PROJECTED: "projected",
    drafter_pb2.FEATURE_KIND_TOKENS: "tokens",
}


def described_from(message: drafter_pb2.DrafterServiceDescribeResponse) -> Described:
    """What a drafter says of itself."""
    probe = message.probe
    card = AcceptanceCard(tuple(probe.prompt), probe.tokens, probe.budget, probe.tokens_per_step, probe.topk_cap)
    return Described(
        vocab_size=message.vocab_size,
        feature_layers=tuple(message.feature_layer_ids),
        feature_width=message.feature_width,
        max_sequences=message.max_sequences,
        head_hash=message.target_head_hash,
        block_size=message.block_size,
        max_budget=message.max_budget,
        features=FEATURES.get(message.feature_kind, str(message.feature_kind)),
        hidden_size=message.hidden_size,
        layers=message.num_target_layers,
        rope_theta=message.rope_theta,
        mask_token=message.mask_token_id if message.HasField("mask_token_id") else None,
        checkpoint_hash=message.checkpoint_hash,
        card=card if message.HasField("probe") else None,
    )


def description(
    name: str, model: Target, engine: VerifierEngine, incarnation: bytes, defaults: Mapping[str, Any]
) -> verifier_pb2.DescribeResponse:
    """What this group is; `defaults` are fields of SamplingParams."""
    return verifier_pb2.DescribeResponse(
        model=name,
        fingerprint=fingerprint(model.checkpoint_hash, model.kernel_law, model.architecture, "fp32", shards(model)),
        vocab_size=model.config.vocab_size,
        context_length=engine.max_context,
        eos_token_ids=model.config.eos_token_ids,
        feature_layer_ids=model.feature_layers,
        feature_width=model.feature_width,
        max_budget=engine.config.max_budget,
        default_budget=engine.config.default_budget,
        incarnation=incarnation,
        max_sequences=engine.config.max_sequences,
        default_sampling=common_pb2.SamplingParams(**defaults),
    )


def fingerprint(
    checkpoint_hash: str, kernel_law: str, architecture: str, dtypes: str, tp_size: int
) -> common_pb2.Fingerprint:
    """Everything that decides the bits. The digest is over the fields' texts in their order, one a line."""
    mode = common_pb2.EXECUTION_MODE_EXACT
    fields = (checkpoint_hash, kernel_law, architecture, str(tp_size), dtypes, str(int(mode)))
    digest = hashlib.sha256("\n".join(fields).encode()).hexdigest()
    return common_pb2.Fingerprint(
        digest=digest,
        checkpoint_hash=checkpoint_hash,
        kernel_law=kernel_law,
        architecture=architecture,
        tp_size=tp_size,
        dtypes=dtypes,
        mode=mode,
    )
