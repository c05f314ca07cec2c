"""Whether the Redis behind this process may hold sessions."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from hedgerow.errors import Unavailable
from hedgerow.rpc.logs import get_log
from services.kvstore.replies import parse_info
from services.kvstore.runner import Runner
from services.kvstore.topology import Single

OLDEST_REDIS = (7, 0)
QUESTIONS = ((b"INFO", b"server"), (b"INFO", b"memory"), (b"INFO", b"replication"))
log = get_log(__name__)


class Fitness:
    """A check for `Health`. `replicas` is how many each node that takes writes must have."""

    def __init__(self, runner: Runner, replicas: int) -> None:
        self.runner, self.replicas = runner, replicas
        self._away: set[str] = set()
        self.used: dict[str, float] = {}
        self.limit: dict[str, float] = {}
        """Bytes by node, as of the last check."""

    async def check(self) -> str | None:
        """Why this Redis may not hold sessions; None: it may. Of a cluster, nodes that do not answer are only logged
        while others do: sessions on those go on. Raises Unavailable where none answers.
        """
        told = await self.runner.ask_nodes([*QUESTIONS, (b"CLUSTER", b"INFO")])
        away = {name: replies for name, replies in told.items() if isinstance(replies, Unavailable)}
        if len(away) == len(told):
            raise next(iter(away.values()))
        for name in sorted(away.keys() - self._away):
            log.warning("a node of the cluster is away", node=name, why=away[name].message)
        self._away = set(away)
        self.used, self.limit = {}, {}
        for name, replies in told.items():
            if name not in away and (why := self._trouble(name, replies)) is not None:
                return why if len(told) == 1 else f"{name}: {why}"
        return None

    def _trouble(self, name: str, replies: list[Any]) -> str | None:
        info: dict[str, str] = {}
        *told, cluster = replies
        for reply in told:
            if isinstance(reply, RedisError):
                return f"INFO was refused: {reply}"
            info.update(parse_info(reply))
        if not isinstance(cluster, RedisError):  # it says so where it is none
            info.update(parse_info(cluster))
        self.used[name] = float(info.get("used_memory", 0))
        self.limit[name] = float(info.get("maxmemory", 0))
        version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
        if version < OLDEST_REDIS:
            return f"Redis {info['redis_version']} is too old: scripts with flags need 7.0"
        policy, role = info.get("maxmemory_policy", "not told"), info.get("role", "not told")
        if policy != "noeviction":
            return f"maxmemory-policy is {policy}: it would evict sessions; set noeviction"
        if role != "master":
            return f"this Redis is a {role}: it takes no writes"
        replicas = int(info.get("connected_slaves", 0))
        if replicas < self.replicas:
            return f"{replicas} replicas are connected, and redis_wait_replicas is {self.replicas}"
        size = int(info.get("cluster_size", 0))
        if size > 1 and isinstance(self.runner.topology, Single):
            return f"this Redis is one of {size} of a cluster: use redis+cluster://"
        return None
