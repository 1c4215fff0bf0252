"""A trainer that hands new weights to vLLM in a file: a kind of vLLM's weight transfer that needs no GPU.

vLLM's own kinds send tensors from one GPU to another. The calls, the layers' reload and the state of the worker are the
same for all kinds. Servers import this module by ``--worker-extension-cls weight_files.Extension``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

KIND = "files"


@dataclass
class Nothing(WeightTransferInitInfo):
    """Files need no rendezvous."""


@dataclass
class File(WeightTransferUpdateInfo):
    """Weights in safetensors format, under a checkpoint's names."""

    path: str


class WeightFiles(WeightTransferEngine[Nothing, File]):
    """Loads files as vLLM's other kinds load tensors."""

    init_info_cls = Nothing
    update_info_cls = File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Let the layers take a checkpoint's tensors again."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Let the layers prepare their weights for use."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without vLLM's wait for a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: File) -> None:
        """Load one file."""
        self.model.load_weights(iter(load_file(update_info.path).items()))

    def shutdown(self) -> None:
        """Nothing to release."""


WeightTransferEngineFactory.register_engine(KIND, WeightFiles)


class Extension:
    """Of workers in processes of their own, for the sake of this module's import."""


def changed_weights(model: Path, to: Path) -> Path:
    """A file with weights that change every token: those of ``model``, with other norms."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor.mul_(torch.linspace(-2, 2, tensor.numel()))
    save_file(tensors, to)
    return to


def send(client: Any, path: Path, *, draft: bool = False) -> None:
    """A trainer's handshake. ``client``: a `VLLMWeightSyncClient`."""
    client.init_weight_transfer_engine({})
    (client.start_draft_weight_update if draft else client.start_weight_update)()
    client.update_weights({"path": str(path)})
    client.finish_weight_update()


class InProcess:
    """A trainer's client of a vLLM in its own process (`VLLMWeightSyncClient`)."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `VLLMWeightSyncClient`."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `VLLMWeightSyncClient`."""
        self._llm.update_weights({"update_info": update_info})
