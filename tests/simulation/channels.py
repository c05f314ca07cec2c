"""grpc.aio's channels over the simulated network."""

from __future__ import annotations

from typing import Any

from tests.simulation.calls import Call
from tests.simulation.processes import CURRENT
from tests.simulation.wire import Network


class Channel:
    """grpc.aio.Channel: `insecure_channel` of a simulated process."""

    def __init__(self, network: Network, address: str) -> None:
        process = CURRENT.get()
        assert process is not None, "a channel belongs to a process"
        self._network, self._address, self._process = network, address, process
        self._open: list[Call] = []

    async def close(self, grace: float | None = None) -> None:
        """Cancel what is open."""
        for call in self._open:
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A unary call, which may break its connection or be delivered twice."""

        def start(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = self._call(path, response_deserializer, timeout)
            network, link = self._network, call._link
            data = request_serializer(request)
            if link is None or not (network.lose or network.repeat):
                call.begin(data, metadata)
                return call
            x = network.chance.random()
            if x < network.lose / 2:  # the request is lost with its connection
                link.fail_client("connection reset")
                return call
            call.begin(data, metadata)
            if x < network.lose:  # so is the answer
                network.loop.at(network.loop.time() + 2 * network.delay(), link.fail_client, "connection reset")
            elif x < network.lose + network.repeat:
                again = Call(network, self._process, self._address, path, response_deserializer, timeout)
                network.loop.at(network.loop.time() + 10 * network.delay(), again.begin, data, metadata)
            return call

        return start

    def unary_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A call with a stream of answers."""

        def start(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = self._call(path, response_deserializer, timeout)
            call.begin(request_serializer(request), metadata)
            return call

        return start

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A stream both ways."""

        def start(*, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = self._call(path, response_deserializer, timeout)
            call.begin(None, metadata)
            return call

        return start

    def _call(self, path: str, decode: Any, timeout: float | None) -> Call:
        call = Call(self._network, self._process, self._address, path, decode, timeout)
        self._open = [open_call for open_call in self._open if not open_call.done()]
        self._open.append(call)
        return call
