"""A trace collector that wants a key, and names who came with it: `python -m tests.trace_collector HOST:PORT KEY`."""

from __future__ import annotations

import sys
from concurrent import futures

import grpc

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Collector(grpc.GenericRpcHandler):
    """Takes spans whose call carries `key`, refuses others with what they carried. `heard`: metadata of all calls."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.heard: list[dict[str, str | bytes]] = []
        self.hosts: set[str] = set()

    def taken(self, peer: str) -> None:
        """Hears of each call that carried the key."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """The collector's one method."""
        if details.method != EXPORT:
            return None

        def export(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.heard.append(dict(context.invocation_metadata()))
            given = self.heard[-1].get("x-key")
            if given != self._key:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not {given!r}")
            self.taken(context.peer())
            return b""

        return grpc.unary_unary_rpc_method_handler(export)


def serve(collector: Collector, address: str) -> tuple[grpc.Server, int]:
    """It listens; its port."""
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(collector,))
    port = server.add_insecure_port(address)
    server.start()
    return server, port


class Told(Collector):
    """Prints each host that came with the key, once."""

    def taken(self, peer: str) -> None:
        host = peer.split(":")[1]
        if host not in self.hosts:
            self.hosts.add(host)
            print(host, flush=True)


if __name__ == "__main__":
    serving, _ = serve(Told(sys.argv[2]), sys.argv[1])
    print("listening", flush=True)
    serving.wait_for_termination()
