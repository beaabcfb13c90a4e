"""Hostile kernels: each is run in a process of its own (`isolate=True`), and must end, hang or deceive nothing but itself."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from plain import Outputs, plain

#: Seconds for one answer, and for one that imports PyTorch first.
TIMEOUT, WITH_TORCH = 10.0, 120.0


@dataclass(frozen=True)
class HostileKernel:
    """A kernel that does something else than answer, and what its campaign must print."""

    name: str
    #: A regular expression that the printed causes match.
    says: str
    #: Whether it may pass: what it does harms nobody.
    may_pass: bool
    #: Seconds for one answer.
    timeout: float = TIMEOUT


KERNELS: list[HostileKernel] = []


def hostile(says: str, *, may_pass: bool = False, timeout: float = TIMEOUT) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS.append(HostileKernel(fn.__name__, says, may_pass, timeout))
        return fn

    return add


# Kernels that end their process.


@hostile(r"(?=.*crashed).*signal: 11\b")
def reads_a_null_pointer(problem: Any) -> Any:
    return ctypes.string_at(0)


@hostile(r"(?=.*crashed).*signal: 6\b")
def aborts(problem: Any) -> Any:
    os.abort()


@hostile(r"(?=.*crashed).*signal: 9\b")
def kills_itself(problem: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@hostile(r"(?=.*crashed).*exit status: 3\b")
def exits_at_once(problem: Any) -> Any:
    os._exit(3)


@hostile(r"(?=.*crashed).*exit status: 0\b")
def exits_as_if_well(problem: Any) -> Any:
    os._exit(0)


@hostile(r"(?=.*crashed).*exit status: 7\b")
def calls_sys_exit(problem: Any) -> Any:
    sys.exit(7)


@hostile(r"crashed|raised|interrupt")
def raises_keyboard_interrupt(problem: Any) -> Any:
    raise KeyboardInterrupt


@hostile(r"crashed|raised")
def raises_an_exception_of_no_kind(problem: Any) -> Any:
    raise BaseException("not an Exception")


@hostile(r"crashed|raised|timed-out")
def overflows_the_stack(problem: Any) -> Any:
    sys.setrecursionlimit(10**9)
    return overflows_the_stack(problem)


@hostile(r"crashed|(?=.*raised).*MemoryError|timed-out")
def takes_all_memory(problem: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
    return np.zeros(1 << 40)


@hostile(r"crashed|signal 24|timed-out")
def runs_out_of_processor_time(problem: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass


# Kernels that hang.


@hostile(r"timed-out")
def sleeps(problem: Any) -> Any:
    time.sleep(3600)


@hostile(r"timed-out")
def ignores_every_signal(problem: Any) -> Any:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)


@hostile(r"timed-out")
def stops_itself(problem: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


@hostile(r"timed-out")
def waits_for_a_lock(problem: Any) -> Any:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@hostile(r"crashed|timed-out")
def leaves_a_child_that_holds_the_pipes(problem: Any) -> Any:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os._exit(4)


@hostile(r"timed-out|crashed|raised", may_pass=True)
def answers_twice_from_a_fork(problem: Any) -> Outputs:
    os.fork()
    return plain(problem)


@hostile(r"crashed|timed-out")
def exits_behind_a_thread(problem: Any) -> Any:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    sys.exit(5)


# Kernels that meddle with what they talk through.


@hostile(r"", may_pass=True)
def prints_much(problem: Any) -> Outputs:
    print("a line of no protocol\n" * 100_000)
    return plain(problem)


@hostile(r"", may_pass=True)
def writes_to_standard_error(problem: Any) -> Outputs:
    os.write(2, b"\xff\xfe\x00" * 1000)
    return plain(problem)


@hostile(r"crashed|timed-out|raised|protocol")
def closes_every_file(problem: Any) -> Outputs:
    os.closerange(0, 1024)
    return plain(problem)


@hostile(r"crashed|timed-out|raised|protocol|answer")
def writes_into_every_file(problem: Any) -> Outputs:
    for number in range(3, 64):
        try:
            os.write(number, b'{"id": 0}\nnonsense\n\xff\xff\n')
        except OSError:
            continue
    return plain(problem)


@hostile(r"crashed|timed-out|raised|protocol|answer")
def answers_without_end(problem: Any) -> Any:
    while True:
        for number in range(3, 32):
            try:
                os.write(number, b"x" * 65_536)
            except OSError:
                continue


@hostile(r"", may_pass=True)
def changes_its_folder(problem: Any) -> Outputs:
    os.chdir("/")
    os.environ.clear()
    return plain(problem)


@hostile(r"", may_pass=True)
def seeds_and_traps(problem: Any) -> Outputs:
    np.random.seed(0)
    np.seterr(all="raise")
    signal.alarm(0)
    return plain(problem)


# Kernels that raise.


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@hostile(r"raised|crashed")
def raises_what_has_no_words(problem: Any) -> Any:
    raise Mute


@hostile(r"raised")
def raises_a_long_text(problem: Any) -> Any:
    raise ValueError("x" * 10_000_000)


@hostile(r"raised|crashed")
def raises_half_a_character(problem: Any) -> Any:
    raise ValueError("\ud800 \x00 \x1b[2J \n\n CAUSE dlogits: 1 problem")


@hostile(r"raised")
def raises_a_memory_error(problem: Any) -> Any:
    raise MemoryError


@hostile(r"skipped +6 problems")
def is_never_written(problem: Any) -> Any:
    raise NotImplementedError


# Kernels that return something else.


class Hostile(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("no item")

    def __iter__(self) -> Any:
        raise RuntimeError("no names")

    def __len__(self) -> int:
        return -1


class Junk:
    """An array by protocols that it does not keep."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __dlpack__(self, **_: Any) -> Any:
        return self.parts.get("capsule")

    def __dlpack_device__(self) -> Any:
        return self.parts.get("device", (1, 0))


def null_capsule() -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(ZEROS), b"dltensor", None)


#: A tensor of nulls: no data, no axes, no deleter.
ZEROS = (ctypes.c_uint8 * 256)()

REFUSED = r"output|raised|its shape|not finite|dlogits|loss"
RETURNED: dict[str, Any] = {
    "nothing": None,
    "a_number": 1.0,
    "a_text": "loss",
    "a_list": [1, 2, 3],
    "an_empty_dict": {},
    "a_mapping_that_raises": lambda problem: Hostile(),
    "other_names": lambda problem: {1: 2, None: 3, b"loss": 4},
    "an_unknown_output": lambda problem: plain(problem) | {"gradient": np.zeros(3, np.float32)},
    "no_gradient": lambda problem: {"loss": plain(problem)["loss"]},
    "a_generator": lambda problem: (each for each in plain(problem).items()),
    "nan": lambda problem: {name: np.full_like(array, np.nan) for name, array in plain(problem).items()},
    "another_shape": lambda problem: plain(problem) | {"dlogits": np.zeros((1, 1, 1), np.float32)},
    "no_elements": lambda problem: plain(problem) | {"dlogits": np.zeros((0, 3, 33), np.float32)},
    "many_axes": lambda problem: plain(problem) | {"dlogits": np.zeros((1,) * 32, np.float32)},
    "integers": lambda problem: plain(problem) | {"dlogits": np.zeros((2, 3, 33), np.int8)},
    "complex_numbers": lambda problem: plain(problem) | {"dlogits": np.zeros((2, 3, 33), np.complex64)},
    "objects": lambda problem: plain(problem) | {"dlogits": np.full((2, 3, 33), None)},
    "texts": lambda problem: plain(problem) | {"logp": np.full((2, 3), "nan")},
    "other_endian": lambda problem: plain(problem) | {"logp": np.zeros((2, 3), ">f4")},
    "one_number_repeated": lambda problem: plain(problem) | {"dlogits": np.broadcast_to(np.float32(0), (2, 3, 33))},
    "too_large_an_extent": lambda problem: plain(problem) | {"dlogits": np.broadcast_to(np.float32(0), (1 << 40, 3, 33))},
    "its_own_input": lambda problem: plain(problem) | {"dlogits": problem.numpy().logits},
    "a_capsule_of_nothing": lambda problem: plain(problem) | {"dlogits": Junk(capsule=None)},
    "a_null_capsule": lambda problem: plain(problem) | {"dlogits": Junk(capsule=null_capsule())},
    "a_tensor_of_another_device": lambda problem: plain(problem) | {"dlogits": Junk(capsule=None, device=(2, 7))},
    "a_device_of_no_kind": lambda problem: plain(problem) | {"dlogits": Junk(capsule=None, device="cpu")},
    "a_released_buffer": lambda problem: plain(problem) | {"logp": released()},
}


def released() -> Any:
    view = memoryview(bytearray(24))
    view.release()
    return view


def tensor_of_torch(name: str) -> Any:
    import torch

    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (2, 3, 33), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no operation")

    def fake() -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.zeros(2, 3, 33)

    made: dict[str, Callable[[], Any]] = {
        "a_tensor_without_storage": Wrapper,
        "a_meta_tensor": lambda: torch.zeros(2, 3, 33, device="meta"),
        "a_sparse_tensor": lambda: torch.zeros(2, 3, 33).to_sparse(),
        "a_fake_tensor": fake,
        "a_nested_tensor": lambda: torch.nested.nested_tensor([torch.zeros(3, 33), torch.zeros(2, 33)]),
        "a_tensor_with_a_gradient": lambda: torch.zeros(2, 3, 33, requires_grad=True),
        "a_conjugated_tensor": lambda: torch.zeros(2, 3, 33, dtype=torch.complex64).conj(),
        "a_quantized_tensor": lambda: torch.quantize_per_tensor(torch.zeros(2, 3, 33), 1.0, 0, torch.quint8),
        "a_resized_storage": lambda: emptied(torch.zeros(2, 3, 33)),
    }
    return made[name]()


#: The tensors by name: PyTorch is imported for none of the others.
OF_TORCH = (
    "a_tensor_without_storage",
    "a_meta_tensor",
    "a_sparse_tensor",
    "a_fake_tensor",
    "a_nested_tensor",
    "a_tensor_with_a_gradient",
    "a_conjugated_tensor",
    "a_quantized_tensor",
    "a_resized_storage",
)


def emptied(tensor: Any) -> Any:
    tensor.untyped_storage().resize_(0)
    return tensor


def answers_with(name: str) -> Callable[[Any], Any]:
    def kernel(problem: Any) -> Any:
        if name in OF_TORCH:
            return plain(problem) | {"dlogits": tensor_of_torch(name)}
        value = RETURNED[name]
        return value(problem) if callable(value) else value

    kernel.__name__ = kernel.__qualname__ = f"returns_{name}"
    return kernel


NAMES = [*RETURNED, *(OF_TORCH if find_spec("torch") else ())]
for each in NAMES:
    # Another process imports it by its name.
    globals()[f"returns_{each}"] = hostile(REFUSED, timeout=WITH_TORCH if each in OF_TORCH else TIMEOUT)(answers_with(each))


# Kernels that write where they should not.


def pointer(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@hostile(r"input-mutated")
def writes_to_the_logits(problem: Any) -> Outputs:
    outputs = plain(problem)
    ctypes.c_uint8.from_address(pointer(problem.numpy().logits)).value ^= 1
    return outputs


@hostile(r"input-mutated")
def writes_to_the_mask(problem: Any) -> Outputs:
    outputs = plain(problem)
    ctypes.c_uint8.from_address(pointer(problem.numpy().mask)).value ^= 1
    return outputs


@hostile(r"crashed|input-mutated|raised")
def writes_around_the_logits(problem: Any) -> Outputs:
    outputs = plain(problem)
    ctypes.memset(pointer(problem.numpy().logits) - (1 << 16), 0xFF, 1 << 22)
    return outputs


@hostile(r"output|raised|dlogits", may_pass=True)
def frees_its_outputs_later(problem: Any) -> Outputs:
    outputs = plain(problem)
    threading.Timer(0.01, lambda: outputs["dlogits"].fill(np.nan)).start()
    return outputs
