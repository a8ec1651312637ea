"""A real MLflow tracking server for tests: MLflow's own application on sqlite, in a process that can die and come back.

Importing MLflow's server costs seconds, so a parent process does that once and forks the server each time it is
started. The address and the data stay over `kill` and `start`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from servers import free_port, stop_process


class MlflowServer:
    """Context manager: starts, and at the end kills the server. `root` keeps the database and the artefacts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._port = free_port()
        self._parent: subprocess.Popen[str] | None = None
        self._server_pid = 0

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self, deadline_s: float = 50.0) -> None:
        """The server answers requests."""
        if self._parent is None:
            with (self._root / "server.log").open("ab") as log:
                self._parent = subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, str(self._root), str(self._port)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                )
        self._server_pid = int(self._say("start"))
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    log = (self._root / "server.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the MLflow server did not come up:\n{log}") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """The server is gone at once; connections to its address are refused."""
        self._say("kill")

    def pause(self) -> None:
        """The server accepts connections but does not answer, until `resume`."""
        stop_process(self._server_pid)

    def resume(self) -> None:
        os.kill(self._server_pid, signal.SIGCONT)

    def __enter__(self) -> MlflowServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        parent, self._parent = self._parent, None
        if parent is not None:
            assert parent.stdin is not None and parent.stdout is not None
            parent.stdin.close()
            parent.wait(timeout=10)
            parent.stdout.close()

    def _say(self, word: str) -> str:
        assert self._parent is not None and self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(word + "\n")
        self._parent.stdin.flush()
        answer = self._parent.stdout.readline().strip()
        if not answer:
            log = (self._root / "server.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the MLflow server's parent died:\n{log}")
        return answer


def _serve(app: Any, port: int) -> None:
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def main(root: Path, port: int) -> None:
    # What `mlflow server` itself hands to its server processes.
    os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{root}/mlflow.db"
    os.environ["_MLFLOW_SERVER_ARTIFACT_DESTINATION"] = str(root / "artifacts")
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = "mlflow-artifacts:/"
    os.environ["_MLFLOW_SERVER_SERVE_ARTIFACTS"] = "true"
    from mlflow.server.fastapi_app import app

    child = 0
    for line in sys.stdin:
        if line.strip() == "start":
            child = os.fork()
            if child == 0:
                sys.stdin.close()
                os.dup2(2, 1)
                _serve(app, port)
                os._exit(0)
            print(child, flush=True)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = 0
            print("gone", flush=True)
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
