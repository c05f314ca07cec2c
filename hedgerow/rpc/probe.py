"""Asks a process for its health, for a container's HEALTHCHECK and for people:

python -m hedgerow.rpc.probe 127.0.0.1:7412          # exit 0: SERVING
python -m hedgerow.rpc.probe 127.0.0.1:7412 --live   # exit 0: it loads, drains or waits for a peer, and does not hang
python -m hedgerow.rpc.probe 127.0.0.1:7412 --wait 60 --tls-ca ca.crt --tls-cert tls.crt --tls-key tls.key
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2

from hedgerow.certificates import Tls, read
from hedgerow.errors import InvalidRequest
from hedgerow.rpc.health import LIVE
from hedgerow.rpc.tls import explained

CHECK = "/grpc.health.v1.Health/Check"
PATIENCE, AGAIN = 5.0, 0.5  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """0: well. 1: not, and one line says how."""
    parser = argparse.ArgumentParser(prog="python -m hedgerow.rpc.probe", description="ask a process for its health")
    parser.add_argument("address", help="host:port of its service or its admin server")
    parser.add_argument("--live", action="store_true", help="ask whether it is to be ended: it may load, drain or wait")
    parser.add_argument("--timeout", type=float, default=PATIENCE, metavar="SECONDS", help=f"{PATIENCE:g} if not given")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="ask again for so long until it is well"
    )
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--tls-{name}", default="", metavar="FILE", help="PEM, for a port with TLS; empty: none")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.wait
    while True:
        well, said = _asked(args)
        if well or time.monotonic() >= end:
            print(said, file=sys.stdout if well else sys.stderr)
            return 0 if well else 1
        time.sleep(AGAIN)


def _asked(args: argparse.Namespace) -> tuple[bool, str]:
    """Whether it is well, and what it says."""
    try:
        tls = Tls(args.tls_ca or None, args.tls_cert or None, args.tls_key or None)
        status = ask(args.address, args.timeout, None if tls == Tls() else tls, LIVE if args.live else "")
    except InvalidRequest as wrong:
        return False, f"--tls-{wrong}"
    except grpc.RpcError as error:
        return False, f"{args.address}: {error.code().name}: {explained(error.details() or '')}"
    return status == "SERVING", f"{args.address}: {status}"


def ask(address: str, timeout: float = PATIENCE, tls: Tls | None = None, service: str = "") -> str:
    """The status of `service`, by its name. Raises grpc.RpcError, InvalidRequest where a file cannot be used."""
    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        opened = grpc.insecure_channel(address, options=options)
    else:
        pem = read(tls)
        opened = grpc.secure_channel(address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert), options=options)
    with opened as channel:
        check = channel.unary_unary(
            CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    sys.exit(main())
