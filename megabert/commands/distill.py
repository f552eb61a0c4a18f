"""Train a student of fewer layers from a teacher, on the same shards and by the same trainer.

    megabert distill --model TEACHER --layers N --data DIR --run DIR [section.key=value …]

Starts `megabert/train.py` with the teacher's configuration, `model.layers` and `distill.teacher`. The losses and their sources are in
`megabert/objectives/distillation.py`.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from megabert.common.arguments import MODEL, Parser
from megabert.common.errors import command
from megabert.common.logs import log
from megabert.common.storage import is_url
from megabert.hf.hub import model_folder

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="TEACHER", help=MODEL)
    add("--layers", type=int, required=True, help="layers of the student")
    add("--data", required=True, metavar="DIR", help="dataset folder built with the teacher's tokenizer")
    add("--run", required=True, metavar="DIR", help="the student's run folder")
    add("overrides", nargs="*", metavar="section.key=value", help="differences from the teacher's training")
    args = parser.parse_intermixed_args(argv)
    if args.layers < 1:
        raise ValueError(f"--layers {args.layers}: must be 1 or more")
    if Path(args.run).is_file():
        raise ValueError(f"--run {args.run}: is a file; name a folder")
    from megabert.config import refuse_unknown_overrides
    from megabert.data.shards import Manifest

    Manifest.load(args.data)
    refuse_unknown_overrides(args.overrides)
    folder = model_folder(args.model).resolve()
    from megabert import hf
    from megabert.objectives.distillation import student_overrides

    teacher = hf.load(folder)
    teacher.refuse_without_mlm_head()
    settings = student_overrides(teacher.config, args.model if is_url(args.model) else str(folder), args.layers)
    training = [str(TRAIN), "--data", args.data, "--run", args.run, *settings, *args.overrides]
    log.info(f"on several ranks or nodes: deepspeed {shlex.join(training)}")
    os.execv(sys.executable, [sys.executable, *training])
