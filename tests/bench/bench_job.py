"""What the session costs a step: the control word of two ranks, the journal, the metrics, and what rank 0 decides about
saves under "auto", beside the bare loop.

Two processes on gloo take steps of 50 ms (a sleep: what is measured is the time our calls take, not what they do to a
busy processor), in turn with and without the session's bookkeeping. Budgets: DESIGN section 8.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from results_file import Budget, parser, report, spread

STEP_S = 0.05
STEPS = 60
ROUNDS = 5


def _rank(world_rank: int, port: int, folder: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from ray_goodput.clock import SystemClock
    from ray_goodput.core.buckets import Bucket
    from ray_goodput.core.tier_cadence import TierCadence
    from ray_goodput.core.tiers import SaveTier
    from ray_goodput.goodput.journal import JournalWriter
    from ray_goodput.goodput.recorder import Recorder
    from ray_goodput.train.decide import decide
    from ray_goodput.train.metrics import MetricsBuffer
    from ray_goodput.train.orders import RankOrders
    from ray_goodput.train.tier_times import TierTimes
    from ray_goodput.train.world import ControlWord, World

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world_rank, world_size=2)
    world = World.join(world_rank, 2)
    word, metrics = ControlWord(world), MetricsBuffer()
    writer = JournalWriter(Path(folder) / f"{world_rank}.journal", run="b", attempt=1, world_rank=world_rank, node="n")
    recorder = Recorder(writer, SystemClock())
    recorder.start()
    recorder.switch(Bucket.STEP)
    loss = torch.zeros(())
    times = TierTimes(TierCadence.parse(every="auto", every_local=None, peers=True, world=2), SystemClock(), 2)
    times.begun(SaveTier.STORAGE, 0, 0.01)  # a save was measured: from now on there are intervals to keep
    orders = RankOrders(world_rank, ())
    cost_s: list[float] = []
    decide_s: list[float] = []
    loops: dict[str, list[float]] = {"bare": [], "session": []}
    step = 0
    for _ in range(ROUNDS):
        for arm, step_s in loops.items():
            world.all_true(True)
            started = time.perf_counter()
            for _ in range(STEPS):
                time.sleep(STEP_S)
                if arm == "session":
                    before = time.perf_counter()
                    with recorder.span(Bucket.DATA_WAIT):
                        pass
                    word.read()
                    step += 1
                    recorder.step_done(step)
                    metrics.note(step, {"loss": loss})
                    asked = time.perf_counter()
                    decisions = decide(orders, times.decide(step + 1, []).tier, False)
                    decided = time.perf_counter()
                    word.post(decisions)
                    decide_s.append(decided - asked)
                    cost_s.append(time.perf_counter() - before - decide_s[-1])
            step_s.append((time.perf_counter() - started) / STEPS)
            metrics.take()
    recorder.close()
    results.put((world_rank, cost_s, decide_s, loops))
    dist.destroy_process_group()


def main() -> None:
    arguments = parser("job").parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(r, port, folder, results)) for r in range(2)]
        for process in ranks:
            process.start()
        _, cost_s, decide_s, loops = min((results.get(timeout=180) for _ in ranks), key=lambda answer: answer[0])
        for process in ranks:
            process.join(30)
    arms = {
        "bare loop": {"step_s": spread(loops["bare"])},
        "with the session": {
            "step_s": spread(loops["session"]),
            "calls_s": spread(cost_s),
            "decide_s": spread(decide_s),
        },
    }
    ratio = arms["with the session"]["step_s"]["median"] / arms["bare loop"]["step_s"]["median"]
    budgets = [
        Budget(name="control word, journal, metrics: seconds a step", limit=2e-4, value=spread(cost_s)["median"]),
        Budget(name="no-failure overhead of a 50 ms step (ratio - 1)", limit=0.01, value=ratio - 1),
    ]
    report("job", arms, budgets, as_json=arguments.json)


if __name__ == "__main__":
    main()
