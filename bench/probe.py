"""Counters of a running stack, as its processes tell them: steps, and the messages of each hop."""

from __future__ import annotations

import grpc

from hedgerow.cli.supervisor import Stack
from hedgerow.v1 import admin_pb2, admin_pb2_grpc, verifier_pb2, verifier_pb2_grpc

APPENDS = "hedgerow_kvstore_append_entries_count"


def counters(stack: Stack) -> dict[str, int]:
    """Steps of the verifier, messages that it sent to gateways, and append messages that the store has answered."""
    with grpc.insecure_channel(stack.address("verifier")) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]
        load = stub.GetLoad(verifier_pb2.GetLoadRequest(), timeout=10)
    return {"steps": load.steps, "verifier": load.messages_sent, "store": appends(stack.admin_address("kvstore"))}


def appends(admin_address: str) -> int:
    """Not creations, renewals and the like: they come with a session or a second, whatever a step does."""
    with grpc.insecure_channel(admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        return int(stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).numbers[APPENDS])
