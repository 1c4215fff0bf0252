"""`test_on_sglang` runs the files in `hicache`, in processes that import SGLang."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("sglang") else ["hicache"]
