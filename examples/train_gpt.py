"""Train a small byte-level GPT on the source text of the Python standard library, on Ray, and survive what comes.

    python examples/train_gpt.py                                             # on this machine, in a temporary folder
    ray job submit --working-dir . -- python examples/train_gpt.py --storage s3://bucket/gpt --workers 2:8

Kill a worker or a node while it runs: it goes on from the newest complete checkpoint, at exactly the next sample.
Start it again under the same `--name`: it goes on, too. The goodput table at the end tells where the time went.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.train.torch
import torch
import torch.nn.functional as F
from torch import nn

import ray_goodput as rg

BLOCK = 128  # tokens a sample predicts; a row of the data has one more
NUM_DATA_SHARDS = 24


class GPT(nn.Module):
    """A causal transformer over bytes: `int64[batch, BLOCK] -> float32[batch, BLOCK, 256]`, about 0.5 M parameters."""

    def __init__(self, width: int = 128, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(BLOCK, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens) + self.position
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def train_loop(config: dict) -> None:
    """What each worker runs, at first and after each restart."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same first weights on each worker; restore() replaces them once there is a checkpoint
    run = rg.session()
    model = ray.train.torch.prepare_model(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    run.restore(model=model, optimizer=optimizer)
    for batch in run.batches("train", epochs=config["epochs"]):
        tokens = batch["tokens"].long()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step({"loss": loss})


def prepare(storage: str, max_rows: int | None = None, storage_options: dict | None = None) -> str:
    """The text lies under `storage` as parquet data shards, rows of BLOCK + 1 bytes; returns their glob pattern.

    A marker comes last, so that shards half-written by an earlier try are not taken for the data.
    """
    fs, path = fsspec.url_to_fs(f"{storage}/data/stdlib-{max_rows or 'all'}", **(storage_options or {}))
    if not fs.exists(f"{path}/COMPLETE"):
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        sources = [p for p in sources if not {"site-packages", "test", "tests"} & set(p.parts)]
        text = np.frombuffer(b"".join(p.read_bytes() for p in sources), dtype=np.uint8)
        rows = text[: len(text) // (BLOCK + 1) * (BLOCK + 1)].reshape(-1, BLOCK + 1)[:max_rows]
        fs.makedirs(path, exist_ok=True)
        for i, part in enumerate(np.array_split(rows, NUM_DATA_SHARDS)):
            column = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), BLOCK + 1)
            with fs.open(f"{path}/part-{i:05d}.parquet", "wb") as file:
                pq.write_table(pa.table({"tokens": column}), file)
        fs.pipe_file(f"{path}/COMPLETE", str(len(rows)).encode())
    return f"{fs.unstrip_protocol(path)}/*.parquet"


def make_trainer(
    storage: str,
    name: str,
    *,
    workers: int | tuple[int, int] = 2,
    epochs: int = 1,
    max_steps: int | None = None,
    batch_size: int = 64,
    every: int | str = 20,
    lr: float = 1e-3,
    storage_options: dict | None = None,
    **trainer_args,
) -> rg.GoodputTrainer:
    """The trainer of the run `name`; with `max_steps` each epoch uses only as much text as that many steps need."""
    storage = storage.rstrip("/") if "://" in storage else os.path.abspath(storage)
    max_rows = max_steps * batch_size // epochs if max_steps else None
    pattern = prepare(storage, max_rows, storage_options)
    text = rg.ShardedDataset(pattern, global_batch_size=batch_size, seed=0, storage_options=storage_options)
    return rg.GoodputTrainer(
        train_loop,
        train_loop_config={"lr": lr, "epochs": epochs},
        datasets={"train": text},
        checkpoint=rg.CheckpointConfig(every=every, keep_last=3),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(name=name, storage_path=f"{storage}/runs"),
        storage_options=storage_options,
        **trainer_args,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default=f"{tempfile.gettempdir()}/ray_goodput_gpt", help="folder or s3://...")
    parser.add_argument("--name", default=time.strftime("gpt-%Y%m%d-%H%M%S"), help="a name used before goes on")
    parser.add_argument("--workers", default="2", help="N, or MIN:MAX to follow the cluster's size")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=120, help="0: all the text, about 1,500 steps an epoch")
    parser.add_argument("--batch-size", type=int, default=64, help="samples a step, over all workers")
    parser.add_argument("--every", default="20", help='checkpoint each N steps, or "auto", or a duration like "10min"')
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--storage-options", type=json.loads, default=None, help='JSON, e.g. {"endpoint_url": ...}')
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    args = vars(parser.parse_args())
    as_json = args.pop("json")
    bounds = [int(n) for n in args["workers"].split(":")]
    args["workers"] = (bounds[0], bounds[1]) if len(bounds) > 1 else bounds[0]
    args["every"] = int(args["every"]) if args["every"].isdigit() else args["every"]
    if not os.environ.get("RAY_ADDRESS"):
        ray.init("local", num_cpus=max(bounds[-1], os.cpu_count() or 1))
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        result = make_trainer(**args).fit()  # prints the goodput table at its end; result.goodput has the numbers
    goodput = result.goodput.to_dict() if result.goodput else None
    summary = {"run": args["name"], "metrics": result.metrics, "goodput": goodput}
    print(json.dumps(summary) if as_json else f"Run {args['name']} is done. Last metrics: {result.metrics}")


if __name__ == "__main__":
    main()
