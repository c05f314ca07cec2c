"""GPUs in the chart: who computes on them has them, and nobody holds one that is not used."""

from __future__ import annotations

from typing import Any

import pytest

from services.verifier.group import split_of
from tests.system.test_chart_own import container, settings
from tests.system.tools import chosen, named, pod_specs, render, template

pytestmark = pytest.mark.system
CUDA, OLD = "verifier.config.device=cuda", "verifier.set=b,previous[0].verifier.set="


def gpus(made: dict[str, Any]) -> int:
    return int(made["resources"]["limits"].get("nvidia.com/gpu", 0))


@pytest.mark.parametrize("values", ["values-h200", "values-pro6000"])
def test_a_box_of_eight_computes_on_all_of_its_gpus(values: str) -> None:
    objects = render(values)
    data = {name: named(objects, "ConfigMap", f"-{name}")["data"] for name in ("verifier", "drafter")}
    assert {each["HEDGEROW_DEVICE"] for each in data.values()} == {"cuda"}
    assert data["verifier"]["HEDGEROW_TENSOR_PARALLEL"] == "8"
    (pod,) = (
        each["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate") or each["spec"]["template"]
        for each in objects
        if each["kind"] in ("StatefulSet", "LeaderWorkerSet") and "redis" not in each["metadata"]["name"]
    )
    (made,) = pod["spec"]["containers"]
    assert gpus(made) == 8
    assert "hedgerow-gpu:" in made["image"]


def test_a_verifier_and_a_drafter_of_their_own_gpus() -> None:
    objects = render(
        "values", CUDA, "verifier.gpus=2", "verifier.config.tensor_parallel=2",
        "drafter.gpus=1", "drafter.config.device=cuda",
    )  # fmt: skip
    assert [gpus(container(objects, each)[0]) for each in ("verifier", "drafter", "gateway")] == [2, 1, 0]
    assert split_of(settings(objects, "verifier")) == (2, 1)
    assert settings(objects, "drafter").device == "cuda"


def test_a_verifier_on_gpus_is_probed_where_a_process_without_one_answers() -> None:
    """And one on CPUs, or of an image without such a process, where it answers itself. A drafter's are its own."""
    of_gpu = (CUDA, "verifier.gpus=1", "drafter.gpus=1", "drafter.config.device=cuda")
    for sets, port in ((of_gpu, 7415), ((*of_gpu, "verifier.healthProcess=false"), 7412), ((), 7412)):
        objects = render("values", *sets)
        asked_at(port, container(objects, "verifier")[0])
        assert settings(objects, "verifier").health_listen == ("0.0.0.0:7415" if port == 7415 else None)
        assert container(objects, "drafter")[0]["livenessProbe"]["grpc"]["port"] == 7412


def asked_at(port: int, made: dict[str, Any]) -> None:
    """The probes of a verifier's container, and what it is told."""
    assert {made[f"{each}Probe"]["grpc"]["port"] for each in ("startup", "liveness", "readiness")} == {port}
    assert port in [each["containerPort"] for each in made["ports"]]
    told = [each["value"] for each in made.get("env", []) if each["name"].endswith("HEDGEROW_HEALTH_LISTEN")]
    assert told == (["0.0.0.0:7415"] if port == 7415 else [])


@pytest.mark.parametrize("mode", ["deployment", "colocated", "in-process"])
def test_what_an_upgrade_leaves_is_told_nothing_that_an_older_image_refuses(mode: str) -> None:
    """Unless it says that its image knows it. Never in the ConfigMap: a container may start again in its old pod."""
    sets = (CUDA, "verifier.gpus=1", f"drafter.mode={mode}", "model.drafterPath=/app/models/sapling-dflash")
    if mode == "deployment":
        sets = (*sets, "drafter.gpus=1", "drafter.config.device=cuda")
    for said, port in (
        ("previous[0].images.engine.tag=0.0.9", 7412),
        ("previous[0].verifier.healthProcess=true", 7415),
    ):
        objects = render("values", *sets, f"{OLD},{said}")
        asked_at(7415, pod_specs(objects)["StatefulSet/demo-hedgerow-verifier-b"]["containers"][0])
        asked_at(port, pod_specs(objects)["StatefulSet/demo-hedgerow-verifier"]["containers"][0])
        data = [each["data"] for each in objects if each["kind"] == "ConfigMap"]
        assert not [each for each in data if "HEDGEROW_HEALTH_LISTEN" in each]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("verifier.gpus=1", "verifier.gpus: 1 would be held and not used; verifier.config.device must be cuda"),
        (CUDA, "verifier.gpus: 0 where verifier.config.device is cuda"),
        (f"{CUDA},verifier.gpus=7,verifier.config.tensor_parallel=8", "verifier.gpus: 7 for the 8 ranks of a pod"),
        (f"{OLD},previous[0].verifier.gpus=1", "verifier.gpus of an entry of previous: 1 would be held"),
        ("drafter.gpus=1", "drafter.gpus: 1 would be held and not used"),
        ("drafter.config.device=cuda", "drafter.gpus: 0 where drafter.config.device is cuda"),
        ("drafter.mode=colocated,drafter.config.device=cuda", "drafter.config.device: cuda, and verifier.gpus is 0"),
        ("drafter.mode=colocated,drafter.gpus=1", "drafter.gpus: 1 is for drafter.mode deployment"),
        (f"{OLD},previous[0].drafter.config.device=cuda", "drafter.gpus of an entry of previous: 0"),
    ],
)
def test_a_gpu_without_its_device_and_a_device_without_its_gpu_are_refused(given: str, why: str) -> None:
    done = template(*chosen("values", given))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr


def test_a_set_of_before_had_no_gpus() -> None:
    left = "previous[0].verifier.gpus=0,previous[0].verifier.config.max_waiting=7"
    new = (CUDA, "verifier.gpus=1", f"{OLD},{left}")
    sets = [each for each in render("values", *new) if each["kind"] == "StatefulSet"]
    held = {each["metadata"]["name"]: gpus(each["spec"]["template"]["spec"]["containers"][0]) for each in sets}
    assert (held["demo-hedgerow-verifier"], held["demo-hedgerow-verifier-b"]) == (0, 1)
