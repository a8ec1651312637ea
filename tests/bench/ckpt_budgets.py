"""The budgets of a save and a restore (DESIGN, section 8), from what was measured."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_state import CASES
from results_file import Budget, spread

Figures = dict[str, dict[str, dict[str, float]]]

_THREAD, _KEPT = "async_save, thread", "async_save, process, kept"
_ASYNC = (_THREAD, "async_save, process", _KEPT, "ray")
# Of the best stock arm, of the default `async_save`: by the number of ranks.
_OF_STOCK = {"ddp2": (0.7, 1 / 4), "ddp4": (0.5, 1 / 5)}
_TO_SPARE = "one"
_SMALL_MB = 100


def budgets(figures: Figures) -> list[Budget]:
    """Every budget whose arms were measured; notes the ratios to memcpy and to the bare upload in `figures` as well."""
    _note_ratios(figures)
    return [*_stalls(figures), *_memory_and_balance(figures), *_durable(figures), *_steps(figures), *_restores(figures)]


def median(figures: Figures, arm: str, metric: str) -> float | None:
    entry = figures.get(arm, {}).get(metric)
    return None if entry is None else entry["median"]


def _budget(name: str, limit: float, value: float | None, of: float | None, why: str = "") -> Iterable[Budget]:
    if value is not None and of:
        yield Budget(name=name, limit=limit, value=value / of, why=why)


def _note_ratios(figures: Figures) -> None:
    for name, metrics in figures.items():
        case = name.partition(": ")[0]
        memcpy = median(figures, f"{case}: ours", "memcpy_s")
        bare = median(figures, f"{case}: bare upload", "durable_s")
        if memcpy and "stall_s" in metrics:
            metrics["stall_to_memcpy"] = spread([metrics["stall_s"]["median"] / memcpy])
        if bare and "durable_s" in metrics:
            metrics["durable_to_bare_upload"] = spread([metrics["durable_s"]["median"] / bare])


def _stalls(figures: Figures) -> Iterable[Budget]:
    for case in (case.name for case in CASES):
        ours = f"{case}: ours"
        stall = median(figures, ours, "stall_s")
        yield from _budget(
            f"{case}: stall to memcpy", 1.5, stall, median(figures, ours, "memcpy_s"), _why_stall(figures, ours)
        )
        if case in _OF_STOCK:
            of_best, of_default = _OF_STOCK[case]
            kept, thread = (median(figures, f"{case}: {arm}", "stall_s") for arm in (_KEPT, _THREAD))
            yield from _budget(f"{case}: stall to async_save with a kept stager", of_best, stall, kept)
            yield from _budget(f"{case}: stall to the default async_save", of_default, stall, thread)
        yield from _budget(f"{case}: first save to later ones", 3, median(figures, ours, "first_save_s"), stall)


def _why_stall(figures: Figures, ours: str) -> str:
    """Some milliseconds of a stall do not depend on the bytes: they show in a small state, and on a busy machine."""
    slice_mb = median(figures, ours, "slice_mb") or 0.0
    few = "Collecting the state and two agreements of the ranks take some ms; "
    return f"{few}a slice of {slice_mb:.0f} MiB is copied in few more." if slice_mb < _SMALL_MB else ""


def _memory_and_balance(figures: Figures) -> Iterable[Budget]:
    for case in (case.name for case in CASES):
        ours = f"{case}: ours"
        slice_mb, memory = (median(figures, ours, m) for m in ("slice_mb", "extra_memory_mb_a_rank"))
        if slice_mb is not None and memory is not None:
            yield Budget(name=f"{case}: extra memory a rank, MiB", limit=2 * slice_mb + 64, value=memory)
        yield from _budget(f"{case}: bytes max/mean", 1.05, median(figures, ours, "slice_max_to_mean"), 1.0)


def _durable(figures: Figures) -> Iterable[Budget]:
    for case in (case.name for case in CASES):
        bare = median(figures, f"{case}: bare upload", "durable_s")
        ours = median(figures, f"{case}: ours", "durable_s")
        yield from _budget(f"{case}: durable to a bare upload", 1.25, ours, bare)


def _steps(figures: Figures) -> Iterable[Budget]:
    for case in (case.name for case in CASES):
        for p in ("p50", "p99"):
            metric = f"step_uploading_{p}_s"
            stock = [median(figures, f"{case}: {arm}", metric) for arm in _ASYNC]
            best = min((value for value in stock if value is not None), default=None)
            ours = median(figures, f"{case}: ours", metric)
            yield from _budget(f"{case}: step while uploading, {p}, to the best stock arm", 1.0, ours, best)
            if case == _TO_SPARE:
                quiet = median(figures, f"{case}: ours", f"step_quiet_{p}_s")
                yield from _budget(f"a core to spare: step while uploading to quiet, {p}", _quiet_limit(p), ours, quiet)


def _quiet_limit(percentile: str) -> float:
    return 1.05 if percentile == "p50" else 1.2


def _restores(figures: Figures) -> Iterable[Budget]:
    def load(arm: str) -> float | None:
        return median(figures, f"restore: {arm}", "restore_s")

    for worlds in ("2 to 2 ranks", "4 to 2 ranks"):
        stock = load(f"stock files, dcp.load, {worlds}")
        for reader in ("our reader", "dcp.load"):
            name = f"restore, {worlds}: our files by {reader} to stock ones by dcp.load"
            yield from _budget(name, 1.1, load(f"our files, {reader}, {worlds}"), stock)
    local, remote = load("our files, our reader, 2 to 2 ranks"), load("stock files from S3, dcp.load")
    yield from _budget("restore, local tier to dcp.load from the store", 1 / 3, local, remote)
    downloads = median(figures, "restore: our files from S3, our reader", "downloads_to_size")
    yield from _budget("restore: bytes downloaded a node to those of the checkpoint", 1.0, downloads, 1.0)
