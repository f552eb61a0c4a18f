"""Train a student of fewer layers from a teacher, on the same shards and by the same trainer.

    python -m megabert.distill --teacher RUN --layers N --data DIR --run DIR [section.key=value …]

starts `megabert/train.py` with the teacher's configuration, `model.layers` and `distill.teacher`; the same as

    deepspeed megabert/train.py … model.layers=N distill.teacher=RUN

The losses and their sources are in `megabert/training/distillation.py`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from megabert import pretrained
from megabert.training.distillation import student_overrides


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="megabert.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--teacher", required=True, help="run folder, checkpoint or Hugging Face folder")
    add("--layers", type=int, required=True, help="layers of the student")
    add("--data", required=True, help="dataset folder built with the teacher's tokenizer")
    add("--run", required=True, help="the student's run folder")
    add("overrides", nargs="*", metavar="section.key=value", help="what differs from the teacher's training")
    args = parser.parse_args(argv)
    try:
        teacher = pretrained.load(args.teacher)
        settings = student_overrides(teacher.config, str(Path(args.teacher).resolve()), args.layers)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    script = str(Path(__file__).with_name("train.py"))
    command = [script, "--data", args.data, "--run", args.run, *settings, *args.overrides]
    print(f"on several ranks or nodes: deepspeed {shlex.join(command)}", flush=True)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    sys.exit(main())
