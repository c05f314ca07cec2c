"""Reflection v1 and channelz, for the admin port."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz
from grpc_reflection.v1alpha import reflection, reflection_pb2

# v1 and v1alpha have the same messages on the wire; grpcio-reflection registers v1alpha alone, tools ask v1 first.
SERVICE = "grpc.reflection.v1.ServerReflection"
OLD_SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve the descriptors of `services` (full names) under the v1 name and the older v1alpha one."""
    servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
        [*services, SERVICE]
    )
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    handlers = tuple(grpc.method_handlers_generic_handler(name, methods) for name in (SERVICE, OLD_SERVICE))
    server.add_generic_rpc_handlers(handlers)


def add_channelz(server: grpc.aio.Server) -> None:
    """Serve what gRPC Core knows of this process's channels, servers and sockets."""
    channelz.add_channelz_servicer(server)  # type: ignore[arg-type]  # it takes both kinds of server
