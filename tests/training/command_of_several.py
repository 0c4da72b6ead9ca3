"""`midus train` as `torchrun` starts it; each process writes how it ended."""

import atexit
import os
import sys
from pathlib import Path

import torch.distributed as dist

from midus.cli.main import main


class TornDown:
    """Writes, should the interpreter be torn down around it."""

    def __init__(self, file):
        self.file, self.write = file, Path.write_text

    def __del__(self):
        self.write(self.file, "")


if __name__ == "__main__":
    folder, rank = Path(sys.argv.pop(1)), os.environ["RANK"]
    witness = TornDown(folder / f"torn-down-{rank}")
    at_exit = folder / f"at-exit-{rank}"
    atexit.register(lambda: at_exit.write_text(str(dist.is_initialized())))
    main()
