"""Ranks that sleep while they wait for each other, so that more of them than there are cores do not hold each other up.

The process from which workers are forked imports this, and so does the engine's own.
"""

import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from real_engine import leave_modules_out_of_collections

# For a second after each message, its readers ask for the next in a loop, since notices of messages may be lost.
shm_broadcast.sched_yield = lambda: time.sleep(0.0005)
# vLLM's own collective operations wait in a loop; without a common name of their memory it takes those of gloo.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
leave_modules_out_of_collections()
