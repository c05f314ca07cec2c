"""Asks a process for its health, for a container's HEALTHCHECK and for people:

python -m hedgerow.rpc.probe 127.0.0.1:7412          # exit 0: SERVING
python -m hedgerow.rpc.probe 127.0.0.1:7412 --live   # exit 0: it answers, whatever it says
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2

CHECK = "/grpc.health.v1.Health/Check"
PATIENCE = 5.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """0: well. 1: not, and one line says how."""
    parser = argparse.ArgumentParser(prog="python -m hedgerow.rpc.probe", description="ask a process for its health")
    parser.add_argument("address", help="host:port of its service or its admin server")
    parser.add_argument("--live", action="store_true", help="any answer will do: it loads, drains or waits for a peer")
    parser.add_argument("--timeout", type=float, default=PATIENCE, metavar="SECONDS", help=f"{PATIENCE:g} if not given")
    args = parser.parse_args(argv)
    try:
        status = ask(args.address, args.timeout)
    except grpc.RpcError as error:
        print(f"{args.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    print(f"{args.address}: {status}")
    return 0 if args.live or status == "SERVING" else 1


def ask(address: str, timeout: float = PATIENCE) -> str:
    """The status by its name. Raises grpc.RpcError."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(), timeout=timeout)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    sys.exit(main())
