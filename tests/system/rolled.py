"""A stack whose processes are restarted and upgraded, as an operator does it."""

from __future__ import annotations

import dataclasses
import re

import grpc

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.v1 import gateway_pb2, gateway_pb2_grpc
from tests.polling import eventually


class Rolled(Stack):
    """`ended`: with which status a process did, time and again."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config, self._tell)
        self.ended: dict[str, list[str]] = {}

    def roll(self, service: str, *, clients_return: bool = True, **settings: str) -> None:
        """SIGTERM to each process of a service, then the next one when its successor is ready.

        `clients_return`: of a gateway, when sessions run there again.
        """
        for name in self.names(service):
            self.upgrade(name, **settings)
            starts = self.starts(name)
            self.terminate(name)
            eventually(lambda: self.starts(name) > starts, 60, f"{name} starts again")  # noqa: B023  awaited here
            self.wait_ready(name)
            if (
                service == "gateway" and clients_return
            ):  # a client that was refused connects again after a second at most
                eventually(lambda: self.sessions(name), 60, f"clients are back at {name}")  # noqa: B023
            assert set(self.ended[name]) == {"0"}, self.ended

    def upgrade(self, name: str, **settings: str) -> None:
        """Other settings for the next start of a process."""
        child = self._children[name]
        env = {**child.command.env, **{f"HEDGEROW_{key}": value for key, value in settings.items()}}
        child.command = dataclasses.replace(child.command, env=env)

    def sessions(self, name: str) -> int:
        """What runs at a gateway."""
        with grpc.insecure_channel(self.address(name)) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            return len(stub.ListSessions(gateway_pb2.ListSessionsRequest(), timeout=10).sessions)

    def _tell(self, name: str, line: str) -> None:
        if found := re.match(r"ended with (-?\d+); starting", line):
            self.ended.setdefault(name, []).append(found[1])
