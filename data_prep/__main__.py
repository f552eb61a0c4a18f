"""Raw text to verified shards: build, verify every byte, inspect the content, push to a hub.

megabert prep build --input PATH… --output DIR --seq-len 128 --vocab-size 30000
mpirun -n 64 megabert prep build …                     the same bytes out, by 64 ranks
megabert prep build … --executor ray                   the same bytes out, by a running Ray cluster
megabert prep build … --part K/N, then without         the same bytes out, by N independent jobs and a last one
megabert prep verify DIR        exit code 1 when anything is damaged
megabert prep inspect DIR
megabert prep push DIR OWNER/NAME    to the Hugging Face hub, from where --data hf://datasets/OWNER/NAME trains
"""

from __future__ import annotations

import sys

from megabert.common.errors import Failed, command, exit_on_ctrl_c, interrupted, run_main

with exit_on_ctrl_c():
    from data_prep import commands


@command
def main(argv: list[str] | None = None) -> int:
    args = commands.parser(__doc__).parse_args(argv)
    folder = args.output if args.command == "build" else args.folder
    try:
        return commands.run(args)
    except BrokenPipeError:
        raise
    except MemoryError:
        raise Failed(f"{args.command}: out of memory; more of it, a higher limit or fewer --workers may help") from None
    except OSError as error:
        if error.errno is not None:  # a failed write has no file name
            error.filename = error.filename or folder
        raise
    except KeyboardInterrupt:
        kept = {
            "build": "finished parts are kept, the same command resumes",
            "push": "the same command completes the push",
        }
        return interrupted(kept.get(args.command, ""))


if __name__ == "__main__":
    sys.exit(run_main(main))
