"""The remote store of the data benchmark: JuiceFS's S3 gateway behind a proxy that makes it far away; its FUSE mount.

The mount is of a volume whose blocks are objects in the same store, read through the same proxy: the network is the
same for every arm. Data goes in directly, past the proxy.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray_goodput.config import StoreSpec
from ray_goodput.storage import open_store
from servers import JuiceFSGateway, juicefs_program
from store_proxy import ProxyProcess

_BUCKET = JuiceFSGateway.bucket
_VOLUME = "mounted"


class RemoteStore:
    """A gateway with its data in `root/store`, and the proxy. Context manager."""

    def __init__(self, root: Path, *, latency_s: float, bytes_per_s: float) -> None:
        self._root = root
        self.gateway = JuiceFSGateway(root / "store")
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    def __enter__(self) -> RemoteStore:
        self.gateway.start()
        self.proxy = ProxyProcess(self.gateway.port, latency_s=self._latency_s, bytes_per_s=self._bytes_per_s)
        self.proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.__exit__()
        self.gateway.stop()

    @property
    def options(self) -> dict[str, Any]:
        """Of the far store, in the spelling of s3fs."""
        return {**self.gateway.storage_options, "endpoint_url": self.proxy.endpoint_url}

    def upload(self, folder: Path, prefix: str) -> None:
        """Every file below `folder` is an object below `prefix`."""
        store = open_store(StoreSpec(uri=f"s3://{_BUCKET}", options=self.gateway.storage_options))
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(store.upload_file, f"{prefix}/{f.relative_to(folder)}", f) for f in files]
            for job in jobs:
                job.result()

    def warm(self) -> None:
        """The server has everything in its page cache, so that no arm pays for the disk of the store."""
        for path in (self._root / "store" / "data").rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(8 << 20):
                        pass

    def make_volume(self, folder: Path) -> None:
        """The volume that `mounted` mounts holds a copy of `folder`."""
        options = self.gateway.storage_options
        arguments = ["--storage", "minio", "--bucket", f"{options['endpoint_url']}/{_BUCKET}", "--trash-days", "0"]
        arguments += ["--access-key", options["key"], "--secret-key", options["secret"], self._meta, _VOLUME]
        subprocess.run([juicefs_program(), "format", *arguments], check=True, capture_output=True, timeout=60)
        with self.mounted(far=False) as mount:
            subprocess.run(["cp", "-r", f"{folder}/.", str(mount)], check=True, timeout=600)

    @contextlib.contextmanager
    def mounted(self, *, far: bool = True) -> Iterator[Path]:
        """The volume as a folder, freshly mounted with an empty cache; `far`: through the proxy."""
        mount, cache = self._root / "mount", self._root / "mount-cache"
        subprocess.run(["rm", "-rf", str(cache)], check=True)
        mount.mkdir(exist_ok=True)
        endpoint = self.proxy.endpoint_url if far else self.gateway.endpoint_url
        command = [juicefs_program(), "mount", self._meta, str(mount), "--bucket", f"{endpoint}/{_BUCKET}"]
        command += ["--cache-dir", str(cache), "--no-usage-report", "--no-bgjob", "--backup-meta", "0"]
        command += ["--metrics", "127.0.0.1:0"]
        with (self._root / "mount.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 30
            while not mount.is_mount():
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = (self._root / "mount.log").read_text(errors="replace")[-1000:]
                    raise RuntimeError(f"the FUSE mount did not come up: {tail}")
                time.sleep(0.05)
            yield mount
        finally:
            subprocess.run([juicefs_program(), "umount", str(mount)], capture_output=True, timeout=60)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait(10)

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self._root}/volume.db"
