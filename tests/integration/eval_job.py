"""The job of `test_evaluate_ray.py`: trains on JSON lines, evaluates on raw files after each epoch. A driver script.

    python eval_job.py FOLDER

Expects FOLDER/train/*.jsonl.gz and FOLDER/val/<class>/*.bin; writes FOLDER/out.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

EPOCHS = 2


def first_byte(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"value": float(sample["bytes"][0]), "label": sample["label"]}


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    import ray_goodput as rg

    torch.set_num_threads(1)
    torch.manual_seed(1)
    run = rg.session()
    net = nn.Linear(2, 1).double()
    model = run.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.restore(model=model, optimizer=optimizer)
    evaluations = []
    sizes = []
    for epoch in range(1, EPOCHS + 1):
        for batch in run.batches("train", epochs=epoch):
            x = torch.stack([batch["a"], batch["b"]], dim=1)
            nn.functional.mse_loss(model(x).squeeze(-1), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            sizes.append(batch.num_samples)
        sums = torch.zeros(4, dtype=torch.float64)
        ids = []
        for batch in run.evaluate_batches("val"):
            ids += batch.sample_ids.tolist()
            mean = batch["value"].double().mean() * batch.num_samples
            sums += torch.tensor([mean, batch.num_samples, 1.0, batch["label"].sum() * (batch.weight > 0)])
        gathered: list[Any] = [None] * run.world_size
        torch.distributed.all_gather_object(gathered, (ids, sums.tolist()))
        evaluations.append(gathered)
    return {
        "weights": [parameter.flatten().tolist() for parameter in net.parameters()],
        "evaluations": evaluations,
        "sizes": sizes,
    }


def main(folder: Path) -> None:
    import ray
    import ray.train

    import ray_goodput as rg

    ray.init(num_cpus=2, include_dashboard=False)
    trainer = rg.GoodputTrainer(
        train_loop,
        train_loop_config={},
        datasets={
            "train": rg.ShardedDataset(f"{folder}/train/*.jsonl.gz", global_batch_size=4, seed=2),
            "val": rg.ShardedDataset(
                f"{folder}/val",
                global_batch_size=6,
                format=rg.RawFilesFormat(group_files=5),
                transform=first_byte,  # of this script: in the workers it is no module's, and goes by value
                workers=1,
                worker_kind="process",
                drop_last=True,
            ),
        },
        checkpoint=rg.CheckpointConfig(every=1000),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="evaluate", storage_path=str(folder / "runs")),
    )
    result = trainer.fit()
    buckets = result.goodput.to_dict()["buckets_s"] if result.goodput is not None else {}
    (folder / "out.json").write_text(json.dumps({"loop": result.return_value, "buckets_s": buckets}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
