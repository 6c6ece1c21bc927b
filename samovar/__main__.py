"""`python -m samovar`: the command, where no script is installed."""

from samovar.cluster.cli.main import main

main()
