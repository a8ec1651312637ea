"""What the nodes of a cluster run themselves: the drain, the watch for spot notices, and the mounting of the NVMe."""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
NODE_ID = "ab" * 28


@pytest.fixture
def drain_node(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CLUSTER)
    return importlib.import_module("drain_node")


@pytest.fixture
def spot_watch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CLUSTER)
    return importlib.import_module("spot_watch")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH for programs that only say how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return folder


def tool(folder: Path, name: str, body: str = "") -> None:
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(folder: Path) -> list[str]:
    path = folder.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def process(proc: Path, pid: int, argv: list[str], state: str = "S") -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {state} 1 1")


RAYLET = [
    "/usr/lib/ray/raylet",
    "--raylet_socket_name=/tmp/ray/raylet",
    f"--node_id={NODE_ID}",
    "--python_worker_command=python worker.py --gcs-address=0.0.0.0:1 --node-id=0",
    "--gcs-address=10.0.0.1:6379",
]


def test_the_raylet_is_found_by_its_own_arguments(drain_node: ModuleType, tmp_path: Path) -> None:
    process(tmp_path, 7, ["python", "-c", "raylet", "--node_id=00", "--gcs-address=0.0.0.0:1"])
    process(tmp_path, 8, [])
    process(tmp_path, 9, RAYLET)
    (tmp_path / "10").mkdir()  # ended between the listing and the look
    (tmp_path / "meminfo").write_text("")
    assert drain_node.find_raylet(tmp_path) == drain_node.Raylet(pid=9, node_id=NODE_ID, gcs_address="10.0.0.1:6379")


def test_without_a_raylet_there_is_nothing_to_drain(
    drain_node: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: Path
) -> None:
    tool(tools, "ray")
    monkeypatch.setattr(drain_node, "find_raylet", lambda: None)
    assert drain_node.main(["--deadline-s=100", "--reason-message=the pod goes"]) == 0
    assert "nothing to drain" in capsys.readouterr().out
    assert calls(tools) == []


def test_the_hook_of_the_pod_hands_the_drain_its_arguments(tools: Path) -> None:
    pod = yaml.safe_load((CLUSTER / "kuberay_cluster.yaml").read_text())["spec"]["workerGroupSpecs"][0]["template"][
        "spec"
    ]
    tool(tools, "python3", 'for word; do echo "[$word]" >> "$CALLS"; done')
    tool(tools, "tee")
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert subprocess.run(hook, timeout=20).returncode == 0
    assert [call for call in calls(tools) if call.startswith("[")] == [
        "[/opt/ray_goodput/drain_node.py]",
        "[--deadline-s=100]",
        "[--reason-message=Kubernetes deletes the pod]",
    ]


def test_a_zombie_does_not_run(drain_node: ModuleType, tmp_path: Path) -> None:
    process(tmp_path, 7, RAYLET)
    process(tmp_path, 8, RAYLET, state="Z")
    assert [drain_node.is_running(pid, tmp_path) for pid in (7, 8, 9)] == [True, False, False]


@pytest.fixture
def raylet(drain_node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the raylet until it is killed."""
    with subprocess.Popen(["sleep", "60"]) as child:
        found = drain_node.Raylet(pid=child.pid, node_id=NODE_ID, gcs_address="10.0.0.1:6379")
        monkeypatch.setattr(drain_node, "find_raylet", lambda: found)
        yield child
        child.kill()


def test_the_drain_asks_ray_and_ends_when_the_raylet_has_left(
    drain_node: ModuleType, raylet: subprocess.Popen[bytes], tools: Path
) -> None:
    tool(tools, "ray", f"kill {raylet.pid}")
    said = drain_node.drain(50, "the pod goes", poll_s=0.01)
    assert said == f"Node {NODE_ID} was drained and has left."
    (call,) = calls(tools)
    assert call.startswith(
        f"ray drain-node --address=10.0.0.1:6379 --node-id={NODE_ID} --reason=DRAIN_NODE_REASON_PREE"
    )
    assert call.endswith("--reason-message=the pod goes --deadline-remaining-seconds=50")


def test_the_drain_leaves_the_vault_its_time_but_not_more(
    drain_node: ModuleType, raylet: subprocess.Popen[bytes], tools: Path
) -> None:
    tool(tools, "ray")
    said = drain_node.drain(1, "the pod goes", poll_s=0.01)
    assert said.endswith("its time of 1 s is up.")
    assert raylet.poll() is None


def test_a_refused_drain_is_said_and_not_waited_for(
    drain_node: ModuleType, raylet: subprocess.Popen[bytes], tools: Path
) -> None:
    tool(tools, "ray", "echo 'Error: the node is not idle' >&2; exit 1")
    assert drain_node.drain(50, "the pod goes").endswith("Error: the node is not idle")


def test_a_head_that_does_not_answer_costs_only_a_bounded_time(
    drain_node: ModuleType, raylet: subprocess.Popen[bytes], tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tools, "ray", "exec sleep 60")
    monkeypatch.setattr(drain_node, "ASK_TIMEOUT_S", 0.2)
    assert "did not answer" in drain_node.drain(50, "the pod goes")


# --- spot notices -----------------------------------------------------------------------------------------------------


class Metadata(ThreadingHTTPServer):
    """The instance metadata service, IMDSv2: `answers` are (status, body), the last one for ever."""

    daemon_threads = True

    def __init__(self, answers: list[tuple[int, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.base = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def _reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._reply(200 if known else 400, "secret")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "secret":
            self._reply(401, "")
            return
        assert isinstance(self.server, Metadata)
        answers = self.server.answers
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        known = self.path == "/latest/meta-data/spot/instance-action"
        self._reply(status if known else 403, body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the test's standard error."""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata([(404, "")])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


NOTICE = '{"action": "terminate", "time": "2026-11-29T12:02:00Z"}'


def test_there_is_no_notice_until_there_is_one(spot_watch: ModuleType, metadata: Metadata) -> None:
    assert spot_watch.read_notice(metadata.base) is None
    metadata.answers[:] = [(200, NOTICE)]
    assert spot_watch.read_notice(metadata.base) == {"action": "terminate", "time": "2026-11-29T12:02:00Z"}


def test_the_watch_survives_a_metadata_service_in_trouble_and_says_so_once(
    spot_watch: ModuleType, metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.answers[:] = [(404, ""), (503, ""), (500, ""), (200, "no json"), (200, NOTICE)]
    assert spot_watch.wait_for_notice(metadata.base, poll_s=0.001)["action"] == "terminate"
    assert len([r for r in caplog.records if "cannot be read" in r.getMessage()]) == 1


@pytest.mark.parametrize(("now", "left"), [("12:00:00", 115), ("12:01:50", 5), ("12:01:58", 0), ("12:05:00", 0)])
def test_ray_is_promised_a_little_less_than_the_time_left(spot_watch: ModuleType, now: str, left: int) -> None:
    at = datetime.fromisoformat(f"2026-11-29T{now}").replace(tzinfo=UTC)
    assert spot_watch.seconds_left({"time": "2026-11-29T12:02:00Z"}, at) == left


def test_a_notice_drains_the_node(spot_watch: ModuleType, metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[tuple[int, str]] = []

    def drain(deadline_s: int, reason: str) -> str:
        drained.append((deadline_s, reason))
        return "done"

    monkeypatch.setattr(spot_watch.drain_node, "drain", drain)
    metadata.answers[:] = [(404, ""), (200, NOTICE.replace("2026", "2126"))]
    assert spot_watch.main([f"--metadata={metadata.base}", "--poll-s=0.001"]) == 0
    ((deadline_s, reason),) = drained
    assert deadline_s > 0
    assert reason == "EC2 spot notice: terminate at 2126-11-29T12:02:00Z"


# --- the NVMe ---------------------------------------------------------------------------------------------------------


def mount_nvme(
    tools: Path, disks: int, *, mounted_by_image: str = "", done: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command of the AWS cluster that mounts the NVMe, with tools that change nothing."""
    for name in ("mkdir", "mount", "mdadm", "mkfs.ext4", "chown", "cloud-init"):
        tool(tools, name)
    (tools / "sudo").write_text('#!/bin/bash\nexec "$@"\n')
    (tools / "sudo").chmod(0o755)
    tool(tools, "mountpoint", "exit 0" if done else "exit 1")
    listing = "".join(f"/dev/nvme{i + 1}n1 Amazon EC2 NVMe Instance Storage\\n" for i in range(disks))
    root_disk = "/dev/nvme0n1 Amazon Elastic Block Store\\n"
    tool(
        tools,
        "lsblk",
        f'case "$*" in *MODEL*) printf "{root_disk}{listing}";; *) printf "\\n\\n{mounted_by_image}\\n";; esac',
    )
    worker = yaml.safe_load((CLUSTER / "aws_cluster.yaml").read_text())["available_node_types"]["spot_gpu"]
    (script,) = [command for command in worker["initialization_commands"] if "/mnt/nvme" in command]
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True)


def changes(tools: Path) -> list[str]:
    return [call for call in calls(tools) if call.split()[0] not in ("lsblk", "mountpoint", "cloud-init", "mkdir")]


def test_one_nvme_disk_becomes_the_file_system(tools: Path) -> None:
    assert mount_nvme(tools, 1).returncode == 0
    assert changes(tools) == [
        "mkfs.ext4 -q -F -E nodiscard /dev/nvme1n1",
        "mount -o noatime,discard /dev/nvme1n1 /mnt/nvme",
        "chown 1000:1000 /mnt/nvme",
    ]


def test_several_nvme_disks_are_striped(tools: Path) -> None:
    assert mount_nvme(tools, 2).returncode == 0
    assert changes(tools) == [
        "mdadm --create /dev/md0 --run --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
        "mkfs.ext4 -q -F -E nodiscard /dev/md0",
        "mount -o noatime,discard /dev/md0 /mnt/nvme",
        "chown 1000:1000 /mnt/nvme",
    ]


def test_what_the_image_has_mounted_is_used_and_not_formatted(tools: Path) -> None:
    assert mount_nvme(tools, 2, mounted_by_image="/opt/dlami/nvme").returncode == 0
    assert changes(tools) == ["mount --bind /opt/dlami/nvme /mnt/nvme", "chown 1000:1000 /mnt/nvme"]


def test_mounting_twice_formats_once(tools: Path) -> None:
    assert mount_nvme(tools, 2, done=True).returncode == 0
    assert changes(tools) == ["chown 1000:1000 /mnt/nvme"]


def test_an_instance_without_nvme_is_refused_with_a_way_out(tools: Path) -> None:
    result = mount_nvme(tools, 0)
    assert result.returncode == 1
    assert "choose one that has" in result.stderr
    assert changes(tools) == []
