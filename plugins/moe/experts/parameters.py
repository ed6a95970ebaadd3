"""Parameters that signatures of several experts' kernels share."""

from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.signature import TensorParam, WeightParam

IDS = TensorParam("ids", "i32", ("M", "T"))
WEIGHTS = TensorParam("weights", "f32", ("M", "T"))
W_GATE, W_UP = (WeightParam(name, "nvfp4", ("E", "I", "H")) for name in ("w_gate", "w_up"))
W_DOWN = WeightParam("w_down", "nvfp4", ("E", "H", "I"))
OFFSETS, WORK = TensorParam("offsets", "i32", ("E + 1",)), TensorParam("work", "i32", ("E", 4))
WHOLE_H, WHOLE_I = (("H", nvfp4.GROUP),), (("I", nvfp4.GROUP),)
