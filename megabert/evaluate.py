"""Held-out MLM (left to right where a run is) and NSP of a run's newest checkpoint, under a mask that never changes.

python -m megabert.evaluate --run DIR --data DIR        prints one JSON line
"""

from __future__ import annotations

import argparse
import json
import sys

from megabert.training.evaluation import evaluate_run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megabert.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="run folder written by megabert/train.py")
    parser.add_argument(
        "--data", required=True, help="dataset folder written by data_prep, with a held-out split"
    )
    parser.add_argument(
        "--rows", type=int, default=0, help="held-out rows at most; 0 takes the run's eval.rows"
    )
    args = parser.parse_args(argv)
    try:
        print(json.dumps(evaluate_run(args.run, args.data, args.rows)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
