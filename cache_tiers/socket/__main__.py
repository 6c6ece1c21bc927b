"""`python -m samovar.cache_tiers.socket`: see `process.py`."""

import sys

from samovar.cache_tiers.socket.process import main

sys.exit(main())
