"""Records the logits of `fixtures/qwen_tiny.safetensors` and `qwen_gsm8k.safetensors` again, from the official weights.

    python setup/record_fixtures.py [--model FILE.gguf] [--assay assay] [--into target/fixtures]

Without `--model` the weights are fetched from their publisher, 491,400,064 bytes. Whatever their source, their sha256 must be the one that
the fixtures name. `assay record` (feature `train`) then scores the recorded completions, and what it wrote is compared with the fixtures:
ids, mask, rewards and advantages must be equal; of logits, which another program computed in another order before they were rounded to
bf16, the largest difference is printed. It needs Python 3.11 and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
NAME = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
ADDRESS = f"https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/resolve/main/{NAME}"
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
FIXTURES = ["qwen_tiny", "qwen_gsm8k"]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights(given: Path | None, into: Path) -> Path:
    """Returns the model's file, fetched if none is given; its hash is checked either way."""
    path = given or into / NAME
    if not path.exists():
        if given:
            raise SystemExit(f"--model: got {given}, which is not there")
        print(f"fetching {ADDRESS}: 491 MB", flush=True)
        partial = path.with_suffix(".part")
        urllib.request.urlretrieve(ADDRESS, partial)
        partial.rename(path)
    found = sha256(path)
    if found != SHA256:
        raise SystemExit(f"{path}: got sha256 {found}, expected {SHA256}")
    return path


def tokens(path: Path) -> list[bytes]:
    """Reads the vocabulary from a GGUF file's metadata, each token as the bytes of its text."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(file: BinaryIO, form: str) -> int:
        value: int = struct.unpack("<" + form, file.read(struct.calcsize(form)))[0]
        return value

    def text(file: BinaryIO) -> str:
        return file.read(number(file, "Q")).decode()

    def value(file: BinaryIO, kind: int) -> list[str] | None:
        if kind == 8:
            text(file)
        elif kind == 9:
            kind, count = number(file, "I"), number(file, "Q")
            if kind == 8:
                return [text(file) for _ in range(count)]
            file.read(sizes[kind] * count)
        else:
            file.read(sizes[kind])
        return None

    # Byte-level BPE writes each byte as a printable character.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SystemExit(f"{path}: got another kind of file, expected GGUF")
        number(file, "I"), number(file, "Q")
        for _ in range(number(file, "Q")):
            key, kind = text(file), number(file, "I")
            read = value(file, kind)
            if key == "tokenizer.ggml.tokens" and read:
                return [bytes(characters[c] for c in token) if all(c in characters for c in token) else token.encode() for token in read]
    raise SystemExit(f"{path}: it has no vocabulary, expected tokenizer.ggml.tokens in its metadata")


class Tensors:
    """A safetensors file: metadata, and tensors as bytes."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", self.data)
        self.header = json.loads(self.data[8 : 8 + length])
        self.metadata: dict[str, str] = self.header.pop("__metadata__")
        self.start = 8 + length

    def bytes(self, name: str) -> bytes:
        first, last = self.header[name]["data_offsets"]
        return self.data[self.start + first : self.start + last]

    def numbers(self, name: str) -> list[float]:
        form = {"F32": "f", "I32": "i", "I64": "q", "U8": "B", "BOOL": "B", "F64": "d"}[self.header[name]["dtype"]]
        return list(struct.unpack(f"<{len(self.bytes(name)) // struct.calcsize(form)}{form}", self.bytes(name)))


def largest_difference(recorded: bytes, again: bytes) -> tuple[float, int]:
    """Returns the largest difference of two bf16 arrays, and how many of their values differ."""
    largest, differing = 0.0, 0
    for a, b in zip(memoryview(recorded).cast("H"), memoryview(again).cast("H"), strict=True):
        if a != b:
            x, y = (struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in (a, b))
            differing += 1
            largest = max(largest, abs(x - y))
    return largest, differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the weights, if they are here already")
    parser.add_argument("--assay", default="assay", help="the command, built with the feature `train`")
    parser.add_argument("--into", type=Path, default=ROOT / "target/fixtures", help="the folder for weights and recordings")
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    model = weights(asked.model, asked.into)
    vocabulary = tokens(model)
    equal = True
    for name in FIXTURES:
        fixture = Tensors(ROOT / f"fixtures/{name}.safetensors")
        prompt = b"".join(vocabulary[i] for i in json.loads(fixture.metadata["prompt_ids"])).decode()
        prompts, out = asked.into / f"{name}.jsonl", asked.into / f"{name}.safetensors"
        completions = json.loads(fixture.metadata["completions_text"])
        rewards = fixture.numbers("rewards")
        lines = [json.dumps({"prompt": prompt, "completion": c, "reward": r}) for c, r in zip(completions, rewards, strict=True)]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        width = fixture.metadata["max_completion_length"]
        command = [asked.assay, "record", "--model", str(model), "--prompts", str(prompts), "--max-tokens", width, "--out", str(out)]
        subprocess.run(command, check=True)
        again = Tensors(out)
        same = {tensor: fixture.numbers(tensor) == again.numbers(tensor) for tensor in ("mask", "rewards", "advantages")}
        # Ids of padding are the recorder's choice.
        counted = fixture.numbers("mask")
        pairs = zip(fixture.numbers("ids"), again.numbers("ids"), counted, strict=True)
        same["ids"] = all(a == b or not counts for a, b, counts in pairs)
        vocab = fixture.header["logits"]["shape"][-1]
        rows = [slice(2 * vocab * t, 2 * vocab * (t + 1)) for t, counts in enumerate(counted) if counts]
        old, new = (b"".join(tensors.bytes("logits")[row] for row in rows) for tensors in (fixture, again))
        largest, differing = largest_difference(old, new)
        equal &= all(same.values())
        said = ", ".join(f"{tensor} {'equal' if is_same else 'DIFFERENT'}" for tensor, is_same in same.items())
        print(f"{out}: {said}; {differing} of {len(old) // 2} logits differ, by at most {largest:.3g}")
        print(f"sha256 of the logits of counting tokens: {hashlib.sha256(new).hexdigest()}, in the fixture {hashlib.sha256(old).hexdigest()}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
