"""One head-wise memory layer, checked and timed: the same as `midus bench layer`.

python benchmarks/hml_layer.py --json benchmarks/results/hml_layer.json
"""

import sys

from midus.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "layer"]
    main()
