"""A kernel of `assay emit --target h100` called from JAX, compiled for that GPU where none is.

    assay emit --target h100 --shape 1x2048x151936 -o kernel
    python jax_ffi.py kernel --plugin .plugins/xla_cuda_plugin.so --toolkit .plugins/cuda

needs JAX 0.10.2 (`pip install jax`). What `call` does is public: `jax.ffi.ffi_call`. Compiling without a GPU is not: those names of
`jaxlib` may change. With a GPU, `jax.jit` of the same function is all there is to it. **No GPU has run this.**
"""

import argparse
import json
import os
import pathlib
import re
import tempfile

import numpy as np

CALL = "__gpu$xla.gpu.ptx"


def call(folder: pathlib.Path, kernel: dict):
    """A function of a kernel's inputs that returns its outputs; those that lie over an input take its place."""
    import jax

    inputs = [argument for argument in kernel["arguments"] if argument["role"] == "input"]
    outputs = [argument for argument in kernel["arguments"] if argument["role"] == "output"]
    over = {argument["over"]: place for place, argument in enumerate(outputs) if "over" in argument}
    names = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32"}
    of = lambda argument: jax.ShapeDtypeStruct(tuple(argument["shape"]), names[argument["dtype"]])  # noqa: E731
    ffi = jax.ffi.ffi_call(CALL, [of(output) for output in outputs], input_output_aliases=over)
    launch = {}
    for name in ("grid", "block"):
        for axis, extent in zip("xyz", kernel[name], strict=True):
            # The call takes integers of 32 bits alone.
            launch[f"{name}_{axis}"] = np.int32(extent)
    # The entry is given the inputs, then the outputs: where those stand among its arguments.
    places = np.arange(len(inputs), len(inputs) + len(outputs), dtype=np.int64)
    text = (folder / kernel["ptx"]).read_text()
    attributes = {"name": kernel["name"], "kernel_type": "ptx", "kernel_data": text, "output_indices": places}
    shared = np.int32(kernel["shared_bytes"])
    return (lambda *arrays: ffi(*arrays, **launch, **attributes, shared_mem_bytes=shared)), [of(one) for one in inputs]


def devices(plugin: str, target: str):
    """The devices of a GPU that is not here: private to jaxlib."""
    from jax._src.lib import xla_client

    xla_client.load_pjrt_plugin_dynamically("cuda", plugin)
    xla_client.initialize_pjrt_plugin("cuda")
    options = {"topology": "1x1x1", "target_config": target}
    topology = xla_client._xla.get_default_c_api_topology("cuda", "cuda", options)
    return topology._make_compile_only_devices()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--plugin", required=True)
    parser.add_argument("--toolkit", type=pathlib.Path, required=True)
    asked = parser.parse_args()
    folder, plugin, toolkit = (pathlib.Path(path).resolve() for path in (asked.folder, asked.plugin, asked.toolkit))
    manifest = json.loads((folder / "manifest.json").read_text())
    # Where the plugin looks for a toolkit first.
    scratch = tempfile.TemporaryDirectory()
    os.chdir(scratch.name)
    os.symlink(toolkit, "cuda_sdk_lib")
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jax

    mesh = jax.sharding.Mesh(devices(str(plugin), manifest["target_config"]), ("one",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for kernel in manifest["kernels"]:
        run, inputs = call(folder, kernel)
        donated = [one["over"] for one in kernel["arguments"] if "over" in one]
        jitted = jax.jit(run, donate_argnums=donated, in_shardings=here, out_shardings=here)
        compiled = jitted.trace(*inputs).lower(lowering_platforms=("cuda",)).compile()
        memory = compiled.memory_analysis()
        calls = len(re.findall(re.escape(CALL), compiled.as_text()))
        print(f"{kernel['name']}: compiled for {manifest['target']}, {calls} call, {memory.alias_size_in_bytes} bytes in place, "
              f"{memory.temp_size_in_bytes} of scratch")


if __name__ == "__main__":
    main()
