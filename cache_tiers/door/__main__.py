"""`python -m cache_tiers.door`: see `process.py`."""

import sys

from cache_tiers.door.process import main

sys.exit(main())
