"""vLLM's PPHandler from the one file of its wheel that holds it, where vLLM itself is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["handler_class"]


def handler_class(carried: Path, group: Any) -> Any:
    """Return PPHandler of a carried pp_utils.py, on stand-ins for what that file imports from vLLM."""
    import torch

    def to_device(data: Any, device: Any) -> Any:
        data = torch.from_numpy(data)
        return data.to(device) if str(device) == "cpu" else data.pin_memory().to(device, non_blocking=True)

    names: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.envs": {"VLLM_XPU_PP_MICROBATCH": True}, "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: group},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_xpu=lambda: False)},
        "vllm.sequence": {"IntermediateTensors": dict}, "vllm.utils": {},
        "vllm.utils.torch_utils": {"async_tensor_h2d": to_device}, "vllm.v1": {}, "vllm.v1.worker": {},
        "vllm.v1.worker.gpu": {}, "vllm.v1.worker.gpu.input_batch": {"InputBatch": object},
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in names}
    try:
        for name, content in names.items():
            module = sys.modules[name] = ModuleType(name)
            vars(module).update(content)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        spec = importlib.util.spec_from_file_location("carried_pp_utils", carried / "pp_utils.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["carried_pp_utils"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.PPHandler
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
