"""`midus train` as `torchrun` starts it; each process then writes whether it left the others."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from midus.cli.main import main

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    try:
        main()
    finally:
        (folder / f"left-{os.environ['RANK']}").write_text(str(not dist.is_initialized()))
