"""AdminService, on every process's admin port: how it is and what it counts, for `hedgerow status`."""

from __future__ import annotations

import time
from typing import Any

import grpc.aio

from hedgerow import __version__
from hedgerow.rpc import telemetry
from hedgerow.rpc.health import Health
from hedgerow.v1 import admin_pb2 as pb
from hedgerow.v1.admin_pb2_grpc import AdminServiceServicer

SERVICE = "hedgerow.v1.AdminService"


class Admin(AdminServiceServicer):
    """Of the process `name`, from now on."""

    def __init__(self, name: str, health: Health) -> None:
        self._name, self._health, self._began = name, health, time.monotonic()

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """Takes a look at every metric, as a scrape does: a few milliseconds."""
        return pb.GetStatusResponse(
            service=self._name,
            version=__version__,
            uptime_seconds=time.monotonic() - self._began,
            serving=self._health.serving,
            draining=self._health.draining.is_set(),
            troubles=self._health.troubles,
            facts=self._health.facts,
            numbers=telemetry.numbers(),
        )
