#!/usr/bin/env bash
# The wheel and the sdist of the Python package, in dist, and what shows that they work: the wheel is imported under each
# Python from 3.11 on that is here, and one is built from the sdist. Nothing is published.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=target/python/wheel-tools
if [ ! -e "$tools/made" ]; then
	rm -rf "$tools"
	"${PYTHON:-python3}" -m venv "$tools"
	"$tools/bin/pip" install --disable-pip-version-check --quiet --only-binary :all: maturin==1.16.0 ziglang==0.17.1
	touch "$tools/made"
fi
export PATH=$PWD/$tools/bin:$PATH
rm -rf dist
# With zig as the linker no symbol is newer than manylinux 2.28 has: maturin looks, and refuses the wheel where one is.
maturin build --manifest-path python/Cargo.toml --release --locked --zig --compatibility manylinux_2_28 --out dist
maturin sdist --manifest-path python/Cargo.toml --out dist
ls -l dist

# What the sdist holds is enough to build from, with nothing of this tree.
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"$tools/bin/pip" wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$folder" dist/*.tar.gz
ls -l "$folder"

wheel=$(echo "$PWD"/dist/*.whl)
# Every Python that is here: of the path, and of a version manager's; one of each version.
said=
for python in $(ls -d "$HOME"/.pyenv/versions/*/bin/python3 2>/dev/null) $(type -aP python3.11 python3.12 python3.13 python3); do
	"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
	version=$("$python" --version)
	[[ $said != *"$version;"* ]] || continue
	said="$said$version;"
	echo "$version: $("$python" - "$wheel" <<-'END'
		import sys, tempfile, zipfile
		with tempfile.TemporaryDirectory() as folder:
		    zipfile.ZipFile(sys.argv[1]).extractall(folder)
		    sys.path.insert(0, folder)
		    import assay
		    print(next(assay.problems("trl", n=1)))
	END
	)"
done
