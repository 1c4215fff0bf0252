"""The files in `engines` run in processes that `test_on_fake_cuda` starts, with another vLLM than all other tests."""

from __future__ import annotations

import fake_device

collect_ignore = [] if fake_device.is_loaded() else ["engines"]
