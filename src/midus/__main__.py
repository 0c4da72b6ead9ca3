"""`python -m midus`, which launchers such as torchrun start on every process."""

from midus.cli.main import main

main()
