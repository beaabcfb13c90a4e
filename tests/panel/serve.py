"""Serves a kernel: `serve.py MODULE FUNCTION`, such as `serve.py torch_kernels logsumexp`."""

import sys
from importlib import import_module

from protocol import OUTPUTS, serve

if __name__ == "__main__":
    module = import_module(sys.argv[1])
    serve(getattr(module, sys.argv[2]), module.ABOUT, getattr(module, "OUTPUTS", OUTPUTS))
