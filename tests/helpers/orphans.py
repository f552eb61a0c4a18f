"""A process that takes updates from a loader with workers and is killed: `python -m tests.helpers.orphans DATA METHOD`.

Prints the workers' process ids, then the first batch of each update.
"""

import os
import signal
import sys

from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from tests.helpers.rows import vocabulary

if __name__ == "__main__":
    loader = Loader(
        Dataset(sys.argv[1]), vocabulary(), global_batch=48, micro_batch=8, seed=1, workers=2, start_method=sys.argv[2]
    )
    batches = [next(loader).batches[0].input_ids.tolist() for _ in range(3)]
    print(*(worker.pid for worker in loader._workers))
    print(*batches, sep="\n", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
