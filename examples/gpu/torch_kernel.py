"""A kernel of `assay emit --target h100` launched from PyTorch, on its tensors and its stream.

    assay emit --target h100 --shape 1x2048x151936 -o kernel

    from torch_kernel import Kernel
    kernel = Kernel("kernel")                      # loads the PTX; the driver assembles it
    results = kernel(ids, numbers, logits, tokens) # dlogits lie over logits afterwards

The PTX is loaded by `torch.cuda._utils._cuda_load_module`, which is private to PyTorch 2.8 and newer, or, where that is not there or
more shared memory is asked for than a launch has without asking, by the driver itself through `ctypes`. **This has never run: it was written on a machine without a GPU**, from PyTorch's
and CUDA's documentation. What the arguments are is in the manifest; what they hold, in docs/gpu.md.
"""

import ctypes
import json
import pathlib

DTYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32"}

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DYNAMIC_SHARED = 8
# What a launch may have without asking for more.
PLAIN_SHARED = 48 << 10


class Driver:
    """A kernel through libcuda alone."""

    def __init__(self, text: str, name: str, shared_bytes: int) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), text.encode() + b"\0"), "load the PTX")
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()), f"find {name}")
        if shared_bytes > PLAIN_SHARED:
            asked = self.cuda.cuFuncSetAttribute(self.function, DYNAMIC_SHARED, shared_bytes)
            self.check(asked, f"ask for {shared_bytes} bytes of shared memory")

    def check(self, status: int, what: str) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"cannot {what}: {(text.value or b'?').decode()} ({status}); a driver of CUDA 12.0 or newer takes it")

    def __call__(self, grid, block, pointers, shared_bytes: int, stream: int) -> None:
        values = [ctypes.c_void_p(pointer) for pointer in pointers]
        arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        launched = self.cuda.cuLaunchKernel(self.function, *grid, *block, shared_bytes, ctypes.c_void_p(stream), arguments, None)
        self.check(launched, "launch it")


class Kernel:
    """A kernel of an emitted folder."""

    def __init__(self, folder: str, place: int = 0) -> None:
        import torch

        self.torch = torch
        manifest = json.loads((pathlib.Path(folder) / "manifest.json").read_text())
        self.kernel = manifest["kernels"][place]
        text = (pathlib.Path(folder) / self.kernel["ptx"]).read_text()
        name, shared = self.kernel["name"], self.kernel["shared_bytes"]
        # A module is loaded into a context, and PyTorch makes none before it allocates: a stream alone is none.
        torch.empty(1, device="cuda")
        load = getattr(getattr(torch.cuda, "_utils", None), "_cuda_load_module", None)
        self.launch = None
        if load is not None and shared <= PLAIN_SHARED:
            self.launch = load(text, [name])[name]
        self.driver = Driver(text, name, shared) if self.launch is None else None

    def __call__(self, *inputs):
        """Its outputs that lie over no input, in order."""
        torch, arguments = self.torch, self.kernel["arguments"]
        expected = [one for one in arguments if one["role"] == "input"]
        if len(inputs) != len(expected):
            raise ValueError(f"{self.kernel['name']}: got {len(inputs)} arrays, expected {[one['name'] for one in expected]}")
        for given, one in zip(inputs, expected, strict=True):
            dtype = getattr(torch, DTYPES[one["dtype"]])
            if tuple(given.shape) != tuple(one["shape"]) or given.dtype != dtype or not given.is_contiguous():
                raise ValueError(f"{one['name']}: got {given.dtype} {tuple(given.shape)}, expected contiguous {dtype} {one['shape']}")
            # What begins within another tensor may begin anywhere.
            if given.data_ptr() % one["alignment"]:
                raise ValueError(f"{one['name']}: begins at {given.data_ptr():#x}, expected a multiple of {one['alignment']} bytes: clone() it")
        tensors, results = list(inputs), []
        for one in arguments[len(inputs):]:
            if "over" in one:
                tensors.append(tensors[one["over"]])
            else:
                tensors.append(torch.empty(one["shape"], dtype=getattr(torch, DTYPES[one["dtype"]]), device=inputs[0].device))
                results.append(tensors[-1])
        launch = (tuple(self.kernel["grid"]), tuple(self.kernel["block"]))
        stream = torch.cuda.current_stream()
        if self.launch is not None:
            self.launch(*launch, tensors, self.kernel["shared_bytes"], stream)
        else:
            pointers = [tensor.data_ptr() for tensor in tensors]
            self.driver(*launch, pointers, self.kernel["shared_bytes"], stream.cuda_stream)
        return results
