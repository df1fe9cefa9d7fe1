"""The small model that is shipped inside the package, so that quality is visible without a hub."""

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
