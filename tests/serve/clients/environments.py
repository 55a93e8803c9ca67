"""The clients that slow tests run: where they are installed, and in which versions.

package.json has the versions: those of Node's clients in `dependencies`, and those of Python's
clients in `python`, where each name is an environment. `python environments.py FOLDER` installs
Python's clients.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
INSTALLED = HERE.parents[2] / ".clients"
"""Where `make clients` installs them."""
VERSIONS = json.loads((HERE / "package.json").read_text("utf-8"))
NODE = Path(os.environ.get("WEIR_NODE_CLIENTS") or INSTALLED)
PYTHON = Path(os.environ.get("WEIR_PYTHON_CLIENTS") or INSTALLED / "python")


def python_of(environment: str) -> Path:
    """The interpreter of an environment."""
    return PYTHON / environment / "bin" / "python"


@cache
def missing_python(environment: str) -> str:
    """Why the clients of an environment cannot be run; empty if they can."""
    python = python_of(environment)
    if not python.exists():
        return f"{environment} is not installed for Python: make clients"
    wanted = {re.sub(r"\[.*", "", n): v for n, v in VERSIONS["python"][environment].items()}
    script = "import importlib.metadata as m, json, sys\nprint(json.dumps({n: m.version(n) "
    script += "for n in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", script, *wanted], capture_output=True, text=True)
    if done.returncode:
        return f"{environment} is not installed completely: {done.stderr.splitlines()[-1]}"
    found = json.loads(done.stdout)
    for name, version in wanted.items():
        if found[name] != version:
            return f"{name} {found[name]} is installed, and {version} is tested"
    return ""


def missing_node(package: str) -> str:
    """Why a client of Node cannot be run; empty if it can."""
    found = NODE / "node_modules" / package / "package.json"
    if not found.exists():
        return f"{package} is not installed for Node: make clients"
    version, wanted = json.loads(found.read_text("utf-8"))["version"], VERSIONS["dependencies"]
    if version != wanted[package]:
        return f"{package} {version} is installed, and {wanted[package]} is tested"
    return ""


def install(folder: Path) -> None:
    """Create the environments that do not have the versions of package.json yet."""
    for name, wanted in VERSIONS["python"].items():
        pins = [f"{package}=={version}" for package, version in wanted.items()]
        done = folder / name / ".installed"
        if done.exists() and done.read_text("utf-8") == "\n".join(pins):
            continue
        print(f"--- {name}: {', '.join(pins)}", flush=True)
        venv.create(folder / name, clear=True, with_pip=True)
        pip = [str(folder / name / "bin" / "python"), "-m", "pip", "install"]
        quiet = ["--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
        subprocess.run([*pip, *quiet, *pins], check=True)
        done.write_text("\n".join(pins), "utf-8")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
