"""`python -m ntx_batch` is `ntx-batch`."""

from ntx_batch.cli import main

main()
