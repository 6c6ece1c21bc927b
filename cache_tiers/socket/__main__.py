"""`python -m cache_tiers.socket`: see `process.py`."""

import sys

from cache_tiers.socket.process import main

sys.exit(main())
