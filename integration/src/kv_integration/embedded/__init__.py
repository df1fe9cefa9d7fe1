"""A small model and its router, shipped in the package: quality is visible without a hub."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Folder of the embedded model, for `from_pretrained`.

    Raises:
        FileNotFoundError: this installation holds no model.
    """
    folder = Path(__file__).parent / "model"
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the embedded model is missing from {folder}: install kv-integration again, or name "
            "another model"
        )
    return folder


def router_path() -> Path:
    """File of the embedded model's router for SeKV, for `Router.load`.

    Raises:
        FileNotFoundError: this installation holds no router.
    """
    file = Path(__file__).parent / "router.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"the embedded model's router is missing: no {file}. Install kv-integration again, or "
            "train one with kv-integration train-router"
        )
    return file
