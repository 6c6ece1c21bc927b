"""`python -m samovar.cache_tiers.command`: see `main.py`."""

import sys

from samovar.cache_tiers.command.main import main

sys.exit(main())
