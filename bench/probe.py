"""Counters of a running stack: the verifier's own, and gRPC's channelz counters of the store's server."""

from __future__ import annotations

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from hedgerow.cli.supervisor import Stack
from hedgerow.v1 import verifier_pb2, verifier_pb2_grpc


def counters(stack: Stack) -> dict[str, int]:
    """Steps of the verifier, messages that it sent to gateways, and messages that the store received."""
    with grpc.insecure_channel(stack.address("verifier")) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]
        load = stub.GetLoad(verifier_pb2.GetLoadRequest(), timeout=10)
    return {"steps": load.steps, "verifier": load.messages_sent, "store": received(stack.admin_address("kvstore"))}


def received(admin_address: str) -> int:
    """Messages that came in over all connections of a process's servers."""
    total = 0
    with grpc.insecure_channel(admin_address) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        for server in stub.GetServers(channelz_pb2.GetServersRequest(), timeout=10).server:
            request = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
            for ref in stub.GetServerSockets(request, timeout=10).socket_ref:
                socket = stub.GetSocket(channelz_pb2.GetSocketRequest(socket_id=ref.socket_id), timeout=10).socket
                total += socket.data.messages_received
    return total
