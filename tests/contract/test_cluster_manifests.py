"""The files of `cluster/` against the schemas of those who read them: Ray's launcher, KubeRay, Ray's command line."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
CRD_DIR = Path(os.environ.get("KUBERAY_CRD_DIR") or ROOT.parent / "shared" / "kuberay")
KUBERAY = {"RayCluster": ("kuberay_cluster.yaml", "rayclusters"), "RayJob": ("kuberay_job.yaml", "rayjobs")}

# Importing Ray's command line imports Ray Serve, which warns about its own use of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

needs_crds = pytest.mark.skipif(
    not CRD_DIR.is_dir(),
    reason=f"No CRDs in {CRD_DIR}: set KUBERAY_CRD_DIR to a folder with ray.io_rayclusters.yaml, ray.io_rayjobs.yaml.",
)


def load(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def closed(schema: Any) -> Any:
    """A structural schema of Kubernetes as a JSON schema that refuses what the API server would silently drop."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: value for key, value in schema.items() if key not in ("properties", "default", "description")}
    for key in ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "not"):
        if key in out:
            out[key] = closed(out[key])
    if "properties" in schema:
        out["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    if schema.get("nullable"):
        return {"anyOf": [out, {"type": "null"}]}
    return out


@cache
def crd_versions(kind: str) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 1 MB each: the loader in C is ten times as fast
    return yaml.load((CRD_DIR / f"ray.io_{KUBERAY[kind][1]}.yaml").read_text(), Loader=loader)["spec"]["versions"]


@cache
def crd_validator(kind: str) -> jsonschema.Draft202012Validator:
    version = next(v for v in crd_versions(kind) if v["name"] == "v1")
    schema = closed(version["schema"]["openAPIV3Schema"])
    # The CRD leaves metadata to the API server.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft202012Validator(schema)


def complaints(kind: str, manifest: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in crd_validator(kind).iter_errors(manifest)]


def cluster_spec(kind: str) -> dict[str, Any]:
    spec = load(KUBERAY[kind][0])["spec"]
    return spec if kind == "RayCluster" else spec["rayClusterSpec"]


def ray_command(name: str) -> Any:
    from ray.scripts.scripts import cli

    return cli.commands[name]


def accepts(name: str, argv: list[str]) -> dict[str, Any]:
    """The parameters that the installed `ray NAME` reads from `argv`, without running it; raises on what it refuses."""
    return ray_command(name).make_context(name, argv).params


# --- KubeRay ----------------------------------------------------------------------------------------------------------


@needs_crds
@pytest.mark.parametrize("kind", KUBERAY)
def test_the_kuberay_manifests_fit_the_published_crds(kind: str) -> None:
    manifest = load(KUBERAY[kind][0])
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    assert complaints(kind, manifest) == []


def _worker_pod(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["workerGroupSpecs"][0]["template"]["spec"]


MISTAKES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field that does not exist": lambda spec: _worker_pod(spec).update(terminationGracePeriod=30),
    "a field at the wrong level": lambda spec: spec.update(workerGroupSpec=[]),
    "a number where flags are strings": lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    "a hook of a kind that does not exist": lambda spec: _worker_pod(spec)["containers"][0]["lifecycle"].update(
        preStop={"command": []}
    ),
    "a size that is none": lambda spec: _worker_pod(spec)["volumes"][0]["emptyDir"].update(sizeLimit="192 gigabytes"),
    "a group without its limits": lambda spec: spec["workerGroupSpecs"][0].pop("maxReplicas"),
    "a mode that does not exist": lambda spec: spec["authOptions"].update(mode="tokens"),
}


@needs_crds
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_crd_check_finds_mistakes(mistake: str) -> None:
    manifest = copy.deepcopy(load(KUBERAY["RayCluster"][0]))
    MISTAKES[mistake](manifest["spec"])
    assert len(complaints("RayCluster", manifest)) == 1


def test_the_job_brings_the_same_cluster_as_the_standing_one() -> None:
    assert cluster_spec("RayJob") == cluster_spec("RayCluster")


def test_rays_version_in_the_manifests_is_the_one_the_package_asks_for() -> None:
    import ray

    assert cluster_spec("RayCluster")["rayVersion"] == ray.__version__


def test_the_start_parameters_are_flags_of_the_installed_ray() -> None:
    spec = cluster_spec("RayCluster")
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert accepts("start", [f"--{name}={value}" for name, value in group["rayStartParams"].items()])


def test_the_budget_protects_the_head_and_the_fewest_workers_that_can_go_on() -> None:
    budgets = list(yaml.safe_load_all((CLUSTER / "disruption_budget.yaml").read_text()))
    spec = cluster_spec("RayCluster")
    (workers,) = spec["workerGroupSpecs"]
    wanted = {"head": (1, spec["headGroupSpec"]), "worker": (workers["minReplicas"], workers)}
    for budget in budgets:
        assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
        labels = dict(budget["spec"]["selector"]["matchLabels"])
        # KubeRay adds this label to each pod; the others have to be in the template.
        least, group = wanted.pop(labels.pop("ray.io/node-type"))
        assert labels.items() <= group["template"]["metadata"]["labels"].items()
        # A RayCluster has no scale subresource: for its pods only minAvailable, as a number, has an effect.
        assert budget["spec"].keys() == {"minAvailable", "selector"}
        assert budget["spec"]["minAvailable"] == least
    assert not wanted


@needs_crds
@pytest.mark.parametrize("kind", KUBERAY)
def test_kuberay_has_no_scale_subresource_so_the_budget_has_to_count(kind: str) -> None:
    assert all("scale" not in version.get("subresources", {}) for version in crd_versions(kind))


# --- AWS --------------------------------------------------------------------------------------------------------------


def ray_schema() -> dict[str, Any]:
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def test_the_aws_cluster_fits_rays_schema() -> None:
    config = load("aws_cluster.yaml")
    errors = list(jsonschema.Draft7Validator(ray_schema()).iter_errors(config))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_rays_own_check_of_the_aws_cluster_passes_with_its_defaults_filled_in() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load("aws_cluster.yaml"))
    validate_config(config)
    assert config["setup_commands"] == config["head_setup_commands"] == config["worker_setup_commands"] == []
    assert config["available_node_types"]["spot_gpu"]["min_workers"] == 2


@pytest.mark.parametrize("place", ["top", "node type", "docker"])
def test_the_schema_check_finds_a_wrong_name(place: str) -> None:
    config = copy.deepcopy(load("aws_cluster.yaml"))
    parts = {"top": config, "node type": config["available_node_types"]["spot_gpu"], "docker": config["docker"]}
    parts[place]["shm_size"] = "1g"
    with pytest.raises(jsonschema.ValidationError, match="shm_size"):
        jsonschema.validate(config, ray_schema())


def start_line(which: str) -> str:
    lines = [line for line in load("aws_cluster.yaml")[f"{which}_start_ray_commands"] if "ray start" in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("which", ["head", "worker"])
def test_the_aws_start_commands_are_flags_of_the_installed_ray(which: str) -> None:
    words = shlex.split(start_line(which).partition("ray start")[2])
    params = accepts("start", words)
    assert params["head"] is (which == "head")
    assert params["object_store_memory"] > 0


def test_workers_are_spot_and_the_head_is_not() -> None:
    types = load("aws_cluster.yaml")["available_node_types"]
    market = types["spot_gpu"]["node_config"]["InstanceMarketOptions"]
    assert (market["MarketType"], market["SpotOptions"]["InstanceInterruptionBehavior"]) == ("spot", "terminate")
    assert "InstanceMarketOptions" not in types["head"]["node_config"]


# --- what runs in them ------------------------------------------------------------------------------------------------


def test_the_drain_is_one_that_the_installed_ray_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CLUSTER)
    drain_node = importlib.import_module("drain_node")
    raylet = drain_node.Raylet(pid=1, node_id="ab" * 28, gcs_address="10.0.0.1:6379")
    command = drain_node.drain_command(raylet, 100, "the pod is being deleted")
    assert command[0] == "ray"
    params = accepts(command[1], command[2:])
    assert params["deadline_remaining_seconds"] == 100
    assert params["reason"] == "DRAIN_NODE_REASON_PREEMPTION"
    assert (params["address"], params["node_id"]) == (raylet.gcs_address, raylet.node_id)


def test_the_runtime_environment_is_one_that_ray_accepts() -> None:
    from ray.runtime_env import RuntimeEnv

    document = load("runtime_env.yaml")
    parsed = RuntimeEnv(**document)
    assert parsed["env_vars"] == document["env_vars"]
    assert yaml.safe_load(load("kuberay_job.yaml")["spec"]["runtimeEnvYAML"]) == {"env_vars": document["env_vars"]}


def _sources(*names: str) -> Iterator[str]:
    import ray

    for name in names:
        yield (Path(ray.__file__).parent / name).read_text()


def test_the_variables_of_the_job_are_read_by_the_installed_ray() -> None:
    names = {name for name in load("runtime_env.yaml")["env_vars"] if name.startswith("RAY_")}
    text = "".join(_sources("dashboard/modules/job/job_supervisor.py", "train/v2/_internal/constants.py"))
    assert names
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_the_health_variables_are_settings_of_the_installed_gcs() -> None:
    import ray

    binary = (Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server").read_bytes()
    names = set(re.findall(r"RAY_(health_check_\w+)=", start_line("head")))
    assert len(names) == 4
    assert {name for name in names if name.encode() not in binary} == set()
