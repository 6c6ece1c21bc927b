"""`make world`: lives of small clusters, seed after seed, until one of them breaks a law."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a life
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]])

from tests.world.swarm import main

sys.exit(main())
