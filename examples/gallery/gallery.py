"""Writes docs/gallery.md and its pictures: each kernel of `wrong_kernels.py` before the judge.

    make gallery
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import wrong_kernels as kernels

import assay

ROOT = Path(__file__).resolve().parents[2]

#: The arguments of every campaign: small and of one shape, so that the pictures can be compared.
DECK: dict[str, Any] = {
    "dtypes": ["f32"],
    "shapes": ["3x16x300"],
    "regimes": ["normal"],
    "cases": 6,
    "wide": 0,
    "masked_garbage": False,
}

LOGP = ("logp", {"entropy": False})
LOSS = ("trl", {"loss_type": "bnpo", "beta": 0.0})


@dataclass(frozen=True)
class Exhibit:
    """A kernel, the loss that it should compute, and what there is to see."""

    kernel: Any
    title: str
    seen: str
    loss: tuple[str, dict[str, Any]] = LOGP
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the kernel, with hyphens."""
        return str(self.kernel.__name__).replace("_", "-")


EXHIBITS = [
    Exhibit(
        kernels.tail_tile_not_written,
        "The tail is not written",
        "A grid of whole tiles. The 44 entries after the last of them keep the 0 that the buffer began with. A vocabulary that the tile divides, as"
        " most of those that are used in tests, shows nothing.",
    ),
    Exhibit(
        kernels.column_of_each_tile_lost,
        "One column of each tile is lost",
        "The end of a range that was meant to be included. Four entries of 300 are 0, and the mean error of dlogits hardly moves.",
    ),
    Exhibit(
        kernels.buffer_overwritten,
        "A buffer is overwritten before it is read",
        "Every second tile has the probabilities of the next: a copy that nothing waits for. On a device this comes and goes with the timing.",
    ),
    Exhibit(
        kernels.shard_offset_forgotten,
        "A shard compares ids with its own columns",
        "The head is cut over two devices. The second has no offset, so that the 1 of a target lies in both halves, or in the wrong one. Forward"
        " passes are right.",
    ),
    Exhibit(
        kernels.sum_in_bf16,
        "The softmax's denominator in bfloat16",
        "Every log-probability is off by up to 2⁻⁹. A tolerance of 10⁻² accepts that; the ratio of two policies, `exp` of a difference of two such"
        " numbers, does not forgive it.",
    ),
    Exhibit(
        kernels.probabilities_saved_in_bf16,
        "Probabilities saved in bfloat16",
        "The forward pass is right, and the backward pass reads what was kept in 16 bits. Every entry of dlogits is hundreds of times beyond what f32"
        " needs.",
    ),
    Exhibit(
        kernels.maximum_not_subtracted,
        "The maximum is not subtracted",
        "Logits around 10⁴ overflow. `!` or a bar to the top is NaN or ∞. Logits of a usual size show nothing.",
        options={"regimes": ["shifted_up", "normal"]},
    ),
    Exhibit(
        kernels.sum_not_rescaled,
        "An online softmax does not rescale",
        "A later tile raises the maximum, and the sum so far keeps the old one. Only tokens whose first tile lacks the maximum are wrong.",
    ),
    Exhibit(
        kernels.temperature_forgotten,
        "The temperature is forgotten in the backward pass",
        "One factor everywhere. At the temperature 1 of most tests it is 1.",
        options={"temperature": 0.7},
    ),
    Exhibit(
        kernels.clip_without_minimum,
        "A clip without the minimum",
        "A few tokens alone are wrong: those whose ratio has left the clip on the side where PPO's loss follows it. Early in training there are none.",
        loss=LOSS,
    ),
    Exhibit(
        kernels.advantages_of_other_sequences,
        "Advantages of other sequences",
        "`np.tile` for `np.repeat`: tokens have the advantages of sequences in turns. With one sequence, or one advantage for all, it is right.",
        loss=LOSS,
    ),
    Exhibit(
        kernels.mean_of_means,
        "The mean of another project",
        "Nothing is wrong but the name: the loss is the mean of sequence means. The judge says which project and option has these numbers.",
        loss=LOSS,
    ),
]


def drawing(page: str, title: str) -> str:
    """Returns the first plot of a report's page as a file of its own, with the page's colours."""
    svg = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert svg and style, "a report of a failure with a picture"
    # The page has colours for light, dark and paper, in this order.
    schemes = re.findall(r":root \{([^}]*)\}", style[1])
    light, dark = ("; ".join(re.findall(r"--[a-z]+: #[0-9a-f]+", scheme)) for scheme in schemes[:2])
    rules = "".join(re.findall(r"svg \[[^}]*\}", style[1]))
    head, body = svg[0].split(">", 1)
    css = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{rules}".replace("svg [", "[")
    ground = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    text = f"{head}>\n<title>{title}</title>\n<style>\n{css}\n</style>\n{ground}{body}"
    # A page is narrower than a report: letters are larger. One line an element, so that a difference can be read.
    text = re.sub(r'font-size="[^"]*"', 'font-size="18"', text)
    return re.sub(r">\s*<", ">\n<", text) + "\n"


def code_of(kernel: Any) -> str:
    """Returns the source of a kernel without its annotations."""
    return re.sub(r"\(problem: Any\) -> .*:", "(problem):", inspect.getsource(kernel)).rstrip()


def call(exhibit: Exhibit) -> str:
    """Returns the call of a campaign as one writes it."""
    name, of_loss = exhibit.loss
    options = of_loss | DECK | exhibit.options
    written = [f"{key}={value!r}".replace("'", '"') for key, value in options.items()]
    return "\n".join([f'assay.check({exhibit.kernel.__name__}, "{name}",', *(f"            {option}," for option in written)])[:-1] + ")"


def judged(exhibit: Exhibit) -> tuple[str, str]:
    """Returns the section of one kernel, and its picture."""
    name, of_loss = exhibit.loss
    with np.errstate(all="ignore"):
        report = assay.check(
            exhibit.kernel, name, power=False, repro_dir=None, progress=False, **(of_loss | DECK | exhibit.options)
        )
    assert report.causes, f"{exhibit.name} passes"
    cause = report.causes[0]
    with tempfile.TemporaryDirectory() as folder:
        report.to_html(Path(folder) / "page.html")
        page = (Path(folder) / "page.html").read_text(encoding="utf-8")
    caption = re.search(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert caption, exhibit.name
    lines = [
        f"## {exhibit.title}",
        "",
        f"> FAIL  {cause.sentence}",
        "",
        '<figure class="plot" markdown>',
        f"![{exhibit.title}: {caption[1]}](gallery/{exhibit.name}.svg)",
        f"<figcaption>{caption[1]}</figcaption>",
        "</figure>",
        "",
        textwrap.fill(exhibit.seen, 140, break_long_words=False, break_on_hyphens=False),
        "",
        "```python",
        code_of(exhibit.kernel),
        "```",
        "",
    ]
    return "\n".join(lines), drawing(page, exhibit.title)


HEAD = """\
# Gallery: twelve wrong kernels

<!-- Written by `make gallery` from examples/gallery. -->

For everybody who wants to see what a wrong kernel looks like before the judge. Each is ten lines of NumPy with one wrong line. Each has the
sentence with which `assay.check` begins its report and the picture that is in it: *error / limit* along the vocabulary or along the tokens.
What is above the line is beyond the limit, and red. A kernel that is right is blue everywhere, as most places here are.

Pictures along the tokens have gaps where a token is masked.

{contents}

All campaigns are small and of one shape, so that the pictures can be compared:

```python
{call}
```

`softmax`, `one_hot`, `outputs` and `ppo` are a few lines in [wrong_kernels.py](../examples/gallery/wrong_kernels.py). How each word is meant:
[How a kernel is judged](judging.md).

"""


def anchor(title: str) -> str:
    """Returns the anchor of a heading, on the site and on GitHub."""
    return re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-")


def pages() -> dict[str, str]:
    """Returns the texts of the gallery by path: the page, and a picture of each kernel."""
    sections, texts = [], {}
    for exhibit in EXHIBITS:
        section, svg = judged(exhibit)
        sections.append(section)
        texts[f"docs/gallery/{exhibit.name}.svg"] = svg
    contents = "\n".join(f"- [{exhibit.title}](#{anchor(exhibit.title)})" for exhibit in EXHIBITS)
    head = HEAD.format(contents=contents, call=call(EXHIBITS[0]))
    return {"docs/gallery.md": head + "\n".join(sections), **texts}


def main() -> None:
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
