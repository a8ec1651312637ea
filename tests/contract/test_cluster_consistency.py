"""The files of `cluster/` against each other and against the package: sizes, paths, variables, times."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_goodput.config import environment

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
GIB = 2**30
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": GIB, "k": 2**10, "m": 2**20, "g": GIB}


def load(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", text)
    assert match is not None, text
    return int(match[1]) * UNITS[match[2]]


def cluster_spec() -> dict[str, Any]:
    return load("kuberay_cluster.yaml")["spec"]


def head_pod() -> dict[str, Any]:
    return cluster_spec()["headGroupSpec"]["template"]["spec"]


def worker_group() -> dict[str, Any]:
    (group,) = cluster_spec()["workerGroupSpecs"]
    return group


def worker_pod() -> dict[str, Any]:
    return worker_group()["template"]["spec"]


def volume(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [v for v in pod["volumes"] if v["name"] == name]
    return found


def mount(container: dict[str, Any], name: str) -> str:
    (found,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == name]
    return found


def aws_start(which: str) -> str:
    (line,) = [line for line in load("aws_cluster.yaml")[f"{which}_start_ray_commands"] if "ray start" in line]
    return line


def variables_the_package_reads() -> set[str]:
    class Spy(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return default

    asked: set[str] = set()
    environment(Spy())
    return asked


def test_each_variable_of_ours_in_the_files_is_one_that_the_package_reads() -> None:
    read = variables_the_package_reads()
    files = [path for path in CLUSTER.iterdir() if path.is_file()]  # and not what Python compiled of them
    used = {name for path in files for name in re.findall(r"RAY_GOODPUT_[A-Z_]+", path.read_text())}
    assert used == read == {"RAY_GOODPUT_LOCAL_DIR", "RAY_GOODPUT_DRILLS"}


def test_each_raylet_of_a_worker_gets_a_folder_on_the_nvme() -> None:
    (container,) = worker_pod()["containers"]
    local_dir = {e["name"]: e["value"] for e in container["env"]}["RAY_GOODPUT_LOCAL_DIR"]
    (own,) = worker_pod()["initContainers"]
    for inside in (container, own):
        assert Path(local_dir).is_relative_to(mount(inside, "nvme"))
    assert own["command"][-1] == local_dir
    assert f"--owner={worker_pod()['securityContext']['runAsUser']}" in own["command"]
    # On AWS the same folder, and set in the same shell that starts Ray.
    assert f"export RAY_GOODPUT_LOCAL_DIR={local_dir};" in aws_start("worker")
    assert "--volume /mnt/nvme:/mnt/nvme" in load("aws_cluster.yaml")["docker"]["worker_run_options"]


def test_the_folder_of_a_node_is_not_given_to_the_whole_job() -> None:
    documents = [load("runtime_env.yaml"), yaml.safe_load(load("kuberay_job.yaml")["spec"]["runtimeEnvYAML"])]
    for document in documents:
        assert not [name for name in document["env_vars"] if name.startswith("RAY_GOODPUT")]


def test_shared_memory_holds_the_object_store_and_leaves_memory_for_the_processes() -> None:
    (container,) = worker_pod()["containers"]
    shm = volume(worker_pod(), "shm")["emptyDir"]
    assert (shm["medium"], mount(container, "shm")) == ("Memory", "/dev/shm")
    shm_bytes = size_bytes(shm["sizeLimit"])
    store_bytes = int(worker_group()["rayStartParams"]["object-store-memory"])
    limit_bytes = size_bytes(container["resources"]["limits"]["memory"])
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    # Two slots a rank; README.md promises 21 GiB each, and 8 GiB for loaders and NCCL.
    assert shm_bytes >= store_bytes + 2 * gpus * 21 * GIB + 8 * GIB
    # What lies in a Memory volume counts against the limit of the container.
    assert limit_bytes - shm_bytes >= 32 * GIB * gpus
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert f"--object-store-memory={store_bytes}" in aws_start("worker")
    (aws_shm,) = [o for o in load("aws_cluster.yaml")["docker"]["worker_run_options"] if o.startswith("--shm-size=")]
    assert size_bytes(aws_shm.removeprefix("--shm-size=")) == shm_bytes


def test_the_head_schedules_nothing_and_has_no_accelerator() -> None:
    (container,) = head_pod()["containers"]
    params = cluster_spec()["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}
    assert int(params["object-store-memory"]) < size_bytes(volume(head_pod(), "shm")["emptyDir"]["sizeLimit"])
    assert "--num-cpus=0 --num-gpus=0" in aws_start("head")
    assert load("aws_cluster.yaml")["available_node_types"]["head"]["resources"] == {"CPU": 0}


def health_settings() -> Iterator[dict[str, int]]:
    (container,) = head_pod()["containers"]
    yield {e["name"]: int(e["value"]) for e in container["env"] if e["name"].startswith("RAY_health_check_")}
    yield {name: int(value) for name, value in re.findall(r"(RAY_health_check_\w+)=(\d+)", aws_start("head"))}


def test_a_lost_node_is_known_within_5_s_and_a_silent_one_within_15_s() -> None:
    for found in health_settings():
        period, timeout, threshold = (
            found[f"RAY_health_check_{name}"] for name in ("period_ms", "timeout_ms", "failure_threshold")
        )
        assert threshold * period <= 5_000
        assert threshold * (period + timeout) <= 15_000
        # One late answer, or three, must not cost a healthy node.
        assert threshold >= 4 and timeout >= 2_000
    first, second = health_settings()
    assert first == second


def test_the_drain_ends_within_the_grace_period_and_the_notice_of_a_spot_node() -> None:
    (container,) = worker_pod()["containers"]
    (deadline,) = re.findall(r"--deadline-s=(\d+)", container["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace_s = worker_pod()["terminationGracePeriodSeconds"]
    assert int(deadline) + 15 <= grace_s <= 120


def test_two_ray_nodes_never_share_a_machine() -> None:
    (term,) = worker_pod()["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    labels = dict(term["labelSelector"]["matchLabels"])
    assert labels.pop("ray.io/node-type") == "worker"
    assert labels.items() <= worker_group()["template"]["metadata"]["labels"].items()


def test_nothing_runs_as_root_but_what_gives_the_folder_away() -> None:
    for pod in (head_pod(), worker_pod()):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert [c["name"] for c in worker_pod()["initContainers"]] == ["own-nvme"]


def test_the_job_asks_for_as_many_workers_as_the_cluster_may_have_accelerators() -> None:
    job = load("kuberay_job.yaml")
    words = shlex.split(job["spec"]["entrypoint"])
    gpus = int(worker_pod()["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    low, high = (int(n) for n in words[words.index("--workers") + 1].split(":"))
    assert (low, high) == (gpus * worker_group()["minReplicas"], gpus * worker_group()["maxReplicas"])
    # Each try has to be the same run.
    assert words[words.index("--name") + 1] == job["metadata"]["name"]
    flags = set(re.findall(r'add_argument\("(--[a-z-]+)"', (ROOT / "examples/train_gpt.py").read_text()))
    assert {word for word in words if word.startswith("--")} <= flags


# --- the image --------------------------------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n", "", (CLUSTER / "Dockerfile").read_text()).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def copied(stage: int) -> dict[str, str]:
    """Source in the repository -> path in the image, for one stage."""
    steps = dockerfile()
    starts = [i for i, (what, _) in enumerate(steps) if what == "FROM"] + [len(steps)]
    out = {}
    for what, rest in steps[starts[stage] : starts[stage + 1]]:
        if what == "COPY":
            *sources, target = rest.split()
            for source in sources:
                out[source] = f"{target}{Path(source).name}" if target.endswith("/") else target
    return out


def test_the_image_runs_as_the_user_the_manifests_name_and_that_is_not_root() -> None:
    users = [rest for what, rest in dockerfile() if what == "USER"]
    uid = worker_pod()["securityContext"]["runAsUser"]
    assert users[-1] == f"{uid}:{uid}" and uid != 0
    assert any(f"useradd --create-home --uid {uid} " in rest for what, rest in dockerfile() if what == "RUN")


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    ignore = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    for source in copied(0) | copied(1):
        assert (ROOT / source).exists(), source
        assert source in allowed
    # The wheel of stage one needs all that pyproject.toml names.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "ray_goodput"} <= copied(0).keys()


def test_the_image_has_what_the_manifests_start() -> None:
    inside = set(copied(1).values())
    hook = worker_pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert set(re.findall(r"/opt/\S+\.py", hook)) == {"/opt/ray_goodput/drain_node.py"} <= inside
    watch = [c for c in load("aws_cluster.yaml")["worker_start_ray_commands"] if "spot_watch.py" in c]
    assert len(watch) == 1 and set(re.findall(r"/opt/\S+\.py", watch[0])) <= inside
    assert shlex.split(load("kuberay_job.yaml")["spec"]["entrypoint"])[1] == f"{copied(1)['examples']}/train_gpt.py"


def test_the_python_of_the_image_is_one_that_the_package_supports() -> None:
    (python,) = [rest.removeprefix("PYTHON=") for what, rest in dockerfile() if what == "ARG"]
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, python.split("."))) >= tuple(map(int, least.split(".")))
    assert {rest.split()[0] for what, rest in dockerfile() if what == "FROM"} == {"python:${PYTHON}-slim-bookworm"}


@pytest.mark.parametrize("name", ["kuberay_cluster.yaml", "kuberay_job.yaml"])
def test_all_pods_run_one_image(name: str) -> None:
    images = set(re.findall(r"image: (\S+)", (CLUSTER / name).read_text()))
    assert len(images) == 1
