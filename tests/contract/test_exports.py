"""What users import, and what importing must not do."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import ray_goodput as rg
from ray_goodput import errors

PACKAGE = Path(rg.__file__).parent
HEAVY = ("torch", "ray", "numpy", "pyarrow", "obstore", "fsspec")
ERRORS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.GoodputError)]


def modules_loaded_by(code: str, heavy: tuple[str, ...] = HEAVY) -> set[str]:
    """Names of the heavy modules that are imported once `code` has run in a fresh interpreter."""
    script = f"{code}\nimport sys; print('loaded:', *[m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50).stdout
    return set(out.rsplit("loaded:", 1)[1].split())


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(rg.__all__) == [
        "Batch",
        "CheckpointConfig",
        "Checkpointer",
        "DataFile",
        "DataLoader",
        "FailureBudget",
        "FileDataset",
        "GoodputError",
        "GoodputTrainer",
        "Mixture",
        "MlflowConfig",
        "RawFilesFormat",
        "ShardedDataset",
        "StorageReader",
        "StorageWriter",
        "TokenFormat",
        "WatchdogConfig",
        "__version__",
        "latest_complete",
        "session",
    ]
    assert set(rg.__all__) <= set(dir(rg))


def test_the_public_names_of_testing_are_exactly_these() -> None:
    from ray_goodput import testing

    assert testing.__all__ == [
        "Fault",
        "FaultInjector",
        "InjectedFaultError",
        "Kind",
        "LiveRun",
        "Phase",
        "Strike",
        "Target",
        "find_run",
        "random_faults",
    ]
    assert all(getattr(testing, name).__doc__ for name in testing.__all__)


@pytest.mark.parametrize("name", rg.__all__)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    value = getattr(rg, name)
    assert name == "__version__" or (value.__doc__ and value.__module__.startswith("ray_goodput."))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = rg.Trainer


def test_importing_the_package_loads_no_heavy_library() -> None:
    assert modules_loaded_by("import ray_goodput; dir(ray_goodput)") == set()


def test_the_actors_that_move_checkpoints_do_without_torch() -> None:
    """It costs each of their processes 200 MB and seconds to start."""
    modules = ("coordinator", "vault", "factories", "shard_cache")
    code = "; ".join(f"import ray_goodput.actors.{name}" for name in modules)
    assert "torch" not in modules_loaded_by(code)


def test_the_help_of_every_command_loads_no_heavy_library() -> None:
    code = """
import contextlib, io
from typer.testing import CliRunner
from ray_goodput.cli.app import app
for args in (["--help"], ["demo", "--help"], ["chaos", "--help"], ["checkpoints", "verify", "--help"]):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0 and "Usage" in result.output, result.output
"""
    assert modules_loaded_by(code) == set()


def test_a_driver_does_not_load_what_only_training_processes_need() -> None:
    """It is a quarter of what a driver imports before its run begins, each time that it is started."""
    engine = ("torch.distributed.checkpoint", "torch.distributed.tensor", "ray_goodput.train.session")
    assert modules_loaded_by("import ray_goodput.train.trainer", (*engine, "torch")) == {"torch"}


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_every_error_survives_pickling_and_is_in_the_drawn_tree(error: type[errors.GoodputError]) -> None:
    back = pickle.loads(pickle.dumps(error("1 of 2 objects is missing.")))
    assert type(back) is error
    assert str(back) == "1 of 2 objects is missing."
    assert error.__name__ in (errors.__doc__ or "")


def test_only_ray_compat_touches_what_ray_keeps_to_itself() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [
                path.name for n in names if n.split(".")[0] == "ray" and any(p[0] == "_" for p in n.split(".") if p)
            ]
    assert set(found) <= {"ray_compat.py"}


def test_the_demo_runs_the_very_file_of_the_example() -> None:
    example = PACKAGE.parent / "examples" / "train_gpt.py"
    assert (PACKAGE / "cli" / "train_gpt.py").resolve() == example.resolve()
    assert len(example.read_text().splitlines()) < 150
