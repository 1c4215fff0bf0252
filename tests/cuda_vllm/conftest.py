"""`test_on_fake_cuda` runs the files in `cuda_engines`, in processes with another vLLM than that of all other tests."""

from __future__ import annotations

import fake_device

collect_ignore = [] if fake_device.is_loaded() else ["cuda_engines"]
