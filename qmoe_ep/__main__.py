"""``python -m qmoe_ep``."""

from __future__ import annotations

import sys

from qmoe_ep.cli.main import main

sys.exit(main())
