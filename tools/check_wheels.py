"""Build distributions and check each wheel as a user would meet it: alone, in a fresh environment.

    python tools/check_wheels.py --out dist kv-score kv-policies

Needs `build` and a pip that knows `--python` (22.3 or later).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from functools import cache
from pathlib import Path

from check_isolated import FORBIDDEN
from monorepo import ALL, PRIMITIVES, PUBLISHED, ROOT, Distribution, by_name


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


@cache
def build(distribution: Distribution, out: Path) -> tuple[Path, Path]:
    """The sdist of `distribution`, and the wheel built from that sdist, both in `out`."""
    run(sys.executable, "-m", "build", "--outdir", out, distribution.path)
    stem = f"{distribution.import_name}-{distribution.version}"
    return out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"


def is_test(name: str) -> bool:
    parts = Path(name).parts
    return "tests" in parts or parts[-1] == "conftest.py" or parts[-1].startswith("test_")


def required(metadata: Message) -> set[str]:
    """Names of the distributions that are installed along, extras left out."""
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}


def wheel_problems(wheel: Path, distribution: Distribution) -> list[str]:
    """What is missing from `wheel`, and what it holds but should not."""
    package = distribution.import_name
    info = f"{package}-{distribution.version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode("utf-8"))
    found = [
        f"no {name}"
        for name in (f"{package}/__init__.py", f"{package}/py.typed", f"{info}/licenses/LICENSE")
        if name not in names
    ]
    found += [f"a test: {name}" for name in names if is_test(name)]
    found += [
        f"a stray file: {name}" for name in names if name.split("/")[0] not in (package, info)
    ]
    wanted = {
        "Name": distribution.name,
        "Version": distribution.version,
        "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.10",
    }
    found += [
        f"{key} is {metadata[key]!r}, wanted {value!r}"
        for key, value in wanted.items()
        if metadata[key] != value
    ]
    others = {other.name for other in ALL if other != distribution}
    allowed = set() if distribution in PRIMITIVES else {other.name for other in PRIMITIVES}
    needs = required(metadata)
    found += [f"requires {name}" for name in sorted(needs & (others - allowed))]
    found += [f"does not require {name}" for name in sorted(allowed - needs)]
    return found


def sdist_problems(sdist: Path, distribution: Distribution) -> list[str]:
    """What is missing from `sdist`."""
    stem = f"{distribution.import_name}-{distribution.version}"
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    wanted = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
    return [f"no {name}" for name in wanted if f"{stem}/{name}" not in names]


def readme_example(distribution: Distribution) -> str:
    """The first Python block of the README."""
    text = (distribution.path / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"{distribution.folder}/README.md has no python block")
    return match[1]


def try_alone(wheel: Path, distribution: Distribution, siblings: list[Path], work: Path) -> None:
    """Install `wheel` into a fresh environment under `work`, import it, run its example.

    Siblings are taken from the given wheels, and only where `wheel` requires them.
    """
    environment = work / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    sources = work / "siblings.txt"
    sources.write_text(
        "".join(f"{path.name.split('-')[0]} @ {path.as_uri()}\n" for path in siblings)
    )
    pip = (sys.executable, "-m", "pip", "--python", python)
    constraints = ("-c", ROOT / "constraints.txt", "-c", sources)
    run(*pip, "install", "--quiet", "--no-compile", *constraints, wheel)
    run(*pip, "check")
    allowed = {path.name.split("-")[0] for path in siblings} | {distribution.import_name}
    absent = [other.import_name for other in ALL if other.import_name not in allowed]
    absent += FORBIDDEN.get(distribution.name, ())
    imports = (
        "from importlib.util import find_spec\n"
        f"import {distribution.import_name} as package\n"
        f"if package.__version__ != {distribution.version!r}:\n"
        "    raise SystemExit(f'imported version {package.__version__}')\n"
        f"if found := [name for name in {absent!r} if find_spec(name)]:\n"
        "    raise SystemExit(f'can be imported: {found}')\n"
    )
    for name, code in (("imports.py", imports), ("example.py", readme_example(distribution))):
        (work / name).write_text(code, encoding="utf-8")
        run(python, "-I", name, cwd=work)


def check(distribution: Distribution, out: Path) -> tuple[Path, Path]:
    """Build `distribution` into `out` and check it; raises at the first thing that is wrong."""
    siblings = []
    if distribution not in PRIMITIVES:
        siblings = [build(primitive, out)[1] for primitive in PRIMITIVES]
    sdist, wheel = build(distribution, out)
    found = sdist_problems(sdist, distribution) + wheel_problems(wheel, distribution)
    if found:
        raise ValueError(f"{wheel.name}: " + "; ".join(found))
    with tempfile.TemporaryDirectory() as work:
        try_alone(wheel, distribution, siblings, Path(work))
    return sdist, wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="DIST", help="default: all that are published")
    parser.add_argument("--out", type=Path, help="keep the sdists and wheels here")
    arguments = parser.parse_args()
    distributions = [by_name(name) for name in arguments.names] or list(PUBLISHED)
    with tempfile.TemporaryDirectory() as built:
        for distribution in distributions:
            files = check(distribution, Path(built))
            if arguments.out:
                arguments.out.mkdir(parents=True, exist_ok=True)
                for file in files:
                    shutil.copy2(file, arguments.out)


if __name__ == "__main__":
    main()
