"""Set before any test file imports torch, whose OpenMP reads it once: how a sum is split among threads rounds it."""

from harness import set_environment

set_environment()
