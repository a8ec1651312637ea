"""What a save costs training, how soon it is durable, and how fast it is loaded: ours beside PyTorch's and Ray's ways.

Ranks are gloo processes on this machine; the object store is a JuiceFS gateway on it too, at the lowest priority, since
a real one takes nothing from training. A step is 30 ms of waiting, as for a device, a little work and an all-reduce.
`--state-mb` is the state of DDP at 2 ranks; at 4 ranks and in the restores it is half of it, for FSDP2 and the huge
embedding a quarter. All of it takes about a quarter of an hour on two cores. A small one: `--cases ddp2 restore
--state-mb 64 --repeats 2`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # a vault's process, spawned, imports this file again, and must stay free of torch
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' servers
    from ckpt_main import main

    main()
