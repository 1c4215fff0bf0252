"""`python tools/gpu_check`: Python then has the folder itself on its path, and not the folder's parent."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_check.run import main  # the line above makes it importable

LONGEST_S = 295.0

if __name__ == "__main__":
    # A driver that hangs must not hang the check: it shows where, and ends with 1.
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    sys.exit(main())
