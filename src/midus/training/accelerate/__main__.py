"""Prints where packaged settings are: `python -m midus.training.accelerate fsdp2`."""

import sys

from midus.errors import MidusError
from midus.training.accelerate import settings_file

try:
    print(settings_file(sys.argv[1] if len(sys.argv) > 1 else ""))
except MidusError as error:
    print(f"midus: {error}", file=sys.stderr)
    sys.exit(2)
