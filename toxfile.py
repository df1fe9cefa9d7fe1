"""Let tox find the interpreters that pyenv has installed, whether active or not."""

from __future__ import annotations

import os
from pathlib import Path

from tox.config.sets import ConfigSet
from tox.plugin import impl
from tox.session.state import State


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    state.conf.options.discover += map(str, sorted(root.glob("versions/3.*/bin/python")))
