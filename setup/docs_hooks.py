"""Hooks of the site: links to files outside of `docs` become their paths, and `llms.txt` lists the pages."""

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")

# Title, address and first paragraph of each page, in the order in which they are built.
_pages: list[tuple[str, str, str]] = []


def on_page_markdown(markdown: str, page, config, files) -> str:  # noqa: ANN001
    """Replaces links that leave `docs` by the paths of their files, which must be there."""
    root = Path(config["docs_dir"]).parent

    def path_of(link: re.Match[str]) -> str:
        text, target = link[1], posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        path = posixpath.normpath(posixpath.join("docs", target))
        if not (root / path).exists():
            raise PluginError(f"{page.file.src_uri}: link `{link[2]}`: no such file")
        return f"`{path}`" if text.strip("`") in (path, posixpath.basename(path)) else f"{text} (`{path}`)"

    replaced = _LINK.sub(path_of, markdown)
    paragraphs = [part.strip() for part in markdown.split("\n\n") if part.strip() and not part.lstrip().startswith(("#", "```", "|", ":::"))]
    first = " ".join(paragraphs[0].split()) if paragraphs else ""
    title = next((line.removeprefix("# ") for line in markdown.splitlines() if line.startswith("# ")), page.file.src_uri)
    _pages.append((title, page.file.src_uri, first))
    return replaced


def on_post_build(config) -> None:  # noqa: ANN001
    """Writes `llms.txt`: each page's title, address and first paragraph."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    lines += [f"- [{title}]({address}): {first}" for title, address, first in _pages]
    (Path(config["site_dir"]) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
