"""The environment in which the data benchmark runs its arms finds ours, wherever it lies."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))
from data_peers import environment  # noqa: E402 (the benchmarks are no package)


def test_the_peers_interpreter_imports_this_checkout(tmp_path: Path) -> None:
    python, _ = environment(tmp_path / "peers", with_pip=False)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", "import ray_goodput, pyarrow; print(ray_goodput.__file__)"]
    told = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert Path(told.stdout.strip()).is_relative_to(ROOT)
