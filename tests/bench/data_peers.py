"""The peers' own environment: made beside ours, on top of its packages. A peer that cannot be had is named with why."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import site
import subprocess
import sys
import types
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIST = Path(__file__).with_name("data_peers.txt")
_REPOSITORY = Path(__file__).parents[2]
_ABSENT = ("torchvision", "transformers")  # imported by Mosaic, used by nothing that is timed here


def peers_python(folder: Path) -> tuple[Path, dict[str, str]]:
    """(interpreter of an environment in `folder` with the peers, package -> why it could not be installed)."""
    python, packages = environment(folder, with_pip=True)
    absent = {}
    for line in _LIST.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name = line.split("==")[0]
        mark = packages / f".{name}.installed"
        if mark.exists() and mark.read_text() == line:
            continue
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            absent[name] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        else:
            mark.write_text(line)
    return python, absent


def environment(folder: Path, *, with_pip: bool) -> tuple[Path, Path]:
    """(interpreter, folder of packages) of an environment in `folder` that sees ours, and ray_goodput itself."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=with_pip)
    packages = next(folder.glob("lib/python3*/site-packages"))
    # The repository too: the file by which an editable installation is found counts in its own environment only.
    (packages / "ours.pth").write_text("\n".join([*site.getsitepackages(), str(_REPOSITORY)]) + "\n")
    return python, packages


class _Hollow(types.ModuleType):
    """A module that has whatever is asked of it, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def import_peer(name: str) -> Any:
    """The module, with hollow ones in place of what it imports and does not need."""
    if not any(isinstance(finder, _HollowFinder) for finder in sys.meta_path):
        sys.meta_path.append(_HollowFinder())
    return importlib.import_module(name)
