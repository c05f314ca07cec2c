"""What a Redis URL names: servers, credentials, database and options, for one server, Sentinels and a cluster."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from services.kvstore.cluster import Cluster
from services.kvstore.nodes import Node
from services.kvstore.topology import Sentinels, Single, addresses, topology_of


def made(url: str) -> Any:
    return topology_of(url, timeout=3.0, connections=2)


def settings(node: Node) -> dict[str, Any]:
    return dict(node._factory.connection_kwargs)


@pytest.mark.parametrize(
    ("netloc", "expected"),
    [
        ("a:1", [("a", 1)]),
        ("a,b:2", [("a", 9), ("b", 2)]),
        ("user:p%40ss@a:1,[::1]:3,", [("a", 1), ("::1", 3)]),
    ],
)
def test_addresses_have_a_default_port(netloc: str, expected: list[tuple[str, int]]) -> None:
    assert addresses(urlsplit(f"redis://{netloc}"), 9) == expected


def test_sentinels_and_servers_have_credentials_of_their_own() -> None:
    url = "redis+sentinel://user:secret@s1,s2:7/service/3?sentinel_password=other&client_name=hedgerow"
    topology = made(url)
    assert isinstance(topology, Sentinels)
    assert topology.service == "service"
    asked = [client.connection_pool.connection_kwargs for client in topology._sentinel.sentinels]
    assert [(each["host"], each["port"], each["password"]) for each in asked] == [
        ("s1", 26379, "other"),
        ("s2", 7, "other"),
    ]
    assert [each["username"] for each in asked] == [None, None]
    data = settings(topology.at("10.0.0.1", 6380))
    assert (data["host"], data["port"], data["db"]) == ("10.0.0.1", 6380, 3)
    assert (data["username"], data["password"], data["client_name"]) == ("user", "secret", "hedgerow")
    assert "sentinel_password" not in data
    assert topology.at("10.0.0.1", 6380) is topology.at("10.0.0.1", 6380)


def test_cluster_nodes_share_credentials_and_names_without_them() -> None:
    topology = made("redis+cluster://user:secret@a,b:7?client_name=hedgerow")
    assert isinstance(topology, Cluster)
    assert topology.seeds == [("a", 6379), ("b", 7)]
    node = topology.at("::1", 6380)
    assert (settings(node)["host"], settings(node)["password"]) == ("::1", "secret")
    assert node.name == "[::1]:6380"
    assert "secret" not in node.name


@pytest.mark.parametrize("url", ["redis://a:1/2", "rediss://a", "unix:///run/redis.sock"])
def test_other_urls_are_one_server(url: str) -> None:
    topology = made(url)
    assert isinstance(topology, Single)
    assert not topology.doubt(topology.node), "there is nothing else to look for"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:1",
        "redis+sentinel:///service",
        "redis+cluster://",
        "redis+cluster://a/1",
        "redis+x://a",
        "x://a",
    ],
)
def test_url_that_lacks_something_is_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (config.py turns it into a named error)
        made(url)
