"""What one process says of itself on its admin port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from hedgerow.certificates import Tls
from hedgerow.client._gateways import Gateways
from hedgerow.client._retry import Retry
from hedgerow.v1 import admin_pb2 as pb
from hedgerow.v1.admin_pb2_grpc import AdminServiceStub

TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class ProcessStatus:
    """One process: a gateway, verifier, drafter or kvstore.

    `troubles`: what keeps it from serving, by name. `facts`: models, fingerprint, peers. `numbers`: its metrics as they
    are now, by `name` or `name{label="value"}`; of histograms, count and sum.
    """

    address: str
    service: str
    version: str
    uptime_seconds: float
    serving: bool
    draining: bool
    troubles: Mapping[str, str]
    facts: Mapping[str, str]
    numbers: Mapping[str, float]


async def process_status(address: str, *, tls: bool | Tls | None = None, within: float = TIMEOUT) -> ProcessStatus:
    """Ask the admin port at `address`, `within` seconds at most.

    Raises Unavailable where nobody answers, Unsupported where it is no admin port, InvalidRequest for files that are
    wrong.
    """
    way = Gateways([address], Retry.never(), "", tls)
    try:
        stub = AdminServiceStub(way.channel(address))  # type: ignore[no-untyped-call]
        s = await stub.GetStatus(pb.GetStatusRequest(), timeout=within)
    except grpc.aio.AioRpcError as failed:
        raise way.decode(failed, address) from None
    finally:
        await way.aclose()
    return ProcessStatus(
        address, s.service, s.version, s.uptime_seconds, s.serving, s.draining, dict(s.troubles), dict(s.facts),
        dict(s.numbers),
    )  # fmt: skip
