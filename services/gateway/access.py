"""Whose call it is: by its API key where there is a file of keys, else by the metadata, which is believed.

With keys every call of the public service has `authorization: Bearer KEY`, and the tenant is the key's. A call that
names another one in its metadata or its request is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar

from hedgerow.errors import HedgerowError, InvalidRequest, SessionUnknown, Unauthenticated
from hedgerow.rpc import telemetry
from services.gateway import limits
from services.gateway.keys import Keys, Tenant
from services.gateway.types import Record

TENANT_KEY, KEY = "hedgerow-tenant", "authorization"  # of the call's metadata
BEARER = "Bearer "
HOW = f"send the metadata `{KEY}: {BEARER}KEY`"
MISSING, MALFORMED, UNKNOWN, TENANT = "missing", "malformed", "unknown", "tenant"
REFUSALS = {
    MISSING: f"no API key came with the call: {HOW}",
    MALFORMED: f"what came as the API key has another form: {HOW}, once",
    UNKNOWN: "the API key is none that this gateway knows",
}
ANYBODY = Tenant("")
_CALLER: ContextVar[Tenant] = ContextVar("hedgerow_caller", default=ANYBODY)


class Access:
    """`keys`: those in force now; None: there is no file, and the metadata is believed."""

    def __init__(self, keys: Callable[[], Keys] | None) -> None:
        self._keys = keys
        text = "Calls that were refused for who makes them: their API key, or their tenant."
        whys = (MISSING, MALFORMED, UNKNOWN, TENANT)
        self._refused = telemetry.counter("hedgerow_gateway_unauthenticated", text, {"reason": whys})

    def admit(self, metadata: Mapping[str, str]) -> None:
        """Sets the call's `caller`. Raises Unauthenticated, InvalidRequest."""
        named = metadata.get(TENANT_KEY, "")
        why = TENANT
        try:
            limits.check_bytes(TENANT_KEY, named, limits.KEY_BYTES)
            if self._keys is None:
                _CALLER.set(Tenant(named))
                return
            why, tenant = _known(metadata.get(KEY, ""), self._keys())
            if tenant is None:
                raise Unauthenticated(REFUSALS[why])
            if named not in ("", tenant.name):
                why = TENANT
                raise InvalidRequest(TENANT_KEY, named, "the tenant of the API key, or absent")
        except HedgerowError:
            self._refused.add(1, why)
            raise
        _CALLER.set(tenant)


def caller() -> Tenant:
    """Whose call this task is."""
    return _CALLER.get()


def tenant_of(asked: str) -> str:
    """The caller's tenant, or, where it has none, the one that its request names. Raises InvalidRequest."""
    ours = caller().name
    if ours and asked not in ("", ours):
        raise InvalidRequest("tenant", limits.brief(asked), f"the caller's ({TENANT_KEY}, or its API key's), or empty")
    return ours or asked


def allowed(tenant: str) -> Callable[[Record], None]:
    """Raises SessionUnknown where a record is another tenant's."""

    def check(record: Record) -> None:
        if record.tenant != tenant:
            raise SessionUnknown(record.session_id)

    return check


def _known(given: str, keys: Keys) -> tuple[str, Tenant | None]:
    if not given:
        return MISSING, None
    kind, space, key = given.partition(" ")
    if kind.lower() != "bearer" or not space or not key or " " in key:
        return MALFORMED, None
    return UNKNOWN, keys.tenant(key)
